"""The native CPU core behind the `TargetModel` interface.

`NativeModel.from_gguf(path)` runs a GGUF file, `from_folder(path)` safetensors,
`from_state(config, tensors)` tensors in memory. A row's logits are bit-identical whatever else
shares the pass, for any number of threads and on every instruction-set path (ROW_INVARIANT):
integer dot products are exact, every float reduction has one fixed order, and attention is
split at fixed positions (Flash-Decoding, Dao et al. 2023, with a fixed split size).

The extension is optional. `is_available()` says whether it is there; without it the torch path
still works.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import UserError
from paceline.models.base import (
    FINAL,
    Batch,
    Int32,
    KVStore,
    LayerMask,
    ModelInfo,
    Numerics,
    Stacked,
    TargetOutput,
)
from paceline.models.config import DecoderConfig, from_gguf, from_hf
from paceline.models.gguf_file import open_gguf
from paceline.models.native_config import NativeConfig
from paceline.models.native_core import default_threads, is_available, kernel_paths, native_core
from paceline.models.native_kv import NativeKV
from paceline.models.native_linear import NativeLinear
from paceline.models.native_source import FolderStore, GGUFStore, StateStore, Store, source_of
from paceline.models.native_weights import (
    Packed,
    Progress,
    Quantize,
    cache_key,
    check_quantize,
    load_cached,
    pack,
)

__all__ = [
    "NativeKV", "NativeLinear", "NativeModel", "default_threads", "is_available", "kernel_paths",
]  # fmt: skip

_FORMAT_NAMES = (
    "q4", "q4", "q6", "q6", "q6", "q6", "q8", "bf16", "f16", "f32",
)  # fmt: skip


class LoadOptions(TypedDict, total=False):
    """How weights are loaded.

    name: how reports call the model. threads: of the core (default: all cores).
    quantize: "q4" or "q8" requantises matrices that are stored in more bits.
    head_ids, compact_logits: see `NativeModel`.
    use_cache: keep packed weights that come from files in the cache folder, and take them
        from there (default: yes).
    kernel_path: one of `kernel_paths()` (default: the fastest).
    progress: called while weights are packed.
    """

    name: str
    threads: int | None
    quantize: Quantize | None
    head_ids: npt.ArrayLike | None
    compact_logits: bool
    use_cache: bool
    kernel_path: str | None
    progress: Progress | None


class NativeModel:
    """A decoder on the native core; implements `TargetModel`.

    head_ids: the vocabulary ids whose logits are computed (ascending), or None for all. With
        `compact_logits` the logits have one column per head id, else V columns with -inf
        elsewhere.
    """

    def __init__(
        self,
        config: NativeConfig,
        packed: Packed,
        *,
        name: str = "native",
        threads: int | None = None,
        path: str | None = None,
        head_ids: Int32 | None = None,
        compact_logits: bool = False,
    ) -> None:
        core = native_core()
        c = self.config = config
        self._packed = packed
        self._linears = {
            role: core.Linear(m.format, m.n_out, m.n_in, m.data)
            for role, m in packed.matrices.items()
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
            rope_scale=c.rope_scale,
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
                role.removeprefix(prefix): value
                for group in (self._linears, packed.vectors)
                for role, value in group.items()
                if role.startswith(prefix)
            }
            self._model.add_layer(**parts)
        self.info = self._describe(name)

    @staticmethod
    def from_gguf(path: str | Path, **options: Unpack[LoadOptions]) -> NativeModel:
        """Loads a GGUF file."""
        file = open_gguf(path)
        config = from_gguf(file)
        given: LoadOptions = {"name": file.path.stem, **options}
        return NativeModel.from_store(config, GGUFStore(file, config), **given)

    @staticmethod
    def from_folder(path: str | Path, **options: Unpack[LoadOptions]) -> NativeModel:
        """Loads a folder of safetensors with its config.json."""
        folder, config = Path(path), from_hf(path)
        given: LoadOptions = {"name": folder.name, **options}
        return NativeModel.from_store(config, FolderStore(folder, config), **given)

    @staticmethod
    def from_state(
        config: Any, tensors: Mapping[str, torch.Tensor], **options: Unpack[LoadOptions]
    ) -> NativeModel:
        """From float tensors by their standard names (`tensor_shapes`), with a HF config
        (object or dict) or a `DecoderConfig`."""
        if not isinstance(config, DecoderConfig):
            config = from_hf(config if isinstance(config, Mapping) else config.to_dict())
        return NativeModel.from_store(config, StateStore(tensors, config), **options)

    @staticmethod
    def from_store(
        config: DecoderConfig,
        store: Store,
        *,
        name: str = "native",
        threads: int | None = None,
        quantize: Quantize | None = None,
        head_ids: npt.ArrayLike | None = None,
        compact_logits: bool = False,
        use_cache: bool = True,
        kernel_path: str | None = None,
        progress: Progress | None = None,
    ) -> NativeModel:
        """Packs weights, or takes them packed from the cache folder, and runs them. Options: see
        `LoadOptions`.

        Raises UserError with the reason for weights that are damaged or can't run here.
        """
        core = native_core()
        check_quantize(quantize)
        native = NativeConfig.from_decoder(config)
        ids = _head_ids(head_ids, config.vocab_size)
        source = source_of(core, config, store, quantize=quantize, head_ids=ids)
        if use_cache and store.files:
            what = {
                "layout": core.LAYOUT_VERSION,
                "quantize": quantize,
                "head": None if ids is None else ids.tolist(),
            }
            packed = load_cached(core, source, cache_key(store.files, what), progress=progress)
        else:
            packed = pack(core, source, progress=progress)
        return NativeModel(
            native,
            packed,
            name=name,
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

    @property
    def embedding(self) -> Any:
        """The embedding table as the core has it, for heads that borrow it."""
        return self._linears["embedding"]

    def embedding_rows(self, tokens: Seq[int]) -> torch.Tensor:
        return self._rows("embedding", tokens)

    def head_rows(self, tokens: Seq[int]) -> torch.Tensor:
        if self.head_ids is not None:
            raise ValueError("this model's head is cut to some tokens; load it whole")
        return self._rows("head" if "head" in self._linears else "embedding", tokens)

    def _rows(self, matrix: str, tokens: Seq[int]) -> torch.Tensor:
        out = np.empty((len(tokens), self.config.hidden_size), np.float32)
        for row, token in zip(out, tokens, strict=True):
            self._linears[matrix].row(token, row)
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
        bad = [i for i in taps if i != FINAL and not 0 <= i <= c.n_layers]
        if bad:
            raise ValueError(f"tap {bad[0]} is not a layer of {c.n_layers}")
        tapped_TND = torch.empty((len(taps), n, c.hidden_size), dtype=torch.float32)
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
                tap_layers=taps,
                taps=tapped_TND.numpy() if taps else None,
                run_attention=run_attention,
                run_mlp=run_mlp,
            )
        if self.head_ids is not None and not self.compact_logits:
            full = torch.full((len(logits), c.vocab_size), -torch.inf)
            full[:, torch.from_numpy(self.head_ids).long()] = logits
            logits = full
        tapped = Stacked(taps, tapped_TND)
        return TargetOutput(logits_RV=logits, taps=tapped, starts_B1=batch.starts_B1)

    def _masks(
        self, mask: LayerMask | None
    ) -> tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.uint8] | None]:
        if mask is None:
            return None, None
        n = self.config.n_layers
        if len(mask.attention_L) != n or len(mask.mlp_L) != n:
            raise ValueError(f"the layer mask must have {n} entries per sub-layer")
        return np.array(mask.attention_L, np.uint8), np.array(mask.mlp_L, np.uint8)

    def _describe(self, name: str) -> ModelInfo:
        c = self.config
        body = [m for role, m in self._packed.matrices.items() if role != "embedding"]
        largest: dict[str, int] = {}
        for m in body or list(self._packed.matrices.values()):
            kind = _FORMAT_NAMES[m.format]
            largest[kind] = largest.get(kind, 0) + m.data.nbytes
        return ModelInfo(
            name=name,
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


def _head_ids(wanted: npt.ArrayLike | None, vocab_size: int) -> Int32 | None:
    if wanted is None:
        return None
    ids = np.unique(np.asarray(wanted))
    if len(ids) == 0 or ids[0] < 0:
        raise UserError("head_ids must name at least one vocabulary id, none negative")
    if ids[-1] >= vocab_size:
        raise UserError(f"head id {ids[-1]} is outside the vocabulary")
    return ids.astype(np.int32)
