"""A smaller language model with the target's vocabulary as drafter.

Leviathan et al. 2022; Chen et al. 2023. Legend: R rows, V the target's vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.cache.allocator import BlockAllocator
from paceline.core.draws import KeyedDraws
from paceline.core.law import Law, PointLaw
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import DrafterUsage
from paceline.models.base import KVStore, RowGroup, TargetModel, TargetOutput, pack
from paceline.sampling.law import BrokenLaw, build_laws
from paceline.types import Sequence

log = logging.getLogger(__name__)


@dataclass
class _State:
    """fed: the tokens whose keys and values are in the draft's cache, in order."""

    fed: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


@dataclass
class _Chain:
    """A proposal in the making."""

    seq: Sequence
    budget: int
    state: _State
    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)


class ModelDrafter:
    """Proposes chains: argmax tokens at temperature 0 (judged as deterministic), samples of
    its own transformed law otherwise.

    The cache holds what was fed; before each proposal, and after each commit, it is cut to
    its common prefix with the committed tokens, then fed whatever it lacks. That one habit
    covers prefill, rejection, rounds without a proposal and the token that an all-accepted
    round leaves unfed.
    """

    name = "model"
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: TargetModel,
        *,
        vocab_size: int,
        n_blocks: int,
        block_size: int,
        prefill_chunk: int = 512,
    ) -> None:
        """vocab_size: tokens that the target can emit; the draft's others are never drawn.
        n_blocks, block_size: as the target's pool, so that the draft's can't run out first."""
        self.model = model
        self._vocab_size = vocab_size
        self._allocator = BlockAllocator(n_blocks, block_size)
        self._kv: KVStore = model.new_kv(n_blocks, block_size)
        self._prefill_chunk = prefill_chunk
        self._states: dict[int, _State] = {}
        self._warned = False

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0], None if greedy else [PointLaw(0, 1)])

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        chains: dict[int, _Chain] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            # The last drafted token is not fed: positions up to len + budget - 2 are.
            budget = min(budget, self.model.info.max_context - len(seq.tokens) + 1)
            if budget > 0:
                state = self._states.setdefault(seq.id, _State())
                self._roll_back(state, seq)
                chains[seq.id] = _Chain(seq, budget, state)
        self._catch_up(list(chains.values()))
        active = list(chains.values())
        while active:
            self._extend(active)
            active = [c for c in active if len(c.tokens) < c.budget]
        return [_tree(seq, chains.get(seq.id)) for seq in seqs]

    def _catch_up(self, chains: list[_Chain]) -> None:
        """Feed long stretches of unseen tokens in chunks, up to the last committed one."""
        while True:
            groups = []
            for c in chains:
                missing = len(c.seq.tokens) - len(c.state.fed)
                if missing > self._prefill_chunk:
                    at = len(c.state.fed)
                    groups.append((c, c.seq.tokens[at : at + self._prefill_chunk]))
            if not groups:
                return
            self._forward([(c, tokens, False) for c, tokens in groups])

    def _extend(self, chains: list[_Chain]) -> None:
        """One draft step: feed what each chain lacks, and draw its next token."""
        logits_RV = self._forward(
            [(c, (c.seq.tokens + c.tokens)[len(c.state.fed) :], True) for c in chains]
        )
        laws = build_laws(
            logits_RV[:, : self._vocab_size], [c.seq.params for c in chains], masked=True
        )
        for c, law in zip(chains, laws, strict=True):
            if isinstance(law, BrokenLaw):
                c.budget = len(c.tokens)
                if not self._warned:
                    log.warning(
                        "the draft model gave NaN or infinite logits; such drafts end there"
                    )
                    self._warned = True
                continue
            if c.seq.params.greedy:
                c.tokens.append(law.mode())
                continue
            draws = KeyedDraws(c.seq.seed, len(c.seq.tokens))
            c.tokens.append(law.sample(draws.draft(len(c.tokens))))
            c.laws.append(law)

    def _forward(self, parts: list[tuple[_Chain, list[int], bool]]) -> torch.Tensor:
        """Feed tokens behind each chain's cache; logits of the last row where wanted."""
        groups = []
        for c, tokens, wanted in parts:
            fed = len(c.state.fed)
            self._allocator.grow(c.state.table, fed + len(tokens))
            groups.append(
                RowGroup(
                    tokens=np.array(tokens, np.int32),
                    parents=np.arange(-1, len(tokens) - 1, dtype=np.int32),
                    context=fed,
                    table=np.array(c.state.table, np.int32),
                    wanted=np.array([len(tokens) - 1] if wanted else [], np.int32),
                )
            )
            c.state.fed.extend(tokens)
        return self.model.forward(pack(groups, self._allocator.block_size), self._kv).logits_RV

    def _roll_back(self, state: _State, seq: Sequence) -> None:
        """Keep the longest prefix of the cache that was committed, and no more than the
        target's cache holds."""
        fed, tokens = state.fed, seq.tokens
        limit = min(len(fed), len(tokens) - 1)
        same = _common_prefix(fed, tokens, limit)
        del fed[same:]
        self._allocator.shrink(state.table, same)

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        for seq in seqs:
            state = self._states.get(seq.id)
            if state is not None:
                self._roll_back(state, seq)

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


def _common_prefix(fed: list[int], tokens: list[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`; only the drafted end can differ."""
    if fed[:limit] == tokens[:limit]:
        return limit
    return next(i for i in range(limit) if fed[i] != tokens[i])


def _tree(seq: Sequence, c: _Chain | None) -> TokenTree:
    root = seq.tokens[-1]
    if c is None:
        return chain(root)
    return chain(root, c.tokens, c.laws if c.laws else None)
