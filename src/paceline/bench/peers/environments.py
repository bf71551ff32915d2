"""Environments of peers: made on demand, one folder each under the user's cache, never ours.

A peer's Python must not share packages with the project: it may pin another torch, and what is
measured should be what its own users install.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock

from paceline.bench.peers.base import PeerError
from paceline.bench.peers.process import died
from paceline.models.catalog import cache_dir

LLAMACPP = "0.3.36"

#: What /proc/cpuinfo calls an instruction set, and the build option of llama.cpp for it.
_X86_OPTIONS = {
    "sse4_2": "SSE42",
    "avx": "AVX",
    "avx2": "AVX2",
    "bmi2": "BMI2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX_VNNI",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
}
#: llama.cpp's AVX512 option stands for all of these.
_AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}

Say = Callable[[str], None]


def _say(text: str) -> None:
    print(text, file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How an environment is made. name: of its folder. install: arguments of `pip install`.
    remove: packages to take out again. env: variables for the build."""

    name: str
    install: tuple[str, ...]
    remove: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


def cpu_flags(cpuinfo: str | None = None) -> set[str]:
    """Instruction sets of this machine by Linux's names; empty where they can't be read."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text()
        except OSError:
            return set()
    line = next((text for text in cpuinfo.splitlines() if text.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def explicit_flags(flags: set[str]) -> str:
    """CMake arguments that name every instruction set of these flags except AMX. On some
    virtual machines AMX is advertised and using it ends the process with SIGILL."""
    options = [option for flag, option in _X86_OPTIONS.items() if flag in flags]
    if flags >= _AVX512:
        options.append("AVX512")
    else:
        options = [o for o in options if not o.startswith("AVX512")]
    return " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{o}=ON" for o in sorted(options))])


def llamacpp_recipes(flags: set[str]) -> list[Recipe]:
    """Builds of llama.cpp to try, in order."""
    builds = {"native": "-DGGML_NATIVE=ON"}
    if any(f.startswith("amx") for f in flags):
        builds["without-amx"] = explicit_flags(flags)
    return [
        Recipe(
            name=f"llama-cpp-python-{LLAMACPP}-{kind}",
            install=(
                "--no-binary",
                "llama-cpp-python",
                f"llama-cpp-python=={LLAMACPP}",
                "numpy",
            ),
            env={"CMAKE_ARGS": args},
        )
        for kind, args in builds.items()
    ]


def peers_root() -> Path:
    return cache_dir() / "peers"


def command(args: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a program to its end. Raises PeerError with its last lines where it fails."""
    done = subprocess.run(
        args, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        tail = " | ".join((done.stderr + done.stdout).strip().splitlines()[-4:])
        raise PeerError(f"'{' '.join(args[1:])}' {died(done.returncode)}: {tail}")


def prepare(
    recipe: Recipe,
    say: Say = _say,
    root: Path | None = None,
    run: Callable[[Sequence[str], Mapping[str, str] | None], None] = command,
) -> Path:
    """The environment's Python; it is made first where it is missing, or was made by another
    recipe, or half made. Raises PeerError with the installer's last lines."""
    home = (root or peers_root()) / recipe.name
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    ready, wanted = home / "ready.json", json.dumps(asdict(recipe), sort_keys=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):
        if ready.exists() and ready.read_text("utf-8") == wanted:
            return python
        say(f"making the peer's environment {home}: minutes")
        ready.unlink(missing_ok=True)
        run([sys.executable, "-m", "venv", "--clear", str(home)], None)
        run([str(python), "-m", "pip", "install", "-q", *recipe.install], recipe.env)
        if recipe.remove:
            run([str(python), "-m", "pip", "uninstall", "-q", "-y", *recipe.remove], None)
        ready.write_text(wanted, "utf-8")
    return python


def probe_llamacpp(python: str, model: Path) -> int:
    """Exit status of a process that decodes 40 tokens with llama.cpp (many rows at once are
    what its AMX code works on); negative is the signal that killed it."""
    code = (
        "import sys; from llama_cpp import Llama; "
        "Llama(sys.argv[1], n_ctx=64, verbose=False).eval(list(range(40)))"
    )
    try:
        done = subprocess.run([python, "-c", code, str(model)], capture_output=True, timeout=300)
    except OSError as e:
        raise PeerError(f"'{python}' can't be run: {e}; give the peer's Python") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"llama.cpp under '{python}' did not answer in 300 s") from None
    return done.returncode


def find_llamacpp(
    model: Path,
    python: str | None = None,
    *,
    say: Say = _say,
    make: Callable[[Recipe, Say], Path] = prepare,
    probe: Callable[[str, Path], int] = probe_llamacpp,
    flags: set[str] | None = None,
) -> tuple[str, str]:
    """(Python of a working llama.cpp, how it was built).

    Builds are tried in a process of their own before they are used, so one that dies of an
    illegal instruction leads to the next. python: an environment that is there already.
    Raises PeerError where nothing works.
    """
    if python is not None:
        if status := probe(python, model):
            raise PeerError(
                f"llama.cpp under '{python}' {died(status)}: it needs llama-cpp-python built for "
                f"this machine (CMAKE_ARGS='{explicit_flags(cpu_flags())}')"
            )
        return python, "given environment"
    tried = []
    for recipe in llamacpp_recipes(cpu_flags() if flags is None else flags):
        candidate = str(make(recipe, say))
        how = recipe.env["CMAKE_ARGS"]
        if not (status := probe(candidate, model)):
            return candidate, how
        tried.append(f"{how} {died(status)}")
        say(f"llama.cpp: {tried[-1]}")
    raise PeerError(f"no build of llama.cpp works here: {'; '.join(tried)}")
