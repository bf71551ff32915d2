"""Where the native core's weights come from: a GGUF file, a folder, or tensors in memory.

A store gives raw rows by the standard names of `tensor_shapes`; `source_of` says how each
matrix of a model is packed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open

from paceline.errors import UserError
from paceline.models import safetensors_weights
from paceline.models.base import Int32
from paceline.models.config import DecoderConfig, tensor_shapes
from paceline.models.gguf_file import GGUFFile, TensorInfo
from paceline.models.gguf_weights import (
    check_tensors,
    dequantize,
    half_order,
    interleaved_heads,
)
from paceline.models.native_weights import (
    GROUP,
    Q4_AFFINE,
    Q4_SUPER,
    QUANTISED,
    TILE,
    Bytes,
    Floats,
    Matrix,
    Quantize,
    Source,
    Vector,
)

Int64 = npt.NDArray[np.int64]

#: Rows that lie closer together than this are read in one go.
_GAP: Final = 64
#: Stored float types by the names that GGUF and safetensors give them.
_FLOATS: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP_ROLES: Final = {EMBEDDING: "embedding", HEAD: "head", "model.norm.weight": "final_norm"}
_LAYER_ROLES: Final = {
    "input_layernorm.weight": "attention_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q_bias",
    "self_attn.k_proj.bias": "k_bias",
    "self_attn.v_proj.bias": "v_bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}


class Store(Protocol):
    """Checked weights by their standard names. Calls may run side by side."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that they come from; none for tensors in memory."""
        ...

    def kind(self, name: str) -> str:
        """GGUF's name of the format that `rows` gives."""
        ...

    def rows(self, name: str, wanted_n: Int64) -> Bytes:
        """Rows of a matrix as stored: uint8 [n, bytes per row]."""
        ...

    def vector(self, name: str) -> Floats: ...


class GGUFStore:
    """The weights of a GGUF file. UserError where they are not what `config` needs."""

    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self._config = config
        self._places = check_tensors(file, config)
        self._file = GGUFFile(file.path, {}, file.tensors)  # keeps no vocabulary alive

    @property
    def files(self) -> tuple[Path, ...]:
        return (self._file.path,)

    def kind(self, name: str) -> str:
        return self._places[name].kind

    def rows(self, name: str, wanted_n: Int64) -> Bytes:
        info = self._places[name]
        size = info.nbytes // info.shape[0]
        heads = interleaved_heads(self._config, name)
        if heads is not None:
            wanted_n = half_order(torch.arange(info.shape[0]), heads).numpy()[wanted_n]

        def read(first: int, last: int) -> Bytes:
            raw = self._read(info, first * size, (last - first) * size)
            return np.frombuffer(raw, np.uint8).reshape(-1, size)

        return gather(wanted_n, read)

    def vector(self, name: str) -> Floats:
        info = self._places[name]
        raw = torch.frombuffer(self._read(info, 0, info.nbytes), dtype=torch.uint8)
        values = torch.empty(info.shape)
        dequantize(raw, info.kind, values)
        heads = interleaved_heads(self._config, name)
        floats: Floats = (values if heads is None else half_order(values, heads)).numpy()
        return floats

    def _read(self, info: TensorInfo, start: int, size: int) -> bytearray:
        raw = bytearray(size)
        with self._file.open() as f:
            f.seek(info.offset + start)
            if f.readinto(raw) != size:
                raise UserError(
                    f"{self._file.path}: is truncated inside {info.name}; fetch it again"
                )
        return raw


class FolderStore:
    """The weights of a safetensors folder. UserError where they are not what `config` needs."""

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._places = safetensors_weights.check_tensors(folder, config)
        self._config_file = folder / "config.json"

    @property
    def files(self) -> tuple[Path, ...]:
        return (self._config_file, *sorted({p.file for p in self._places.values()}))

    def kind(self, name: str) -> str:
        kind = self._places[name].kind
        return "F32" if kind == "F64" else kind

    def rows(self, name: str, wanted_n: Int64) -> Bytes:
        with safe_open(self._places[name].file, framework="pt") as f:
            tensor = f.get_slice(name)
            return gather(wanted_n, lambda first, last: _raw(tensor[first:last]))

    def vector(self, name: str) -> Floats:
        with safe_open(self._places[name].file, framework="pt") as f:
            floats: Floats = f.get_tensor(name).to(torch.float32, copy=True).numpy()
        return floats


