"""The objectives, readably and in float64: what the fast ones are tested against.

Everything is written for one sequence of T rows, with no packing, no chunks and no fused
gradient. Legend: T rows, D hidden, U draft vocabulary, H heads, E head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.heads import EagleHead, MedusaHeads
from paceline.train.losses import Kind


def law_loss(q_logits_U: torch.Tensor, p_U: torch.Tensor, kind: Kind) -> torch.Tensor:
    """One row's loss; p_U: the target's probabilities on the draft vocabulary, mass <= 1."""
    log_q_U = q_logits_U.log_softmax(-1)
    if kind == "ce":
        return -(p_U / p_U.sum() * log_q_U).sum()
    return -torch.log(torch.minimum(p_U, log_q_U.exp()).sum())


def eagle3_loss(
    head: EagleHead,
    taps_TX: torch.Tensor,
    embedding_TD: torch.Tensor,
    p_TU: torch.Tensor,
    usable_T: torch.Tensor,
    *,
    steps: int,
    decay: float,
    kind: Kind,
) -> torch.Tensor:
    """Training-time test (Li et al. 2025, section 3.2). Step i of row t reads the embedding
    of token t + 1 + i, sits at position t + i, and is judged by the target's law behind that
    token; embedding_TD[t] belongs to token t + 1, p_TU[t] to the law behind token t."""
    T = len(taps_TX)
    g_TD = head.fuse(taps_TX)
    keys, values = [], []
    total = taps_TX.new_zeros(())
    for i in range(steps):
        rows = torch.arange(T)
        shifted = (rows + i).clamp(max=T - 1)
        q, k, v, residual = head.qkv(embedding_TD[shifted], g_TD, rows + i)
        keys.append(k)
        values.append(v)
        attended = torch.stack([_attend_row(t, q, keys, values) for t in range(T)])
        g_TD = head.finish(attended, residual)
        logits_TU = head.logits(g_TD)
        judged = [t for t in range(T - 1 - i) if usable_T[t + 1 + i]]
        if judged:
            rows_loss = [law_loss(logits_TU[t], p_TU[t + 1 + i], kind) for t in judged]
            total = total + decay**i * torch.stack(rows_loss).mean()
    return total


def _attend_row(
    t: int, q_THE: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """[H * E]: row t over the step-0 keys of rows up to t and its own key of later steps."""
    n_heads, size = q_THE.shape[1:]
    shared = n_heads // keys[0].shape[1]
    out = []
    for h in range(n_heads):
        kv = h // shared
        k = torch.cat([keys[0][: t + 1, kv], *(k[t : t + 1, kv] for k in keys[1:])])
        v = torch.cat([values[0][: t + 1, kv], *(v[t : t + 1, kv] for v in values[1:])])
        weights = (k @ q_THE[t, h] * size**-0.5).softmax(-1)
        out.append(weights @ v)
    return torch.cat(out)


def eagle1_loss(
    head: EagleHead,
    final_TD: torch.Tensor,
    embedding_TD: torch.Tensor,
    p_TU: torch.Tensor,
    usable_T: torch.Tensor,
    *,
    ce_weight: float,
    noise_TD: torch.Tensor,
) -> torch.Tensor:
    """SmoothL1 on the next feature plus weighted cross-entropy (Li et al. 2024, section 4.2);
    the input features carry noise. usable_T here: rows whose next feature is an answer's."""
    rows = torch.arange(len(final_TD))
    out_TD, _ = head.layer(embedding_TD, final_TD + noise_TD, rows)
    judged = [t for t in range(len(final_TD) - 1) if usable_T[t + 1]]
    regression = [F.smooth_l1_loss(out_TD[t], final_TD[t + 1]) for t in judged]
    ce = [law_loss(head.logits(out_TD)[t], p_TU[t + 1], "ce") for t in judged]
    return torch.stack(regression).mean() + ce_weight * torch.stack(ce).mean()


def medusa_loss(
    heads: MedusaHeads,
    final_TD: torch.Tensor,
    p_TU: torch.Tensor,
    usable_T: torch.Tensor,
    *,
    decay: float,
    kind: Kind,
) -> torch.Tensor:
    """Medusa-1 (Cai et al. 2024, section 2.2.1): head i at row t predicts token t + 2 + i,
    here by the target's law behind token t + 1 + i, whose expectation is the paper's loss."""
    total = final_TD.new_zeros(())
    for i in range(heads.config.num_heads):
        logits_TU = heads.logits(final_TD, i)
        judged = [t for t in range(len(final_TD) - 1 - i) if usable_T[t + 1 + i]]
        if judged:
            rows_loss = [law_loss(logits_TU[t], p_TU[t + 1 + i], kind) for t in judged]
            total = total + decay**i * torch.stack(rows_loss).mean()
    return total
