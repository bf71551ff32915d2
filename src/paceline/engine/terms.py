"""What requests ask for themselves, and what they leave to a policy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.core.latency import mode_of
from paceline.draft.base import Arm, Drafter, arms_of
from paceline.draft.coupling import unsteady
from paceline.engine.plan import Choice, Choices, Plan
from paceline.types import Sequence

#: Budget of requests whose text must not depend on times (`draft.coupling.unsteady`).
STEADY_K = 4


class Terms:
    """Mutable: the plan of the last sequences is kept. most: nodes a round and sequence at most."""

    def __init__(self, drafter: Drafter, choices: Choices, most: int) -> None:
        self.most = most
        self._drafter = drafter
        self._choices = choices
        self.settled: Plan | None = None

    def stand(self, seqs: Seq[Sequence]) -> bool:
        """Whether the last plan was for these sequences, and none names a k of its own."""
        return self.settled is not None and list(self.settled.choices) == [s.id for s in seqs]

    def plain(self, seqs: Seq[Sequence]) -> Plan:
        """What the requests themselves settle, nothing drafted beyond; not priced."""
        if self.settled is not None and self.stand(seqs):
            return self.settled
        choices = {s.id: self._given(s) for s in seqs}
        plan = self._choices.unpriced(seqs, choices)
        # What a request's own k asks for changes from round to round.
        self.settled = plan if all(c.free for c in choices.values()) else None
        return plan

    def arms(self, seq: Sequence) -> list[Arm]:
        """What may be drafted for a sequence, within its limits."""
        left = seq.params.max_tokens - seq.n_output - 1
        most = min(self.most, left)
        if most <= 0:
            return []
        found = arms_of(self._drafter, seq)
        return [a if a.most <= most else replace(a, most=most) for a in found if a.most > 0]

    def _given(self, seq: Sequence) -> Choice:
        """Its own k, or a fixed one for a steady text."""
        k, mode = seq.params.k, mode_of(seq.params.temperature)
        if k is None and unsteady(seq.params):
            k = min(STEADY_K, self.most)
        if k is None:
            return Choice(None, 0, True, mode)
        arms = arms_of(self._drafter, seq) if k > 0 else ()
        return Choice(arms[0] if arms else None, k, False, mode)
