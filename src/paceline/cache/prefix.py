"""Blocks of finished sequences, kept for prompts that begin alike. Holds no tensors.

A full block is known by its tokens and the block before it, so a match is always a prefix
from position 0. The cache holds one reference to each of its blocks; those that nobody
else holds can be evicted, the least recently used first, the end of a chain before its
beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.cache.allocator import BlockAllocator

#: A block's tokens, behind the cache entry of the block before it (0 for none).
Key = tuple[int, tuple[int, ...]]


@dataclass
class _Entry:
    id: int
    block: int
    parent: Key | None
    children: int = 0


class PrefixCache:
    """Mutable; single-threaded. Entries are ordered by their last use."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._next_id = 1

    @property
    def table(self) -> list[int]:
        """The blocks that the cache holds a reference to."""
        return [e.block for e in self._entries.values()]

    @property
    def n_evictable(self) -> int:
        """Blocks that eviction can free: those which only the cache holds."""
        return sum(self._allocator.references(e.block) == 1 for e in self._entries.values())

    def match(self, tokens: Seq[int]) -> list[int]:
        """A table of shared blocks for the longest known prefix of `tokens`, short of its
        last token (whose logits are wanted)."""
        size = self._allocator.block_size
        found: list[int] = []
        parent = 0
        for start in range(0, (len(tokens) - 1) // size * size, size):
            key = (parent, tuple(tokens[start : start + size]))
            entry = self._entries.get(key)
            if entry is None:
                break
            self._entries.move_to_end(key)
            found.append(entry.block)
            parent = entry.id
        return self._allocator.share(found)

    def store(self, tokens: Seq[int], table: Seq[int]) -> None:
        """Keep the full blocks among the cache entries of `tokens`, which `table` covers."""
        size = self._allocator.block_size
        parent: Key | None = None
        parent_id = 0
        for i in range(len(tokens) // size):
            key = (parent_id, tuple(tokens[i * size : (i + 1) * size]))
            entry = self._entries.get(key)
            if entry is None:
                self._allocator.share([table[i]])
                entry = self._entries[key] = _Entry(self._next_id, table[i], parent)
                self._next_id += 1
                if parent is not None:
                    self._entries[parent].children += 1
            self._entries.move_to_end(key)
            parent, parent_id = key, entry.id

    def evict(self, n_blocks: int) -> int:
        """Free up to `n_blocks` blocks; how many were freed."""
        freed = 0
        while freed < n_blocks:
            key = next((k for k, e in self._entries.items() if self._is_loose_end(e)), None)
            if key is None:
                break
            entry = self._entries.pop(key)
            if entry.parent is not None:
                self._entries[entry.parent].children -= 1
            self._allocator.free([entry.block])
            freed += 1
        return freed

    def clear(self) -> None:
        """Give every block back."""
        self._allocator.free(self.table)
        self._entries.clear()

    def _is_loose_end(self, entry: _Entry) -> bool:
        return entry.children == 0 and self._allocator.references(entry.block) == 1
