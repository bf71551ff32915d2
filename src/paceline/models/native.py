"""The native CPU core behind the `TargetModel` interface.

`NativeModel.from_gguf(path)` runs a GGUF file, `NativeModel.from_state(config, tensors)` float
tensors in memory (optionally quantised). A row's logits are bit-identical whatever else shares
the pass, for any number of threads and on every instruction-set path (ROW_INVARIANT): integer
dot products are exact, every float reduction has one fixed order, and attention is split at
fixed positions (Flash-Decoding, Dao et al. 2023, with a fixed split size).

The extension is optional. `is_available()` says whether it is there; without it the torch path
still works.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.base import (
    FINAL,
    Batch,
    Int32,
    KVStore,
    LayerMask,
    ModelInfo,
    Numerics,
    TargetOutput,
)
from paceline.models.native_config import NativeConfig, config_from_hf
from paceline.models.native_gguf import source_from_gguf
from paceline.models.native_weights import (
    DENSE_BF16,
    DENSE_F16,
    DENSE_F32,
    Q4_SUPER,
    Q8_SYM,
    Floats,
    Packed,
    PackedMatrix,
    Quantize,
    Source,
    anonymous_memory,
    cache_key,
    float_matrix,
    load_cached,
    pack_in_memory,
)

_native: Any = None
_reason = ""
try:
    # By name: the extension is no part of the package's import graph.
    _native = importlib.import_module("paceline._native")
except ImportError as error:
    _reason = str(error)

_FORMAT_NAMES = (
    "q4", "q4", "q6", "q6", "q6", "q6", "q8", "bf16", "f16", "f32",
)  # fmt: skip


def is_available() -> tuple[bool, str]:
    """(True, kernel path) where the extension imported, else (False, the reason)."""
    if _native is None:
        return False, f"the native CPU core was not built: {_reason}"
    return True, str(_native.paths()[0])


def kernel_paths() -> list[str]:
    """Instruction-set paths that run on this machine, fastest first."""
    return list(_core().paths())


def default_threads() -> int:
    """The cores that this process may use ($PACELINE_THREADS overrides)."""
    text = os.environ.get("PACELINE_THREADS", "")
    if text:
        if not text.isdigit() or not 1 <= int(text) <= 64:
            raise ValueError(f"PACELINE_THREADS must be in 1..64, not {text!r}")
        return int(text)
    return max(1, min(64, len(os.sched_getaffinity(0))))


def _core() -> Any:
    if _native is None:
        raise ValueError(f"the native CPU core was not built ({_reason}); use the torch path")
    return _native


class NativeLinear:
    """A weight matrix on the native kernels: out_NV = x_NK @ weight_VK.T, row-invariant."""

    def __init__(self, packed: PackedMatrix, *, threads: int | None = None, path: str = "") -> None:
        self._linear = _core().Linear(packed.format, packed.n_out, packed.n_in, packed.data)
        self._threads = default_threads() if threads is None else threads
        self._path = path
        self.n_out, self.n_in, self.format = packed.n_out, packed.n_in, packed.format
        self.nbytes = packed.data.nbytes

    @staticmethod
    def from_float(
        weight_VK: torch.Tensor,
        *,
        quantize: Quantize | None = None,
        threads: int | None = None,
        path: str = "",
    ) -> NativeLinear:
        """Packs float weights [V, K]: 4-bit, 8-bit, or as they are (float32, bf16, fp16)."""
        core = _core()
        matrix = float_matrix(
            core, weight_VK.detach().float().numpy(), _float_format(weight_VK, quantize)
        )
        data = np.empty(matrix.nbytes(core), np.uint8)
        matrix.write(data)
        packed = PackedMatrix(format=matrix.format, n_out=matrix.n_out, n_in=matrix.n_in, data=data)
        return NativeLinear(packed, threads=threads, path=path)

    def __call__(self, x_NK: torch.Tensor) -> torch.Tensor:
        """x_NK: float32 [N, K]. Returns float32 [N, V]."""
        x = np.ascontiguousarray(x_NK.detach().float().numpy())
        if x.ndim != 2 or x.shape[1] != self.n_in:
            raise ValueError(f"expected activations [N, {self.n_in}], got {list(x_NK.shape)}")
        out = np.empty((len(x), self.n_out), np.float32)
        self._linear.run(x, out, self._threads, self._path)
        return torch.from_numpy(out)

    def row(self, index: int) -> torch.Tensor:
        """Row `index` of the weights, dequantised: float32 [K]."""
        out = np.empty(self.n_in, np.float32)
        self._linear.row(index, out)
        return torch.from_numpy(out)


class NativeKV:
    """fp16 keys and values, [L, 2, K, slots, E]; see `KVStore`."""

    def __init__(self, config: NativeConfig, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks: {n_blocks} of {block_size} slots")
        self.n_blocks, self.block_size = n_blocks, block_size
        shape = (config.n_layers, 2, config.n_kv_heads, n_blocks * block_size, config.head_size)
        self._memory = anonymous_memory(2 * math.prod(shape))  # not touched yet
        self.data_L2KSE = np.frombuffer(self._memory, np.uint16).reshape(shape)
        self.flat = self.data_L2KSE.reshape(-1)

    @property
    def nbytes(self) -> int:
        return self.data_L2KSE.nbytes

    def move(self, source: Int32, destination: Int32) -> None:
        """Copies slots in every layer; all are read before any is written."""
        if len(source):
            self.data_L2KSE[:, :, :, destination] = self.data_L2KSE[:, :, :, source]


class NativeModel:
    """A decoder on the native core; implements `TargetModel`.

    head_ids: the vocabulary ids whose logits are computed (ascending), or None for all. With
        `compact_logits` the logits have one column per head id, else V columns with -inf
        elsewhere.
    """

    def __init__(
        self,
        packed: Packed,
        *,
        threads: int | None = None,
        path: str | None = None,
        head_ids: Int32 | None = None,
        compact_logits: bool = False,
    ) -> None:
        core = _core()
        c = self.config = packed.config
        self._packed = packed
        self._linears = {
            name: core.Linear(m.format, m.n_out, m.n_in, m.data)
            for name, m in packed.matrices.items()
        }
        self.head_ids = head_ids
        self.compact_logits = compact_logits
        head = self._linears.get("head", self._linears["embedding"])
        self._n_logits = head.n_out
        self._model = core.Model(
            hidden=c.hidden_size,
            intermediate=c.intermediate_size,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_size=c.head_size,
            eps=c.norm_eps,
            inverse_frequencies=list(c.inverse_frequencies),
            rope_scale=1.0,
            embedding_scale=1.0,
            embedding=self._linears["embedding"],
            head=head,
            final_norm=packed.vectors["final_norm"],
            threads=default_threads() if threads is None else threads,
            path=os.environ.get("PACELINE_KERNELS", "") if path is None else path,
        )
        for i in range(c.n_layers):
            prefix = f"{i}."
            parts = {
                name.removeprefix(prefix): value
                for group in (self._linears, packed.vectors)
                for name, value in group.items()
                if name.startswith(prefix)
            }
            self._model.add_layer(**parts)
        self.info = self._describe()

    @staticmethod
    def from_gguf(
        path: str | Path,
        *,
        threads: int | None = None,
        quantize: Quantize | None = None,
        head_ids: npt.ArrayLike | None = None,
        compact_logits: bool = False,
        use_cache: bool = True,
        kernel_path: str | None = None,
        name: str | None = None,
    ) -> NativeModel:
        """Loads a GGUF file (llama, qwen2 or qwen3).

        quantize: "q4" or "q8" requantises what is stored in more bits (for a draft model).
        use_cache: keep the packed weights under $PACELINE_CACHE or ~/.cache/paceline.
        Raises ValueError with the reason for a file that is damaged or cannot run here.
        """
        core = _core()
        _check_quantize(quantize)
        file = Path(path)
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        ids = None if head_ids is None else np.unique(np.asarray(head_ids)).astype(np.int32)
        if ids is not None and (len(ids) == 0 or ids[0] < 0):
            raise ValueError("head_ids must name at least one vocabulary id, none negative")
        options = {
            "layout": core.LAYOUT_VERSION,
            "quantize": quantize,
            "head": None if ids is None else ids.tolist(),
        }

        def make() -> Source:
            source = source_from_gguf(core, file, quantize=quantize, head_ids=ids)
            if ids is not None and ids[-1] >= source.config.vocab_size:
                raise ValueError(f"head id {ids[-1]} is outside the vocabulary")
            return source

        packed = load_cached(core, cache_key(file, options), make, use_cache=use_cache)
        model = NativeModel(
            packed, threads=threads, path=kernel_path, head_ids=ids, compact_logits=compact_logits
        )
        if name is not None:
            model.info = replace(model.info, name=name)
        return model

    @staticmethod
    def from_state(
        config: Any,
        tensors: Mapping[str, torch.Tensor],
        *,
        threads: int | None = None,
        quantize: Quantize | None = None,
        head_ids: npt.ArrayLike | None = None,
        compact_logits: bool = False,
        kernel_path: str | None = None,
    ) -> NativeModel:
        """From float tensors by their transformers names ("model.layers.0...."), with a HF
        config (object or dict) or a `NativeConfig`. Without `quantize` matrices keep their
        dtype. Raises ValueError for shapes that the core cannot run."""
        core = _core()
        _check_quantize(quantize)
        c = config if isinstance(config, NativeConfig) else config_from_hf(config)
        ids = None if head_ids is None else np.unique(np.asarray(head_ids)).astype(np.int32)
        source = _source_from_state(core, c, tensors, quantize, ids)
        return NativeModel(
            pack_in_memory(core, source),
            threads=threads,
            path=kernel_path,
            head_ids=ids,
            compact_logits=compact_logits,
        )

    @property
    def kernel_path(self) -> str:
        return str(self._model.path)

    @property
    def threads(self) -> int:
        return int(self._model.threads)

    @threads.setter
    def threads(self, n: int) -> None:
        self._model.set_threads(n)

    @property
    def bytes_per_pass(self) -> int:
        """Weight bytes that one pass reads (without the embedding rows it looks up)."""
        tied = "head" not in self._packed.matrices
        return sum(
            m.data.nbytes
            for name, m in self._packed.matrices.items()
            if tied or name != "embedding"
        )

    @property
    def workspace_bytes(self) -> int:
        return int(self._model.workspace_bytes)

    def embedding_row(self, token: int) -> torch.Tensor:
        """The embedding of a token: float32 [D]."""
        out = np.empty(self.config.hidden_size, np.float32)
        self._linears["embedding"].row(token, out)
        return torch.from_numpy(out)

    def new_kv(self, n_blocks: int, block_size: int) -> KVStore:
        return NativeKV(self.config, n_blocks, block_size)

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        c = self.config
        if not isinstance(kv, NativeKV):
            raise ValueError("the native core needs a cache made by its own new_kv()")
        if kv.block_size != batch.block_size:
            raise ValueError(
                f"batch has blocks of {batch.block_size}, the cache of {kv.block_size}"
            )
        n = batch.n_rows
        logits = torch.empty((len(batch.wanted_R), self._n_logits), dtype=torch.float32)
        tapped = {i: torch.empty((n, c.hidden_size), dtype=torch.float32) for i in taps}
        bad = [i for i in tapped if i != FINAL and not 0 <= i <= c.n_layers]
        if bad:
            raise ValueError(f"tap {bad[0]} is not a layer of {c.n_layers}")
        inner = [i for i in tapped if i != FINAL]
        final = tapped.get(FINAL)
        run_attention, run_mlp = self._masks(layer_mask)
        if n:
            self._model.forward(
                tokens=batch.tokens_N,
                positions=batch.positions_N,
                parents=batch.parents_N,
                slots=batch.slots_N,
                starts=batch.starts_B1,
                contexts=batch.context_B,
                tables=list(batch.tables_B),
                block_size=batch.block_size,
                wanted=batch.wanted_R,
                kv=kv.flat,
                logits=logits.numpy(),
                tap_layers=inner,
                taps=[tapped[i].numpy() for i in inner],
                final_tap=None if final is None else final.numpy(),
                run_attention=run_attention,
                run_mlp=run_mlp,
            )
        if self.head_ids is not None and not self.compact_logits:
            full = torch.full((len(logits), c.vocab_size), -torch.inf)
            full[:, torch.from_numpy(self.head_ids).long()] = logits
            logits = full
        return TargetOutput(logits_RV=logits, taps=tapped)

    def _masks(
        self, mask: LayerMask | None
    ) -> tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.uint8] | None]:
        if mask is None:
            return None, None
        n = self.config.n_layers
        if len(mask.attention_L) != n or len(mask.mlp_L) != n:
            raise ValueError(f"the layer mask must have {n} entries per sub-layer")
        return np.array(mask.attention_L, np.uint8), np.array(mask.mlp_L, np.uint8)

    def _describe(self) -> ModelInfo:
        c = self.config
        body = [m for name, m in self._packed.matrices.items() if name != "embedding"]
        largest: dict[str, int] = {}
        for m in body or list(self._packed.matrices.values()):
            kind = _FORMAT_NAMES[m.format]
            largest[kind] = largest.get(kind, 0) + m.data.nbytes
        return ModelInfo(
            name=c.name,
            vocab_size=c.vocab_size,
            n_layers=c.n_layers,
            hidden_size=c.hidden_size,
            max_context=c.max_context,
            kv_slot_bytes=4 * c.n_layers * c.n_kv_heads * c.head_size,
            weight_bytes=sum(m.data.nbytes for m in self._packed.matrices.values()),
            numerics=Numerics.ROW_INVARIANT,
            dtype="+".join(sorted(largest, key=lambda k: -largest[k])),
            device=f"cpu ({self.kernel_path})",
        )


def _check_quantize(quantize: object) -> None:
    if quantize not in (None, "q4", "q8"):
        raise ValueError(f"quantize must be None, 'q4' or 'q8', not {quantize!r}")


def _float_format(weight: torch.Tensor, quantize: Quantize | None) -> int:
    if quantize is not None and weight.shape[1] % 32 == 0:
        return {"q4": Q4_SUPER, "q8": Q8_SYM}[quantize]
    return {torch.bfloat16: DENSE_BF16, torch.float16: DENSE_F16}.get(weight.dtype, DENSE_F32)


_STATE_MATRICES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip
_STATE_VECTORS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}


def _source_from_state(
    core: Any,
    c: NativeConfig,
    tensors: Mapping[str, torch.Tensor],
    quantize: Quantize | None,
    head_ids: Int32 | None,
) -> Source:
    def get(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ValueError(f"{c.name}: tensor {name} is missing")
        return tensors[name].detach()

    def matrix(name: str, how: Quantize | None, ids: Int32 | None = None) -> Any:
        weight = get(name)
        rows = weight if ids is None else weight[torch.from_numpy(ids).long()]
        return float_matrix(core, rows.float().numpy(), _float_format(weight, how))

    for name in tensors:
        if name.endswith(("o_proj.bias", "gate_proj.bias", "up_proj.bias", "down_proj.bias")):
            raise ValueError(f"{c.name}: the native core does not know tensor {name}")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    head = head if head in tensors else embedding
    matrices = {"embedding": matrix(embedding, None)}
    if head != embedding or quantize or head_ids is not None:
        matrices["head"] = matrix(head, quantize, head_ids)
    vectors: dict[str, Floats] = {"final_norm": get("model.norm.weight").float().numpy()}
    for i in range(c.n_layers):
        prefix = f"model.layers.{i}."
        for role, short in _STATE_MATRICES.items():
            matrices[f"{i}.{role}"] = matrix(f"{prefix}{short}.weight", quantize)
        for role, short in _STATE_VECTORS.items():
            if (role.endswith("_norm") and role[1:] != "_norm") or prefix + short in tensors:
                vectors[f"{i}.{role}"] = get(prefix + short).float().numpy()
    return Source(config=c, matrices=matrices, vectors=vectors)
