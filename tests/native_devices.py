"""Tiny models for the native core, and a runner that feeds them sequences."""

from __future__ import annotations

import numpy as np
import torch

from paceline.models.base import Batch, KVStore, LayerMask, RowGroup, TargetModel, pack

BLOCK = 16


def tiny_config(arch: str = "llama", **changes: object) -> dict[str, object]:
    config: dict[str, object] = {
        "model_type": arch,
        "vocab_size": 150,  # not a multiple of a tile
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    config.update(changes)
    return config


def tiny_tensors(config: dict, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights by their transformers names, with biases for qwen2 and head norms
    for qwen3."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=g) * scale

    D, I, E = config["hidden_size"], config["intermediate_size"], config["head_dim"]  # noqa: E741
    H, K, V = config["num_attention_heads"], config["num_key_value_heads"], config["vocab_size"]
    t = {"model.embed_tokens.weight": rand(V, D), "model.norm.weight": 1 + rand(D, scale=0.1)}
    if not config["tie_word_embeddings"]:
        t["lm_head.weight"] = rand(V, D, scale=D**-0.5)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, n_out, n_in in (
            ("self_attn.q_proj", H * E, D),
            ("self_attn.k_proj", K * E, D),
            ("self_attn.v_proj", K * E, D),
            ("self_attn.o_proj", D, H * E),
            ("mlp.gate_proj", I, D),
            ("mlp.up_proj", I, D),
            ("mlp.down_proj", D, I),
        ):
            t[f"{p}{name}.weight"] = rand(n_out, n_in, scale=1.5 * n_in**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            t[f"{p}{name}.weight"] = 1 + rand(D, scale=0.1)
        if config["model_type"] == "qwen2":
            for name, n in (("q", H * E), ("k", K * E), ("v", K * E)):
                t[f"{p}self_attn.{name}_proj.bias"] = rand(n, scale=0.3)
        if config["model_type"] == "qwen3":
            for name in ("q_norm", "k_norm"):
                t[f"{p}self_attn.{name}.weight"] = 1 + rand(E, scale=0.1)
    return t


class Runner:
    """Feeds sequences to a model, one block table per sequence."""

    def __init__(self, model: TargetModel, n_blocks: int = 256, block: int = BLOCK) -> None:
        self.model, self.block = model, block
        self.kv: KVStore = model.new_kv(n_blocks, block)
        self.tables: dict[int, np.ndarray] = {}
        self._next = 0

    def table(self, seq: int, length: int) -> np.ndarray:
        """Blocks of a sequence, handed out in order of need (so sequences interleave)."""
        have = self.tables.get(seq, np.zeros(0, np.int32))
        missing = -(-length // self.block) - len(have)
        if missing > 0:
            fresh = np.arange(self._next, self._next + missing, dtype=np.int32)
            self._next += missing
            have = np.concatenate([have, fresh[::-1]])
        self.tables[seq] = have
        return have

    def group(self, seq: int, tokens, context: int, parents=None, wanted=None) -> RowGroup:
        n = len(tokens)
        return RowGroup(
            tokens=np.asarray(tokens, np.int32),
            parents=np.arange(-1, n - 1, dtype=np.int32)
            if parents is None
            else np.asarray(parents, np.int32),
            context=context,
            table=self.table(seq, context + n),
            wanted=np.arange(n, dtype=np.int32) if wanted is None else np.asarray(wanted, np.int32),
        )

    def batch(self, *groups: RowGroup) -> Batch:
        return pack(list(groups), self.block)

    def run(self, *groups: RowGroup, mask: LayerMask | None = None) -> torch.Tensor:
        return self.model.forward(self.batch(*groups), self.kv, layer_mask=mask).logits_RV

    def prefill(self, seq: int, tokens, chunks=None) -> torch.Tensor:
        """Logits of every token, fed in chunks of the given sizes."""
        out, at = [], 0
        for n in chunks or [len(tokens)]:
            out.append(self.run(self.group(seq, tokens[at : at + n], at)))
            at += n
        assert at == len(tokens)
        return torch.cat(out)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())
