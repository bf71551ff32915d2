"""From a model's name or path to a decoder and a tokenizer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import UserError
from paceline.models import gguf_weights, safetensors_weights
from paceline.models.base import TargetModel
from paceline.models.catalog import ModelSource, resolve_model
from paceline.models.config import DecoderConfig, from_gguf, from_hf, tensor_shapes
from paceline.models.decoder import build_decoder
from paceline.models.gguf_file import open_gguf
from paceline.models.native import NativeModel, is_available
from paceline.models.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Tokens of a fast draft's head.
FAST_HEAD = 32768
#: Stored formats that are not quantised.
_PLAIN_FORMATS = ("F32", "F16", "BF16")
#: Packed weights of the native core against the file, and the share of a head that is packed
#: anew.
_NATIVE_SIZE = 1.2


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk whose header is read and whose weights are not.

    native: run it on the native CPU core, from the weights as they are stored; dtype is then
        that of the torch path, which takes over where the core can't run the model.
    fast: for drafts on the native core: weights re-quantised to 4 bits, and only the logits
        of the `FAST_HEAD` most frequent tokens computed. A draft's law is whatever is drawn
        from, so this changes no output's law, only how often proposals are accepted.
    """

    source: ModelSource
    config: DecoderConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    native: bool = False
    fast: bool = False

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
        if self.native:
            return int(_NATIVE_SIZE * Path(self.source.path).stat().st_size)
        size = torch.empty((), dtype=self.dtype).element_size()
        return size * sum(math.prod(s) for s in tensor_shapes(self.config).values())

    @property
    def kv_slot_bytes(self) -> int:
        """Cache bytes of one token."""
        c = self.config
        size = torch.empty((), dtype=self.dtype).element_size()
        return 2 * c.n_layers * c.n_kv_heads * c.head_dim * size

    def load(self) -> TargetModel:
        """UserError where a tensor is missing, unknown or damaged."""
        if self.native:
            try:
                return NativeModel.from_gguf(
                    self.source.path,
                    name=self.source.name,
                    quantize="q4" if self.fast else None,
                    head_ids=self.fast_head,
                )
            except ValueError as e:
                log.warning("the native core can't run %s (%s); using torch", self.source.name, e)
        path, config = Path(self.source.path), self.config
        reader = gguf_weights if self.source.kind == "gguf" else safetensors_weights
        tensors = reader.iter_tensors(path, config, self.dtype)
        return build_decoder(
            config, tensors, name=self.source.name, dtype=self.dtype, device=self.device
        )


def open_checkpoint(spec: str, *, dtype: str = "auto", device: str = "auto") -> Checkpoint:
    """Find a model (catalog name, path or Hub id; downloaded where needed) and read its
    config and tokenizer. UserError where it can't be had or is not supported."""
    where = parse_device(device)
    kind = parse_dtype(dtype, where)
    source = resolve_model(spec)
    if source.kind == "gguf":
        config, tokenizer = from_gguf(source.path), Tokenizer.from_gguf(source.path)
    else:
        config, tokenizer = from_hf(source.path), Tokenizer.from_folder(source.path)
    native = source.kind == "gguf" and _wants_native(dtype, where, source)
    return Checkpoint(
        source=source,
        config=config,
        tokenizer=tokenizer,
        dtype=kind,
        device=where,
        native=native,
    )


def _wants_native(dtype: str, device: torch.device, source: ModelSource) -> bool:
    """'auto' is the native core for quantised weights on a CPU, where it was built."""
    if dtype != "auto" or device.type != "cpu":
        return False
    tensors = open_gguf(source.path).tensors.values()
    if all(t.kind in _PLAIN_FORMATS for t in tensors):
        return False
    built, why = is_available()
    if not built:
        log.warning("%s; using torch", why)
    return built


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
        raise UserError(f"unknown dtype {name!r}: use auto, {' or '.join(DTYPES)}")
    return DTYPES[name]
