"""How many nodes are worth their time: the pure arithmetic of a decision.

gains: expected accepted tokens that each further node of a sequence brings, never rising.
by_rows[n]: seconds of the target's pass with n nodes. price: tokens for a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq


def caps(longest: int) -> list[int]:
    """Depths that are compared."""
    steps = (*range(1, 9), 12, 16, 24, 32, 48, 64)
    return [c for c in steps if c < longest] + [longest]


def spread(gains: dict[int, list[float]], by_rows: list[float], price: float) -> dict[int, int]:
    """Nodes for each sequence: the most promising ones of all, as many as their rows are
    worth; at least one."""
    ranked = sorted(((g, i) for i, many in gains.items() for g in many), key=lambda x: -x[0])
    best, best_n, total = -float("inf"), 0, 0.0
    for n, (gain, _) in enumerate(ranked, start=1):
        total += gain
        value = total - price * by_rows[n]
        if value > best:
            best, best_n = value, n
    return dict(Counter(i for _, i in ranked[:best_n]))


def best_length(
    gains: Seq[float], drafting: Seq[float], by_rows: Seq[float], price: float
) -> tuple[int, float]:
    """The number of nodes, at least one, that is worth most where one sequence alone drafts,
    and its value against drafting none. drafting[k - 1]: seconds of drafting k nodes."""
    total, best, best_k = 0.0, -float("inf"), 1
    for k, gain in enumerate(gains, start=1):
        total += gain
        value = total - price * (drafting[k - 1] + by_rows[k] - by_rows[0])
        if value > best:
            best, best_k = value, k
    return best_k, best
