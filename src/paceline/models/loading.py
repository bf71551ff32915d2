"""From a model's name or path to a decoder and a tokenizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import torch

from paceline.errors import UserError
from paceline.models import gguf_weights, safetensors_weights
from paceline.models.base import Int32, TargetModel
from paceline.models.catalog import ModelSource, resolve_model
from paceline.models.config import DecoderConfig, from_gguf, from_hf, tensor_shapes
from paceline.models.decoder import build_decoder
from paceline.models.gguf_file import GGUFFile, open_gguf
from paceline.models.native import NativeModel, is_available
from paceline.models.native_config import NativeConfig
from paceline.models.native_core import native_core
from paceline.models.native_source import FolderStore, GGUFStore, Store, source_of
from paceline.models.native_weights import Quantize, Source
from paceline.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Called while the native core packs weights (once, then they are kept): the model's name, and
#: the share that is done.
OnPack = Callable[[str, float], None]
#: Tokens of a fast draft's head.
FAST_HEAD = 32768
#: Stored formats that are not quantised.
_PLAIN_FORMATS = ("F32", "F16", "BF16")
_QUANTISED = get_args(Quantize)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk whose header is read and whose weights are not.

    store: where the native CPU core takes the weights from; None runs it in torch, in `dtype`.
    quantize: on the native core, matrices that are stored in more bits are quantised to these.
    fast: for drafts on the native core: quantised to 4 bits, and only the logits of the
        `FAST_HEAD` most frequent tokens computed. A draft's law is whatever is drawn from, so
        this changes no output's law, only how often proposals are accepted.
    """

    source: ModelSource
    config: DecoderConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    store: Store | None = None
    quantize: Quantize | None = None
    fast: bool = False
    on_pack: OnPack | None = None

    @property
    def native(self) -> bool:
        """Whether it runs on the native CPU core."""
        return self.store is not None

    @property
    def fast_head(self) -> list[int] | None:
        """Tokens whose logits a fast draft computes; None for all. Byte-pair vocabularies are
        ordered by how early a pair was merged, so low ids are the frequent ones."""
        size = min(self.tokenizer.vocab_size, self.config.vocab_size)
        if not self.fast or size <= 2 * FAST_HEAD:
            return None
        special = {i for i in self.tokenizer.special_ids if i < size}
        return sorted({*range(FAST_HEAD), *special})

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights, each held once."""
        if self.store is not None:
            head = self.fast_head
            ids = None if head is None else np.array(head, np.int32)
            source = _source(self.config, self.store, self._bits, ids)
            return source.nbytes(native_core())
        size = torch.empty((), dtype=self.dtype).element_size()
        return size * sum(math.prod(s) for s in tensor_shapes(self.config).values())

    @property
    def kv_slot_bytes(self) -> int:
        """Cache bytes of one token."""
        c = self.config
        size = 2 if self.native else torch.empty((), dtype=self.dtype).element_size()
        return 2 * c.n_layers * c.n_kv_heads * c.head_dim * size

    @property
    def _bits(self) -> Quantize | None:
        return "q4" if self.fast else self.quantize

    def load(self) -> TargetModel:
        """UserError where a tensor is missing, unknown or damaged."""
        name, on_pack = self.source.name, self.on_pack
        if self.store is not None:
            return NativeModel.from_store(
                self.config,
                self.store,
                name=name,
                quantize=self._bits,
                head_ids=self.fast_head,
                progress=on_pack and (lambda done, total: on_pack(name, done / total)),
            )
        reader = gguf_weights if self.source.kind == "gguf" else safetensors_weights
        tensors = reader.iter_tensors(self.source.path, self.config, self.dtype)
        return build_decoder(self.config, tensors, name=name, dtype=self.dtype, device=self.device)

    def quantised(self, quantize: Quantize) -> Checkpoint:
        """The same on the native core, in few bits. UserError where that can't be."""
        name = self.source.name
        store = self.store or _open_store(self.source, self.config)
        try:
            NativeConfig.from_decoder(self.config)
        except UserError as e:
            raise UserError(f"dtype {quantize!r} can't be had for {name}: {e}") from None
        stored = _source(self.config, store).matrices
        packed = _source(self.config, store, quantize).matrices
        if all(m.format == stored.get(k, stored["embedding"]).format for k, m in packed.items()):
            raise UserError(
                f"dtype {quantize!r} would change nothing in {name}: its weights take no more "
                "bits than that already, or their widths are no multiples of 32; use dtype auto"
            )
        return replace(self, store=store, quantize=quantize)


