"""What training needs of the target besides its captured states: tables and a fingerprint.

Legend: V vocabulary, D hidden.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.models import gguf_weights, safetensors_weights
from paceline.models.catalog import sha256_of
from paceline.models.loading import Checkpoint


@dataclass(frozen=True, kw_only=True)
class Tables:
    """embedding_VD: input embeddings. head_VD: output projection (the same where tied).
    norm_D: the final norm's gain. layer: the last decoder layer's tensors by their names
    below `model.layers.{L - 1}.`, from which a head's layer may start."""

    embedding_VD: torch.Tensor
    head_VD: torch.Tensor
    norm_D: torch.Tensor
    layer: Mapping[str, torch.Tensor]

    def to(self, device: torch.device) -> Tables:
        return Tables(
            embedding_VD=self.embedding_VD.to(device),
            head_VD=self.head_VD.to(device),
            norm_D=self.norm_D.to(device),
            layer={name: t.to(device) for name, t in self.layer.items()},
        )


def read_tables(target: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> Tables:
    """From a checkpoint's file, one tensor at a time; the rest is not kept."""
    reader = gguf_weights if target.source.kind == "gguf" else safetensors_weights
    last = f"model.layers.{target.config.n_layers - 1}."
    found, layer = {}, {}
    for name, tensor in reader.iter_tensors(target.source.path, target.config, dtype):
        if name.startswith(last):
            layer[name.removeprefix(last)] = tensor
        elif not name.startswith("model.layers."):
            found[name] = tensor
    embedding = found["model.embed_tokens.weight"]
    return Tables(
        embedding_VD=embedding,
        head_VD=found.get("lm_head.weight", embedding),
        norm_D=found["model.norm.weight"],
        layer=layer,
    )


def target_sha256(target: Checkpoint) -> str:
    """SHA-256 of a .gguf file, or of a folder's weight files in the order of their names."""
    path = Path(target.source.path)
    if path.is_file():
        return sha256_of(path)
    digest = hashlib.sha256()
    for file in safetensors_weights.shards(path):
        digest.update(sha256_of(file).encode())
    return digest.hexdigest()
