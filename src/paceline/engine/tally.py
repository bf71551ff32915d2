"""What an adaptive policy did, counted: for people, and for what depends on how often."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from paceline.engine.costs import size_class

#: Rounds after which a size of batch is new again.
STALE = 512


@dataclass
class Tally:
    """plain: rounds in which nothing was drafted. rounds: in which a drafter proposed something;
    drafted: nodes of each sequence and round."""

    plain: int = 0
    probes: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)
    _all: int = 0
    _drafting: Counter[int] = field(default_factory=Counter)  # by size of batch, since a plain one
    _plain_at: dict[int, int] = field(default_factory=dict)  # by size of batch

    def add(self, drafted: list[int], drafters: set[str]) -> None:
        """A round: nodes of each sequence, and who proposed them."""
        if not drafters:
            self.add_plain(len(drafted))
            return
        self.drafted.update(drafted)
        self.rounds.update(drafters)
        self._all += 1
        self._drafting[size_class(len(drafted))] += 1

    def add_plain(self, sequences: int) -> None:
        """A round in which nobody proposed, for so many sequences."""
        self.drafted[0] += sequences
        self.plain += 1
        self._all += 1
        size = size_class(sequences)
        self._drafting[size] = 0
        self._plain_at[size] = self._all

    def since_plain(self, sequences: int) -> float:
        """Rounds of about so many sequences behind the last plain one of them; infinite where that
        was too long ago to tell what a plain step takes now."""
        size = size_class(sequences)
        if self._all - self._plain_at.get(size, 0) > STALE:
            return math.inf
        return self._drafting[size]

    def as_dict(self) -> dict[str, object]:
        return {
            "plain_rounds": self.plain,
            "rounds_by_drafter": dict(sorted(self.rounds.items())),
            "drafted_histogram": {str(k): n for k, n in sorted(self.drafted.items())},
            "probes": self.probes,
        }
