"""What a drafter asks of an EAGLE head that is ready to run: passes over rows of features.

Legend: N rows of a pass, W of them wanted, D hidden, U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch


class Rows(Protocol):
    """Keys and values of one sequence. Rows [0, rows) are committed; what a proposal appends
    behind them is scratch and written over."""

    rows: int

    @property
    def nbytes(self) -> int: ...


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
