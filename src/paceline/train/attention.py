"""Attention of the training-time test (EAGLE-3, Li et al. 2025, section 3.2).

At unrolled step i, row t sees the step-0 keys of rows up to t of its own sequence, and one
key of each later step: that of row t itself (a diagonal). That is what a draft sees at its
i-th step: real features for the committed prefix, its own outputs behind them.

Legend: N packed rows, H heads, K key/value heads, E head size, T rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import torch

KV = tuple[torch.Tensor, torch.Tensor]

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(q_NHE: torch.Tensor, prefix: KV, later: Seq[KV], starts_B1: Seq[int]) -> torch.Tensor:
    """[N, H * E]. prefix: step-0 keys and values [N, K, E]; later: those of steps 1 to i.

    On a CPU by flash attention, nothing quadratic is kept; elsewhere as written in
    `attend_plain`.
    """
    if q_NHE.device.type != "cpu":
        return attend_plain(q_NHE, prefix, later, starts_B1)
    flat = [t for pair in later for t in pair]
    out: torch.Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        tuple(starts_B1), q_NHE, *prefix, *flat
    )
    return out


def attend_plain(
    q_NHE: torch.Tensor, prefix: KV, later: Seq[KV], starts_B1: Seq[int]
) -> torch.Tensor:
    """The same, readably: one softmax over prefix and diagonal scores, sequence by sequence."""
    shared = q_NHE.shape[1] // prefix[0].shape[1]
    k_NHE, v_NHE = (t.repeat_interleave(shared, 1) for t in prefix)
    scale = q_NHE.shape[-1] ** -0.5
    out = []
    for first, last in pairwise(starts_B1):
        q, k, v = (t[first:last].transpose(0, 1) for t in (q_NHE, k_NHE, v_NHE))
        n = last - first
        seen = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        scores = [(q @ k.transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)]
        values = []
        for k_later, v_later in later:
            k_j = k_later[first:last].repeat_interleave(shared, 1).transpose(0, 1)
            scores.append((q * k_j).sum(-1, keepdim=True) * scale)
            values.append(v_later[first:last].repeat_interleave(shared, 1).transpose(0, 1))
        weights = torch.cat(scores, -1).to(_wide(q)).softmax(-1).to(q.dtype)
        o = weights[..., :n] @ v
        for j, v_j in enumerate(values):
            o = o + weights[..., n + j : n + j + 1] * v_j
        out.append(o.transpose(0, 1).flatten(1))
    return torch.cat(out)


class _Attend(torch.autograd.Function):
    """Flash attention over the prefix, joined with the diagonal keys by their log-sum-exp.

    Its backward pass may be given the *joint* output and log-sum-exp L: the prefix weights
    are exp(score - L) then, and the row sums of grad * output are the joint ones, so the
    prefix gradients come out right without a pass of our own (as in ring attention).
    """

    @staticmethod
    def forward(
        ctx: Any,
        starts: tuple[int, ...],
        q_NHE: torch.Tensor,
        k_NKE: torch.Tensor,
        v_NKE: torch.Tensor,
        *later: torch.Tensor,
    ) -> torch.Tensor:
        n, heads, size = q_NHE.shape
        q, k, v = _by_head(q_NHE, heads), _by_head(k_NKE, heads), _by_head(v_NKE, heads)
        out = torch.empty_like(q)
        lse = torch.empty(1, heads, n, dtype=_wide(q))
        for first, last in pairwise(starts):
            rows = slice(first, last)
            out[:, :, rows], lse[:, :, rows] = _FLASH(
                q[:, :, rows], k[:, :, rows], v[:, :, rows], 0.0, True
            )
        if later:
            scores = [_diagonal(q, _by_head(k_j, heads)) for k_j in later[::2]]
            total = torch.logsumexp(torch.stack([lse, *scores]), 0)
            joint = out * (lse - total).exp().unsqueeze(-1)
            for s_j, v_j in zip(scores, later[1::2], strict=True):
                joint += (s_j - total).exp().unsqueeze(-1) * _by_head(v_j, heads)
            out, lse = joint.to(q.dtype), total
        ctx.save_for_backward(q, k, v, out, lse, *later)
        ctx.starts, ctx.kv_heads = starts, k_NKE.shape[1]
        return out[0].transpose(0, 1).reshape(n, heads * size)

    @staticmethod
    def backward(ctx: Any, grad_NX: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *later = ctx.saved_tensors
        n, heads = q.shape[2], q.shape[1]
        grad = grad_NX.to(q.dtype).view(n, heads, -1).transpose(0, 1).unsqueeze(0).contiguous()
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for first, last in pairwise(ctx.starts):
            rows = slice(first, last)
            parts = [t[:, :, rows] for t in (grad, q, k, v, out, lse)]
            dq[:, :, rows], dk[:, :, rows], dv[:, :, rows] = _FLASH_BACKWARD(*parts, 0.0, True)
        d_later: list[torch.Tensor] = []
        scale = q.shape[-1] ** -0.5
        wide = _wide(q)
        delta = (grad.to(wide) * out.to(wide)).sum(-1)
        for k_j, v_j in zip(later[::2], later[1::2], strict=True):
            k_h, v_h = _by_head(k_j, heads), _by_head(v_j, heads)
            weight = (_diagonal(q, k_h) - lse).exp()
            ds = (weight * ((grad.to(wide) * v_h.to(wide)).sum(-1) - delta) * scale).unsqueeze(-1)
            dq += (ds * k_h).to(dq.dtype)
            d_later.append(_to_kv_heads((ds * q).to(q.dtype), ctx.kv_heads))
            d_later.append(_to_kv_heads((weight.unsqueeze(-1) * grad).to(q.dtype), ctx.kv_heads))
        return (
            None,
            dq[0].transpose(0, 1),
            _to_kv_heads(dk, ctx.kv_heads),
            _to_kv_heads(dv, ctx.kv_heads),
            *d_later,
        )


def _by_head(x_NKE: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, H, N, E], key/value heads repeated for the queries that share them."""
    x = x_NKE.repeat_interleave(heads // x_NKE.shape[1], 1)
    return x.transpose(0, 1).unsqueeze(0).contiguous()


def _to_kv_heads(grad_1HNE: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[N, K, E]: gradients of repeated heads, added up."""
    _, heads, n, size = grad_1HNE.shape
    return grad_1HNE.reshape(kv_heads, heads // kv_heads, n, size).sum(1).transpose(0, 1)


def _diagonal(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[1, H, N] scores of each row with its own later key, in float32 or better."""
    wide = _wide(q)
    scores: torch.Tensor = (q.to(wide) * k.to(wide)).sum(-1) * q.shape[-1] ** -0.5
    return scores


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
