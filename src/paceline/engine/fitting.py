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
from scipy.optimize import isotonic_regression, nnls

from paceline.core.latency import Curve, DraftCost, HostCost, TargetCost

#: Prompt length from which a session tells what reading a draft cache costs.
LONG = 512
#: Steps of a streak that waits for the machine to settle, at most.
MOST_STREAK = 24


@dataclass(frozen=True, kw_only=True)
class Session:
    """Engine steps to take: `rounds` times every k of `budgets`, in shuffled order. Each is
    taken `streak` times in a row, of which the first does not count (where there are more):
    what a pass finds in the caches depends on the one before. settle: seconds at the beginning
    of a streak that do not count either, as caches and clocks take some; a streak is then
    longer, but no longer than MOST_STREAK."""

    batch: int = 1
    sampled: bool = False
    budgets: tuple[int, ...]
    rounds: int
    prompt: int
    streak: int = 1
    settle: float = 0.0

    @property
    def longest_streak(self) -> int:
        return max(self.streak, MOST_STREAK) if self.settle else self.streak


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
    def seconds(self) -> float:
        return self.t_p + self.t_q + self.t_o

    @property
    def full(self) -> bool:
        """Whether every sequence proposed as much as it was asked for."""
        return self.drafted == self.k * len(self.contexts)


@dataclass(frozen=True)
class Run:
    """A session's steps, and what reading the prompts cost the drafter (with the first
    proposal), so many rows of each."""

    session: Session
    steps: tuple[Step, ...]
    t_q_prompt: float
    fed: int

    def scaled(self, factor: float) -> Run:
        """The same with all times multiplied."""
        steps = tuple(
            replace(s, t_p=s.t_p * factor, t_q=s.t_q * factor, t_o=s.t_o * factor)
            for s in self.steps
        )
        return Run(self.session, steps, self.t_q_prompt * factor, self.fed)


def _plain(cycle: Seq[Run]) -> float:
    """Seconds of a plain greedy pass of one short sequence."""
    return median(
        s.t_p for run in cycle for s in run.steps
        if s.k == 0 and len(s.contexts) == 1 and _near(run) and not run.session.sampled
    )  # fmt: skip


def _near(run: Run) -> bool:
    return run.session.prompt < LONG


def at_one_speed(cycles: Seq[Seq[Run]]) -> list[Run]:
    """All runs as the machine would have taken them at one speed: that of the median cycle, by
    the plain greedy steps of each."""
    unit = median(map(_plain, cycles))
    return [run.scaled(unit / _plain(cycle)) for cycle in cycles for run in cycle]


def settled(run: Run, target: TargetCost, host: Mapping[str, HostCost]) -> Run:
    """A run at the speed of `target`, by its own plain steps."""
    cost = host["sampled" if run.session.sampled else "greedy"]
    known = [
        (target(s.rows, s.contexts) + cost(len(s.contexts), len(s.contexts))) / (s.t_p + s.t_o)
        for s in run.steps
        if s.drafted == 0
    ]
    return run.scaled(median(known)) if known else run


def fit_target(swept: TargetCost, runs: Seq[Run]) -> tuple[TargetCost, float]:
    """The target's cost as it is between an engine's other work, and the relative standard
    error of its ratios.

    swept: of passes that follow each other. runs: with random drafts, at one speed; how much
    longer than `swept` the greedy ones' passes take goes by rows, and by context with long
    prompts.
    """
    found: dict[int, list[float]] = {}
    far = []
    for run in runs:
        for s in run.steps if not run.session.sampled else ():
            if _near(run):
                found.setdefault(sum(s.rows), []).append(s.t_p / swept(s.rows, s.contexts))
            else:
                far.append(s)
    seen = sorted(found)
    xs = sorted({*swept.rows.xs, *map(float, seen)})
    longer = np.interp(xs, seen, [median(found[n]) for n in seen])
    ys = isotonic_regression(np.array([swept.rows(x) for x in xs]) * longer).x
    target = replace(swept, rows=Curve(xs=tuple(xs), ys=tuple(ys.tolist())))
    reading = [(s.t_p - target.rows(sum(s.rows))) / max(_read(target, s), 1e-12) for s in far]
    if reading:
        more = max(median(reading), 0.0)
        entry = Curve(xs=swept.per_entry.xs, ys=tuple(y * more for y in swept.per_entry.ys))
        target = replace(target, per_entry=entry)
    spread = [relative_error(v) for n, v in found.items() if n > 1 and len(v) > 2]
    return target, float(np.mean(spread)) if spread else 0.0


