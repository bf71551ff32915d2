"""Trained heads ready to draft: weights packed for their device.

Legend: N rows, D hidden, U draft vocabulary, M Medusa heads.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from paceline.models.base import TargetTables
from paceline.models.heads.eagle import EagleHead
from paceline.models.heads.eagle_native import NativeEagle, runs
from paceline.models.heads.eagle_torch import TorchEagle
from paceline.models.heads.kernels import Kernels, Map
from paceline.models.heads.medusa import MedusaHeads
from paceline.models.heads.passes import EagleRunner
from paceline.models.native import NativeModel
from paceline.models.native_weights import Quantize

__all__ = ["EagleRunner", "Kernels", "MedusaRunner", "eagle_runner"]


def eagle_runner(
    head: EagleHead,
    tables: TargetTables,
    kernels: Kernels,
    embedding_VD: torch.Tensor | None = None,
) -> EagleRunner:
    """The head beside the target that `tables` belong to: on the native core where its shape
    allows, else on torch. embedding_VD: the head's own embeddings, None for the target's."""
    if kernels.threads is not None and isinstance(tables, NativeModel) and runs(head):
        return NativeEagle(head, tables, kernels, embedding_VD)
    return TorchEagle(head, tables, embedding_VD)


class MedusaRunner:
    """`MedusaHeads` for drafting. Made from the heads, which it does not change."""

    def __init__(
        self, heads: MedusaHeads, kernels: Kernels, device: torch.device | str = "cpu"
    ) -> None:
        """device: the target's."""
        c = self.config = heads.config
        self.target_ids = heads.target_ids.to(device)

        def linear(
            weights: Seq[torch.Tensor], biases: Seq[torch.Tensor], bits: Quantize | None
        ) -> Map:
            bias = torch.cat([b.detach().to(device) for b in biases]) if biases else None
            return kernels.linear(torch.cat([w.detach().to(device) for w in weights]), bias, bits)

        blocks = [[block.linear for block in head] for head in heads.residual_blocks()]
        first = [head[0] for head in blocks]
        self._first = linear([m.weight for m in first], [m.bias for m in first], kernels.body)
        self._rest = [
            [linear([m.weight], [m.bias], kernels.body) for m in head[1:]] for head in blocks
        ]
        self._heads = [linear([p], [], kernels.head) for p in heads.lm_heads.parameters()]
        self._hidden = c.hidden

    def logits(self, h_ND: torch.Tensor, depth: int) -> torch.Tensor:
        """[N, depth, U] float32 logits of the first `depth` heads."""
        n = h_ND.shape[0]
        h_ND = h_ND.float()
        z = h_ND.unsqueeze(1) + F.silu(self._first(h_ND).view(n, -1, self._hidden))
        parts = []
        for i in range(depth):
            z_ND = z[:, i]
            for block in self._rest[i]:
                z_ND = z_ND + F.silu(block(z_ND))
            parts.append(z_ND)
        if self.config.shared_head:
            stacked = torch.stack(parts, 1).view(n * depth, -1)
            return self._heads[0](stacked).view(n, depth, -1)
        return torch.stack([self._heads[i](z_ND) for i, z_ND in enumerate(parts)], 1)
