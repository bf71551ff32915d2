"""Reads a GGUF file for the native core: metadata, tensors, and how each is packed.

The `gguf` package parses the container. It trusts its input, so every failure on a damaged
file is turned into a one-line ValueError here, and sizes are checked before use.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.models.native_config import NativeConfig, config_from_gguf
from paceline.models.native_weights import (
    Q4_AFFINE,
    Q4_SUPER,
    Q8_SYM,
    Bytes,
    Floats,
    Matrix,
    Quantize,
    Source,
)

LAYER_MATRICES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}  # fmt: skip
LAYER_VECTORS = {
    "attention_norm": ("attn_norm.weight", True),
    "mlp_norm": ("ffn_norm.weight", True),
    "q_bias": ("attn_q.bias", False),
    "k_bias": ("attn_k.bias", False),
    "v_bias": ("attn_v.bias", False),
    "q_norm": ("attn_q_norm.weight", False),
    "k_norm": ("attn_k_norm.weight", False),
}


class GgufTensors:
    """The tensors of an open file by name, with their shapes checked against their bytes."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            with path.open("rb") as f:
                if f.read(4) != b"GGUF":
                    raise ValueError(f"{path.name}: not a GGUF file")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader = GGUFReader(path)
            self.meta: dict[str, Any] = {
                key: value.contents()
                for key, value in reader.fields.items()
                if not key.startswith("tokenizer.")
            }
            self.tensors = {t.name: t for t in reader.tensors}
            self._reader = reader
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except ValueError as error:
            raise ValueError(f"{path.name}: damaged GGUF file: {_one_line(error)}") from None
        except Exception as error:  # whatever a damaged header provokes in the parser
            raise ValueError(
                f"{path.name}: damaged GGUF file: {type(error).__name__}: {_one_line(error)}"
            ) from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in row-major order ([n_out, n_in])."""
        if name not in self.tensors:
            raise ValueError(f"{self.path.name}: tensor {name} is missing")
        return tuple(int(x) for x in reversed(self.tensors[name].shape.tolist()))

    def rows(self, native: Any, name: str) -> tuple[int, Bytes, int, int]:
        """(type, raw bytes [n_out, row bytes], n_out, n_in) of a matrix."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise ValueError(f"{self.path.name}: {name} has {len(shape)} dimensions, not 2")
        n_out, n_in = shape
        tensor = self.tensors[name]
        kind = int(tensor.tensor_type)
        if native.format_of_gguf(kind) < 0:
            raise ValueError(
                f"{self.path.name}: {name} has type {tensor.tensor_type.name}, which the native "
                "core does not read"
            )
        row = int(native.gguf_row_bytes(kind, n_in))
        data = np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1)
        if row == 0 or data.size != row * n_out:
            raise ValueError(f"{self.path.name}: {name} does not fit its shape {list(shape)}")
        return kind, data.reshape(n_out, row), n_out, n_in

    def vector(self, native: Any, name: str) -> Floats:
        shape = self.shape(name)
        kind = int(self.tensors[name].tensor_type)
        if len(shape) != 1 or kind not in (0, 1, 30):
            raise ValueError(f"{self.path.name}: {name} is not a float vector")
        data = np.ascontiguousarray(self.tensors[name].data).view(np.uint8).reshape(-1)
        out: Floats = np.empty(shape[0], np.float32)
        native.unpack_gguf(kind, data, out[None])
        return out


