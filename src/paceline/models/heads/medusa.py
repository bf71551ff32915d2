"""Medusa heads: residual blocks on the target's final feature (Cai et al. 2024, section 2.1).

Head i (from 0) reads the feature of token t and predicts token t + 2 + i.

Legend: N rows, D hidden, U draft vocabulary, M heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from paceline.models.heads.config import MedusaConfig
from paceline.models.heads.eagle import register_vocabulary


class ResBlock(nn.Module):
    """h + SiLU(W h + b); W and b start at zero, so that a new head repeats the target's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, h_ND: torch.Tensor) -> torch.Tensor:
        return h_ND + F.silu(self.linear(h_ND))


class MedusaHeads(nn.Module):
    """`blocks[i]`: the residual blocks of head i; `lm_heads[i]`: its projection [U, D]. With
    `shared_head` there is one projection, the target's, frozen. d2t, t2d: as `EagleHead`'s."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: MedusaConfig, target_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        c = self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(c.hidden) for _ in range(c.num_layers)))
            for _ in range(c.num_heads)
        )
        projections = 1 if c.shared_head else c.num_heads
        self.lm_heads = nn.ModuleList(
            nn.Linear(c.hidden, c.draft_vocab_size, bias=False) for _ in range(projections)
        )
        if c.shared_head:
            self.lm_heads.requires_grad_(False)
        register_vocabulary(self, target_ids, c.vocab_size, c.draft_vocab_size)

    @property
    def target_ids(self) -> torch.Tensor:
        """int64 [U]: the target's id of each of the heads' tokens."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @torch.no_grad()
    def borrow_head(self, rows_UD: torch.Tensor) -> None:
        """Start every projection from the target's output rows of `target_ids`
        (`TargetTables.head_rows`; Cai et al. 2024, section 2.2)."""
        for linear in self.lm_heads:
            assert isinstance(linear, nn.Linear)
            linear.weight.copy_(rows_UD)

    def residual_blocks(self) -> list[list[ResBlock]]:
        """The blocks of each head, first to last."""
        return [[b for b in head.children() if isinstance(b, ResBlock)] for head in self.blocks]

    def features(self, h_ND: torch.Tensor, head: int) -> torch.Tensor:
        """z_i [N, D]."""
        z_ND: torch.Tensor = self.blocks[head](h_ND)
        return z_ND

    def logits(self, h_ND: torch.Tensor, head: int) -> torch.Tensor:
        """[N, U] logits of one head over the draft vocabulary."""
        projection = self.lm_heads[0 if self.config.shared_head else head]
        out: torch.Tensor = projection(self.features(h_ND, head))
        return out

    def forward(self, h_ND: torch.Tensor) -> torch.Tensor:
        """[M, N, U]: all heads."""
        return torch.stack([self.logits(h_ND, i) for i in range(self.config.num_heads)])
