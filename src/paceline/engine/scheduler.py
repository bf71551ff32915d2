"""Who takes part in a step, and the only place that writes a Sequence.

No tensors here. Sequences wait until the pool can hold what they have; the oldest running
one always advances, and the youngest gives its blocks back when the pool is full
(preemption by recomputation), so that nothing starves and nothing deadlocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest

from paceline.cache.allocator import BlockAllocator, OutOfBlocks
from paceline.cache.prefix import PrefixCache
from paceline.core.rules import Guarantee, Origin, Verdict
from paceline.core.tree import TokenTree
from paceline.engine.policy import BudgetPolicy
from paceline.types import (
    FinishReason,
    Sequence,
    Status,
    StepOutput,
    TextState,
    TokenOut,
)


@dataclass(frozen=True)
class Item:
    """One sequence's part in a step: `rows` of its pending tokens behind `context` entries
    of the cache, and where these reach its last token (`decides`), up to `budget` proposed
    ones."""

    seq: Sequence
    rows: int
    budget: int
    context: int

    @property
    def decides(self) -> bool:
        return self.rows == self.seq.pending


@dataclass(frozen=True)
class Commit:
    """What a round adds to a sequence, after the first end among its tokens.

    kept: accepted nodes whose cache entries stay; discarded: emitted tokens behind the end.
    """

    text: TextState
    tokens: tuple[TokenOut, ...] = ()
    kept: tuple[int, ...] = ()
    discarded: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    guarantee: Guarantee | None = None


class Scheduler:
    """Mutable; single-threaded."""

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_batch: int,
        prefill_chunk: int,
        max_length: int,
        prefix_cache: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.allocator = allocator
        self.prefix_cache = PrefixCache(allocator) if prefix_cache else None
        self.max_length = max_length
        self._clock = clock
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._preempted: list[Sequence] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, seq: Sequence) -> None:
        seq.stats.submitted = self._clock()
        self.waiting.append(seq)

    def plan(self, policy: BudgetPolicy) -> list[Item]:
        """Admit, cut prefill into chunks, reserve cache blocks, preempt where they lack."""
        self._admit()
        items: list[Item] = []
        room = self._prefill_chunk
        budgets = dict(zip(self.running, policy.budgets(self.running), strict=True))
        for seq in list(self.running):
            if seq not in self.running:
                continue  # preempted for an older one
            rows = 1 if seq.pending == 1 else min(seq.pending, room)
            if rows == 0:
                continue
            if seq.pending > 1:
                room -= rows
            budget = self._budget(seq, budgets[seq]) if rows == seq.pending else 0
            if self._reserve(seq, seq.computed + rows + budget):
                items.append(Item(seq, rows, budget, seq.computed))
        return items

    def _budget(self, seq: Sequence, wanted: int) -> int:
        """No more than could be delivered. The first token is not delayed by drafting; a
        preempted sequence drafts as it would have without preemption."""
        if seq.n_output == 0:
            return 0
        left = min(seq.params.max_tokens - seq.n_output, self.max_length - len(seq.tokens))
        return max(0, min(wanted, left - 1))

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            seq = self.waiting[0]
            known = self.prefix_cache.match(seq.tokens) if self.prefix_cache else []
            reserved = sum(
                max(0, self.allocator.blocks_for(len(s.tokens)) - len(s.table))
                for s in self.running
            )
            # One block more than its tokens need, so that it is not preempted at once.
            need = self.allocator.blocks_for(len(seq.tokens)) - len(known) + reserved
            need += 1 if self.running else 0
            if need > self._obtainable():
                self.allocator.free(known)
                return
            self.waiting.popleft()
            seq.status = Status.RUNNING
            seq.table = known
            seq.computed = len(known) * self.allocator.block_size
            seq.stats.cached += seq.computed
            self.running.append(seq)

    def _obtainable(self) -> int:
        evictable = self.prefix_cache.n_evictable if self.prefix_cache else 0
        return self.allocator.n_free + evictable

    def _reserve(self, seq: Sequence, n_slots: int) -> bool:
        """Grow the table; False where `seq` itself had to give way to older ones."""
        while True:
            try:
                self.allocator.grow(seq.table, n_slots)
                return True
            except OutOfBlocks as e:
                if self.prefix_cache and self.prefix_cache.evict(e.missing):
                    continue
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is seq:
                    return False

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._release(seq)
        seq.computed = 0
        seq.status = Status.WAITING
        seq.stats.preemptions += 1
        self.waiting.appendleft(seq)
        self._preempted.append(seq)

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call; drafters must forget them."""
        taken, self._preempted = self._preempted, []
        return taken

    def commit(
        self,
        items: Seq[Item],
        trees: Seq[TokenTree | None],
        verdicts: Seq[Verdict | None],
        commits: Seq[Commit],
    ) -> list[StepOutput]:
        """Write the step's outcome to its sequences; the one place that does."""
        outputs = []
        for item, tree, verdict, commit in zip(items, trees, verdicts, commits, strict=True):
            seq = item.seq
            seq.stats.target_calls += 1
            seq.computed += item.rows + len(commit.kept)
            if verdict is not None and tree is not None:
                _count(seq, tree, verdict, commit, self._clock())
            if commit.guarantee is not None:
                known = [commit.guarantee] + ([seq.guarantee] if seq.guarantee else [])
                seq.guarantee = Guarantee.weakest(known)
            text = commit.text.text[seq.text.sent : commit.text.sent]
            seq.tokens.extend(t.id for t in commit.tokens)
            seq.out.extend(commit.tokens)
            seq.text = commit.text
            if commit.finish_reason is not None:
                self._finish(seq, commit.finish_reason, commit.error)
            else:
                assert seq.computed < len(seq.tokens)
                self.allocator.shrink(seq.table, seq.computed)
            if commit.tokens or commit.finish_reason is not None:
                outputs.append(_step_output(seq, commit.tokens, text))
        return outputs

    def abort(self, seq: Sequence) -> StepOutput | None:
        """End a sequence now; None where it had ended already."""
        if seq.done:
            return None
        self._finish(seq, FinishReason.ABORTED, None)
        text = seq.text.text[seq.text.sent :]
        return _step_output(seq, (), text)

    def _finish(self, seq: Sequence, reason: FinishReason, error: str | None) -> None:
        seq.finish_reason = reason
        seq.error = error
        seq.status = Status.FINISHED
        seq.stats.finished = self._clock()
        self._release(seq)
        if seq in self.running:
            self.running.remove(seq)
        else:
            self.waiting.remove(seq)

    def _release(self, seq: Sequence) -> None:
        """Give the blocks back; whole ones stay for prompts that begin alike, but not those
        of a failed request, whose entries may be NaN."""
        if self.prefix_cache and seq.finish_reason is not FinishReason.ERROR:
            self.prefix_cache.store(seq.tokens[: seq.computed], seq.table)
        self.allocator.free(seq.table)

    def audit(self) -> None:
        """AssertionError where a block is lost, held twice, or a cache length is wrong."""
        tables = [s.table for s in (*self.running, *self.waiting)]
        if self.prefix_cache:
            tables.append(self.prefix_cache.table)
        self.allocator.audit(tables)
        for seq in self.running:
            assert 0 <= seq.computed < len(seq.tokens)
            assert len(seq.table) >= self.allocator.blocks_for(seq.computed)
            if seq.n_output:
                assert seq.pending == 1 or seq.stats.preemptions, "a committed entry is missing"