def source_from_gguf(
    native: Any,
    path: Path,
    *,
    quantize: Quantize | None = None,
    head_ids: npt.NDArray[np.int32] | None = None,
) -> Source:
    """Describes how to pack a file. Raises ValueError for what the native core cannot run."""
    file = GgufTensors(path)
    vocab, _ = _matrix_shape(file, "token_embd.weight")
    factors = None
    if "rope_freqs.weight" in file.tensors:
        factors = [float(x) for x in file.vector(native, "rope_freqs.weight")]
    try:
        config = config_from_gguf(file.meta, vocab, factors)
    except (TypeError, OverflowError, ZeroDivisionError) as error:
        raise ValueError(f"{path.name}: bad metadata: {_one_line(error)}") from None
    used = {"token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"}
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    sizes = _sizes(config)
    matrices = {"embedding": _matrix(native, file, "token_embd.weight", sizes["embedding"])}
    if head == "output.weight" or quantize is not None or head_ids is not None:
        matrices["head"] = _matrix(
            native, file, head, sizes["embedding"], quantize=quantize, keep=head_ids
        )
    vectors = {"final_norm": file.vector(native, "output_norm.weight")}
    for i in range(config.n_layers):
        for role, short in LAYER_MATRICES.items():
            name = f"blk.{i}.{short}.weight"
            used.add(name)
            order = _half_split_order(config, role)
            matrices[f"{i}.{role}"] = _matrix(
                native, file, name, sizes[role], quantize=quantize, keep=order
            )
        for role, (short, required) in LAYER_VECTORS.items():
            name = f"blk.{i}.{short}"
            used.add(name)
            if required or name in file.tensors:
                values = file.vector(native, name)
                order = _half_split_order(config, role)
                vectors[f"{i}.{role}"] = values if order is None else values[order]
    unknown = sorted(set(file.tensors) - used)
    if unknown:
        raise ValueError(f"{path.name}: the native core does not know tensor {unknown[0]}")
    return Source(config=config, matrices=matrices, vectors=vectors)


def _sizes(c: NativeConfig) -> dict[str, tuple[int, int]]:
    heads, kv = c.n_heads * c.head_size, c.n_kv_heads * c.head_size
    return {
        "embedding": (c.vocab_size, c.hidden_size),
        "q": (heads, c.hidden_size),
        "k": (kv, c.hidden_size),
        "v": (kv, c.hidden_size),
        "o": (c.hidden_size, heads),
        "gate": (c.intermediate_size, c.hidden_size),
        "up": (c.intermediate_size, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
    }


def _half_split_order(c: NativeConfig, role: str) -> npt.NDArray[np.int64] | None:
    """Row order that undoes the llama architecture's interleaved rotary layout."""
    if c.architecture != "llama" or role not in ("q", "k", "q_bias", "k_bias"):
        return None
    heads = c.n_heads if role[0] == "q" else c.n_kv_heads
    rows = np.arange(heads * c.head_size).reshape(heads, c.head_size // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)


def _matrix_shape(file: GgufTensors, name: str) -> tuple[int, int]:
    shape = file.shape(name)
    if len(shape) != 2:
        raise ValueError(f"{file.path.name}: {name} has {len(shape)} dimensions, not 2")
    return shape[0], shape[1]


def _matrix(
    native: Any,
    file: GgufTensors,
    name: str,
    size: tuple[int, int],
    *,
    quantize: Quantize | None = None,
    keep: npt.NDArray[Any] | None = None,
) -> Matrix:
    """Packs tensor `name`, or only its rows `keep`, requantised where that makes it smaller."""
    kind, rows, n_out, n_in = file.rows(native, name)
    if (n_out, n_in) != size:
        raise ValueError(f"{file.path.name}: {name} is {[n_out, n_in]}, not {list(size)}")
    exact = int(native.format_of_gguf(kind))
    wanted = {"q4": Q4_SUPER, "q8": Q8_SYM}[quantize] if quantize else exact
    shrinks = native.packed_bytes(wanted, 16, 256) < native.packed_bytes(exact, 16, 256)
    format = wanted if shrinks and exact not in (Q4_AFFINE, Q4_SUPER) and n_in % 32 == 0 else exact
    count = n_out if keep is None else len(keep)

    def write(out: Bytes) -> None:
        chosen = rows if keep is None else rows[keep]
        if format == exact:
            native.pack_gguf(kind, np.ascontiguousarray(chosen).reshape(-1), count, n_in, out)
            return
        tile = int(native.packed_bytes(format, 16, n_in))
        step = 16 * 256  # rows at a time, whole tiles: bounds the memory for floats
        for at in range(0, count, step):
            part = np.ascontiguousarray(chosen[at : at + step])
            floats = np.empty((len(part), n_in), np.float32)
            native.unpack_gguf(kind, part.reshape(-1), floats)
            begin = at // 16 * tile
            native.pack_float(floats, format, out[begin : begin + -(-len(part) // 16) * tile])

    return Matrix(format=format, n_out=count, n_in=n_in, write=write)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
