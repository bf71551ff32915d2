"""Who owns which cache block. Holds no tensors.

A block is a run of `block_size` slots of a paged cache. Blocks are counted by reference, so
that sequences can share a prefix; a block returns to the pool with its last reference.
"""

from __future__ import annotations

import heapq


class OutOfBlocks(Exception):
    """The pool has fewer free blocks than were asked for; nothing was taken."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} more free blocks are needed")
        self.missing = missing


class BlockAllocator:
    """Mutable; single-threaded. The lowest free block goes first, so that a sequence alone
    gets consecutive blocks, whose keys can be read without gathering."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one slot, got {n_blocks} of {block_size}")
        self.n_blocks = n_blocks
        self.block_size = block_size
        self._free = list(range(n_blocks))  # a heap
        self._references = [0] * n_blocks

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_used(self) -> int:
        return self.n_blocks - len(self._free)

    def blocks_for(self, n_slots: int) -> int:
        """Blocks that hold `n_slots` slots."""
        return -(-n_slots // self.block_size)

    def grow(self, table: list[int], n_slots: int) -> None:
        """Extend `table` until it covers `n_slots`; OutOfBlocks leaves it unchanged."""
        need = self.blocks_for(n_slots) - len(table)
        if need > len(self._free):
            raise OutOfBlocks(need - len(self._free))
        for _ in range(need):
            block = heapq.heappop(self._free)
            self._references[block] = 1
            table.append(block)

    def shrink(self, table: list[int], n_slots: int) -> None:
        """Release the blocks of `table` beyond the first `n_slots` slots."""
        keep = self.blocks_for(n_slots)
        while len(table) > keep:
            self._release(table.pop())

    def free(self, table: list[int]) -> None:
        self.shrink(table, 0)

    def share(self, table: list[int]) -> list[int]:
        """A second table on the same blocks (for a common prefix, which nobody rewrites)."""
        for block in table:
            assert self._references[block] > 0, f"block {block} is free and can't be shared"
            self._references[block] += 1
        return list(table)

    def references(self, block: int) -> int:
        """How many tables hold this block."""
        return self._references[block]

    def _release(self, block: int) -> None:
        assert self._references[block] > 0, f"block {block} was freed twice"
        self._references[block] -= 1
        if self._references[block] == 0:
            heapq.heappush(self._free, block)

    def audit(self, tables: list[list[int]]) -> None:
        """AssertionError unless `tables` are exactly the references that were handed out."""
        counts = [0] * self.n_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a table holds a block twice: {table}"
            for block in table:
                counts[block] += 1
        assert counts == self._references, "tables and reference counts disagree"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {b for b, n in enumerate(counts) if n == 0}, "a block is lost or both"
