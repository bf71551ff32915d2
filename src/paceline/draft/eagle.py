"""EAGLE: one trained decoder layer drafts from the target's own hidden states.

EAGLE-1 (Li et al. 2024) and EAGLE-3 (2025) heads; chains, or EAGLE-2's dynamic trees of the
most probable paths. Row t of the head's cache pairs the target's feature of token t with the
embedding of token t + 1:

    tokens     x0  x1  x2 ... x(n-2)  x(n-1) = root
    features   f0  f1  f2 ... f(n-2)               n - 1 of them, as in the target's cache; of a
                                                   long text the last ones (`eagle_state`)
    rows       (f0,x1) (f1,x2) ... (f(n-2),root)   row n - 2 gives the root's children

Below the root the layer's own output takes the feature's place. Those rows are scratch: the
next round computes them again from the target's features, as far as they were accepted.
Legend: N rows, D hidden, U draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from paceline.core.law import Law, PointLaw
from paceline.core.rules import Verdict
from paceline.core.shapes import Beam
from paceline.core.tree import TokenTree, best_paths, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.coupling import next_token
from paceline.draft.eagle_state import Ended, State
from paceline.draft.heads import HeadVocabulary, committed_rows, heat
from paceline.errors import UserError
from paceline.models.base import KVStore, TargetModel, TargetOutput, stack
from paceline.models.heads.config import EagleConfig
from paceline.models.heads.passes import Ask, EagleRunner, Part
from paceline.sampling.context import Context, Row, context_of
from paceline.sampling.law import build_laws
from paceline.types import FinishReason, Sequence


@dataclass
class _Growing:
    """A proposal in the making; node 0 is the root. scores: log-probabilities of the paths;
    hidden: the layer's output at the row whose token is the node's (the root's: the last
    committed row); slots: that row's place in the scratch (the root has none)."""

    seq: Sequence
    state: State
    budget: int
    context: Context | None
    tokens: list[int]
    hidden: dict[int, torch.Tensor]
    parents: list[int] = field(default_factory=lambda: [-1])
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    scores: list[float] = field(default_factory=lambda: [0.0])
    laws: list[Law] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, token: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.paths[parent], token))
        self.scores.append(score)
        return len(self.tokens) - 1

    def above(self, node: int) -> list[int]:
        """Scratch places of a node's ancestors."""
        found = []
        node = self.parents[node]
        while node > 0:
            found.append(self.slots[node])
            node = self.parents[node]
        return found


