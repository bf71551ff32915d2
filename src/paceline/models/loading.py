"""From a model's name or path to a decoder and a tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import UserError
from paceline.models import gguf_weights, safetensors_weights
from paceline.models.catalog import ModelSource, resolve_model
from paceline.models.config import DecoderConfig, from_gguf, from_hf, tensor_shapes
from paceline.models.decoder import TorchDecoder, build_decoder
from paceline.models.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk whose header is read and whose weights are not."""

    source: ModelSource
    config: DecoderConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights, each held once."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return size * sum(math.prod(s) for s in tensor_shapes(self.config).values())

    @property
    def kv_slot_bytes(self) -> int:
        """Cache bytes of one token."""
        c = self.config
        size = torch.empty((), dtype=self.dtype).element_size()
        return 2 * c.n_layers * c.n_kv_heads * c.head_dim * size

    def load(self) -> TorchDecoder:
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
    return Checkpoint(source=source, config=config, tokenizer=tokenizer, dtype=kind, device=where)


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
    """'auto' is bfloat16 where the device multiplies it natively, else float32."""
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
