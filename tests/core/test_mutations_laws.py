"""The proof can fail: classic faults in laws and drafts, planted one at a time, are caught.

As test_mutations.py, where the fault is not in the rule but in what it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from planting import CAUGHT, CHAIN, REPLACED, SOUND, TREE, WIDE, Makers, some_worlds, worst

from paceline.core.law import Excess, Law
from paceline.core.rules import (
    AcceptanceRule,
    BlockVerification,
    RecursiveRejection,
    TokenRejection,
    TraversalVerification,
)
from paceline.core.tree import Proposal, TokenTree
from paceline.proof import worlds
from paceline.proof.drafts import Drafting, Weighted
from paceline.proof.judge import Drafts
from paceline.proof.laws import ExactLaw
from paceline.proof.worlds import World
from paceline.sampling.filters import Filters

# --- faults in the laws -----------------------------------------------------------------


class SoftmaxedResidual(ExactLaw):
    """max(p - q, 0) passed through a softmax instead of being divided by its sum."""

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        left = [max(scale * v - q.probability(x), 0.0) for x, v in enumerate(self.probs)]
        return Excess(math.fsum(left), ExactLaw([math.exp(v) for v in left]))


class Unnormalised(ExactLaw):
    """Probabilities of a filtered law that were not divided by what the filter kept."""

    def __init__(self, kept: list[float]) -> None:
        super().__init__(kept)
        self.probs = tuple(kept)


def with_laws(world: World, p: type[ExactLaw]) -> World:
    return replace(world, p={s: p(list(law.dense().tolist())) for s, law in world.p.items()})


RULES = (TokenRejection, BlockVerification, RecursiveRejection, TraversalVerification)


@pytest.mark.parametrize("rule", RULES)
def test_a_softmaxed_residual_is_caught(rule: type[AcceptanceRule]) -> None:
    assert worst(rule(), CHAIN, seen=lambda w: with_laws(w, ExactLaw)) < SOUND
    assert worst(rule(), CHAIN, seen=lambda w: with_laws(w, SoftmaxedResidual)) > CAUGHT


def relabelled(drafting: Drafting, world: World, laws: World) -> Drafts:
    """Drafts of `world` that claim to be drawn from another world's laws."""
    moved = []
    for chance, tree in drafting.trees(world):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        claims = tuple(laws.q[s] if tree.children[u] else None for u, s in enumerate(paths))
        moved.append((chance, replace(tree, laws=claims)))
    return moved


NUCLEUS = Filters(temperature=0.7, top_k=2)
FILTERED: Makers = (worlds.filtered(NUCLEUS, NUCLEUS),)


def unfiltered(world: World) -> World:
    """The laws of the same logits before the filter (the same generator again)."""
    for case, other in enumerate(some_worlds(world.depth, FILTERED)):
        if other.p[()].dense().equal(world.p[()].dense()):
            maker = worlds.filtered(worlds.PLAIN, worlds.PLAIN)
            return maker(np.random.default_rng((21, case)), world.size, world.depth)
    raise AssertionError("no such world")


def unnormalised(world: World) -> World:
    """The laws of the filtered tokens, each still divided by the sum over all tokens."""
    raw = unfiltered(world)

    def kept(law: Law, full: Law) -> Unnormalised:
        keep = [law.probability(x) > 0.0 for x in range(law.size)]
        return Unnormalised([full.probability(x) * k for x, k in enumerate(keep)])

    return replace(
        world,
        p={s: kept(law, raw.p[s]) for s, law in world.p.items()},
        q={s: kept(law, raw.q[s]) for s, law in world.q.items()},
    )


@pytest.mark.parametrize("rule", RULES)
def test_transforms_on_one_side_only_are_caught(rule: type[AcceptanceRule]) -> None:
    made = rule()
    assert worst(made, CHAIN, FILTERED) < SOUND
    q_before = worst(made, CHAIN, FILTERED, drafts=lambda w: relabelled(CHAIN, w, unfiltered(w)))
    assert q_before > CAUGHT, "q taken before the filter"
    p_before = worst(made, CHAIN, FILTERED, seen=unfiltered)
    assert p_before > CAUGHT, "p taken before the filter"


