"""What an adaptive policy did, counted: for people, and for what depends on how often."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """plain: rounds in which nothing was drafted; since_plain: rounds behind the last of them.
    rounds: in which a drafter proposed something; drafted: nodes of each sequence and round."""

    plain: int = 0
    since_plain: int = 0
    probes: int = 0
    rounds: Counter[str] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)

    def add(self, drafted: list[int], drafters: set[str]) -> None:
        """A round: nodes of each sequence, and who proposed them."""
        self.drafted.update(drafted)
        self.rounds.update(drafters)
        self.plain += not drafters
        self.since_plain = self.since_plain + 1 if drafters else 0

    def add_plain(self, sequences: int) -> None:
        """A round in which nobody proposed, for so many sequences."""
        self.drafted[0] += sequences
        self.plain += 1
        self.since_plain = 0

    def as_dict(self) -> dict[str, object]:
        return {
            "plain_rounds": self.plain,
            "rounds_by_drafter": dict(sorted(self.rounds.items())),
            "drafted_histogram": {str(k): n for k, n in sorted(self.drafted.items())},
            "probes": self.probes,
        }
