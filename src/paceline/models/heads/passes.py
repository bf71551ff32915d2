"""What a drafter asks of an EAGLE head that is ready to run: passes over rows of features.

Legend: N rows of a pass, W of them wanted, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Rows(Protocol):
    """Keys and values of one sequence. Rows [0, rows) are committed; what a proposal appends
    behind them is scratch and written over."""

    rows: int

    @property
    def nbytes(self) -> int: ...

    def copy(self, rows: int) -> Rows:
        """The first of the committed rows, in memory of their own."""
        ...


@dataclass(frozen=True)
class Part:
    """One sequence's rows of a pass, written to its cache from `at` on.

    wanted: the last rows, whose outputs are returned. above: for each wanted row, the rows of
    the scratch that it sees beside the committed ones and itself, ascending; None: every row
    sees all before it.
    """

    cache: Rows
    at: int
    count: int
    wanted: int = 1
    above: Seq[Seq[int]] | None = None


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A draft to grow behind the committed rows of `cache`.

    tokens, taps_NT: those of rows to append first, as `feed` takes them; none: hidden_D is the
    layer's output of the last committed row. depth:
    levels, 1 or more. heat: the temperature of the log-probabilities. end_ids: nothing is
    drafted behind these.
    """

    cache: Rows
    hidden_D: torch.Tensor | None = None
    tokens: Seq[int] = ()
    taps_NT: torch.Tensor | None = None
    depth: int
    heat: float = 1.0
    end_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Grown:
    """A draft's nodes, parents first; node 0 is the root, whose token the caller knows (here
    -1). hidden_D: the layer's output of the last committed row. scores: log-probabilities of the
    paths. healthy: False where the head gave NaN or infinite logits; nothing follows there."""

    hidden_D: torch.Tensor = field(compare=False)
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    healthy: bool


class EagleRunner(Protocol):
    """`EagleHead` for drafting. target_ids: int64 [U], the target's ids of the head's tokens."""

    target_ids: torch.Tensor

    def new_cache(self) -> Rows: ...

    def feed(
        self, parts: Seq[Part], tokens: Seq[int], taps_NT: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        """As `run`, with the target's states side by side in the order of `config.taps`
        ([N, n_taps * D]) in place of features."""
        ...

    def run(
        self, parts: Seq[Part], tokens: Seq[int], g_ND: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        """One pass over the rows of all parts, back to back. tokens, g_ND, positions: of each
        row, its embedding's token, its feature, its place. Returns the layer's outputs of the
        wanted rows, [W, D]; keys and values of all rows go to the caches."""
        ...

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, U] float32 logits over the draft vocabulary, from the layer's outputs."""
        ...

    def grow(self, asks: Seq[Ask], width: int) -> list[Grown] | None:
        """Whole drafts in one call: the rows that an ask brings, then its chain (width 1), or a
        tree whose best `width` open nodes of each level propose `width` children. The caches'
        `rows` count what was appended. None where the runner has no such call, and nothing is
        done: `feed`, `run` and `logits`, level by level, give the same."""
        ...