def open_checkpoint(
    spec: str, *, dtype: str = "auto", device: str = "auto", on_pack: OnPack | None = None
) -> Checkpoint:
    """Find a model (catalog name, path or Hub id; downloaded where needed) and read its
    config and tokenizer. UserError where it can't be had or is not supported."""
    quantize = next((q for q in _QUANTISED if q == dtype), None)
    where = parse_device(device) if quantize is None else _native_device(quantize, device)
    kind = parse_dtype("auto" if quantize else dtype, where)
    source = resolve_model(spec)
    store = None
    if source.kind == "gguf":
        file = open_gguf(source.path)
        config, tokenizer = from_gguf(file), Tokenizer.from_gguf(file)
        if dtype == "auto" and where.type == "cpu":
            store = _stored_form(file, config, source.name)
    else:
        config, tokenizer = from_hf(source.path), Tokenizer.from_folder(source.path)
    checkpoint = Checkpoint(
        source=source,
        config=config,
        tokenizer=tokenizer,
        dtype=kind,
        device=where,
        store=store,
        on_pack=on_pack,
    )
    return checkpoint if quantize is None else checkpoint.quantised(quantize)


def _native_device(dtype: str, device: str) -> torch.device:
    """Where weights of few bits run. UserError where they can't."""
    where = torch.device("cpu") if device == "auto" else parse_device(device)
    if where.type != "cpu":
        raise UserError(
            f"dtype {dtype!r} is for the native CPU core, not for device {device!r}: "
            "use device cpu, or dtype bfloat16"
        )
    built, why = is_available()
    if not built:
        raise UserError(f"dtype {dtype!r} needs the native CPU core, but {why}; use bfloat16")
    return where


def _stored_form(file: GGUFFile, config: DecoderConfig, name: str) -> Store | None:
    """'auto' is the native core for quantised weights on a CPU, where it was built and runs
    such models."""
    if all(t.kind in _PLAIN_FORMATS for t in file.tensors.values()):
        return None
    built, why = is_available()
    if not built:
        log.warning("%s; using torch", why)
        return None
    store = GGUFStore(file, config)
    try:
        NativeConfig.from_decoder(config)
    except UserError as e:
        log.warning("the native core can't run %s (%s); using torch", name, e)
        return None
    return store


def _open_store(source: ModelSource, config: DecoderConfig) -> Store:
    if source.kind == "gguf":
        return GGUFStore(open_gguf(source.path), config)
    return FolderStore(source.path, config)


def _source(
    config: DecoderConfig,
    store: Store,
    quantize: Quantize | None = None,
    head_ids: Int32 | None = None,
) -> Source:
    return source_of(native_core(), config, store, quantize=quantize, head_ids=head_ids)


def parse_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use auto, cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r} was asked for, but torch sees no CUDA device: use cpu")
    return device


def parse_dtype(name: str, device: torch.device) -> torch.dtype:
    """'auto' is bfloat16 where the device multiplies it natively, else float32 (of the torch
    path: quantised weights on a CPU run on the native core)."""
    if name == "auto":
        if device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        native = torch.backends.mkldnn.is_available() and bool(
            torch.ops.mkldnn._is_mkldnn_bf16_supported()
        )
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise UserError(
            f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}, {' or '.join(_QUANTISED)}"
        )
    return DTYPES[name]
