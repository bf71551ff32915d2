"""Scratch rows and their commit.

A pass writes row j of a sequence to slot `context + j` of its table:

    [0 ... context)          committed entries
    [context, context + n)   scratch: pending committed tokens first, then the proposal

`commit_moves` says which slots must be copied so that the entries of the accepted path
follow the committed ones in order; everything behind them is dead.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


def slots(table: Seq[int] | Int32, at: Int32, block_size: int) -> Int32:
    """Cache slots of the positions `at` of a sequence with this block table."""
    blocks = np.asarray(table, np.int32)
    return (blocks[at // block_size] * block_size + at % block_size).astype(np.int32)


def commit_moves(
    table: Seq[int], context: int, rows: Seq[int], block_size: int
) -> tuple[Int32, Int32]:
    """(source, destination) slots that bring scratch rows `rows` (ascending, relative to
    `context`) to positions context, context + 1, ...; rows already in place are left out."""
    source = np.asarray(rows, np.int32)
    target = np.arange(len(source), dtype=np.int32)
    moved = source != target
    return (
        slots(table, context + source[moved], block_size),
        slots(table, context + target[moved], block_size),
    )
