"""When not to think again: a decision that holds for some rounds.

Weighing the choices and learning from a round take a part of a millisecond each, which is a
part of a small target's round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from paceline.draft.base import Arm
from paceline.engine.plan import Plan
from paceline.types import Sequence

#: Share of a round's time that weighing the choices may take; the rounds that a decision holds for
#: at most, a plain one and one to draft.
THINKING, LONGEST_REST, LONGEST_COURSE = 0.002, 64, 8


@dataclass
class Course:
    """The last decision. A plain one holds unless somebody sees more than then; one to draft
    unless somebody sees more or less, or it has lost a plain step.

    rounds: still to come. plan: what was decided. plain: seconds of a plain step then. gained:
    seconds since then. passed: drafters that were not asked and count towards a probe. blind: a
    plain decision that goes on without asking what anybody sees.
    """

    rounds: int = 0
    plan: Plan | None = None
    plain: float = 0.0
    gained: float = 0.0
    passed: tuple[str, ...] = ()
    blind: bool = False
    _took: float = 0.0
    _sights: dict[int, dict[str, int]] = field(default_factory=dict)

    def decided(self, took: float, plain: float) -> None:
        """A decision that took so long, where a plain step takes `plain`. It does not hold yet."""
        self._took += 0.1 * (took - self._took) if self._took else took
        self.rounds, self.plain = 0, plain

    def hold(
        self, plan: Plan, arms: Mapping[int, Seq[Arm]], passed: Seq[str], *, blind: bool = False
    ) -> None:
        """Let it hold: the round that was decided is the first of its rounds. blind: all drafters
        are, and what they see does not change."""
        longest = LONGEST_COURSE if plan.work.extra else LONGEST_REST
        rounds = min(longest, math.ceil(self._took / (THINKING * plan.seconds)))
        self.rounds = max(rounds - 1, 0)
        self.plan, self.passed, self.gained = plan, tuple(passed), 0.0
        self.blind = blind and not plan.work.extra
        self._sights = {i: _sights(many) for i, many in arms.items()}

    def end(self) -> None:
        self.rounds = 0

    def holds_blindly(self, plain: Plan) -> bool:
        """Whether it is this one, for the same sequences, and nobody need be asked about it."""
        if not self.blind or self.plan is None:
            return False
        return self.plan.choices.keys() == plain.choices.keys()

    def stop_drafting(self) -> None:
        """What is left of a decision to draft does not hold; a plain one does."""
        if self.plan is not None and self.plan.work.extra:
            self.end()

    def add(self, seconds: float, plain: float) -> None:
        """A round that drafted, and what plain decoding takes for its tokens."""
        self.gained += plain - seconds
        if self.gained < -self.plain:
            self.end()

    def goes_on(self, arms: Mapping[int, Seq[Arm]]) -> bool:
        """One round more of it, or none: other sights than then."""
        assert self.plan is not None
        if self.plan.work.extra:
            same = {i: _sights(many) for i, many in arms.items()} == self._sights
        else:
            same = all(
                a.bucket <= self._sights.get(i, {}).get(a.drafter, -1)
                for i, many in arms.items()
                for a in many
            )
        self.rounds = self.rounds - 1 if same else 0
        return same

    def again(self, seqs: Seq[Sequence], arms: Mapping[int, Seq[Arm]]) -> Plan | None:
        """What was decided, by the arms of now; None where they can't do as much, or there are
        sequences that it was not decided for."""
        assert self.plan is not None
        if len(seqs) > len(arms):
            return None
        choices = {}
        for seq in seqs:
            old = self.plan.choices[seq.id]
            found = (a for a in arms[seq.id] if old.arm and a.drafter == old.arm.drafter)
            arm = next(found, None)
            if old.budget > (arm.most if arm else 0):
                return None
            choices[seq.id] = replace(old, arm=arm)
        return replace(self.plan, choices=choices)


def _sights(arms: Seq[Arm]) -> dict[str, int]:
    return {a.drafter: a.bucket for a in arms}
