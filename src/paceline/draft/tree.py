"""A smaller language model that proposes trees.

Static shapes with siblings sampled without replacement (SpecInfer, Miao et al. 2023;
Sequoia, Chen et al. 2024) or chosen as the most probable tokens, and the most probable
paths (EAGLE-2, Li et al. 2024, section 4). Legend: R rows, U the draft's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from paceline.core.draws import KeyedDraws
from paceline.core.law import Law, PointLaw, WeightLaw, draw_siblings
from paceline.core.rules import Verdict
from paceline.core.shapes import Beam, TreeShape
from paceline.core.tree import Proposal, TokenTree, best_paths, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.cache import DraftCache, Feed
from paceline.draft.coupling import coupled
from paceline.draft.health import DraftHealth
from paceline.draft.vocabulary import Vocabulary, room
from paceline.errors import UserError
from paceline.models.base import TargetOutput
from paceline.sampling.context import Context, Row, context_of
from paceline.sampling.law import build_laws
from paceline.types import SamplingParams, Sequence


@dataclass
class _Growing:
    """A tree in the making; node 0 is the root. fed: the draft's own committed tokens;
    laws[u]: what node u's children were drawn from; scores: log-probability of the path."""

    seq: Sequence
    params: SamplingParams
    context: Context | None
    fed: list[int]
    shape: TreeShape | None
    budget: int
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    paths: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    scores: list[float] = field(default_factory=lambda: [0.0])
    laws: dict[int, Law] = field(default_factory=dict)
    frontier: list[int] = field(default_factory=lambda: [0])
    slots: dict[int, int] = field(default_factory=lambda: {0: 0})

    def add(self, parent: int, token: int, score: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append((*self.paths[parent], token))
        self.scores.append(score)
        return len(self.tokens) - 1


class TreeDrafter:
    """Trees from a draft model, grown level by level.

    shape: a static shape, or a `Beam` of the most probable paths. sampled: draw siblings
    without replacement where the request samples (static shapes only); otherwise, at
    temperature 0, and where the request's text must not depend on budgets
    (`draft.coupling`), the most probable tokens are taken. Earlier levels are fed again with
    each new one, as scratch: a draft pass costs about the same for a few rows more.
    """

    name = "tree"
    blind = True
    taps: tuple[int, ...] = ()

    def __init__(
        self,
        cache: DraftCache,
        vocabulary: Vocabulary,
        shape: TreeShape | Beam,
        *,
        sampled: bool = True,
    ) -> None:
        if sampled and isinstance(shape, Beam):
            raise UserError("the most probable paths are chosen, not sampled: use a static shape")
        self.cache = cache
        self.shape = shape
        self._vocabulary = vocabulary
        self._sampled = sampled
        self._health = DraftHealth()

    def example(self, greedy: bool) -> TokenTree:
        if greedy or not self._sampled:
            return TokenTree((0, 0, 1), (-1, 0, 0))
        law = WeightLaw(torch.ones(2))
        return TokenTree((0, 0, 1), (-1, 0, 0), Proposal.SAMPLED, (law, None, None))

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return self.cache.arm(self.name, seq, tree_nodes=self.shape.nodes)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        growing: dict[int, _Growing] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            if budget == 0:
                continue
            fed = list(self._vocabulary.context(seq.tokens))
            budget = room(self._vocabulary, fed, seq.tokens, budget)
            shape = self.shape.cut(budget) if isinstance(self.shape, TreeShape) else None
            depth = shape.depth if shape is not None else min(self._beam.depth, budget)
            if not fed or budget == 0 or len(fed) + depth > self.cache.max_context:
                continue
            self.cache.roll_back(seq.id, fed)
            params = seq.params if self._draws_for(seq) else _ranking(seq.params)
            growing[seq.id] = _Growing(
                seq, params, context_of(seq), fed, shape, budget, [seq.tokens[-1]]
            )
        level = 0
        active = list(growing.values())
        while active:
            self._grow(active)
            level += 1
            active = [g for g in active if g.frontier and self._goes_on(g, level)]
        return [self._tree(seq, growing.get(seq.id)) for seq in seqs]

    @property
    def _beam(self) -> Beam:
        assert isinstance(self.shape, Beam)
        return self.shape

    def _draws_for(self, seq: Sequence) -> bool:
        return self._sampled and not seq.params.greedy and not coupled(seq.params)

    def _goes_on(self, g: _Growing, level: int) -> bool:
        return g.shape is not None or level < min(self._beam.depth, g.budget)

    def _grow(self, growing: list[_Growing]) -> None:
        """One level: the laws of the frontier's nodes, and their children."""
        logits_RU = self.cache.feed([self._feed(g) for g in growing])
        rows = [Row(g.params, g.context, g.paths[u]) for g in growing for u in g.frontier]
        laws = iter(build_laws(self._vocabulary.logits(logits_RU), rows, masked=True))
        for g in growing:
            found = {u: next(laws) for u in g.frontier}
            usable = {u: law for u, law in found.items() if self._health.usable(law)}
            if g.shape is None:
                self._expand_best(g, usable)
            else:
                self._expand_shape(g, usable, g.shape)

    def _feed(self, g: _Growing) -> Feed:
        """All nodes whose children are needed, or that lie above such a node."""
        if g.frontier == [0]:
            return Feed(g.seq.id, g.fed)
        needed: set[int] = set()
        for node in g.frontier:
            while node and node not in needed:
                needed.add(node)
                node = g.parents[node]
        order = sorted(needed)
        place = {node: i for i, node in enumerate(order)}
        return Feed(
            g.seq.id,
            g.fed,
            of_last=False,
            scratch=[self._own(g.tokens[u]) for u in order],
            parents=[place.get(g.parents[u], -1) for u in order],
            wanted=[place[u] for u in g.frontier],
        )

    def _own(self, token: int) -> int:
        own = self._vocabulary.own(token)
        assert own is not None
        return own

    def _expand_shape(self, g: _Growing, laws: dict[int, Law], shape: TreeShape) -> None:
        """The children that the shape gives each node of the frontier. Nodes are numbered
        as they come, and `slots` says which node of the shape each one fills."""
        counts: dict[int, list[int]] = {}
        for i, parent in enumerate(shape.parents):
            counts.setdefault(parent, []).append(i)
        frontier = []
        draws = KeyedDraws(g.seq.seed, len(g.seq.tokens))
        for node, law in laws.items():
            places = counts.get(g.slots[node], [])
            if self._draws_for(g.seq):
                # A place of the shape is a stream of its own: no two nodes share a uniform.
                tokens = draw_siblings(law, [draws.draft(i) for i in places])
                g.laws[node] = law
            else:
                tokens = tuple(t for t, _ in best_tokens(law, len(places)))
            for token, place in zip(tokens, places, strict=False):
                child = g.add(node, token, 0.0)
                g.slots[child] = place
                if place in counts and self._can_grow(g, child):
                    frontier.append(child)
        g.frontier = frontier

    def _expand_best(self, g: _Growing, laws: dict[int, Law]) -> None:
        """The best children of each node; the best of the new level go on."""
        width = self._beam.width
        added = []
        for node, law in laws.items():
            for token, probability in best_tokens(law, width):
                added.append(g.add(node, token, g.scores[node] + math.log(probability)))
        added.sort(key=lambda u: (-g.scores[u], u))
        g.frontier = sorted([u for u in added if self._can_grow(g, u)][:width])

    def _can_grow(self, g: _Growing, node: int) -> bool:
        """Whether anything may follow a node, and the draft can be told of it."""
        token = g.tokens[node]
        return token not in g.seq.end_ids and self._vocabulary.own(token) is not None

    def _tree(self, seq: Sequence, g: _Growing | None) -> TokenTree:
        if g is None or len(g.tokens) == 1:
            return chain(seq.tokens[-1])
        if g.shape is not None:
            if not self._draws_for(seq):
                return TokenTree(tuple(g.tokens), tuple(g.parents))
            laws = tuple(g.laws.get(u) for u in range(len(g.tokens)))
            return TokenTree(tuple(g.tokens), tuple(g.parents), Proposal.SAMPLED, laws)
        return best_paths(g.tokens, g.parents, g.scores, min(self._beam.nodes, g.budget))

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        self.cache.settle(seqs, trees, self._vocabulary.context)

    def forget(self, seq_id: int) -> None:
        self.cache.forget(seq_id)

    def usage(self) -> DrafterUsage:
        return self.cache.usage()


@lru_cache(maxsize=256)
def _ranking(params: SamplingParams) -> SamplingParams:
    """Parameters whose law ranks tokens for a request: its own, but at temperature 0, where
    that law is a point, the draft's untempered one."""
    return replace(params, temperature=1.0, rule=None) if params.greedy else params


def best_tokens(law: Law, count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens and their probabilities, the most probable first;
    fewer where the support is smaller. Among equals the lower id comes first."""
    if isinstance(law, PointLaw):
        return [(law.token, 1.0)]
    probs_V = law.dense()
    # Equal probabilities: topk may take any, so look at a few more and order by id.
    top = probs_V.topk(min(count + 8, probs_V.shape[0]))
    pairs = sorted(zip(top.indices.tolist(), top.values.tolist(), strict=True), key=_by_rank)
    return [(t, p) for t, p in pairs[:count] if p > 0.0]


def _by_rank(pair: tuple[int, float]) -> tuple[float, int]:
    return (-pair[1], pair[0])
