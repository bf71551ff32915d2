"""What a drafter is: something that proposes, and is told what became of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree
from paceline.models.base import KVStore, TargetModel, TargetOutput
from paceline.types import Sequence


@dataclass(frozen=True)
class DrafterUsage:
    """Cache blocks of a drafter's own model; zeros where it has none."""

    blocks_used: int = 0
    blocks_total: int = 0
    bytes_total: int = 0


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to propose for a sequence in its next round, as far as it is known before
    anything is drafted.

    drafter: who would. bucket: what speaks for it (the length of an n-gram's match), by
    which its acceptance is kept apart. lag: committed tokens that it has to read first.
    most: nodes that it could propose. tree: whether nodes stand beside each other.
    """

    drafter: str
    bucket: int = 0
    lag: int = 0
    most: int = 64
    tree: bool = False


class Drafter(Protocol):
    """`name`: how it is chosen; `taps`: target layers whose input states it reads in
    `observe`. Drafters keep their state by `Sequence.id` and never write a Sequence. `arms`,
    `blind` and `drafters` may be there too, see `arms_of`, `blind` and `names_of`."""

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
        """A sequence ended or was preempted. Nothing of it counts as in use any more; what it may
        tell of others that begin alike can be remembered."""
        ...

    def usage(self) -> DrafterUsage: ...


@runtime_checkable
class SelfDrafter(Protocol):
    """A drafter that runs the target itself on the engine's own cache.

    In `propose` it may read a sequence's committed entries [0, computed) and write the slots
    behind them that `Sequence.table` covers: its pending tokens' and those of the nodes that
    it then proposes. The target's pass writes all of these again before it reads them, so
    nothing that a draft computed is ever committed.
    """

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        """Called once, before anything is proposed. UserError where they don't fit."""
        ...


def arms_of(drafter: Drafter, seq: Sequence) -> tuple[Arm, ...]:
    """What a drafter could do for a sequence now, the one that would be taken first; one arm
    without particulars where it has no method `arms` to say so without drafting. That method
    looks at committed tokens and deterministic proposals only."""
    # Not by `isinstance`: asked in every round, and a protocol's takes 30 microseconds.
    arms: Callable[[Sequence], tuple[Arm, ...]] | None = getattr(drafter, "arms", None)
    return (Arm(drafter=drafter.name),) if arms is None else arms(seq)


def names_of(drafter: Drafter) -> tuple[str, ...]:
    """The drafters that its arms may name: those of a combination, or itself."""
    return tuple(getattr(drafter, "drafters", None) or (drafter.name,))


def blind(drafter: Drafter) -> bool:
    """Whether its arms for a running request are the same in every round, but for their lag:
    then nobody has to ask for them to know that nothing new speaks for it."""
    return bool(getattr(drafter, "blind", False))
