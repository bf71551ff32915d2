"""Sets up llama.cpp in an environment of its own, on demand, and talks to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSION = "0.3.36"
BUILDS = {
    "native": "-DGGML_NATIVE=ON",
    # On some virtual machines AMX is advertised and llama.cpp's use of it dies with SIGILL.
    "native-without-amx": "-DGGML_NATIVE=ON -DCMAKE_C_FLAGS=-mno-amx-int8"
    " -DCMAKE_CXX_FLAGS=-mno-amx-int8",
}


def root() -> Path:
    cache = os.environ.get("PACELINE_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "paceline") / "peers"


def _build(kind: str) -> Path:
    """The peer's Python, built first where it is missing (minutes)."""
    home = root() / f"llama-cpp-python-{VERSION}-{kind}"
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    print(f"building llama.cpp ({kind}) in {home}: a few minutes", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    subprocess.run(
        [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", "--no-binary",
         "llama-cpp-python", "numpy", f"llama-cpp-python=={VERSION}"],
        check=True,
        env={**os.environ, "CMAKE_ARGS": BUILDS[kind]},
    )  # fmt: skip
    (home / "ready").touch()
    return python


def find_peer(model: Path, python: str | None = None) -> tuple[str, str]:
    """(Python of a working llama.cpp, how it was built). `python`: one that is already there."""
    if python is not None:
        return python, "given"
    for kind in BUILDS:
        candidate = str(_build(kind))
        code = "import sys; from llama_cpp import Llama; "
        code += "Llama(sys.argv[1], n_ctx=64, verbose=False).eval(list(range(40)))"
        done = subprocess.run([candidate, "-c", code, str(model)], capture_output=True)
        if done.returncode == 0:
            return candidate, kind
        if done.returncode != -signal.SIGILL:
            raise RuntimeError(f"llama.cpp failed: {done.stderr.decode()[-500:]}")
        print(f"llama.cpp ({kind}) died of an illegal instruction here", file=sys.stderr)
    raise RuntimeError("no build of llama.cpp works here")


class LlamaCpp:
    """A running llama.cpp with one model."""

    def __init__(self, python: str, model: Path, *, threads: int, n_ctx: int = 2048) -> None:
        script = Path(__file__).with_name("peer_llamacpp.py")
        self._process = subprocess.Popen(
            [python, str(script), str(model), str(threads), str(n_ctx)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, op: str, **fields: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
