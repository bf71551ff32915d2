"""A draft model and what its cache holds for each sequence.

The cache is cut to its common prefix with the committed tokens before each proposal and
after each commit, then fed whatever it lacks. That one habit covers prefill, rejection,
rounds without a proposal, and the token that an all-accepted round leaves unfed.

Legend: R wanted rows, V the draft model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.cache.allocator import BlockAllocator
from paceline.core.tree import TokenTree
from paceline.draft.base import Arm, DrafterUsage
from paceline.models.base import KVStore, RowGroup, TargetModel, pack
from paceline.types import Sequence


@dataclass
class _State:
    """fed: the tokens whose keys and values are in the cache, in order."""

    fed: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Feed:
    """What one sequence adds to a pass.

    tokens: all that the cache shall hold afterwards; it is fed what it lacks. scratch: rows
    of a tree below the last of them, with `parents` among themselves (-1: below that last
    token), which are gone after the pass. wanted: which logits are returned: of the last of
    `tokens` (`of_last`), then of the scratch rows `wanted`, ascending.
    """

    seq_id: int
    tokens: Seq[int]
    of_last: bool = True
    scratch: Seq[int] = ()
    parents: Seq[int] = ()
    wanted: Seq[int] = ()


class DraftCache:
    """Mutable. n_blocks, block_size: as the target's pool, so that this one can't run out
    first: it holds no more tokens of a sequence than the target's does (or `stretch` times
    as many in a pool as much larger, see `Vocabulary`)."""

    def __init__(
        self,
        model: TargetModel,
        *,
        n_blocks: int,
        block_size: int,
        prefill_chunk: int = 512,
        max_batch: int = 1,
        scratch: int = 0,
    ) -> None:
        """max_batch, scratch: so many sequences may need so many rows beyond their budget."""
        n_blocks += max_batch * -(-scratch // block_size)
        self.model = model
        self._allocator = BlockAllocator(n_blocks, block_size)
        self._kv: KVStore = model.new_kv(n_blocks, block_size)
        self._prefill_chunk = prefill_chunk
        self._states: dict[int, _State] = {}

    @property
    def max_context(self) -> int:
        return self.model.info.max_context

    def lag(self, seq_id: int, n_tokens: int) -> int:
        """Of `n_tokens` of its own, how many were not fed yet (at least the last one)."""
        state = self._states.get(seq_id)
        return max(1, n_tokens - (len(state.fed) if state else 0))

    def roll_back(self, seq_id: int, tokens: Seq[int]) -> None:
        """Keep the longest prefix that agrees with `tokens`, short of their last one, whose
        logits will be wanted."""
        state = self._states.setdefault(seq_id, _State())
        limit = min(len(state.fed), len(tokens) - 1)
        same = _common_prefix(state.fed, tokens, limit)
        del state.fed[same:]
        self._allocator.shrink(state.table, same)

    def settle(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        context: Callable[[Seq[int]], Seq[int]],
    ) -> None:
        """After a commit: drop what was not committed; nothing to do where nothing was
        proposed. context: the draft's own tokens for a committed sequence of the target's."""
        for seq, tree in zip(seqs, trees, strict=True):
            if len(tree) > 1 and seq.id in self._states:
                self.roll_back(seq.id, context(seq.tokens))

    def arm(self, name: str, seq: Sequence, *, tree_nodes: int | None = None) -> tuple[Arm, ...]:
        """What a drafter with this cache could do for a sequence, nothing where the draft's
        context is full. Counts the target's tokens for the draft's own."""
        n = len(seq.tokens)
        if n > self.max_context:
            return ()
        tree = tree_nodes is not None
        most = tree_nodes if tree_nodes is not None else self.max_context - n + 1
        return (Arm(drafter=name, lag=self.lag(seq.id, n), most=min(most, 64), tree=tree),)

    def feed(self, feeds: Seq[Feed]) -> torch.Tensor:
        """One pass (more where a prompt is long): [R, V] float32 logits, feed by feed."""
        self._feed_long_prompts(feeds)
        groups = []
        for f in feeds:
            state = self._states[f.seq_id]
            fed = len(state.fed)
            new = list(f.tokens[fed:])
            n = len(new)
            # Rows behind the new tokens; without any, they follow the cache directly.
            parents = [*range(-1, n - 1), *(n + p if p >= 0 else n - 1 for p in f.parents)]
            wanted = [n - 1] if f.of_last else []
            wanted += [n + w for w in f.wanted]
            groups.append(self._rows(state, [*new, *f.scratch], parents, wanted))
            state.fed.extend(new)
        return self._pass(groups)

    def _feed_long_prompts(self, feeds: Seq[Feed]) -> None:
        chunk = self._prefill_chunk
        while True:
            groups = []
            for f in feeds:
                state = self._states[f.seq_id]
                if len(f.tokens) - len(state.fed) > chunk:
                    part = list(f.tokens[len(state.fed) : len(state.fed) + chunk])
                    groups.append(self._rows(state, part, range(-1, chunk - 1), []))
                    state.fed.extend(part)
            if not groups:
                return
            self._pass(groups)

    def _rows(
        self, state: _State, tokens: list[int], parents: Seq[int], wanted: list[int]
    ) -> RowGroup:
        self._allocator.grow(state.table, len(state.fed) + len(tokens))
        return RowGroup(
            tokens=np.array(tokens, np.int32),
            parents=np.array(parents, np.int32),
            context=len(state.fed),
            table=np.array(state.table, np.int32),
            wanted=np.array(wanted, np.int32),
        )

    def _pass(self, groups: list[RowGroup]) -> torch.Tensor:
        return self.model.forward(pack(groups, self._allocator.block_size), self._kv).logits_RV

    def forget(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._allocator.free(state.table)

    def usage(self) -> DrafterUsage:
        return DrafterUsage(
            blocks_used=self._allocator.n_used,
            blocks_total=self._allocator.n_blocks,
            bytes_total=self.model.info.weight_bytes + self._kv.nbytes,
        )

    def audit(self) -> None:
        """AssertionError unless the blocks in use are exactly those of live sequences."""
        self._allocator.audit([s.table for s in self._states.values()])


def _common_prefix(fed: list[int], tokens: Seq[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`; only the drafted end can differ."""
    if fed[:limit] == list(tokens[:limit]):
        return limit
    return next(i for i in range(limit) if fed[i] != tokens[i])
