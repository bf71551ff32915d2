"""How many tokens each sequence may draft in a round. Zero is always possible."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from paceline.types import Sequence


class BudgetPolicy(Protocol):
    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        """Nodes below the root for each sequence, before the request's own limits."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same number for all, or what the request asks for."""

    k: int

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.k if s.params.k is None else s.params.k for s in seqs]
