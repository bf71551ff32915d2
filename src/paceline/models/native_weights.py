"""Weights packed for the native core, in memory and on disk.

A model is a set of named matrices (packed tiles, see native/layout.h) and float32 vectors:
`embedding`, `head`, `final_norm` and, for each layer i, `i.q i.k i.v i.o i.gate i.up i.down
i.attention_norm i.mlp_norm` and optionally `i.q_bias i.k_bias i.v_bias i.q_norm i.k_norm`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from paceline.errors import UserError
from paceline.models.catalog import cache_dir
from paceline.models.native_core import default_threads

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Quantize = Literal["q4", "q8"]
#: Called while weights are packed: bytes that are done, and all of them.
Progress = Callable[[int, int], None]

MAGIC = b"PACELINE"
ALIGN = 4096
#: Rows of a packed tile (native/layout.h).
TILE = 16
#: Weights that share a scale: quantised rows are whole groups (native/types.h).
GROUP = 32
#: Formats of native/types.h that Python names.
Q4_AFFINE, Q4_SUPER, Q8_SYM, DENSE_BF16, DENSE_F16, DENSE_F32 = 0, 1, 6, 7, 8, 9
QUANTISED: Final[dict[Quantize, int]] = {"q4": Q4_SUPER, "q8": Q8_SYM}
#: Bytes of float32 that one packing job holds.
_JOB = 1 << 22


def check_quantize(quantize: object) -> None:
    if quantize is not None and quantize not in QUANTISED:
        raise UserError(f"quantize must be None, 'q4' or 'q8', not {quantize!r}")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix [n_out, n_in] before packing. `write(first, last, out)` packs its rows
    [first, last), where `first` begins a tile, to `out`; calls may run side by side."""

    format: int
    n_out: int
    n_in: int
    write: Callable[[int, int, Bytes], None]

    def nbytes(self, core: Any) -> int:
        return int(core.packed_bytes(self.format, self.n_out, self.n_in))


