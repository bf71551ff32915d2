"""What a drafter is trained to lower, fused with its output projection.

For one row, p is the target's law of the next token restricted to the draft vocabulary (mass
m <= 1: what lies outside can't be drafted), q the head's softmax:

    ce        -sum_x (p(x) / m) log q(x)      soft targets; the gradient of KL(p / m, q)
    overlap   -log sum_x min(p(x), q(x))      the sum is the acceptance probability of a
                                              sampled proposal (Leviathan et al. 2022)

Logits of a pack are never held at once: `_HeadLoss` runs over chunks of rows, forms loss and
gradient with respect to the logits on the way forward (as Liger's fused cross-entropy does,
Hsu et al. 2024), and keeps two gradients of the size of its inputs.

Rows are filled up to a multiple of `ROWS`: a matrix product of a new shape costs a CPU's library
(oneDNN) several times the product, to generate its code.

Legend: N rows, R rows of laws, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

Kind = Literal["ce", "overlap"]
KINDS: tuple[Kind, ...] = ("ce", "overlap")
#: Rows of a matrix product come in multiples of this.
ROWS = 128
#: Rows whose logits are held at once, and rows whose gradients are: more than a chunk, as each
#: product of gradients is added to one as large as the weights.
CHUNK, BLOCK = 256, 1024


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
    """Of N rows. loss: their sum, each times its share; differentiable. agreed_N: whether a
    row's most probable token is the target's (accepted at temperature 0). overlap_N: sum_x
    min(p, q) (the chance that a sample is accepted at temperature 1)."""

    loss: torch.Tensor
    agreed_N: torch.Tensor
    overlap_N: torch.Tensor


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
        z = project(final_RD[rows], head_UD)
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
    share_N: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> HeadLosses:
    """Row n of x is judged by row `rows_N[n]` of the laws. share_N: what its loss counts
    (None: 1). dtype: of the matrix products."""
    if share_N is None:
        share_N = torch.ones(len(rows_N), device=x_ND.device)
    loss, agreed_N, overlap_N = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        x_ND, weight_UD, laws.p_RU, laws.mass_R, laws.top_R, rows_N, share_N, kind, dtype
    )
    return HeadLosses(loss=loss, agreed_N=agreed_N, overlap_N=overlap_N)


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
        share_N: torch.Tensor,
        kind: Kind,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight, n = weight_UD.to(dtype), len(x_ND)
        x, share_N1 = filled(x_ND.to(dtype)), share_N.to(_wide(weight)).unsqueeze(1)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if wants_x else None
        # Added up in the products' type it would lose small blocks.
        grad_weight = torch.zeros_like(weight, dtype=share_N1.dtype) if wants_weight else None
        loss_N1, overlap_N1 = torch.empty_like(share_N1), torch.empty_like(share_N1)
        agreed_N = torch.empty(n, dtype=torch.bool, device=x.device)
        block = torch.empty(min(BLOCK, len(x)), len(weight), dtype=dtype, device=x.device)
        for first in range(0, len(x), BLOCK):
            grad = block[: len(x) - first].zero_()
            for at in range(first, min(first + BLOCK, n), CHUNK):
                part = slice(at, min(at + CHUNK, first + BLOCK, n))
                rows = rows_N[part]
                z = project(x[part], weight)
                # Several times faster than argmax; a tie counts as agreement.
                best_N1 = z.amax(-1, keepdim=True)
                agreed_N[part] = (z.gather(1, top_R[rows].unsqueeze(1)) >= best_N1).squeeze(1)
                p, mass_N1 = p_RU[rows].to(z.dtype), mass_R[rows].to(z.dtype).unsqueeze(1)
                value, grad_z, shared = _chunk(z.sub_(best_N1), p, mass_N1, kind)
                loss_N1[part], overlap_N1[part] = value, shared
                grad[at - first :][: len(rows)] = grad_z.mul_(share_N1[part])
            of_block = slice(first, first + len(grad))
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[of_block])
            if grad_weight is not None:
                grad_weight += grad.T @ x[of_block]
        ctx.save_for_backward(None if grad_x is None else grad_x[:n], grad_weight)
        ctx.types = x_ND.dtype, weight_UD.dtype
        overlap_N = overlap_N1.squeeze(1)
        ctx.mark_non_differentiable(agreed_N, overlap_N)
        return (loss_N1 * share_N1).sum(), agreed_N, overlap_N

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *_: torch.Tensor) -> tuple[Any, ...]:
        grads = [
            None if t is None else (t * g).to(kind)
            for t, kind in zip(ctx.saved_tensors, ctx.types, strict=True)
        ]
        return (*grads, None, None, None, None, None, None, None)


def filled(x_ND: torch.Tensor) -> torch.Tensor:
    """With rows of zeros behind, up to a multiple of ROWS."""
    return F.pad(x_ND, (0, 0, 0, -len(x_ND) % ROWS))


def project(x_ND: torch.Tensor, weight_UD: torch.Tensor) -> torch.Tensor:
    """[N, U] in float32 or better: the product in the weights' type."""
    z_NU = filled(x_ND.to(weight_UD.dtype)) @ weight_UD.T
    return z_NU[: len(x_ND)].to(_wide(weight_UD))


def _chunk(
    z: torch.Tensor, p: torch.Tensor, mass: torch.Tensor, kind: Kind
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each row loss, its gradient with respect to the logits (in their place), and overlap.
    z: logits below 0, p: probabilities of such a mass. Few passes, which is what it costs."""
    expected = _dot(p, z) if kind == "ce" else None
    q = z.exp_()
    total = q.sum(-1, keepdim=True)
    q.div_(total)
    low = torch.minimum(p, q)
    both = low.sum(-1, keepdim=True)
    if expected is not None:
        return total.log() - expected / mass, q.addcdiv_(p, mass, value=-1), both
    both = both.clamp(min=1e-12)
    # d both / d z = q * (low - sum of q where low): only tokens below p move the minimum.
    below = torch.lt(q, p, out=low)
    weight = (below * q).sum(-1, keepdim=True)
    return -both.log(), q.mul_(weight - below).div_(both), both


def _dot(x_NU: torch.Tensor, y_NU: torch.Tensor) -> torch.Tensor:
    """[N, 1] sums of products, as a matrix product, which keeps no terms."""
    with torch.autocast(x_NU.device.type, enabled=False):  # or it would be narrowed
        return torch.bmm(x_NU.unsqueeze(1), y_NU.unsqueeze(2)).squeeze(2)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