@pytest.mark.parametrize("rule", RULES)
def test_a_missing_renormalisation_is_caught(rule: type[AcceptanceRule]) -> None:
    made = rule()
    q_sum = worst(made, CHAIN, FILTERED, drafts=lambda w: relabelled(CHAIN, w, unnormalised(w)))
    assert q_sum > CAUGHT, "q not divided by what the filter kept"
    assert worst(made, CHAIN, FILTERED, seen=unnormalised) > CAUGHT, "p likewise"


# --- faults in the draft ----------------------------------------------------------------


class Forgetful(TokenTree):
    """A tree drawn with replacement that says it was drawn without."""

    def next_law(self, law: Law, refused: int, child: int) -> Law:
        return law.without(self.tokens[refused]) or law


def forgetful(tree: TokenTree) -> TokenTree:
    if any(len({tree.tokens[c] for c in cs}) < len(cs) for cs in tree.children):
        return tree
    return Forgetful(tree.tokens, tree.parents, tree.proposal, tree.laws)


@pytest.mark.parametrize("rule", [RecursiveRejection, TraversalVerification])
def test_the_wrong_kind_of_siblings_is_caught(rule: type[AcceptanceRule]) -> None:
    made = rule()
    assert worst(made, REPLACED) < SOUND
    # Equal siblings would give the fault away by a zero in a denominator: only the others.
    as_without = worst(
        made,
        REPLACED,
        drafts=lambda w: [(v, forgetful(t)) for v, t in REPLACED.trees(w)],
    )
    assert as_without > CAUGHT, "with replacement, judged as without"
    as_with = worst(
        made,
        TREE,
        drafts=lambda w: [(v, replace(t, proposal=Proposal.REPLACED)) for v, t in TREE.trees(w)],
    )
    assert as_with > CAUGHT, "without replacement, judged as with"


@pytest.mark.parametrize("rule", [RecursiveRejection, TraversalVerification])
def test_siblings_out_of_drawing_order_are_caught(rule: type[AcceptanceRule]) -> None:
    """Siblings sorted by token, as a drafter might that merges candidates."""

    def by_token(tree: TokenTree) -> TokenTree:
        return replace(tree, tokens=(0, *sorted(tree.tokens[1:])))

    assert worst(rule(), WIDE) < SOUND
    moved = worst(rule(), WIDE, drafts=lambda w: [(v, by_token(t)) for v, t in WIDE.trees(w)])
    assert moved > CAUGHT


@dataclass(frozen=True)
class Dropped:
    """A chain whose last token is thrown away, before it is judged, where `drop` says so."""

    drop: Callable[[float, int, World], bool]
    name: str = "chain that drops its last token"
    depth: int = 2

    def trees(self, world: World) -> Weighted:
        for chance, tree in CHAIN.trees(world):
            last = tree.tokens[-1]
            if self.drop(tree.law(1).probability(last), last, world):
                assert tree.laws is not None
                yield (
                    chance,
                    TokenTree(
                        tree.tokens[:-1], tree.parents[:-1], tree.proposal, (tree.laws[0], None)
                    ),
                )
            else:
                yield chance, tree


@pytest.mark.parametrize("rule", RULES)
def test_dropping_a_drawn_token_is_caught(rule: type[AcceptanceRule]) -> None:
    never = Dropped(lambda v, x, w: False)
    unlikely = Dropped(lambda v, x, w: v < 0.35)
    foreign = Dropped(lambda v, x, w: x >= w.size)
    assert worst(rule(), never) < SOUND
    assert worst(rule(), unlikely) > CAUGHT, "dropped because it was improbable"
    assert worst(rule(), foreign, (worlds.larger,)) > CAUGHT, "dropped as not the target's"