class StateStore:
    """Tensors in memory, by their standard names. UserError where they are not what `config`
    needs."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: DecoderConfig) -> None:
        wanted = tensor_shapes(config)
        self._tensors = {name: tensors[name].detach().cpu() for name in wanted if name in tensors}
        for name in tensors:
            if name not in wanted and not safetensors_weights.is_ignored(name, config):
                raise UserError(f"the native core does not know tensor {name}")
        for name, shape in wanted.items():
            if name not in tensors:
                raise UserError(f"tensor {name} is missing")
            if tuple(tensors[name].shape) != shape:
                raise UserError(f"tensor {name} is {list(tensors[name].shape)}, not {list(shape)}")

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    def kind(self, name: str) -> str:
        return _FLOATS.get(self._tensors[name].dtype, "F32")

    def rows(self, name: str, wanted_n: Int64) -> Bytes:
        return _raw(self._tensors[name][torch.from_numpy(wanted_n)])

    def vector(self, name: str) -> Floats:
        floats: Floats = self._tensors[name].float().numpy()
        return floats


def _raw(tensor: torch.Tensor) -> Bytes:
    """Rows of floats, any type that is not one of `_FLOATS` as float32."""
    if tensor.dtype not in _FLOATS:
        tensor = tensor.float()
    raw: Bytes = tensor.contiguous().view(torch.uint8).numpy()
    return raw


def gather(wanted_n: Int64, read: Callable[[int, int], Bytes]) -> Bytes:
    """Rows `wanted_n`, by as few calls of `read(first, last)` as reads little beside them."""
    order = np.argsort(wanted_n, kind="stable")
    gaps = np.flatnonzero(np.diff(wanted_n[order]) > _GAP) + 1
    parts = []
    for part in np.split(order, gaps):
        first, last = int(wanted_n[part[0]]), int(wanted_n[part[-1]]) + 1
        parts.append(read(first, last)[wanted_n[part] - first])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return np.concatenate(parts)[back]


def source_of(
    core: Any,
    config: DecoderConfig,
    store: Store,
    *,
    quantize: Quantize | None = None,
    head_ids: Int32 | None = None,
) -> Source:
    """How to pack a model. Reads no weights.

    quantize: bits of the matrices that are stored in more, except the embedding's, of which
        a pass reads one row per token. head_ids: the rows of the head to keep; None for all.
    """
    shapes = tensor_shapes(config)
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Vector] = {}
    for name, shape in shapes.items():
        role = _role(name)
        if len(shape) == 1:
            vectors[role] = Vector(n=shape[0], read=partial(store.vector, name))
            continue
        how = None if name == EMBEDDING else quantize
        keep = head_ids if name == HEAD else None
        matrices[role] = _matrix(core, store, name, shape, how, keep)
    if config.tied and (quantize is not None or head_ids is not None):
        shape = shapes[EMBEDDING]
        matrices["head"] = _matrix(core, store, EMBEDDING, shape, quantize, head_ids)
    return Source(matrices=matrices, vectors=vectors)


def _role(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` to `3.up`."""
    if name in _TOP_ROLES:
        return _TOP_ROLES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"{layer}.{_LAYER_ROLES[rest]}"


def _matrix(
    core: Any,
    store: Store,
    name: str,
    shape: tuple[int, ...],
    quantize: Quantize | None,
    keep: Int32 | None,
) -> Matrix:
    """Packs tensor `name`, or only its rows `keep`, requantised where that makes it smaller."""
    n_in = shape[1]
    stored = int(GGMLQuantizationType[store.kind(name)])
    exact = int(core.format_of_gguf(stored))
    form = _smaller(core, exact, n_in, quantize)
    rows_n = np.arange(shape[0]) if keep is None else keep.astype(np.int64)

    def write(first: int, last: int, out: Bytes) -> None:
        raw = store.rows(name, rows_n[first:last])
        if form == exact:
            core.pack_gguf(stored, raw.reshape(-1), last - first, n_in, out)
            return
        floats = np.empty((last - first, n_in), np.float32)
        core.unpack_gguf(stored, raw.reshape(-1), floats)
        core.pack_float(floats, form, out)

    return Matrix(format=form, n_out=len(rows_n), n_in=n_in, write=write)


def _smaller(core: Any, exact: int, n_in: int, quantize: Quantize | None) -> int:
    """The format of a matrix: as asked for where that takes fewer bytes than as stored."""
    if quantize is None or n_in % GROUP or exact in (Q4_AFFINE, Q4_SUPER):
        return exact
    asked = QUANTISED[quantize]
    smaller = core.packed_bytes(asked, TILE, n_in) < core.packed_bytes(exact, TILE, n_in)
    return asked if smaller else exact
