"""From logits to weights: temperature, top-k, top-p, min-p, typical-p, in this order.

Each sees the outcome of the one before. No vocabulary is sorted: what a filter keeps is
found by a histogram over the leading bits of its key, and only the bin that holds the
threshold is sorted. Legend: R rows, V vocabulary, n tokens that are still in question.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.law import block_sums
from paceline.types import SamplingParams

Floats = npt.NDArray[np.floating]
Ints = npt.NDArray[np.integer]

#: Smaller temperatures are this one: float32 can't divide by them, and all are greedy.
_COLDEST = 1e-30

#: So few tokens are sorted at once.
_FEW = 2048


@dataclass(frozen=True)
class Filters:
    """What `transform` needs of a request; rows with equal ones are transformed together."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> Filters:
        p = params
        return cls(p.temperature, p.top_k, p.top_p, p.min_p, p.typical_p)


def transform(
    logits_RV: torch.Tensor, filters: Filters, top_R1: torch.Tensor | float | None = None
) -> torch.Tensor:
    """[R, V] unnormalised weights; the largest of each row is 1 (where typical-p keeps it),
    removed tokens are 0. top_R1: the largest logit of each row, where it is known.

    The temperature must not be 0. Logits of -inf have weight 0.
    """
    if top_R1 is None:
        top_R1 = logits_RV.amax(-1, keepdim=True)
    # The difference first: dividing by a tiny temperature may overflow to -inf, which is
    # weight 0, but can't meet another infinity.
    weights_RV = torch.sub(logits_RV, top_R1)
    if filters.temperature != 1.0:
        weights_RV.mul_(1.0 / max(filters.temperature, _COLDEST))
    weights_RV.exp_()
    k = filters.top_k
    for weights_V, logits_V in zip(weights_RV, logits_RV, strict=True):
        if 0 < k < logits_RV.shape[-1]:
            _keep_only(weights_V, _top_k_ids(logits_V, k))
        if filters.top_p < 1.0:
            _keep_nucleus(weights_V, filters.top_p)
        if filters.min_p > 0.0:
            _drop_below(weights_V, filters.min_p)
        if filters.typical_p < 1.0:
            _keep_typical(weights_V, filters.typical_p)
    return weights_RV


def _keep_only(weights_V: torch.Tensor, ids: torch.Tensor) -> None:
    values = weights_V[ids]
    weights_V.zero_()
    weights_V[ids] = values


def _drop_below(weights_V: torch.Tensor, least: float) -> None:
    """Zero the weights below `least`, in one fast pass."""
    kind = np.float32 if weights_V.dtype == torch.float32 else np.float64
    below = float(np.nextafter(kind(least), kind(0.0)))
    torch.threshold_(weights_V, below, 0.0)


def _top_k_ids(logits_V: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest logits; among equals the lowest ids stay."""
    if logits_V.device.type == "cpu":
        host_V: Floats = logits_V.numpy()
        least = np.partition(host_V, len(host_V) - k)[len(host_V) - k]
        ids = torch.from_numpy((host_V >= least).nonzero()[0])
    else:
        ids = (logits_V >= logits_V.topk(k).values[-1]).nonzero().flatten()
    if len(ids) > k:
        order = logits_V[ids].sort(descending=True, stable=True).indices
        ids = ids[order[:k]]
    return ids


def _keep_nucleus(weights_V: torch.Tensor, top_p: float) -> None:
    """Zero all but the smallest set of largest weights with at least `top_p` of the mass;
    among equals the lowest ids stay. (Holtzman et al. 2019.)

    All weights up to (1 - p) * total / V together weigh at most (1 - p) * total, so the set
    lies above that cut.
    """
    total = float(block_sums(weights_V).sum())
    cut = (1.0 - top_p) * total / weights_V.shape[0]
    keep = _nucleus_by_sorting if weights_V.is_cuda else _nucleus_by_bins
    keep(weights_V, cut, top_p * total)


def _nucleus_by_sorting(weights_V: torch.Tensor, cut: float, goal: float) -> None:
    ids = (weights_V > cut).nonzero().flatten()
    sorted_weights, order = weights_V[ids].sort(descending=True, stable=True)
    before = sorted_weights.cumsum(0, dtype=torch.float64) - sorted_weights
    _keep_only(weights_V, ids[order[: int((before < goal).sum())]])


def _nucleus_by_bins(weights_V: torch.Tensor, cut: float, goal: float) -> None:
    host_V: Floats = weights_V.numpy()
    ids_n = (host_V > host_V.dtype.type(cut)).nonzero()[0]
    weights_n = host_V[ids_n]
    keys_n = _bits(np.ones_like(weights_n)) - _bits(weights_n)  # the largest weight, 1, has key 0
    last, equals = _first_with_mass(keys_n, weights_n, goal)
    at_border = (keys_n == last).nonzero()[0]
    _drop_below(weights_V, float(weights_n[at_border[0]]))
    host_V[ids_n[at_border[equals:]]] = 0.0


def _keep_typical(weights_V: torch.Tensor, mass: float) -> None:
    """Zero all but the smallest set of tokens whose surprise -log p is nearest to the
    entropy, with at least `mass`; equals of the last one stay too, as in transformers.
    (Meister et al. 2022, section 3.)"""
    host_V: Floats = weights_V.cpu().numpy()
    ids_n = (host_V > 0).nonzero()[0]
    weights_n = host_V[ids_n]
    total = float(weights_n.sum(dtype=np.float64))
    # The entropy is the mean of -log p, so -log p - H is log w's distance from its mean.
    away_n = np.log(weights_n)
    away_n -= host_V.dtype.type((weights_n * away_n).sum(dtype=np.float64) / total)
    keys_n = _bits(np.abs(away_n, out=away_n))
    last, _ = _first_with_mass(keys_n, weights_n, mass * total)
    gone = torch.from_numpy(ids_n[keys_n > last]).to(weights_V.device)
    weights_V[gone] = 0.0


def _bits(values_n: Floats) -> Ints:
    """Non-negative floats as integers in the same order."""
    return values_n.view(np.int32 if values_n.dtype == np.float32 else np.int64)


def _first_with_mass(keys_n: Ints, weights_n: Floats, goal: float) -> tuple[int, int]:
    """Of the shortest beginning of all tokens, by ascending key, that weighs at least
    `goal`: its last key, and how many tokens with that key are in it."""
    inside, before = np.arange(len(keys_n)), 0.0
    if len(keys_n) > _FEW:
        # The exponent and four more bits: a bin spans 1/16 of a power of two.
        bins_n = keys_n >> (19 if keys_n.dtype == np.int32 else 48)
        masses = np.bincount(bins_n, weights_n)
        running = masses.cumsum()
        # Rounding can leave the goal above the whole: then the last bin holds the end.
        bin_ = min(int(running.searchsorted(goal)), len(masses) - 1)
        inside = (bins_n == bin_).nonzero()[0]
        before = float(running[bin_] - masses[bin_])
    order = inside[keys_n[inside].argsort(kind="stable")]
    running = weights_n[order].cumsum(dtype=np.float64)
    at = min(int(running.searchsorted(goal - before)), len(order) - 1)
    last = int(keys_n[order[at]])
    return last, int((keys_n[order[: at + 1]] == last).sum())
