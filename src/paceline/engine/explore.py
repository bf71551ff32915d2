"""What a policy keeps knowing and how: probes of drafters that do not pay, the speed-up so far,
and how long a request will probably go on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.engine.costs import size_class
from paceline.types import Sequence

#: Rounds until a refused drafter is tried again: at first, and at most.
FIRST_WAIT, LONGEST_WAIT = 16, 4096
#: Share of plain decoding's time below which probes need not become rarer.
CHEAP = 0.005
#: Tokens that a probe drafts at first; each one that pays is followed by a longer one.
PROBE = 2
#: What a round keeps of the older rounds' speed-up.
RATE_KEEP = 0.97


@dataclass
class Probe:
    """Of one drafter. wait: rounds until the next probe; streak: probes in a row that paid."""

    interval: int = FIRST_WAIT
    wait: int = 0
    streak: int = 0

    @property
    def due(self) -> bool:
        return self.wait <= 0

    @property
    def size(self) -> int:
        return PROBE + self.streak

    def refused(self, rounds: int = 1) -> None:
        """Rounds in which the drafter could have proposed and was not asked."""
        self.wait -= rounds

    def postponed(self, rounds: int) -> None:
        """It was due, but the ledger has no room for so many rounds: asking again costs a
        decision, too."""
        self.wait = max(self.wait, rounds, FIRST_WAIT)

    def done(self, paid: bool, cost: float) -> None:
        """A probe's outcome, and what it cost in plain steps. One that paid is followed by
        another at once. After each that did not, twice as many rounds pass, while that many
        probes are not cheap."""
        if paid:
            self.interval, self.wait, self.streak = FIRST_WAIT, 0, self.streak + 1
        else:
            self.wait, self.streak = self.interval, 0
            most = min(max(FIRST_WAIT, round(cost / CHEAP)), LONGEST_WAIT)
            self.interval = min(2 * self.interval, most)

    def adopted(self) -> None:
        """The drafter pays by its estimates, so it is no longer probed."""
        self.interval, self.wait, self.streak = FIRST_WAIT, FIRST_WAIT, 0


@dataclass
class Probes:
    """By drafter. unasked: rounds since the last `pass_over` in which nobody was asked."""

    unasked: int = 0
    _known: dict[str, Probe] = field(default_factory=dict)

    def of(self, drafter: str) -> Probe:
        return self._known.setdefault(drafter, Probe())

    def wait(self, drafters: Iterable[str]) -> int:
        """Rounds until one of these is due, if none of them is asked."""
        waits = [self.of(name).wait - self.unasked for name in drafters]
        return max(min(waits, default=LONGEST_WAIT), 0)

    def pass_over(self, drafters: Iterable[str]) -> bool:
        """A round in which none of these was asked; whether one is due now."""
        probes = [self.of(name) for name in drafters]
        for probe in probes:
            probe.refused(1 + self.unasked)
        self.unasked = 0
        return any(probe.due for probe in probes)


@dataclass
class Lengths:
    """Output lengths of requests, running and ended."""

    mean: float | None = None
    _running: dict[int, Sequence] = field(default_factory=dict)

    def note(self, seq: Sequence) -> None:
        """A request that has begun to answer."""
        self._running[seq.id] = seq

    def forget(self, seq_id: int) -> None:
        """It has ended."""
        seq = self._running.pop(seq_id, None)
        if seq is not None:
            n = seq.n_output
            self.mean = n if self.mean is None else 0.9 * self.mean + 0.1 * n

    def remaining(self, n_output: int, max_tokens: int) -> float:
        """Tokens that a request will probably still emit: to the mean of those before it
        (128 before any ended), a quarter of that where it is past it, max_tokens at most."""
        mean = 128.0 if self.mean is None else self.mean
        return min(max(mean - n_output, mean / 4), max_tokens - n_output)


@dataclass
class Rates:
    """Running speed-up over plain decoding, by batch size; never more than tau, whatever a
    plain step is believed to take."""

    got: dict[int, float] = field(default_factory=dict)
    paid: dict[int, float] = field(default_factory=dict)
    tau: dict[int, float] = field(default_factory=dict)

    def add(self, batch: int, emitted: int, share: float, seconds: float) -> None:
        """A round of so many tokens, each of which takes `share` seconds plainly."""
        key = size_class(batch)
        self.got[key] = RATE_KEEP * self.got.get(key, 0.0) + share * emitted
        self.paid[key] = RATE_KEEP * self.paid.get(key, 0.0) + seconds
        tau = self.tau.get(key, 1.0)
        self.tau[key] = RATE_KEEP * tau + (1.0 - RATE_KEEP) * emitted / batch

    def speedup(self, batch: int) -> float:
        key = size_class(batch)
        paid = self.paid.get(key, 0.0)
        return max(1.0, min(self.got[key] / paid, self.tau[key])) if paid > 0.0 else 1.0