class EagleDrafter:
    """shape: a dynamic tree, or None for chains. sampled: where the request samples, chains are
    drawn from the head's own law (judged by block verification; tied to the target's draws and
    judged by the walk where `draft.coupling` says so), not chosen as its most probable
    tokens."""

    name = "eagle"
    blind = True

    def __init__(
        self,
        config: EagleConfig,
        make: Callable[[TargetModel], EagleRunner],
        *,
        shape: Beam | None = None,
        sampled: bool = False,
        weight_bytes: int = 0,
        block_size: int = 32,
    ) -> None:
        """make: the head of this config, ready to run beside the target that it is bound to.
        block_size: rows that `usage` counts as one block."""
        if sampled and shape is not None:
            raise UserError("the most probable paths are chosen, not sampled: drop the tree")
        self.name = config.kind
        self.taps: tuple[int, ...] = config.taps
        self.config = config
        self.shape = shape
        self._make = make
        self._sampled = sampled
        self._weight_bytes = weight_bytes
        self._block_size = block_size
        self._states: dict[int, State] = {}
        self._ended = Ended()

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        """See `draft.base`: the head borrows the target's embeddings. Its cache stays alone."""
        self._states, self._ended = {}, Ended()
        self._runner = self._make(model)
        self._vocabulary = HeadVocabulary(self._runner.target_ids, self.config.vocab_size)

    def example(self, greedy: bool) -> TokenTree:
        if self.shape is not None:
            return TokenTree((0, 0, 1), (-1, 0, 0))
        return chain(0, [0], [PointLaw(0, 1)] if self._sampled and not greedy else None)

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        state = self._states.get(seq.id)
        if state is None or seq.pending > 1:
            return ()
        room = self._room(seq, state)
        if room < 1:
            return ()
        most = room if self.shape is None else min(self.shape.nodes, 64)
        tree = self.shape is not None
        return (Arm(drafter=self.name, lag=state.waiting.rows, most=min(most, 64), tree=tree),)

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        growing: dict[int, _Growing] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            state = self._states.get(seq.id)
            # After a preemption tokens behind the head's last feature may be pending.
            if budget == 0 or state is None or seq.pending > 1 or self._room(seq, state) < 1:
                continue
            assert state.known == seq.computed, "a drafter missed a committed position"
            growing[seq.id] = _Growing(seq, state, budget, context_of(seq), [seq.tokens[-1]], {})
        level, active = 0, self._grow_at_once(list(growing.values()))
        self._catch_up([g.state for g in active])
        for g in active:
            assert g.state.last_D is not None
            g.hidden[0] = g.state.last_D
        while active:
            self._expand(active)
            level += 1
            active = [g for g in active if g.frontier and level < self._depth(g)]
            if active:
                self._feed(active)
        return [self._tree(seq, growing.get(seq.id)) for seq in seqs]

    def _grow_at_once(self, growing: list[_Growing]) -> list[_Growing]:
        """Whole drafts in one call, where the runner has it and a request asks for nothing that
        needs all logits. Returns the others."""
        plain: list[_Growing] = []
        others: list[_Growing] = []
        for g in growing:
            seen = g.seq.params.adjusts or self._draws_for(g.seq)
            (others if seen else plain).append(g)
        if not plain:
            return others
        found = self._runner.grow([self._ask(g) for g in plain], self._width)
        if found is None:
            return growing
        for g, grown in zip(plain, found, strict=True):
            g.state.fed(grown.hidden_D)
            g.tokens += grown.tokens[1:]
            g.parents, g.scores = grown.parents, grown.scores
            if not grown.healthy:
                self._vocabulary.healthy(math.nan)
        return others

    def _ask(self, g: _Growing) -> Ask:
        """Its draft, behind the features that wait."""
        return Ask(
            cache=g.state.cache,
            hidden_D=g.state.last_D,
            tokens=g.state.waiting_tokens(),
            taps_NT=g.state.waiting.joined() if g.state.waiting.rows else None,
            depth=self._depth(g),
            heat=heat(g.seq.params),
            end_ids=g.seq.end_ids,
        )

    @property
    def _width(self) -> int:
        return 1 if self.shape is None else self.shape.width

    def _room(self, seq: Sequence, state: State) -> int:
        """Tokens that may be drafted before the head's own context ends."""
        return self.config.max_context - (len(seq.tokens) - state.start) + 1

    def _depth(self, g: _Growing) -> int:
        deepest = g.budget if self.shape is None else min(self.shape.depth, g.budget)
        return min(deepest, self._room(g.seq, g.state))

    def _catch_up(self, lagging: Seq[State]) -> None:
        """Feed all waiting features: one pass, of which the last row's output is kept."""
        parts, taps, fed = [], [], []
        tokens: list[int] = []
        positions: list[int] = []
        for state in lagging:
            n = state.waiting.rows
            if n == 0:
                continue
            at = state.cache.rows
            parts.append(Part(state.cache, at, n))
            tokens += state.waiting_tokens()
            positions += range(at, at + n)
            taps.append(state.waiting.joined())
            fed.append(state)
        if not parts:
            return
        taps_NT = taps[0] if len(taps) == 1 else torch.cat(taps)
        hidden_WD = self._runner.feed(parts, tokens, taps_NT, positions)
        for state, hidden_D in zip(fed, hidden_WD, strict=True):
            state.cache.rows += state.waiting.rows
            state.fed(hidden_D)

    def _expand(self, growing: Seq[_Growing]) -> None:
        """Children of every frontier node, from the layer's outputs there."""
        hidden = [g.hidden[u] for g in growing for u in g.frontier]
        logits_NU = self._runner.logits(torch.stack(hidden))
        rows = [Row(g.seq.params, g.context, g.paths[u]) for g in growing for u in g.frontier]
        drawn = [g for g in growing if self._draws_for(g.seq)]
        laws: dict[int, Law] = {}
        if drawn:  # chains: one row each
            at = [i for i, g in enumerate(growing) if self._draws_for(g.seq)]
            found = build_laws(
                self._vocabulary.spread(logits_NU[at]), [rows[i] for i in at], masked=True
            )
            laws = {g.seq.id: law for g, law in zip(drawn, found, strict=True)}
        width = self._width
        ranked = iter(self._vocabulary.ranked(logits_NU, rows, width))
        for g in growing:
            best = [next(ranked) for _ in g.frontier]
            if g.seq.id in laws:
                self._draw(g, laws[g.seq.id])
                continue
            added = []
            for node, pairs in zip(g.frontier, best, strict=True):
                added += [g.add(node, t, g.scores[node] + score) for t, score in pairs]
            added.sort(key=lambda u: (-g.scores[u], u))
            open_ends = [u for u in added if g.tokens[u] not in g.seq.end_ids]
            g.frontier = sorted(open_ends[:width])

    def _draws_for(self, seq: Sequence) -> bool:
        return self._sampled and not seq.params.greedy

    def _draw(self, g: _Growing, law: Law) -> None:
        """One more token of a sampled chain."""
        node, g.frontier = g.frontier[0], []
        if not self._vocabulary.usable(law):
            return
        depth = len(g.tokens) - 1
        token, drawn = next_token(law, g.seq, depth)
        if drawn:
            g.laws.append(law)
        child = g.add(node, token, 0.0)
        if g.tokens[child] not in g.seq.end_ids:
            g.frontier = [child]

    def _feed(self, growing: Seq[_Growing]) -> None:
        """The rows of the new frontier: each sees the committed rows, its ancestors, itself."""
        parts, tokens, positions, features = [], [], [], []
        for g in growing:
            base, used, n = g.state.cache.rows, len(g.slots), len(g.frontier)
            unbranched = n == 1 and used == len(g.paths[g.frontier[0]]) - 1
            above = [[base + s for s in sorted(g.above(node))] for node in g.frontier]
            parts.append(Part(g.state.cache, base + used, n, n, None if unbranched else above))
            for i, node in enumerate(g.frontier):
                tokens.append(g.tokens[node])
                positions.append(base + len(g.paths[node]) - 1)
                features.append(g.hidden[g.parents[node]])
                g.slots[node] = used + i
        hidden = iter(self._runner.run(parts, tokens, torch.stack(features), positions))
        for g in growing:
            for node in g.frontier:
                g.hidden[node] = next(hidden)

    def _tree(self, seq: Sequence, g: _Growing | None) -> TokenTree:
        if g is None or len(g.tokens) == 1:
            return chain(seq.tokens[-1])
        if self.shape is None:
            return chain(seq.tokens[-1], g.tokens[1:], g.laws or None)
        return best_paths(g.tokens, g.parents, g.scores, min(self.shape.nodes, g.budget))

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        taps_TND = stack(output.taps, self.taps)
        found = committed_rows(seqs, trees, output, verdicts, ended=True)
        for seq, rows in zip(seqs, found, strict=True):
            if seq.finish_reason is FinishReason.ERROR:  # its states are not to be trusted
                self._states.pop(seq.id, None)
                continue
            if not rows or seq.params.k == 0:  # k = 0: it never proposes
                continue
            state = self._states.get(seq.id)
            if state is None:
                state = self._states[seq.id] = self._begin(seq, seq.computed - len(rows))
            if seq.done:  # the verdict went beyond its end
                rows = rows[: seq.computed - state.known]
            assert state.known + len(rows) == seq.computed, "a drafter missed a position"
            state.add(taps_TND, rows)

    def _begin(self, seq: Sequence, start: int) -> State:
        """start: so many tokens of a cached beginning are not computed again."""
        remembered = self._ended.begin(seq, start)
        return remembered or State(seq.tokens, self._runner.new_cache(), start)

    def forget(self, seq_id: int) -> None:
        state = self._states.pop(seq_id, None)
        if state is not None:
            self._ended.add(state)

    def usage(self) -> DrafterUsage:
        rows = [-(-s.cache.rows // self._block_size) for s in self._states.values()]
        cached = sum(s.cache.nbytes for s in self._states.values()) + self._ended.nbytes
        waiting: dict[int, int] = {}
        for state in self._states.values():
            waiting |= state.waiting.storages()
        return DrafterUsage(
            blocks_used=sum(rows),
            bytes_total=self._weight_bytes + cached + sum(waiting.values()),
        )
