"""What the next round will take: a measured profile, corrected by what rounds really took.

A correction is a factor, kept as its logarithm. One is common to all: the machine's speed
now (shared machines jump), anchored by plain steps. Another belongs to a size of batch: what
slows one sequence's pass, which waits for memory, need not slow that of sixteen, which computes.
Others belong to a kind of work (drafting with one drafter, a pass of so many rows beyond a plain
one's of as many sequences) and say by how much the profile misjudges it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median

from paceline.core.latency import MODES, Curve, DraftCost, HostCost, Profile, TargetCost

#: Observations of a kind before the speed is judged by it, too.
KNOWN = 4
#: Gain of the speed's and of the kinds' running means.
SPEED_GAIN, KIND_GAIN = 0.3, 0.1
#: Natural logarithm of the largest factor by which one observation may differ.
CLIP = 1.0


def guess() -> Profile:
    """Costs in place of measured ones, right in proportion at best: plain steps soon give
    their scale. Drafting is taken for as slow as the target until it was seen."""
    rows = Curve(xs=(1.0, 8.0, 64.0), ys=(0.01, 0.013, 0.05))
    host = HostCost(step=2e-4, sequence=1e-4, row=1e-4)
    target = TargetCost(rows=rows, per_entry=Curve.level(1e-7))
    return Profile(target=target, drafts={}, host=dict.fromkeys(MODES, host))


@dataclass
class _Running:
    """A running mean that begins as a plain one. weight: observations that its beginning
    (0) counts for."""

    weight: float = 0.0
    value: float = 0.0
    count: int = 0

    def add(self, x: float, gain: float) -> None:
        self.count += 1
        if self.count > KNOWN:
            x = min(max(x, self.value - CLIP), self.value + CLIP)
        self.value += max(gain, 1.0 / (self.count + self.weight)) * (x - self.value)


@dataclass
class _Kind:
    """How much longer one kind of work takes than the profile says: for all sizes, and what
    sets each size apart."""

    common: _Running = field(default_factory=lambda: _Running(weight=1.0))
    sizes: dict[int, _Running] = field(default_factory=dict)

    def at(self, size: int) -> float:
        own = self.sizes.get(size)
        return self.common.value + (own.value if own else 0.0)

    def add(self, size: int, x: float) -> None:
        own = self.sizes.setdefault(size, _Running(weight=3.0))
        rest = x - own.value
        self.common.add(rest, KIND_GAIN)
        own.add(x - self.common.value, KIND_GAIN)


@dataclass
class _Batch:
    """Plain steps of one size of batch: how many were seen, and how much longer they take than
    profile and speed say."""

    seen: int = 0
    own: _Running = field(default_factory=_Running)


def size_class(n: int) -> int:
    """1, 2, 3, 4 apart, then by halves of powers of two: 5-6, 7-8, 9-12, 13-16, ..."""
    if n <= 4:
        return n
    power = (n - 1).bit_length() - 1
    return 2 * power + (n - 1 >> power - 1 & 1) + 1


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a round does. budgets: nodes of each sequence; drafters: who proposes them (None
    for none); lags: committed tokens that each would have to read; contexts: cache entries;
    modes: how each draws its tokens (`core.latency.MODES`)."""

    budgets: tuple[int, ...]
    drafters: tuple[str | None, ...]
    lags: tuple[int, ...]
    contexts: tuple[int, ...]
    modes: tuple[str, ...]

    @property
    def mode(self) -> str:
        """Of the host cost: one sequence that samples is enough."""
        return "sampled" if "sampled" in self.modes else "greedy"

    @property
    def extra(self) -> int:
        return sum(self.budgets)

    def of(self, drafter: str) -> list[int]:
        """Indices of the sequences that it proposes for."""
        return [i for i, d in enumerate(self.drafters) if d == drafter and self.budgets[i] > 0]


