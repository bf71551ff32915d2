"""Weights for the native core: where they come from, how they are packed, and the disk cache.

A model is a set of named matrices (packed tiles, see native/layout.h) and float32 vectors:
`embedding`, `head`, `final_norm` and, for each layer i, `i.q i.k i.v i.o i.gate i.up i.down
i.attention_norm i.mlp_norm` and optionally `i.q_bias i.k_bias i.v_bias i.q_norm i.k_norm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paceline.models.native_config import NativeConfig

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Quantize = Literal["q4", "q8"]

MAGIC = b"PACELINE"
ALIGN = 4096
#: Formats of native/types.h that Python names.
Q4_AFFINE, Q4_SUPER, Q8_SYM, DENSE_BF16, DENSE_F16, DENSE_F32 = 0, 1, 6, 7, 8, 9


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A source matrix [n_out, n_in]: how large its packed form is and how to write it."""

    format: int
    n_out: int
    n_in: int
    write: Callable[[Bytes], None]

    def nbytes(self, native: Any) -> int:
        return int(native.packed_bytes(self.format, self.n_out, self.n_in))


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model before packing."""

    config: NativeConfig
    matrices: dict[str, Matrix]
    vectors: dict[str, Floats]


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    format: int
    n_out: int
    n_in: int
    data: Bytes


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A model ready to run. `data` is a view of one buffer (memory map or anonymous)."""

    config: NativeConfig
    matrices: dict[str, PackedMatrix]
    vectors: dict[str, Floats]
    keep: list[Any] = field(default_factory=list)


def float_matrix(native: Any, rows: Floats, format: int) -> Matrix:
    """A source that packs float32 rows to `format`."""
    rows = np.ascontiguousarray(rows, np.float32)
    return Matrix(
        format=format,
        n_out=rows.shape[0],
        n_in=rows.shape[1],
        write=lambda out: native.pack_float(rows, format, out),
    )


def layout(native: Any, source: Source) -> tuple[bytes, dict[str, int], int]:
    """Header, offset of each entry, and total size of the packed file."""
    offsets: dict[str, int] = {}
    entries: dict[str, Any] = {}
    at = 0
    for name, m in source.matrices.items():
        offsets[name], size = at, m.nbytes(native)
        entries[name] = {"format": m.format, "shape": [m.n_out, m.n_in], "at": at, "bytes": size}
        at += -(-size // ALIGN) * ALIGN
    for name, v in source.vectors.items():
        offsets[name] = at
        entries[name] = {"shape": [len(v)], "at": at, "bytes": 4 * len(v)}
        at += -(-4 * len(v) // 64) * 64
    text = json.dumps({"config": source.config.to_json(), "entries": entries}).encode()
    header = MAGIC + len(text).to_bytes(8, "little") + text
    header += bytes(-len(header) % ALIGN)
    return header, offsets, len(header) + at


def write_packed(native: Any, source: Source, out: Bytes) -> None:
    """Packs every matrix into `out`, whose size is that of `layout`."""
    header, offsets, _ = layout(native, source)
    out[: len(header)] = np.frombuffer(header, np.uint8)
    body = out[len(header) :]
    for name, m in source.matrices.items():
        m.write(body[offsets[name] : offsets[name] + m.nbytes(native)])
    for name, v in source.vectors.items():
        body[offsets[name] : offsets[name] + 4 * len(v)] = np.ascontiguousarray(v).view(np.uint8)


def read_packed(data: Bytes, keep: list[Any]) -> Packed:
    """Views into a packed buffer. Raises ValueError if it is damaged."""
    if len(data) < 16 or data[:8].tobytes() != MAGIC:
        raise ValueError("not a packed model")
    size = int.from_bytes(data[8:16].tobytes(), "little")
    start = -(-(16 + size) // ALIGN) * ALIGN
    if size > len(data) - 16:
        raise ValueError("packed model is truncated")
    head = json.loads(data[16 : 16 + size].tobytes())
    matrices: dict[str, PackedMatrix] = {}
    vectors: dict[str, Floats] = {}
    for name, e in head["entries"].items():
        at = start + e["at"]
        view = data[at : at + e["bytes"]]
        if len(view) != e["bytes"]:
            raise ValueError("packed model is truncated")
        if "format" in e:
            n_out, n_in = e["shape"]
            matrices[name] = PackedMatrix(format=e["format"], n_out=n_out, n_in=n_in, data=view)
        else:
            vectors[name] = view.view(np.float32)
    config = NativeConfig.from_json(head["config"])
    return Packed(config=config, matrices=matrices, vectors=vectors, keep=keep)


def pack_in_memory(native: Any, source: Source) -> Packed:
    """Packs without a cache."""
    _, _, size = layout(native, source)
    buffer = anonymous_memory(size)
    data = np.frombuffer(buffer, np.uint8)
    write_packed(native, source, data)
    return read_packed(data, [buffer])


# --- the disk cache -----------------------------------------------------------------------


def cache_directory() -> Path:
    """$PACELINE_CACHE/native, or ~/.cache/paceline/native."""
    root = os.environ.get("PACELINE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "paceline") / "native"


def cache_key(path: Path, options: Mapping[str, Any]) -> str:
    """Identifies a file by size, modification time and the hash of both its ends (hashing a
    gigabyte at each start would cost more than packing it), with the options and layout."""
    stat = path.stat()
    edge = 1 << 20
    digest = hashlib.sha256()
    with path.open("rb") as f:
        digest.update(f.read(edge))
        f.seek(max(0, stat.st_size - edge))
        digest.update(f.read(edge))
    digest.update(
        f"{stat.st_size} {stat.st_mtime_ns} {json.dumps(options, sort_keys=True)}".encode()
    )
    return digest.hexdigest()[:32]


def load_cached(native: Any, key: str, make: Callable[[], Source], *, use_cache: bool) -> Packed:
    """The packed model `key` from disk, made first where it is missing or damaged."""
    if not use_cache:
        return pack_in_memory(native, make())
    target = cache_directory() / f"{key}.pack"
    if target.exists():
        try:
            return _read_file(target)
        except (ValueError, KeyError, TypeError, OSError):
            target.unlink(missing_ok=True)  # damaged or half written by something else
    source = make()
    try:
        _write_file(native, source, target)
    except OSError:  # read-only or full disk: run from memory
        return pack_in_memory(native, source)
    return _read_file(target)


def _write_file(native: Any, source: Source, target: Path) -> None:
    _, _, size = layout(native, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "r+b") as f:
            os.posix_fallocate(f.fileno(), 0, size)  # a full disk fails here, not by a signal
            with mmap.mmap(f.fileno(), size) as m:
                data = np.frombuffer(m, np.uint8)
                write_packed(native, source, data)
                del data
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read_file(path: Path) -> Packed:
    """Reads the file into memory of huge pages: weights are streamed once per token, and with
    small pages address translation costs some of the bandwidth."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError("packed model is truncated")
    buffer = anonymous_memory(size)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as f:
        done = 0
        while done < size:
            n = f.readinto(view[done : done + (64 << 20)])
            if not n:
                raise ValueError("packed model is truncated")
            done += n
    return read_packed(np.frombuffer(buffer, np.uint8), [buffer])


def anonymous_memory(size: int) -> mmap.mmap:
    """Zeroed memory that takes pages when touched, huge ones where the kernel has them."""
    buffer = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
