"""EAGLE heads on the native core: a pass, or a whole draft, in one call.

A row's numbers depend on nothing else in its pass, so a draft is the same whether it is grown
in one call or level by level, alone or beside others. Keys and values are kept in fp16, as the
target's are.

Legend: N rows, W of them wanted, D hidden, V vocabulary, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.models.heads.eagle import EagleHead, Norm
from paceline.models.heads.kernels import Kernels
from paceline.models.heads.passes import Ask, Grown, Part, Rows
from paceline.models.native import NativeModel
from paceline.models.native_core import native_core
from paceline.models.native_linear import pack_floats


def runs(head: EagleHead) -> bool:
    """Whether the core has kernels for the head's shape."""
    c = head.config
    widths = (c.hidden, c.intermediate, c.head_size)
    return all(w % 16 == 0 for w in widths) and c.n_heads // c.n_kv_heads <= 64


class NativeEagle:
    """See `passes.EagleRunner`. Made from the head, which it does not change."""

    def __init__(
        self,
        head: EagleHead,
        target: NativeModel,
        kernels: Kernels,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        """embedding_VD: the head's own embeddings, None for the target's."""
        core, c = native_core(), head.config
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        self.config = c
        self._taps_width = c.hidden * len(c.taps)
        self.target_ids = head.target_ids.cpu()
        body = {
            "fc": [head.fc.weight],
            "qkv": [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight],
            "o": [attention.o_proj.weight],
            "gate_up": [mlp.gate_proj.weight, mlp.up_proj.weight],
            "down": [mlp.down_proj.weight],
        }
        weights = [(torch.cat(w).detach().cpu(), kernels.body) for w in body.values()]
        weights.append((head.lm_head.weight.detach().cpu(), kernels.head))
        packed = pack_floats([(w if q else w.bfloat16(), q) for w, q in weights])
        matrices = {
            role: core.Linear(m.format, m.n_out, m.n_in, m.data)
            for role, m in zip((*body, "head"), packed, strict=True)
        }
        embedding = target.embedding
        if embedding_VD is not None:
            (own,) = pack_floats([(embedding_VD.cpu(), None)])
            embedding = core.Linear(own.format, own.n_out, own.n_in, own.data)
        eagle3 = c.kind == "eagle3"
        frequencies, scale = c.inverse_frequencies()
        self._layer = core.EagleLayer(
            hidden=c.hidden,
            intermediate=c.intermediate,
            heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_size=c.head_size,
            fused=c.fused_width,
            first=not eagle3,
            norm_before_residual=c.norm_before_residual,
            eps=c.eps,
            inverse_frequencies=frequencies.tolist(),
            rope_scale=scale,
            embedding=embedding,
            **matrices,
            fc_bias=None if head.fc.bias is None else _floats(head.fc.bias),
            fused_norm=_gain(head.input_norm) if c.norm_before_fc else None,
            input_norm=_gain(layer.input_layernorm) if eagle3 else None,
            hidden_norm=_gain(layer.hidden_norm) if eagle3 else None,
            mlp_norm=_gain(layer.post_attention_layernorm),
            final_norm=_gain(head.norm) if eagle3 else None,
            target_ids=self.target_ids.numpy().astype(np.int32),
            threads=kernels.threads,
            path=target.kernel_path,
        )

    def new_cache(self) -> Rows:
        cache: Rows = self._layer.new_cache()
        return cache

    def feed(
        self, parts: Seq[Part], tokens: Seq[int], taps_NT: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        return self._pass(parts, tokens, taps_NT, positions, fuse=True)

    def run(
        self, parts: Seq[Part], tokens: Seq[int], g_ND: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        return self._pass(parts, tokens, g_ND, positions, fuse=False)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        out_NU = np.empty((len(hidden_ND), self.config.draft_vocab_size), np.float32)
        self._layer.logits(_floats(hidden_ND), out_NU)
        return torch.from_numpy(out_NU)

    def grow(self, asks: Seq[Ask], width: int) -> list[Grown]:
        """Drafts for all that ask: of each level the best `width` nodes propose their best
        `width` children (EAGLE-2, Li et al. 2024, section 4); a chain where width is 1."""
        hidden_BD = np.empty((len(asks), self.config.hidden), np.float32)
        for out_D, ask in zip(hidden_BD, asks, strict=True):
            if not ask.tokens:
                assert ask.hidden_D is not None
                out_D[:] = ask.hidden_D.numpy()
        found = self._layer.grow(
            caches=[a.cache for a in asks],
            tokens=np.array([t for a in asks for t in a.tokens], np.int32),
            features=self._features([a.taps_NT for a in asks if a.taps_NT is not None]),
            count=[len(a.tokens) for a in asks],
            hidden=hidden_BD,
            depths=[a.depth for a in asks],
            heats=[a.heat for a in asks],
            end_ids=[list(a.end_ids) for a in asks],
            width=width,
        )
        rows = torch.from_numpy(hidden_BD)
        return [Grown(hidden_D, *parts) for hidden_D, parts in zip(rows, found, strict=True)]

    def _features(self, parts_NT: Seq[torch.Tensor]) -> np.ndarray:
        if not parts_NT:
            return np.empty((0, self._taps_width), np.float32)
        return _floats(parts_NT[0] if len(parts_NT) == 1 else torch.cat(list(parts_NT)))

    def _pass(
        self,
        parts: Seq[Part],
        tokens: Seq[int],
        features: torch.Tensor,
        positions: Seq[int],
        *,
        fuse: bool,
    ) -> torch.Tensor:
        out_WD = np.empty((sum(p.wanted for p in parts), self.config.hidden), np.float32)
        self._layer.run(
            caches=[p.cache for p in parts],
            at=[p.at for p in parts],
            count=[p.count for p in parts],
            wanted=[p.wanted for p in parts],
            above=[p.above for p in parts],
            tokens=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            features=_floats(features),
            fuse=fuse,
            out=out_WD,
        )
        return torch.from_numpy(out_WD)


def _floats(x: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.detach().cpu().float().numpy())


def _gain(norm: Norm) -> np.ndarray:
    return _floats(norm.weight)
