"""From measured engine steps to the costs of target, drafters and host.

Medians throughout: a step that something else on the machine disturbed counts for one, not
for its length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from paceline.core.latency import Curve, DraftCost, HostCost, TargetCost

#: Prompt length from which a session tells what reading a draft cache costs.
LONG = 512


@dataclass(frozen=True, kw_only=True)
class Session:
    """Engine steps to take: `rounds` times every k of `budgets`, in shuffled order."""

    batch: int = 1
    sampled: bool = False
    budgets: tuple[int, ...]
    rounds: int
    prompt: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One engine step in which all sequences decide; seconds."""

    session: Session
    k: int
    drafted: int
    contexts: tuple[int, ...]
    t_p: float
    t_q: float
    t_o: float

    @property
    def rows(self) -> list[int]:
        """Of each sequence; what was drafted is spread evenly."""
        n = len(self.contexts)
        return [1 + self.drafted // n + (i < self.drafted % n) for i in range(n)]

    @property
    def full(self) -> bool:
        """Whether every sequence proposed as much as it was asked for."""
        return self.drafted == self.k * len(self.contexts)


@dataclass(frozen=True)
class Run:
    """A session's steps, and what reading the prompts cost the drafter (with the first
    proposal)."""

    session: Session
    steps: tuple[Step, ...]
    t_q_prompt: float


def in_situ(target: TargetCost, steps: Seq[Step]) -> TargetCost:
    """The target's cost as it is between an engine's other work: plain steps tell the scale."""
    scale = median(s.t_p / target(s.rows, s.contexts) for s in steps if s.drafted == 0)
    rows = Curve(xs=target.rows.xs, ys=tuple(y * scale for y in target.rows.ys))
    return replace(target, rows=rows)


def fit_host(steps: Seq[Step]) -> HostCost:
    """Non-negative least squares on medians: a step, its sequences, its rows."""
    cells: dict[tuple[int, int], list[float]] = {}
    for s in steps:
        cells.setdefault((len(s.contexts), sum(s.rows)), []).append(s.t_o)
    if not cells:
        return HostCost(step=0.0, sequence=0.0, row=0.0)
    times = np.array([median(t) for t in cells.values()])
    weights = np.sqrt([len(t) for t in cells.values()]) / times
    terms = np.array([[1.0, batch, rows] for batch, rows in cells])
    fit, _ = nnls(terms * weights[:, None], times * weights)
    return HostCost(step=float(fit[0]), sequence=float(fit[1]), row=float(fit[2]))


def fit_draft(runs: Seq[Run], target: TargetCost, host: Mapping[str, HostCost]) -> DraftCost:
    """The cost of one drafter from its sessions (greedy short ones at least)."""
    greedy = [r for r in runs if not r.session.sampled]
    short = [r for r in greedy if r.session.prompt < LONG]
    per_entry = _draft_reading(greedy)
    lines = {
        batch: _line(
            [s for r in short if r.session.batch == batch for s in r.steps if s.k > 0], per_entry
        )
        for batch in sorted({r.session.batch for r in short})
    }
    xs = tuple(float(b) for b in lines)
    cost = DraftCost(
        idle=median(s.t_q for r in greedy for s in r.steps if s.k == 0),
        first=Curve(xs=xs, ys=tuple(a for a, _ in lines.values())),
        step=Curve(xs=xs, ys=tuple(b for _, b in lines.values())),
        per_entry=per_entry,
    )
    cost = replace(cost, feed=_feeding(greedy, cost))
    sampled = [s for r in runs if r.session.sampled for s in r.steps if s.drafted > 0]
    if sampled:
        more = [
            (s.t_q + s.t_o - cost(s.k, s.contexts) - host["sampled"](len(s.rows), sum(s.rows)))
            / s.drafted
            for s in sampled
        ]
        cost = replace(cost, sampling=max(_significant(more), 0.0))
    # What a round costs more than its parts: passes after drafting find colder caches. Of
    # single short sequences, where nothing else that the target's cost gets wrong adds to it.
    rest = [
        s.t_p - target(s.rows, s.contexts)
        for r in short if r.session.batch == 1 for s in r.steps if s.drafted > 0
    ]  # fmt: skip
    return replace(cost, fixed=max(_significant(rest), 0.0))


def _line(steps: Seq[Step], per_entry: float) -> tuple[float, float]:
    """T_q of the first draft token and of each further one (slope between medians), without
    what reading the cache takes."""
    asked = [s for s in steps if s.full] or list(steps)
    by_k: dict[int, list[float]] = {}
    for s in asked:
        by_k.setdefault(s.k, []).append(max(s.t_q - per_entry * s.k * sum(s.contexts), 0.0))
    points = sorted((k, median(t)) for k, t in by_k.items())
    if len(points) == 1:
        k, t = points[0]  # all tokens alike
        return t / k, t / k
    slopes = [
        (b - a) / (kb - ka)
        for i, (ka, a) in enumerate(points)
        for kb, b in points[i + 1 :]
    ]  # fmt: skip
    slope = max(median(slopes), 0.0)
    return max(median(t - slope * (k - 1) for k, t in points), 0.0), slope


def _draft_reading(runs: Seq[Run]) -> float:
    """Seconds for each entry and draft token: sessions with long prompts against those with
    short ones, at the same k."""
    alone = [s for r in runs if r.session.batch == 1 for s in r.steps if s.k > 0]
    long = [s for s in alone if s.session.prompt >= LONG]
    found = []
    for s in long:
        same = [o for o in alone if o.k == s.k and o.session.prompt < LONG]
        if same:
            near = median(o.contexts[0] for o in same)
            more = s.t_q - median(o.t_q for o in same)
            found.append(more / (s.k * (s.contexts[0] - near)))
    return max(_significant(found), 0.0)


def _feeding(runs: Seq[Run], cost: DraftCost) -> Curve:
    """What reading a prompt cost, by its length, on top of one token's."""
    points = {1.0: cost.first(1)}
    for r in runs:
        if r.session.batch == 1 and r.session.prompt > 1:
            points[float(r.session.prompt)] = cost.first(1) + r.t_q_prompt
    xs = tuple(sorted(points))
    return Curve(xs=xs, ys=tuple(points[x] for x in xs))


def _significant(values: Seq[float]) -> float:
    """The median, or 0 where it is within two standard errors of that."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    return middle if abs(middle) > 2 * _error(values) else 0.0


def _error(values: Seq[float]) -> float:
    """Standard error of a median, from the median deviation (normal noise, few outliers)."""
    middle = median(values)
    deviation = 1.4826 * median(abs(v - middle) for v in values)
    return float(1.2533 * deviation / math.sqrt(len(values)))


def relative_error(values: Seq[float]) -> float:
    return _error(values) / median(values)


def draft_spread(runs: Seq[Run]) -> float:
    """Relative standard error of drafting times, over cells with several."""
    cells: dict[tuple[Session, int], list[float]] = {}
    for r in runs:
        for s in r.steps:
            if s.k > 0:
                cells.setdefault((r.session, s.k), []).append(s.t_q)
    found = [relative_error(v) for v in cells.values() if len(v) > 2 and median(v) > 0.0]
    return float(np.median(found)) if found else 0.0
