"""The block allocator and the moves that commit a path."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.cache.allocator import BlockAllocator, OutOfBlocks
from paceline.cache.paged import commit_moves, slots


def test_tables_grow_and_shrink_to_what_they_cover() -> None:
    a = BlockAllocator(10, 4)
    table: list[int] = []
    a.grow(table, 9)
    assert table == [0, 1, 2]
    a.grow(table, 5)
    assert len(table) == 3
    a.shrink(table, 4)
    assert table == [0]
    a.shrink(table, 0)
    assert (table, a.n_free) == ([], 10)


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    a = BlockAllocator(3, 4)
    one, two = [], []
    a.grow(one, 8)
    with pytest.raises(OutOfBlocks):
        a.grow(two, 8)
    assert (two, a.n_free) == ([], 1)
    a.audit([one, two])


def test_shared_blocks_live_until_the_last_owner() -> None:
    a = BlockAllocator(4, 2)
    one: list[int] = []
    a.grow(one, 4)
    two = a.share(one)
    a.free(one)
    assert a.n_used == 2
    a.audit([one, two])
    a.free(two)
    assert a.n_used == 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a, t: t.pop(), "disagree"),
        (lambda a, t: t.append(t[0]), "twice"),
        (lambda a, t: a._free.append(t[0]), "lost or both"),
        (lambda a, t: a._free.append(a._free[0]), "free twice"),
    ],
)
def test_the_audit_finds_what_is_wrong(spoil, words: str) -> None:
    a = BlockAllocator(6, 2)
    table: list[int] = []
    a.grow(table, 5)
    a.audit([table])
    spoil(a, table)
    with pytest.raises(AssertionError, match=words):
        a.audit([table])


def test_freeing_twice_is_caught() -> None:
    a = BlockAllocator(2, 1)
    table: list[int] = []
    a.grow(table, 1)
    a.free(list(table))
    with pytest.raises(AssertionError, match="freed twice"):
        a.free(table)


def test_random_traffic_keeps_the_books() -> None:
    rng = random.Random(0)
    a = BlockAllocator(32, 3)
    tables: list[list[int]] = []
    for _ in range(2000):
        action = rng.random()
        if action < 0.3 and len(tables) < 12:
            tables.append([])
        elif tables and action < 0.7:
            table = rng.choice(tables)
            try:
                a.grow(table, len(table) * 3 + rng.randrange(8))
            except OutOfBlocks:
                a.free(tables.pop(rng.randrange(len(tables))))
        elif tables and action < 0.85:
            table = rng.choice(tables)
            a.shrink(table, rng.randrange(len(table) * 3 + 1))
        elif tables and len(tables) < 12:
            tables.append(a.share(rng.choice(tables)))
        a.audit(tables)


def test_moves_bring_a_path_behind_the_prefix() -> None:
    """Read through random tables before and after, as a model would."""
    rng = np.random.default_rng(1)
    for _ in range(200):
        block = int(rng.integers(1, 6))
        context, rows = int(rng.integers(0, 20)), int(rng.integers(1, 12))
        n_blocks = -(-(context + rows) // block)
        table = rng.permutation(n_blocks + 5)[:n_blocks].tolist()
        memory = np.full((n_blocks + 5) * block, -1)
        everything = slots(table, np.arange(context + rows, dtype=np.int32), block)
        memory[everything] = np.arange(context + rows)
        kept = sorted(rng.choice(rows, int(rng.integers(1, rows + 1)), replace=False).tolist())
        source, destination = commit_moves(table, context, kept, block)
        assert len(source) <= len(kept)
        memory[destination] = memory[source]
        after = memory[slots(table, np.arange(context + len(kept), dtype=np.int32), block)]
        assert after.tolist() == [*range(context), *(context + r for r in kept)]


def test_a_chain_moves_nothing() -> None:
    source, destination = commit_moves([3, 1], 2, [0, 1, 2], 4)
    assert len(source) == len(destination) == 0
