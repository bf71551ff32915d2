"""What a round costs and what it buys: the latency model of speculative decoding.

    speed-up = E[tau] T_p(1 row) / (T_q(k) + T_p(k + 1 rows) + T_o)

(Leviathan et al. 2022, theorem 3.8, with every term measured instead of assumed.) T_p is the
target's pass, T_q drafting, T_o everything else in a step; all in seconds. tau: tokens that a
round commits, accepted ones plus one; alpha: probability that a proposed token is accepted,
given that those before it were.

Pure arithmetic on measured curves; `paceline.engine.profile` measures them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

#: Layout of `Profile.to_json`.
FORMAT = 1


def expected_tokens(alphas: Seq[float]) -> float:
    """E[tau] of a chain: one plus the cumulative products of `alphas`, the acceptance of each
    position given that the positions before it were accepted."""
    total, reach = 1.0, 1.0
    for alpha in alphas:
        reach *= alpha
        total += reach
    return total


def constant(alpha: float, k: int) -> float:
    """E[tau] for the same acceptance at k positions: (1 - alpha^(k+1)) / (1 - alpha)
    (Leviathan et al. 2022, equation 1); k + 1 at alpha = 1."""
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha = {alpha} is not a probability")
    if 1.0 - alpha < 1e-9:
        return float(k + 1)
    return (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def expected_tokens_tree(parents: Seq[int], reach: Seq[float]) -> float:
    """E[tau] of a tree: one plus the probability that each node is reached.

    parents[u]: node above u, before it; -1 at the root, node 0. reach[u]: acceptance of node
    u given that its parent was accepted (reach[0] is not read).
    """
    if not parents or parents[0] != -1 or len(parents) != len(reach):
        raise ValueError("a tree needs a root first, and one probability for each node")
    path = [1.0] * len(parents)
    for u in range(1, len(parents)):
        if not 0 <= parents[u] < u:
            raise ValueError(f"node {u} must come after its parent, not {parents[u]}")
        path[u] = path[parents[u]] * reach[u]
    return sum(path)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Piecewise linear through measured points; level before the first of them, and beyond
    the last as steep as between the last two (level where there is one only).

    xs: ascending. ys: seconds, or seconds per something.
    """

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.xs or len(self.xs) != len(self.ys):
            raise ValueError("a curve needs as many ys as xs, and one point at least")
        if any(a >= b for a, b in zip(self.xs, self.xs[1:], strict=False)):
            raise ValueError(f"the xs of a curve must ascend: {self.xs}")
        if not all(math.isfinite(v) for v in (*self.xs, *self.ys)):
            raise ValueError("the points of a curve must be finite")

    def __call__(self, x: float) -> float:
        xs, ys = self.xs, self.ys
        if x <= xs[0] or len(xs) == 1:
            return ys[0]
        i = min(bisect_right(xs, x), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        return ys[i - 1] + slope * (x - xs[i - 1])

    @staticmethod
    def level(y: float) -> Curve:
        """The same value everywhere."""
        return Curve(xs=(1.0,), ys=(y,))

    def to_json(self) -> dict[str, Any]:
        return {"x": list(self.xs), "y": list(self.ys)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Curve:
        return Curve(xs=tuple(float(x) for x in value["x"]), ys=tuple(float(y) for y in value["y"]))


@dataclass(frozen=True, kw_only=True)
class TargetCost:
    """T_p: seconds of one target pass.

    rows: by packed rows of all sequences, at almost no context. per_entry: seconds more for
    each cached entry of a sequence, by the rows that this sequence has in the pass.
    """

    rows: Curve
    per_entry: Curve

    def __call__(self, rows: Seq[int], contexts: Seq[int]) -> float:
        """rows, contexts: of each sequence in the pass."""
        reading = sum(self.per_entry(r) * c for r, c in zip(rows, contexts, strict=True))
        return self.rows(sum(rows)) + reading

    def extra(self, n: int, rows: int) -> float:
        """Seconds that n more rows cost in a pass of `rows`, attention aside."""
        return self.rows(rows + n) - self.rows(rows)

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows.to_json(), "per_entry": self.per_entry.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> TargetCost:
        return TargetCost(
            rows=Curve.from_json(value["rows"]), per_entry=Curve.from_json(value["per_entry"])
        )


@dataclass(frozen=True, kw_only=True)
class DraftCost:
    """T_q: seconds of drafting in one round, for a whole batch.

    fixed: a round with a proposal, whatever its length (look-up, bookkeeping, observe).
    idle: a round without one (budget 0). first: by number of sequences, the first draft token
    with the one or two tokens that the draft cache lacks after a round. step: by number of
    sequences, each further token. per_entry: for each cached entry of a sequence and token.
    sampling: more for each token and sequence where requests sample (the draft builds a law
    and draws from it, and the rule judges it). feed: by tokens, what a drafter needs to read
    so many committed ones (a prompt, or what was committed while it rested).
    """

    fixed: float = 0.0
    idle: float = 0.0
    first: Curve = field(default_factory=lambda: Curve.level(0.0))
    step: Curve = field(default_factory=lambda: Curve.level(0.0))
    per_entry: float = 0.0
    sampling: float = 0.0
    feed: Curve = field(default_factory=lambda: Curve.level(0.0))

    def __call__(
        self, k: int | Seq[int], contexts: Seq[int], mode: str | Seq[str] = "greedy"
    ) -> float:
        """k, mode: draft tokens and mode (`MODES`) of every sequence, or of each. Sequences
        without draft tokens take no part; without any at all it is `idle`."""
        budgets = [k] * len(contexts) if isinstance(k, int) else list(k)
        asked = sorted(b for b in budgets if b > 0)
        if not asked:
            return self.idle
        total, depth = self.fixed + self.first(len(asked)), 1
        for i, budget in enumerate(asked):
            if budget > depth:  # tokens that this sequence and the longer ones have
                total += (budget - depth) * self.step(len(asked) - i)
                depth = budget
        if mode != "greedy":
            modes = [mode] * len(budgets) if isinstance(mode, str) else mode
            drawn = sum(b for b, m in zip(budgets, modes, strict=True) if m == "sampled")
            total += self.sampling * drawn
        reading = sum(b * c for b, c in zip(budgets, contexts, strict=True))
        return total + self.per_entry * reading

    def catch_up(self, lag: int) -> float:
        """Seconds more than `first` where the draft lacks `lag` committed tokens (a whole
        prompt, before its first proposal), not just the last round's."""
        return max(0.0, self.feed(lag) - self.feed(1)) if lag > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "fixed": self.fixed,
            "idle": self.idle,
            "first": self.first.to_json(),
            "step": self.step.to_json(),
            "per_entry": self.per_entry,
            "sampling": self.sampling,
            "feed": self.feed.to_json(),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DraftCost:
        return DraftCost(
            fixed=float(value["fixed"]),
            idle=float(value["idle"]),
            first=Curve.from_json(value["first"]),
            step=Curve.from_json(value["step"]),
            per_entry=float(value["per_entry"]),
            sampling=float(value["sampling"]),
            feed=Curve.from_json(value["feed"]),
        )


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """T_o: scheduling, laws, judging, committing: seconds a step, more for each sequence in
    it, and more for each row whose law is built."""

    step: float
    sequence: float
    row: float

    def __call__(self, batch: int, rows: int) -> float:
        return self.step + self.sequence * batch + self.row * rows

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "sequence": self.sequence, "row": self.row}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HostCost:
        return HostCost(**{name: float(value[name]) for name in ("step", "sequence", "row")})


#: What HostCost depends on: greedy laws are an argmax, sampled ones a pass over the vocabulary.
MODES = ("greedy", "sampled")


def mode_of(temperature: float) -> str:
    """The mode of a request's host cost."""
    return "greedy" if temperature == 0.0 else "sampled"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured costs of one machine with one target and its drafters.

    drafts: by drafter label (its spec as a string). host: by mode, see `MODES`.
    spread: relative standard errors of what was measured: `target` (of T_p(n) against
    T_p(1)), `draft`, `host`. meta: hardware, versions, model, date, seconds that it took.
    """

    target: TargetCost
    drafts: dict[str, DraftCost]
    host: dict[str, HostCost]
    spread: dict[str, float] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "target": self.target.to_json(),
            "drafts": {name: cost.to_json() for name, cost in self.drafts.items()},
            "host": {mode: cost.to_json() for mode, cost in self.host.items()},
            "spread": dict(self.spread),
            "meta": dict(self.meta),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Profile:
        """ValueError where the value is no profile of this format."""
        try:
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
            profile = Profile(
                target=TargetCost.from_json(value["target"]),
                drafts={str(n): DraftCost.from_json(d) for n, d in value["drafts"].items()},
                host={str(m): HostCost.from_json(h) for m, h in value["host"].items()},
                spread={str(n): float(s) for n, s in value["spread"].items()},
                meta=dict(value["meta"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not a profile: {type(e).__name__}: {e}") from None
        missing = [m for m in MODES if m not in profile.host]
        if missing:
            raise ValueError(f"not a profile: no host cost for {missing[0]!r}")
        return profile


def round_seconds(
    profile: Profile, draft: str, k: int | Seq[int], contexts: Seq[int], mode: str
) -> float:
    """T_q + T_p + T_o of one round in which every sequence proposes k tokens (or each its
    own number) behind `contexts` cached entries."""
    budgets = [k] * len(contexts) if isinstance(k, int) else list(k)
    rows = [b + 1 for b in budgets]
    drafting = profile.drafts[draft](budgets, contexts, mode)
    host = profile.host[mode](len(rows), sum(rows))
    return drafting + profile.target(rows, contexts) + host


def plain_seconds(profile: Profile, contexts: Seq[int], mode: str) -> float:
    """T_p + T_o of one round without drafter and proposals."""
    rows = [1] * len(contexts)
    return profile.target(rows, contexts) + profile.host[mode](len(rows), len(rows))


def speedup(tau: float, t_plain: float, t_round: float) -> float:
    """Tokens per second of rounds that commit tau tokens each, over plain decoding."""
    return tau * t_plain / t_round


def break_even(t_plain: float, t_round: float, k: int) -> float | None:
    """The constant acceptance at which k draft tokens a round just pay; 0 where they pay
    without any, None where not even acceptance of all does."""
    goal = t_round / t_plain
    if goal <= 1.0:
        return 0.0
    if goal > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if constant(middle, k) < goal else (low, middle)
    return high
