"""A bounded reader of GGUF files: the header at once, tensor bytes on request.

The `gguf` package describes the format (value types, block types, their sizes). Its own
reader builds one array view per vocabulary string, which takes ten seconds on a vocabulary
of 150,000, and it believes every length that a damaged header states. This one checks each
length against the file's size before using it, so that a file of n bytes costs O(n) at
most, and it raises nothing but `UserError`.

It reads tensor bytes with ordinary reads, not through a memory map: pages of a map count as
the process's memory, and a map over a file that shrinks kills the process.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from paceline.errors import UserError

_SCALARS: Final[dict[int, str]] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}
_VERSIONS: Final = (2, 3)
_MAX_DIMS: Final = 4
_MAX_ITEMS: Final = 1 << 24
#: Texts of tokens that end a turn or a document, whatever the file's `eos_token_id` says.
_END_TEXTS: Final = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "</s>",
)
#: `tokenizer.ggml.token_type` values.
TYPE_NORMAL, TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER, TYPE_UNUSED, TYPE_BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies. `shape` is outermost first (rows, columns), as torch has it;
    `offset` counts from the start of the file; `kind` is the block format, e.g. "Q4_K"."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Damaged(Exception):
    """The header contradicts itself or the file's size."""


class _Cursor:
    """Reads little-endian values from a buffer and refuses to step past its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, n: int) -> int:
        """Step over n bytes; the offset where they start."""
        start = self.at
        if n < 0 or n > len(self._data) - start:
            raise _Damaged(f"it ends inside the header, at byte {start}")
        self.at = start + n
        return start

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        # The size is checked before a format string of that length is built.
        start = self.take(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def string(self) -> str:
        length = self.unpack("Q")[0]
        start = self.take(length)
        try:
            return str(self._data[start : self.at], "utf-8")
        except UnicodeDecodeError:
            raise _Damaged(f"the text at byte {start} is not UTF-8") from None

    def value(self) -> Any:
        kind = self.unpack("I")[0]
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind in _SCALARS:
            return self.unpack(_SCALARS[kind])[0]
        if kind != GGUFValueType.ARRAY:
            raise _Damaged(f"unknown value type {kind} before byte {self.at}")
        item, count = self.unpack("IQ")
        if item == GGUFValueType.STRING:
            if count > len(self._data) // 8:  # each string has an eight-byte length
                raise _Damaged(f"an array of {count} texts does not fit")
            return [self.string() for _ in range(count)]
        if item in _SCALARS:
            if count > _MAX_ITEMS:  # a damaged length must not cost gigabytes of integers
                raise _Damaged(f"an array of {count} numbers, which no vocabulary has")
            return list(self.unpack(_SCALARS[item], count))
        raise _Damaged(f"an array of type {item}, which no GGUF key of a language model has")


class GGUFFile:
    """One opened `.gguf`: `metadata` (key to value), `tensors` (name to place).

    `read` opens the file anew, so an instance holds no descriptor and may be shared between
    threads.
    """

    def __init__(
        self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of `key`, or `default`.

        Raises:
            UserError: the value is not of `kind` (an int serves where a float is wanted).
        """
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise UserError(f"{self.path}: {key} has the wrong type; the file is damaged")
        return value

    def need(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """As `get`, but a missing key is a `UserError`."""
        if key not in self.metadata:
            raise UserError(f"{self.path}: the key {key} is missing; convert the model again")
        return self.get(key, kind)

    def open(self) -> BufferedReader:
        """The file, for `readinto` at a tensor's offset."""
        try:
            return self.path.open("rb")
        except OSError as e:
            raise UserError(f"{self.path}: cannot be read ({e.strerror})") from None

    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end generation, ascending: the file's eos, eot and eom keys, and control
        tokens whose text is a known end mark (both `<|im_end|>` and `<|endoftext|>`)."""
        tokens: list[str] = self.get("tokenizer.ggml.tokens", list, [])
        kinds: list[int] = self.get("tokenizer.ggml.token_type", list, [])
        keys = [f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom")]
        ids: set[int] = {self.get(key, int) for key in keys if key in self.metadata}
        ends = frozenset(_END_TEXTS)
        for i, (text, kind) in enumerate(zip(tokens, kinds, strict=False)):
            if kind in (TYPE_CONTROL, TYPE_USER) and text in ends:
                ids.add(i)
        for i in ids:
            if not 0 <= i < len(tokens):
                raise UserError(f"{self.path}: end token {i} is outside the vocabulary")
        return tuple(sorted(ids))


def open_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file (version 2 or 3, little endian).

    Raises:
        UserError: missing, unreadable, not a GGUF, truncated or damaged; one line.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            return _parse(path, f, size)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a .gguf file") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from None
    except _Damaged as e:
        raise UserError(f"{path}: not a usable GGUF file: {e}; fetch it again") from None


def _parse(path: Path, f: BufferedReader, size: int) -> GGUFFile:
    """Try a small prefix of the file first: headers are megabytes, files gigabytes."""
    window = 1 << 24
    while True:
        f.seek(0)
        data = f.read(min(window, size))
        try:
            return _parse_header(path, data, size)
        except _Damaged:
            if window >= size:
                raise
            if not data.startswith(struct.pack("<I", GGUF_MAGIC)) or window >= 1 << 28:
                raise  # a header of more than 256 MB is a damaged one
            window <<= 4


def _parse_header(path: Path, data: bytes, size: int) -> GGUFFile:
    c = _Cursor(data)
    if size < 24:
        raise _Damaged(f"it has only {size} bytes")
    if c.unpack("I")[0] != GGUF_MAGIC:
        raise _Damaged("it does not start with 'GGUF'")
    version, n_tensors, n_keys = c.unpack("I") + c.unpack("Q", 2)
    if version not in _VERSIONS:
        raise _Damaged(f"version {version}; versions 2 and 3 (little endian) are supported")
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = c.string()
        if key in metadata:
            raise _Damaged(f"the key {key!r} occurs twice")
        metadata[key] = c.value()
    raw = [_tensor_header(c) for _ in range(n_tensors)]
    align = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise _Damaged(f"general.alignment is {align!r}, not a power of two")
    start = -(-c.at // align) * align
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in raw:
        info = _place(name, shape, kind, start + offset, size)
        if name in tensors:
            raise _Damaged(f"the tensor {name!r} occurs twice")
        tensors[name] = info
    return GGUFFile(path, metadata, tensors)


def _tensor_header(c: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = c.string()
    n_dims = c.unpack("I")[0]
    if n_dims > _MAX_DIMS:
        raise _Damaged(f"the tensor {name!r} has {n_dims} dimensions")
    dims = c.unpack("Q", n_dims)
    kind, offset = c.unpack("I") + c.unpack("Q")
    return name, tuple(reversed(dims)), kind, offset


def _place(name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> TensorInfo:
    try:
        quant = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[quant]
    except (ValueError, KeyError):
        raise _Damaged(f"the tensor {name!r} has the unknown block format {kind}") from None
    n = 1
    for d in shape:
        n *= d
    if (shape[-1] if shape else 1) % block:
        raise _Damaged(f"rows of {name!r} are not whole {quant.name} blocks")
    nbytes = n // block * block_bytes
    if offset + nbytes > size:
        raise _Damaged(f"it is truncated: {name!r} ends at byte {offset + nbytes} of {size}")
    return TensorInfo(name=name, kind=quant.name, shape=shape, offset=offset, nbytes=nbytes)
