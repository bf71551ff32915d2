"""What a drafter is: something that proposes, and is told what became of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree
from paceline.models.base import TargetOutput
from paceline.types import Sequence


@dataclass(frozen=True)
class DrafterUsage:
    """Cache blocks of a drafter's own model; zeros where it has none."""

    blocks_used: int = 0
    blocks_total: int = 0
    bytes_total: int = 0


class Drafter(Protocol):
    """`name`: how it is chosen; `taps`: target layers whose input states it reads in
    `observe`. Drafters keep their state by `Sequence.id` and never write a Sequence."""

    name: str
    taps: tuple[int, ...]

    def example(self, greedy: bool) -> TokenTree:
        """A smallest tree of the kind that is proposed for such a request, by which rules
        that can't judge it are refused before any work is done."""
        ...

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        """One tree for each sequence, rooted at its last token, of at most `budget` nodes
        below the root. Budget 0 gives the root alone."""
        ...

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        """Called after every commit, prefill too (verdict None while a prompt is still being
        read). The sequences already hold their new tokens."""
        ...

    def forget(self, seq_id: int) -> None:
        """Drop all state of a sequence that ended or was preempted."""
        ...

    def usage(self) -> DrafterUsage: ...
