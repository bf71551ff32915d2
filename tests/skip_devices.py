"""Targets that can skip sub-layers: tiny decoders, and a table that knows who wrote a slot."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from devices import VOCAB, noisy
from native_devices import tiny_config, tiny_tensors

from paceline.models.base import Batch, KVStore, LayerMask, TargetModel, TargetOutput
from paceline.models.config import DecoderConfig
from paceline.models.decoder import build_decoder
from paceline.models.native import NativeModel
from paceline.models.toy import TabularModel, TokenStore

#: The torch decoder and the native core.
KINDS = ("torch", "native")


def tiny(
    kind: str, *, layers: int = 3, weak: Iterable[tuple[str, int]] = (), strength: float = 0.0
) -> TargetModel:
    """Random float32 weights; `weak`: sub-layers ("attention" or "mlp", layer) that add so
    much less than the others, by default nothing at all."""
    config = tiny_config(num_hidden_layers=layers)
    tensors = tiny_tensors(config)
    last = {"attention": "self_attn.o_proj", "mlp": "mlp.down_proj"}
    for part, layer in weak:
        tensors[f"model.layers.{layer}.{last[part]}.weight"] *= strength
    if kind == "native":
        return NativeModel.from_state(config, tensors, threads=1)
    shape = DecoderConfig(
        architecture="llama",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        n_layers=layers,
        n_heads=config["num_attention_heads"],
        n_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        rms_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        max_context=config["max_position_embeddings"],
    )
    return build_decoder(shape, tensors.items(), name="tiny", dtype=torch.float32)


class OwnedStore(TokenStore):
    """Also who wrote a slot last: the whole target, or the target with skipped sub-layers."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        super().__init__(n_blocks, block_size)
        self.by_draft_S = np.zeros(n_blocks * block_size, bool)

    def move(self, source: np.ndarray, destination: np.ndarray) -> None:
        assert not self.by_draft_S[source].any(), "a draft's entry is committed"
        super().move(source, destination)
        self.by_draft_S[destination] = False


class SkippingTable(TabularModel):
    """A table whose logits are another one's where anything is skipped. The whole target
    asserts that no entry which it reads is a draft's, a draft that committed ones are the
    target's."""

    def __init__(self, draft: TabularModel | None = None) -> None:
        super().__init__(VOCAB, order=None, skipped=draft or noisy(0.7))

    def new_kv(self, n_blocks: int, block_size: int) -> OwnedStore:
        return OwnedStore(n_blocks, block_size)

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        assert isinstance(kv, OwnedStore)
        for table, context in zip(batch.tables_B, batch.context_B, strict=True):
            at = np.arange(context)
            slots = table[at // batch.block_size] * batch.block_size + at % batch.block_size
            drafted = np.flatnonzero(kv.by_draft_S[slots])
            if layer_mask is None:
                assert len(drafted) == 0, "the target reads a draft's entry"
            else:  # only the draft's own chain, which ends the prefix
                assert (drafted == np.arange(context - len(drafted), context)).all()
        kv.by_draft_S[batch.slots_N] = layer_mask is not None
        return super().forward(batch, kv, taps=taps, layer_mask=layer_mask)
