"""Target states that wait until a head is asked to draft.

A pass's states belong to all its sequences. Copying each one's out of it takes longer than the
rest of a round's bookkeeping, and is done for nothing where nobody drafts, so what waits is the
pass and its rows. A sequence that keeps many foreign rows alive copies its own; what is older
than the last `most` rows is dropped.

Legend: T taps, N rows of a pass, n of them this sequence's, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

#: Bytes of foreign rows that a sequence keeps alive at most. Sequences that wait together keep
#: the same ones.
FOREIGN_BYTES = 32 << 20

#: States of a pass, [T, N, D], and rows of it.
Piece = tuple[torch.Tensor, range | list[int]]


@dataclass
class Waiting:
    """rows: of one sequence, in order of position, from one pass after another. most: so many
    at most, the last ones."""

    most: int
    rows: int = 0
    _pieces: list[Piece] = field(default_factory=list)
    _foreign: int = 0

    def add(self, taps_TND: torch.Tensor, rows: range | list[int]) -> int:
        """These rows of a pass. Returns how many older ones were dropped."""
        self._pieces.append((taps_TND, rows))
        self.rows += len(rows)
        self._foreign += _foreign(taps_TND, rows)
        dropped = self.rows - self.most
        if dropped > 0:
            self._drop(dropped)
        if self._foreign > FOREIGN_BYTES:
            self._copy()
        return max(dropped, 0)

    def first(self, n: int) -> Waiting:
        """The first n rows alone."""
        found = Waiting(self.most)
        for taps_TND, rows in self._pieces:
            part = rows[: n - found.rows]
            if part:
                found.add(taps_TND, part)
        return found

    def own(self) -> None:
        """Keep no row of anybody else alive, and all in one piece."""
        if self._foreign or len(self._pieces) > 1:
            self._copy()

    def joined(self) -> torch.Tensor:
        """[rows, T * D]: the taps of each side by side. There must be some."""
        return _states(self._pieces).transpose(0, 1).flatten(1)

    def clear(self) -> None:
        self._pieces, self.rows, self._foreign = [], 0, 0

    def storages(self) -> dict[int, int]:
        """Bytes of what is kept alive, by address."""
        kept = (taps_TND.untyped_storage() for taps_TND, _ in self._pieces)
        return {s.data_ptr(): s.nbytes() for s in kept}

    def _drop(self, n: int) -> None:
        """The first n rows."""
        self.rows -= n
        while n > 0:
            taps_TND, rows = self._pieces[0]
            kept = rows[n:]
            n -= len(rows) - len(kept)
            self._foreign -= _foreign(taps_TND, rows)
            if kept:
                self._pieces[0] = (taps_TND, kept)
                self._foreign += _foreign(taps_TND, kept)
            else:
                del self._pieces[0]

    def _copy(self) -> None:
        """All rows, without those beside them."""
        own_TnD = _states(self._pieces).clone()
        self._pieces, self._foreign = [(own_TnD, range(self.rows))], 0


def _foreign(taps_TND: torch.Tensor, rows: range | list[int]) -> int:
    """Bytes of a pass beside these rows."""
    n_taps, n_rows, width = taps_TND.shape
    return (n_rows - len(rows)) * n_taps * width * taps_TND.element_size()


def _states(pieces: Seq[Piece]) -> torch.Tensor:
    found = [_rows_of(taps_TND, rows) for taps_TND, rows in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _rows_of(taps_TND: torch.Tensor, rows: range | list[int]) -> torch.Tensor:
    if isinstance(rows, range):
        return taps_TND[:, rows.start : rows.stop]
    return taps_TND.index_select(1, torch.tensor(rows, device=taps_TND.device))
