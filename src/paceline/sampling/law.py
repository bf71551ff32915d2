"""From logits to laws: the only place where sampling parameters meet logits.

Order of the transforms (that of transformers): temperature, top-k, top-p, min-p. Each sees
the outcome of the one before; the kept weights are what is sampled, divided by, and taken
residuals of, so a filter never stands outside the law.

Legend: R rows, V vocabulary. Everything runs in float32, sums in float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.core.law import Excess, Law, PointLaw, weight_laws
from paceline.types import SamplingParams


class BadLogits(Exception):
    """A row's logits are NaN or infinite."""


@dataclass(frozen=True)
class BrokenLaw:
    """Stands for the law of a row with unusable logits; BadLogits when it is asked."""

    size: int

    def probability(self, token: int) -> float:
        raise BadLogits

    def sample(self, u: float) -> int:
        raise BadLogits

    def mode(self) -> int:
        raise BadLogits

    def entropy(self) -> float:
        raise BadLogits

    def dense(self) -> torch.Tensor:
        raise BadLogits

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        raise BadLogits

    def without(self, token: int) -> Law | None:
        raise BadLogits

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        raise BadLogits


def build_laws(
    logits_RV: torch.Tensor, params_R: Seq[SamplingParams], *, masked: bool = False
) -> list[Law]:
    """The law of each row under its request's parameters; a BrokenLaw where a row's logits
    are NaN or infinite (with `masked`, single -inf logits are tokens that can't be drawn).

    Rows with the same parameters are transformed together, whichever request they belong to.
    """
    laws: list[Law] = [BrokenLaw(logits_RV.shape[-1])] * len(params_R)
    if not params_R:
        return laws
    healthy = _healthy(logits_RV, masked)
    groups: dict[tuple[float, int, float, float], list[int]] = {}
    for row, p in enumerate(params_R):
        if healthy[row]:
            key = (0.0, 0, 1.0, 0.0) if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)
            groups.setdefault(key, []).append(row)
    for (temperature, top_k, top_p, min_p), rows in groups.items():
        part_RV = logits_RV if len(rows) == len(logits_RV) else logits_RV[rows]
        if temperature == 0.0:
            for row, token in zip(rows, part_RV.argmax(-1).tolist(), strict=True):
                laws[row] = PointLaw(token, logits_RV.shape[-1])
            continue
        weights_RV = transform(part_RV, temperature, top_k, top_p, min_p)
        for row, law in zip(rows, weight_laws(weights_RV), strict=True):
            laws[row] = law
    return laws


def transform(
    logits_RV: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """[R, V] unnormalised weights; the largest of each row is 1, removed tokens are 0."""
    top_R1 = logits_RV.amax(-1, keepdim=True)
    # The difference first: dividing by a tiny temperature may overflow to -inf, which is
    # weight 0, but can't meet another infinity.
    weights_RV = ((logits_RV - top_R1) / temperature).exp_()
    if 0 < top_k < logits_RV.shape[-1]:
        weights_RV.masked_fill_(~_top_k_mask(logits_RV, top_k), 0.0)
    if top_p < 1.0:
        for weights_V in weights_RV:
            _keep_nucleus(weights_V, top_p)
    if min_p > 0.0:
        weights_RV.masked_fill_(weights_RV < min_p, 0.0)
    return weights_RV


def _healthy(logits_RV: torch.Tensor, masked: bool) -> list[bool]:
    low_R, high_R = torch.aminmax(logits_RV, dim=-1)  # NaN spreads to both
    ok_R = high_R.isfinite()
    if not masked:
        ok_R &= low_R.isfinite()
    return [bool(ok) for ok in ok_R.tolist()]


def _top_k_mask(logits_RV: torch.Tensor, k: int) -> torch.Tensor:
    """True for the k largest logits of each row; among equals the lowest ids stay."""
    least_R1 = logits_RV.topk(k, dim=-1).values[:, -1:]
    keep_RV = logits_RV >= least_R1
    for row in (keep_RV.sum(-1) > k).nonzero().flatten().tolist():
        above = logits_RV[row] > least_R1[row]
        equal = (logits_RV[row] == least_R1[row]).nonzero().flatten()
        keep_RV[row] = above
        keep_RV[row, equal[: k - int(above.sum())]] = True
    return keep_RV


def _keep_nucleus(weights_V: torch.Tensor, top_p: float) -> None:
    """Zero all but the smallest set of largest weights with at least `top_p` of the mass.

    All weights up to (1 - p) * total / V together weigh at most (1 - p) * total, so the set
    lies above that cut, and only the few weights there are sorted.
    """
    total = float(weights_V.sum(dtype=torch.float64))
    cut = (1.0 - top_p) * total / weights_V.shape[0]
    ids = (weights_V > cut).nonzero().flatten()
    sorted_weights, order = weights_V[ids].sort(descending=True, stable=True)
    before = sorted_weights.cumsum(0, dtype=torch.float64) - sorted_weights
    kept = int((before < top_p * total).sum())
    chosen = ids[order[:kept]]
    values = weights_V[chosen]
    weights_V.zero_()
    weights_V[chosen] = values