@dataclass
class Costs:
    """Mutable. profile: measured before; its drafters are those of the arms. A drafter that
    it lacks is taken for as slow as the target until it was measured."""

    profile: Profile
    _speed: _Running = field(default_factory=_Running)
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _drafters: dict[str, _Kind] = field(default_factory=dict)
    _passes: dict[int, _Kind] = field(default_factory=dict)  # by size of batch

    @property
    def speed(self) -> float:
        """Seconds now for each second of the profile."""
        return math.exp(self._speed.value)

    def plain_seen(self, n_seqs: int) -> int:
        """Plain steps of about so many sequences that were looked at."""
        batch = self._batches.get(size_class(n_seqs))
        return batch.seen if batch else 0

    def plain(self, contexts: Seq[int], mode: str) -> float:
        """Seconds of a plain step now."""
        return self._pace(len(contexts)) * self._pass([0] * len(contexts), contexts, mode)

    def of(self, work: Work) -> float:
        """Seconds of a round now."""
        return self.drafting(work) + self.passing(work)

    def passing(self, work: Work) -> float:
        """T_p + T_o; more rows never take less than a plain step."""
        n = len(work.budgets)
        seconds = self._rows(n, work.extra) * self._pass(work.budgets, work.contexts, work.mode)
        plain = self._pass([0] * n, work.contexts, work.mode)
        return self._pace(n) * max(seconds, plain)

    def drafting(self, work: Work) -> float:
        """T_q, catching up included."""
        return self.speed * sum(
            self._factor(name, longest) * seconds
            for name, (longest, seconds) in self._drafts(work).items()
        )

    def alone(self, drafter: str, k: int, context: int, mode: str) -> float:
        """T_q of k tokens for one sequence that lacks nothing."""
        seconds = self.draft_cost(drafter)(k, [context], mode)
        return self.speed * self._factor(drafter, k) * seconds

    def catching_up(self, drafter: str, lag: int) -> float:
        """The part of T_q that reads what one sequence's draft lacks beyond a round's."""
        factor = self._factor(drafter, 1)
        return self.speed * factor * self.draft_cost(drafter).catch_up(lag)

    def draft_cost(self, drafter: str) -> DraftCost:
        known = self.profile.drafts.get(drafter)
        if known is not None:
            return known
        rows = self.profile.target.rows
        return DraftCost(first=rows, step=rows, feed=rows)

    def per_row(self, n_seqs: int, contexts: Seq[int], most: int, mode: str) -> list[float]:
        """T_p + T_o with 0, 1, ... `most` rows more than one for each sequence, spread evenly;
        never falling."""
        target, host = self.profile.target, self.profile.host[mode]
        entries, pace = sum(contexts), self._pace(n_seqs)
        found = []
        for n in range(most + 1):
            reading = target.per_entry(1 + n / n_seqs) * entries
            seconds = target.rows(n_seqs + n) + reading + host(n_seqs, n_seqs + n)
            found.append(pace * self._rows(n_seqs, n) * seconds)
            found[-1] = max(found[-1], found[max(n - 1, 0)])
        return found

    def _pass(self, budgets: Seq[int], contexts: Seq[int], mode: str) -> float:
        rows = [b + 1 for b in budgets]
        host: Mapping[str, object] = self.profile.host
        assert mode in host
        return self.profile.target(rows, contexts) + self.profile.host[mode](len(rows), sum(rows))

    def _drafts(self, work: Work) -> dict[str, tuple[int, float]]:
        """For each drafter at work: its longest proposal, and seconds of the profile."""
        found = {}
        for name in dict.fromkeys(d for d in work.drafters if d is not None):
            who = work.of(name)
            if not who:
                continue
            cost = self.draft_cost(name)
            budgets = [work.budgets[i] for i in who]
            contexts, modes = [work.contexts[i] for i in who], [work.modes[i] for i in who]
            seconds = cost(budgets, contexts, modes)
            lag = sum(work.lags[i] for i in who if work.lags[i] > 2)
            found[name] = (max(budgets), seconds + cost.catch_up(lag))
        return found

    def _pace(self, n_seqs: int) -> float:
        """Seconds now for each second of the profile, of passes of so many sequences."""
        batch = self._batches.get(size_class(n_seqs))
        return self.speed * (math.exp(batch.own.value) if batch else 1.0)

    def _rows(self, n_seqs: int, extra: int) -> float:
        """The factor of a pass of so many rows more than one for each sequence."""
        if extra == 0:
            return 1.0  # a plain step: all there is to know is the pace
        known = self._passes.get(size_class(n_seqs))
        return math.exp(known.at(size_class(extra))) if known else 1.0

    def _factor(self, drafter: str, k: int) -> float:
        known = self._drafters.get(drafter)
        return math.exp(known.at(size_class(k))) if known else 1.0

    def observe(self, work: Work, t_draft: float, t_pass: float) -> None:
        """A round that is over. t_pass: T_p + T_o."""
        predicted = self._pass(work.budgets, work.contexts, work.mode)
        ratio = math.log(max(t_pass, 1e-9) / predicted)
        size = size_class(len(work.budgets))
        if work.extra == 0:
            self._observe_plain(size, ratio)
            return
        batch = self._batches.get(size)
        self._learn_rows(size, size_class(work.extra), ratio - (batch.own.value if batch else 0.0))
        drafts = self._drafts(work)
        # One clock for all drafters of a round: what it shows is the largest share's.
        total = sum(self._factor(n, k) * s for n, (k, s) in drafts.items())
        if drafts and total > 0.0:
            name = max(drafts, key=lambda n: drafts[n][1])
            longest, _ = drafts[name]
            others = math.log(max(t_draft, 1e-9) / total) + math.log(self._factor(name, longest))
            kind = self._drafters.setdefault(name, _Kind())
            kind.add(size_class(longest), others - self._speed.value)

    def _observe_plain(self, size: int, ratio: float) -> None:
        """The size of batch that was seen first has no pace of its own: the speed is that."""
        first = next(iter(self._batches), size)
        batch = self._batches.setdefault(size, _Batch())
        batch.seen += 1
        if size == first or batch.seen > 1:
            self._see(ratio - batch.own.value, SPEED_GAIN)
        if size != first:
            batch.own.add(ratio - self._speed.value, KIND_GAIN)

    def _learn_rows(self, batch: int, size: int, ratio: float) -> None:
        known = self._passes.setdefault(batch, _Kind())
        seen = known.sizes[size].count if size in known.sizes else 0
        if seen >= KNOWN and self._batches:
            # Half as much as a plain step does: it may be the kind that is misjudged.
            self._see(ratio - known.at(size), SPEED_GAIN / 2)
        known.add(size, ratio - self._speed.value)

    def _see(self, ratio: float, gain: float) -> None:
        """The speed by the median of the last looks: one interruption does not count."""
        self._recent.append(ratio)
        self._speed.add(median(self._recent), gain)
