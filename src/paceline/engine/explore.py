"""What a policy keeps knowing and how: probes of drafters that do not pay, when not to think
again, the speed-up so far, and how long a request will probably go on."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.draft.base import Arm
from paceline.engine.costs import size_class

#: Rounds until a refused drafter is tried again: at first, and at most.
FIRST_WAIT, LONGEST_WAIT = 16, 4096
#: Share of plain decoding's time below which probes need not become rarer.
CHEAP = 0.005
#: Tokens that a probe drafts at first; each one that pays is followed by a longer one.
PROBE = 2
#: What a round keeps of the older rounds' speed-up.
RATE_KEEP = 0.97
#: Share of a round's time that weighing the choices may take; the rounds that it rests for at most
#: where nothing came of it, and that a choice to draft is kept for.
THINKING, LONGEST_REST, LONGEST_COURSE = 0.004, 64, 8


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

    def refused(self) -> None:
        """A round in which the drafter could have proposed and was not asked."""
        self.wait -= 1

    def postponed(self) -> None:
        """It was due, but the ledger had no room: asking again costs a decision, too."""
        self.wait = max(self.wait, FIRST_WAIT)

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
class Lengths:
    """Output lengths of requests, running and ended."""

    mean: float | None = None
    _known: dict[int, int] = field(default_factory=dict)

    def note(self, seq_id: int, n_output: int) -> None:
        self._known[seq_id] = n_output

    def forget(self, seq_id: int) -> None:
        n = self._known.pop(seq_id, 0)
        if n > 0:
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


@dataclass
class Rest:
    """Weighing the choices takes a part of a millisecond. Where plain decoding came of it, the
    next rounds are plain without it, unless somebody sees more than before.

    rounds: still to come; refused: drafters that were not asked and count towards a probe.
    """

    rounds: int = 0
    refused: tuple[str, ...] = ()
    _took: float = 0.0
    _sights: dict[tuple[int, str], int] = field(default_factory=dict)

    def begin(
        self, arms: Mapping[int, Seq[Arm]], on_trial: Collection[str], took: float, plain: float
    ) -> None:
        """Plain decoding came of a decision that took so long; a plain step takes `plain`."""
        self.end(took)
        self.rounds = min(LONGEST_REST, math.ceil(self._took / (THINKING * plain)))
        self._sights = {(i, a.drafter): a.bucket for i, many in arms.items() for a in many}
        names = sorted({drafter for _, drafter in self._sights})
        self.refused = tuple(n for n in names if n not in on_trial)

    def end(self, took: float) -> None:
        """A decision that took so long."""
        self._took += 0.1 * (took - self._took) if self._took else took
        self.rounds = 0

    def goes_on(self, arms: Mapping[int, Seq[Arm]], *, wake: bool) -> bool:
        """One round more of rest, or none: `wake`, or a match longer than any then."""
        known = self._sights
        if wake or any(
            a.bucket > known.get((i, a.drafter), -1) for i, many in arms.items() for a in many
        ):
            self.rounds = 0
            return False
        self.rounds -= 1
        return True


@dataclass
class Course:
    """Weighing the choices and learning from a round take a part of a millisecond. A choice to
    draft is kept for a few rounds, unless somebody sees more or less than before, or it has lost
    a plain step.

    rounds: still to come. plain: seconds of a plain step when it was chosen. gained: seconds
    since then. passed: drafters that were not asked and count towards a probe.
    """

    rounds: int = 0
    plain: float = 0.0
    gained: float = 0.0
    passed: tuple[str, ...] = ()
    _took: float = 0.0
    _sights: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def begin(
        self, arms: Mapping[int, Seq[Arm]], used: Collection[str], took: float, plain: float,
        seconds: float,
    ) -> None:  # fmt: skip
        """A decision that took so long: rounds of `seconds` by the drafters `used`; a plain step
        takes `plain`."""
        self._took += 0.1 * (took - self._took) if self._took else took
        # The round that was decided is the first of them.
        rounds = min(LONGEST_COURSE, math.ceil(self._took / (THINKING * seconds)))
        self.rounds = max(rounds - 1, 0)
        self.plain, self.gained = plain, 0.0
        self._sights = {i: _sights(many) for i, many in arms.items()}
        names = sorted({drafter for many in self._sights.values() for drafter, _ in many})
        self.passed = tuple(n for n in names if n not in used)

    def end(self) -> None:
        self.rounds = 0

    def add(self, seconds: float, plain: float) -> None:
        """A round, and what plain decoding takes for its tokens."""
        self.gained += plain - seconds
        if self.gained < -self.plain:
            self.rounds = 0

    def goes_on(self, arms: Mapping[int, Seq[Arm]]) -> bool:
        """One round more of it, or none: other sequences, or other sights than then."""
        known = self._sights
        if list(arms) != list(known) or any(_sights(many) != known[i] for i, many in arms.items()):
            self.rounds = 0
            return False
        self.rounds -= 1
        return True


def _sights(arms: Seq[Arm]) -> list[tuple[str, int]]:
    return [(a.drafter, a.bucket) for a in arms]
