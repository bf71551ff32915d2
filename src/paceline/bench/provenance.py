"""Where a result comes from: command, machine, versions, weights."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence as Seq
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

import paceline
from paceline.bench.results import ModelRecord, Provenance
from paceline.models.base import ModelInfo
from paceline.models.catalog import ModelSource, resolve_model

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "scipy", "gguf", "safetensors")


def provenance(
    run: int, *, threads: int, bandwidth: float | None, argv: Seq[str] | None = None
) -> Provenance:
    """The present process and machine. argv: as of `sys.argv` (default: that)."""
    argv = sys.argv if argv is None else argv
    revision = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain")
    model, flags = _cpu()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return Provenance(
        run=run,
        command=shlex.join([Path(argv[0]).name, *argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        paceline=_version("paceline"),
        git_revision=revision,
        git_dirty=None if revision is None or changes is None else changes != "",
        python=platform.python_version(),
        platform=platform.platform(),
        libraries={name: _version(name) for name in _LIBRARIES},
        cpu=model,
        cpu_flags=flags,
        cores_physical=psutil.cpu_count(logical=False),
        cores_logical=psutil.cpu_count(),
        threads=threads,
        memory_bytes=psutil.virtual_memory().total,
        gpu=gpu,
        read_bandwidth_bytes_s=bandwidth,
        load_average=tuple(round(x, 2) for x in psutil.getloadavg()),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(*args: str) -> str | None:
    """Of the checkout that this package is run from; None for an installed one."""
    folder = Path(paceline.__file__).parent
    try:
        inside = _run_git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return None if inside is None else _run_git(folder, *args)
    except OSError:  # no git
        return None


def _run_git(folder: Path, *args: str) -> str | None:
    done = subprocess.run(
        ["git", "-C", str(folder), *args], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu() -> tuple[str, tuple[str, ...]]:
    """Name, and the vector and matrix instruction sets."""
    name, flags = platform.processor() or platform.machine(), ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name, ()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = value
    kinds = ("avx", "amx", "fma", "asimd", "sve", "neon")
    return name, tuple(sorted(f for f in set(flags.split()) if f.startswith(kinds)))


def model_record(role: str, spec: str, info: ModelInfo | None = None) -> ModelRecord:
    """role: target or draft. info: of the loaded model, where there is one at hand."""
    source = resolve_model(spec)
    return ModelRecord.model_validate(
        {
            "role": role,
            "name": source.name,
            "source": source.path.name,
            "sha256": weights_sha256(source),
            "weight_bytes": info.weight_bytes if info else _size(source),
            "dtype": info.dtype if info else "as stored",
            "device": info.device if info else "",
            "numerics": info.numerics.value if info else "",
        }
    )


def _weight_files(source: ModelSource) -> list[Path]:
    if source.path.is_file():
        return [source.path]
    return sorted(p for p in source.path.iterdir() if p.suffix in (".safetensors", ".json"))


def _size(source: ModelSource) -> int:
    return sum(os.path.getsize(p) for p in _weight_files(source))


def weights_sha256(source: ModelSource) -> str:
    """Of the file; of a folder, of its weights and JSON files in order of their names."""
    digest = hashlib.sha256()
    for path in _weight_files(source):
        with open(path, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()