@dataclass(frozen=True, kw_only=True)
class Vector:
    """A float32 vector of n components; `read` fetches them."""

    n: int
    read: Callable[[], Floats]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model before packing: known sizes, no weights in memory."""

    matrices: dict[str, Matrix]
    vectors: dict[str, Vector]

    def nbytes(self, core: Any) -> int:
        """Bytes that it takes when packed."""
        return layout(core, self).size


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    format: int
    n_out: int
    n_in: int
    data: Bytes


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A model ready to run. Matrices and vectors are views of one buffer."""

    matrices: dict[str, PackedMatrix]
    vectors: dict[str, Floats]
    keep: list[Any] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a packed model's parts lie: [header | parts], offsets from the file's start."""

    header: bytes
    offsets: dict[str, int]
    size: int


def layout(core: Any, source: Source) -> Layout:
    places: dict[str, int] = {}
    entries: dict[str, Any] = {}
    at = 0
    for name, m in source.matrices.items():
        places[name], size = at, m.nbytes(core)
        entries[name] = {"format": m.format, "shape": [m.n_out, m.n_in], "at": at}
        at += -(-size // ALIGN) * ALIGN
    for name, v in source.vectors.items():
        places[name] = at
        entries[name] = {"shape": [v.n], "at": at}
        at += -(-4 * v.n // 64) * 64
    text = json.dumps({"layout": core.LAYOUT_VERSION, "entries": entries}).encode()
    header = MAGIC + len(text).to_bytes(8, "little") + text
    header += bytes(-len(header) % ALIGN)
    offsets = {name: len(header) + place for name, place in places.items()}
    return Layout(header=header, offsets=offsets, size=len(header) + at)


def pack(core: Any, source: Source, *, progress: Progress | None = None) -> Packed:
    """Reads and packs all weights, in as many threads as the core runs in."""
    plan = layout(core, source)
    buffer = anonymous_memory(plan.size)
    buffer[: len(plan.header)] = plan.header
    packed = _views(core, source, plan, buffer)
    for name, v in source.vectors.items():
        packed.vectors[name][:] = v.read()
    total = sum(m.data.nbytes for m in packed.matrices.values())
    done = 0
    pool = ThreadPoolExecutor(default_threads())
    try:
        jobs = [
            pool.submit(_run, job)
            for name, m in source.matrices.items()
            for job in _jobs(core, m, packed.matrices[name].data)
        ]
        for finished in as_completed(jobs):
            done += finished.result()
            if progress is not None:
                progress(done, total)
    finally:  # after a failure no job may go on writing to the buffer
        pool.shutdown(cancel_futures=True)
    return packed


#: Rows [first, last) of a matrix, and where they go.
_Job = tuple[Matrix, int, int, Bytes]


def _jobs(core: Any, m: Matrix, out: Bytes) -> Iterator[_Job]:
    tile = int(core.packed_bytes(m.format, TILE, m.n_in))
    step = max(TILE, _JOB // (4 * m.n_in) // TILE * TILE)
    for first in range(0, m.n_out, step):
        last = min(first + step, m.n_out)
        yield m, first, last, out[first // TILE * tile : -(-last // TILE) * tile]


def _run(job: _Job) -> int:
    matrix, first, last, out = job
    matrix.write(first, last, out)
    return out.nbytes


def _views(core: Any, source: Source, plan: Layout, buffer: mmap.mmap) -> Packed:
    data, offsets = np.frombuffer(buffer, np.uint8), plan.offsets
    matrices = {
        name: PackedMatrix(
            format=m.format,
            n_out=m.n_out,
            n_in=m.n_in,
            data=data[offsets[name] : offsets[name] + m.nbytes(core)],
        )
        for name, m in source.matrices.items()
    }
    vectors = {
        name: data[offsets[name] : offsets[name] + 4 * v.n].view(np.float32)
        for name, v in source.vectors.items()
    }
    return Packed(matrices=matrices, vectors=vectors, keep=[buffer])


# --- the disk cache -----------------------------------------------------------------------


def cache_directory() -> Path:
    return cache_dir() / "native"


def cache_key(files: Seq[Path], options: Mapping[str, Any]) -> str:
    """Identifies files by size, modification time and the hash of both their ends (hashing a
    gigabyte at each start would cost more than packing it), with the options and layout."""
    edge = 1 << 20
    digest = hashlib.sha256()
    stats = []
    for path in files:
        stat = path.stat()
        stats.append(f"{stat.st_size} {stat.st_mtime_ns}")
        with path.open("rb") as f:
            digest.update(f.read(edge))
            f.seek(max(0, stat.st_size - edge))
            digest.update(f.read(edge))
    digest.update(f"{' '.join(stats)} {json.dumps(options, sort_keys=True)}".encode())
    return digest.hexdigest()[:32]


def load_cached(core: Any, source: Source, key: str, *, progress: Progress | None = None) -> Packed:
    """The packed model `key` from disk, made first where it is missing or damaged."""
    target = cache_directory() / f"{key}.pack"
    packed = _read_file(core, source, target)
    if packed is not None:
        return packed
    packed = pack(core, source, progress=progress)
    try:
        _write_file(packed.keep[0], target)
    except OSError as e:
        log.warning(
            "packed weights can't be kept in %s (%s): they are packed again at each start",
            target.parent,
            e.strerror,
        )
    return packed


def _write_file(buffer: mmap.mmap, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as f, memoryview(buffer) as data:
            f.write(data)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _read_file(core: Any, source: Source, path: Path) -> Packed | None:
    """Reads the file into memory of huge pages: weights are streamed once per token, and with
    small pages address translation costs some of the bandwidth. None where there is no file
    or it is not what packing `source` gives."""
    plan = layout(core, source)
    try:
        with path.open("rb", buffering=0) as f:
            if path.stat().st_size != plan.size or f.read(len(plan.header)) != plan.header:
                return None
            f.seek(0)
            buffer = anonymous_memory(plan.size)
            with memoryview(buffer) as view:
                done = 0
                while done < plan.size:
                    n = f.readinto(view[done : done + (64 << 20)])
                    if not n:
                        return None
                    done += n
    except OSError:
        return None
    return _views(core, source, plan, buffer)


def anonymous_memory(size: int) -> mmap.mmap:
    """Zeroed memory that takes pages when touched, huge ones where the kernel has them."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # not a POSIX system
        return mmap.mmap(-1, max(size, 1))
    # Private: kernels rarely give huge pages to shared memory, Python's default here.
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
