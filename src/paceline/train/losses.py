"""What a drafter is trained to lower, fused with its output projection.

For one row, p is the target's law of the next token restricted to the draft vocabulary (mass
m <= 1: what lies outside can't be drafted), q the head's softmax:

    ce        -sum_x (p(x) / m) log q(x)      soft targets; the gradient of KL(p / m, q)
    overlap   -log sum_x min(p(x), q(x))      the sum is the acceptance probability of a
                                              sampled proposal (Leviathan et al. 2022)

Logits of a pack are never held at once: `HeadLoss` runs over chunks of rows, forms loss and
gradient with respect to the logits on the way forward (as Liger's fused cross-entropy does,
Hsu et al. 2024), and keeps two gradients of the size of its inputs.

Legend: N rows, R rows of laws, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Kind = Literal["ce", "overlap"]
KINDS: tuple[Kind, ...] = ("ce", "overlap")
#: Rows whose logits are held at once.
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The target's laws of R rows on the draft vocabulary.

    p_RU: probabilities, of mass `mass_R` (1 at most). top_R: the head's index of the most
    probable token of the whole vocabulary. usable_R: False where that token is outside the
    draft vocabulary: nothing to learn there (EAGLE-3's mask).
    """

    p_RU: torch.Tensor
    mass_R: torch.Tensor
    top_R: torch.Tensor
    usable_R: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class HeadLosses:
    """Sums over N rows. loss: differentiable. agreed: rows whose most probable token is the
    target's (accepted at temperature 0). overlap: sum of sum_x min(p, q) (accepted when
    sampled at temperature 1)."""

    loss: torch.Tensor
    agreed: torch.Tensor
    overlap: torch.Tensor
    rows: int


@torch.no_grad()
def laws_from_features(
    final_RD: torch.Tensor,
    head_UD: torch.Tensor,
    logz_R: torch.Tensor,
    top_R: torch.Tensor,
    index_V: torch.Tensor,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Laws:
    """Laws from the target's final features, its output rows of the draft vocabulary and the
    log-partition of its whole vocabulary. index_V: token to the head's index, -1 outside."""
    p_RU = torch.empty(len(final_RD), len(head_UD), dtype=dtype, device=final_RD.device)
    mass_R = torch.empty(len(final_RD), device=final_RD.device)
    for at in range(0, len(final_RD), CHUNK):
        rows = slice(at, at + CHUNK)
        z = (final_RD[rows].to(head_UD.dtype) @ head_UD.T).to(_wide(head_UD))
        lse = z.logsumexp(-1)
        # The features are rounded, so the captured partition is not quite that of z.
        mass = (lse - logz_R[rows]).exp().clamp(max=1.0)
        p_RU[rows] = (z - lse.unsqueeze(-1)).exp_() * mass.unsqueeze(-1)
        mass_R[rows] = mass.float()
    top = index_V[top_R]
    return Laws(p_RU=p_RU, mass_R=mass_R, top_R=top, usable_R=top >= 0)


def head_loss(
    x_ND: torch.Tensor,
    weight_UD: torch.Tensor,
    laws: Laws,
    rows_N: torch.Tensor,
    kind: Kind,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> HeadLosses:
    """Row n of x is judged by row `rows_N[n]` of the laws. dtype: of the matrix products."""
    loss, agreed, overlap = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_UD, laws.p_RU, laws.mass_R, laws.top_R, rows_N, kind, dtype
    )
    return HeadLosses(loss=loss, agreed=agreed, overlap=overlap, rows=len(rows_N))


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: torch.Tensor,
        weight_UD: torch.Tensor,
        p_RU: torch.Tensor,
        mass_R: torch.Tensor,
        top_R: torch.Tensor,
        rows_N: torch.Tensor,
        kind: Kind,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, x = weight_UD.to(dtype), x_ND.to(dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if wants_x else None
        # Accumulated in the products' type it would lose small chunks.
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight)) if wants_weight else None
        loss = torch.zeros((), dtype=_wide(weight), device=x.device)
        agreed, overlap = torch.zeros_like(loss), torch.zeros_like(loss)
        for at in range(0, len(x), CHUNK):
            part = slice(at, at + CHUNK)
            rows = rows_N[part]
            z = (x[part] @ weight.T).to(_wide(weight))
            # Several times faster than argmax; a tie counts as agreement.
            chosen = z.gather(1, top_R[rows].unsqueeze(1)).squeeze(1)
            agreed += (chosen >= z.amax(-1)).sum()
            value, grad, shared = _chunk(z, p_RU[rows], mass_R[rows], kind)
            loss += value
            overlap += shared
            grad = grad.to(dtype)
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[part])
            if grad_weight is not None:
                grad_weight += (grad.T @ x[part]).to(grad_weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.types = x_ND.dtype, weight_UD.dtype
        ctx.mark_non_differentiable(agreed, overlap)
        return loss, agreed, overlap

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        grads = [
            None if t is None else (t * g).to(kind)
            for t, kind in zip(ctx.saved_tensors, ctx.types, strict=True)
        ]
        return (*grads, None, None, None, None, None, None)


def _chunk(
    z: torch.Tensor, p: torch.Tensor, mass: torch.Tensor, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (summed), its gradient with respect to the logits (in their place), overlap."""
    p = p.to(z.dtype)
    log_q = z.sub_(z.logsumexp(-1, keepdim=True))
    if kind == "ce":
        p_hat = p / mass.to(z.dtype).unsqueeze(-1)
        loss = -(p_hat * log_q).sum()
        q = log_q.exp_()
        shared = torch.minimum(p, q).sum()
        return loss, q.sub_(p_hat), shared
    q = log_q.exp_()
    low = (q < p).to(q.dtype)
    both = torch.minimum(p, q).sum(-1, keepdim=True).clamp_(min=1e-12)
    # d both / d z = q * (low - sum of q where low): only tokens below p move the minimum.
    weight = (low * q).sum(-1, keepdim=True)
    grad = q.mul_(weight - low).div_(both)
    return -both.log().sum(), grad, both.sum()


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