def _count(seq: Sequence, tree: TokenTree, verdict: Verdict, commit: Commit, now: float) -> None:
    stats = seq.stats
    path = (0, *verdict.path)
    stats.rounds += 1
    stats.drafted += len(tree) - 1
    stats.verified += sum(len(tree.children[u]) for u in path)
    stats.accepted += len(verdict.path)
    stats.emitted += len(commit.tokens)
    stats.discarded += commit.discarded
    stats.tau_histogram[len(path)] += 1
    for depth in range(max(tree.depths)):
        stats.proposed_at[depth] += 1
    for depth in range(len(verdict.path)):
        stats.accepted_at[depth] += 1
    for node, chosen in zip_longest(path, verdict.path):
        for rank, child in enumerate(tree.children[node]):
            stats.offered_rank[rank] += 1
            stats.accepted_rank[rank] += child == chosen
    if stats.first_token is None and commit.tokens:
        stats.first_token = now


def _step_output(seq: Sequence, tokens: tuple[TokenOut, ...], text: str) -> StepOutput:
    return StepOutput(
        request_id=seq.id,
        index=seq.index,
        tokens=tokens,
        text=text,
        finish_reason=seq.finish_reason,
        error=seq.error,
    )


def origins(verdict: Verdict) -> tuple[Origin, ...]:
    """Who brought each token that a verdict emits."""
    return (*(Origin.ACCEPTED for _ in verdict.path), verdict.origin)