def _read(target: TargetCost, step: Step) -> float:
    """The part of a pass that reads the cache."""
    return target(step.rows, step.contexts) - target.rows(sum(step.rows))


def fit_host(runs: Seq[Run], target: TargetCost, mode: str) -> HostCost:
    """Non-negative least squares on medians: a step, its sequences, its rows. What a pass
    takes longer between steps that sample, whose laws displace it from the caches, is counted
    here, too."""
    cells: dict[tuple[int, int], list[Step]] = {}
    sampled = mode == "sampled"
    for run in runs:
        for s in run.steps if run.session.sampled == sampled and _near(run) else ():
            cells.setdefault((len(s.contexts), sum(s.rows)), []).append(s)
    if not cells:
        return HostCost(step=0.0, sequence=0.0, row=0.0)
    own = np.array([median(s.t_o for s in steps) for steps in cells.values()])
    weights = np.sqrt([len(steps) for steps in cells.values()]) / own
    times = own
    if sampled:
        times = own + [
            median(s.t_p - target(s.rows, s.contexts) for s in c) for c in cells.values()
        ]
    terms = np.array([[1.0, batch, rows] for batch, rows in cells])
    fit, _ = nnls(terms * weights[:, None], times * weights)
    return HostCost(step=float(fit[0]), sequence=float(fit[1]), row=float(fit[2]))


def fit_draft(
    runs: Seq[Run], target: TargetCost, host: Mapping[str, HostCost], spread: float = 0.0
) -> DraftCost:
    """The cost of one drafter from its sessions (greedy short ones at least). spread: of the
    target's ratios."""
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
    cost = replace(cost, feed=_feeding(runs, cost))
    # What a round costs more than its parts: passes after drafting find colder caches. Of
    # single short sequences, where nothing else that the target's cost gets wrong adds to it.
    rest = [
        s.t_p + s.t_o - target(s.rows, s.contexts) - host["greedy"](1, sum(s.rows))
        for r in short if r.session.batch == 1 for s in r.steps if s.drafted > 0
    ]  # fmt: skip
    slack = target.rows(1) * math.hypot(spread / 2, _plain_error(short))
    cost = replace(cost, fixed=max(_shrunk(rest, slack), 0.0))
    sampled = [r for r in runs if r.session.sampled]
    drawn = [s for r in sampled for s in r.steps if s.drafted > 0]
    if not drawn:
        return cost
    more = [
        (s.t_q + s.t_o + s.t_p - cost(s.k, s.contexts) - target(s.rows, s.contexts)
         - host["sampled"](len(s.rows), sum(s.rows))) / s.drafted
        for s in drawn
    ]  # fmt: skip
    slack += target.rows(1) * _plain_error(sampled)
    each = slack / median(s.drafted for s in drawn)
    return replace(cost, sampling=max(_shrunk(more, each), 0.0))


def _plain_error(runs: Seq[Run]) -> float:
    """Relative standard error of the plain steps by which runs were brought to one speed."""
    found = [[s.t_p for s in r.steps if s.drafted == 0] for r in runs]
    return max((relative_error(times) for times in found if len(times) > 1), default=0.0)


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
    return max(_shrunk(found), 0.0)


def _feeding(runs: Seq[Run], cost: DraftCost) -> Curve:
    """What reading a prompt cost, by the rows that were read, on top of one token's."""
    points: dict[int, list[float]] = {1: [0.0]}
    for r in runs:
        if r.session.batch == 1 and r.fed > 1:
            points.setdefault(r.fed, []).append(r.t_q_prompt)
    xs = sorted(points)
    ys = tuple(cost.first(1) + median(points[x]) for x in xs)
    return Curve(xs=tuple(map(float, xs)), ys=ys)


def _shrunk(values: Seq[float], slack: float = 0.0) -> float:
    """The median, nearer to 0 the less it stands out from its error (James and Stein 1961).
    slack: error that all values share."""
    if len(values) < 2:
        return 0.0
    middle = median(values)
    error = math.hypot(_error(values), slack)
    return middle * middle**2 / (middle**2 + error**2) if middle else 0.0


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
