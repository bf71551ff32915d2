"""How many tokens each sequence may draft in a round. Zero is always possible."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from paceline.types import Sequence


@dataclass(frozen=True, kw_only=True)
class Part:
    """One sequence's part in a round that is over.

    rows: its committed tokens in the pass (more than one: it read its prompt, or a part of
    it). context: cache entries before them. budget,
    drafted, accepted: nodes below the root that were allowed, proposed, and taken. emitted:
    tokens that were delivered, those behind an end left out.
    """

    seq_id: int
    rows: int
    context: int
    budget: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a round did, and its seconds: T_q drafting (propose and observe), T_p the target's
    pass, T_o everything else."""

    parts: tuple[Part, ...]
    t_draft: float
    t_target: float
    t_other: float

    @property
    def seconds(self) -> float:
        return self.t_draft + self.t_target + self.t_other

    @property
    def reads(self) -> bool:
        """Whether a prompt was read in it."""
        return any(p.rows > 1 for p in self.parts)


class BudgetPolicy(Protocol):
    """Keeps its state by `Sequence.id` and never writes a Sequence."""

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        """Nodes below the root for each sequence, before what is left of its length."""
        ...

    def observe(self, done: Round) -> None:
        """Called once after every round."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence that ended."""
        ...

    def usage(self) -> dict[str, object]:
        """Statistics for people and JSON."""
        ...


@dataclass(frozen=True)
class FixedBudget:
    """The same number for all, or what the request asks for."""

    k: int

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.k if s.params.k is None else s.params.k for s in seqs]

    def observe(self, done: Round) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None

    def usage(self) -> dict[str, object]:
        return {"policy": "fixed", "k": self.k}
