"""The EAGLE head: one decoder layer over the target's features (Li et al. 2024, 2025).

Row t pairs the feature of token t with the embedding of token t + 1, sits at position t,
and predicts token t + 2. `qkv` and `finish` are the two halves of the layer around its
attention, so that training can unroll it with keys of its own (EAGLE-3, section 3.2).

Legend: N rows (any leading shape), D hidden, H heads, K key/value heads, E head size,
F MLP width, U draft vocabulary, V the target's vocabulary, T keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.heads.config import EagleConfig

KV = tuple[torch.Tensor, torch.Tensor]


class Norm(nn.Module):
    """RMS norm with a gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """The layer's projections; what is between them belongs to `EagleHead`."""

    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(c.layer_width, c.n_heads * c.head_size, bias=False)
        self.k_proj = nn.Linear(c.layer_width, c.n_kv_heads * c.head_size, bias=False)
        self.v_proj = nn.Linear(c.layer_width, c.n_kv_heads * c.head_size, bias=False)
        self.o_proj = nn.Linear(c.n_heads * c.head_size, c.hidden, bias=False)


class GatedMLP(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))
        return y


class Midlayer(nn.Module):
    def __init__(self, c: EagleConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = GatedMLP(c)
        if c.kind == "eagle3":
            self.input_layernorm = Norm(c.hidden, c.eps)
            self.hidden_norm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)


class EagleHead(nn.Module):
    """Parameters are named as in the official EAGLE-3 layout (`docs/drafters.md`).

    d2t: int64 [U], the target's id less the head's: target id = i + d2t[i].
    t2d: bool [V], True where the head has the token. Embeddings are the target's, and so is
    the output projection of an EAGLE-1 head (`lm_head`, frozen): set it with
    `borrow_head`.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: EagleConfig, target_ids: torch.Tensor | None = None) -> None:
        """target_ids: int64 [U], the target's ids of the head's tokens, best in ascending order
        (None: all, where the draft vocabulary is the target's)."""
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(c.fused_width, c.hidden, bias=c.kind == "eagle1")
        if c.norm_before_fc:
            self.input_norm = Norm(c.fused_width, c.eps)
        self.midlayer = Midlayer(c)
        if c.kind == "eagle3":
            self.norm = Norm(c.hidden, c.eps)
        self.lm_head = nn.Linear(c.hidden, c.draft_vocab_size, bias=False)
        if c.kind == "eagle1":
            self.lm_head.weight.requires_grad_(False)
        register_vocabulary(self, target_ids, c.vocab_size, c.draft_vocab_size)
        frequencies, self._rope_scale = c.inverse_frequencies()
        self.register_buffer("_frequencies", frequencies, persistent=False)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [U]: the target's id of each of the head's tokens."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def borrow_head(self, rows_UD: torch.Tensor) -> None:
        """Take the target's output rows of `target_ids` (`TargetTables.head_rows`)."""
        self.lm_head.weight.copy_(rows_UD)

    def fuse(self, taps_ND: torch.Tensor) -> torch.Tensor:
        """[N, n_taps * D] target states, side by side in the order of `config.taps`, to the
        feature g [N, D]. EAGLE-1: the final feature as it is."""
        if self.config.kind == "eagle1":
            return taps_ND
        if self.config.norm_before_fc:
            taps_ND = self.input_norm(taps_ND)
        g_ND: torch.Tensor = self.fc(taps_ND)
        return g_ND

    def qkv(
        self, embedding_ND: torch.Tensor, g_ND: torch.Tensor, position_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Everything before the attention: queries [N, H, E] and keys [N, K, E], rotated to
        `position_N`, values [N, K, E], and the residual stream [N, D]."""
        c, layer = self.config, self.midlayer
        if c.kind == "eagle1":
            residual_ND = self.fc(torch.cat([embedding_ND, g_ND], -1))
            x = residual_ND
        else:
            normed_ND = layer.hidden_norm(g_ND)
            residual_ND = normed_ND if c.norm_before_residual else g_ND
            x = torch.cat([layer.input_layernorm(embedding_ND), normed_ND], -1)
        a = layer.self_attn
        q = a.q_proj(x).unflatten(-1, (c.n_heads, c.head_size))
        k = a.k_proj(x).unflatten(-1, (c.n_kv_heads, c.head_size))
        v = a.v_proj(x).unflatten(-1, (c.n_kv_heads, c.head_size))
        cos, sin = self._rotation(position_N)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v, residual_ND

    def finish(self, attended_ND: torch.Tensor, residual_ND: torch.Tensor) -> torch.Tensor:
        """Everything behind the attention, whose output is [N, H * E]: the layer's (pre-norm)
        output [N, D], which is the next draft step's feature."""
        layer = self.midlayer
        h_ND = residual_ND + layer.self_attn.o_proj(attended_ND)
        out: torch.Tensor = h_ND + layer.mlp(layer.post_attention_layernorm(h_ND))
        return out

    def layer(
        self,
        embedding_ND: torch.Tensor,
        g_ND: torch.Tensor,
        position_N: torch.Tensor,
        *,
        past: KV | None = None,
        mask_NT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, KV]:
        """One pass over N rows ([N, D], or [B, N, D] with keys per batch entry).

        past: keys and values [T', K, E] that stand before the rows' own. mask_NT: True where
        a row sees a key, over past and own rows (None: all of past, and own rows causally).
        Returns the output [N, D] and all keys and values, [T' + N, K, E].
        """
        q, k, v, residual = self.qkv(embedding_ND, g_ND, position_N)
        if past is not None:
            k, v = torch.cat([past[0], k], -3), torch.cat([past[1], v], -3)
        n, total = q.shape[-3], k.shape[-3]
        if mask_NT is None:
            mask_NT = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n)
        attended = F.scaled_dot_product_attention(
            q.transpose(-3, -2),
            k.transpose(-3, -2),
            v.transpose(-3, -2),
            attn_mask=mask_NT,
            enable_gqa=self.config.n_heads != self.config.n_kv_heads,
        )
        return self.finish(attended.transpose(-3, -2).flatten(-2), residual), (k, v)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, U] logits over the draft vocabulary from the layer's output."""
        if self.config.kind == "eagle3":
            hidden_ND = self.norm(hidden_ND)
        out: torch.Tensor = self.lm_head(hidden_ND)
        return out

    def _rotation(self, position_N: torch.Tensor) -> KV:
        """cos, sin [N, 1, E]."""
        angle = position_N.float().unsqueeze(-1) * self.get_buffer("_frequencies")
        angle = torch.cat([angle, angle], -1).unsqueeze(-2)
        return angle.cos() * self._rope_scale, angle.sin() * self._rope_scale


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def register_vocabulary(
    module: nn.Module, target_ids: torch.Tensor | None, vocab_size: int, draft_size: int
) -> None:
    """The buffers d2t (offsets) and t2d of a draft vocabulary. ValueError where the ids are
    not `draft_size` different ids below `vocab_size`."""
    if target_ids is None:
        if draft_size != vocab_size:
            raise ValueError("a reduced draft vocabulary needs its target ids")
        target_ids = torch.arange(vocab_size)
    ids = target_ids.to(torch.int64).cpu()
    inside = len(ids) > 0 and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
    if len(ids) != draft_size or len(set(ids.tolist())) != len(ids) or not inside:
        raise ValueError(
            f"a draft vocabulary of {draft_size} needs as many different ids below {vocab_size}"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    module.register_buffer("d2t", ids - torch.arange(draft_size))
    module.register_buffer("t2d", t2d)
