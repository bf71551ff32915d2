"""Keyed uniforms: uniform, independent of each other, and enough for whole generations.

Seeds are fixed, so these tests give the same result every time; the false-alarm odds are
those that the seeds had when they were chosen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import chi2

from paceline.core.draws import KeyedDraws, Purpose, derive_seed, uniform
from paceline.core.law import Law, draw_siblings
from paceline.core.rules import (
    AcceptanceRule,
    BlockVerification,
    RecursiveRejection,
    TokenRejection,
    TraversalVerification,
    Walk,
)
from paceline.core.tree import Proposal, TokenTree
from paceline.proof import worlds
from paceline.proof.judge import target_laws
from paceline.proof.worlds import World

N = 20_000
SERIES: dict[str, Callable[[int], float]] = {
    "positions": lambda i: uniform(7, i, Purpose.ACCEPT),
    "indices": lambda i: uniform(7, 3, Purpose.ACCEPT, i),
    "seeds": lambda i: uniform(i, 3, Purpose.ACCEPT),
    "high seeds": lambda i: uniform(2**64 - 1 - i, 3, Purpose.TARGET),
    "draft": lambda i: uniform(7, i, Purpose.DRAFT),
    "residual": lambda i: uniform(7, i, Purpose.RESIDUAL),
    "target": lambda i: uniform(7, i, Purpose.TARGET),
    "samples of a request": lambda i: uniform(derive_seed(7, i), 3, Purpose.TARGET),
}


@pytest.mark.parametrize("name", SERIES)
def test_each_series_is_uniform(name: str) -> None:
    """Chi-square over 64 cells at 1e-8: false-alarm odds under 1e-7 for all series."""
    values = np.array([SERIES[name](i) for i in range(N)])
    assert values.min() >= 0.0
    assert values.max() < 1.0
    counts = np.histogram(values, bins=64, range=(0.0, 1.0))[0]
    statistic = float(((counts - N / 64) ** 2 / (N / 64)).sum())
    assert statistic < chi2.isf(1e-8, 63)


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(SERIES, 2)), ids=lambda p: " and ".join(p)
)
def test_series_are_independent(pair: tuple[str, str]) -> None:
    """Joint chi-square over 8 x 8 cells at 1e-9, of equal and of neighbouring terms: false-
    alarm odds under 1e-7 for all pairs."""
    # Terms 1.. of each: term 0 of "samples of a request" is by design that of "target".
    a, b = (np.array([SERIES[name](i) for i in range(11, N + 12)]) for name in pair)
    for first, second in ((a[1:], b[1:]), (a[1:], b[:-1]), (a[:-1], b[1:])):
        counts = np.histogram2d(first, second, bins=8, range=((0, 1), (0, 1)))[0]
        statistic = float(((counts - N / 64) ** 2 / (N / 64)).sum())
        assert statistic < chi2.isf(1e-9, 63)


def test_neighbours_are_independent() -> None:
    """Lag-one correlations within 6 standard errors: false-alarm odds 2e-9 each, under
    2e-8 for all series."""
    for series in SERIES.values():
        values = np.array([series(i) for i in range(N)])
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 6.0 / np.sqrt(N)


def test_no_two_keys_share_a_uniform() -> None:
    """46,080 keys of neighbouring seeds, positions, purposes and indices: odds of a chance
    collision among 53-bit values 1.2e-7."""
    keys = itertools.product(range(8), range(24), Purpose, range(60))
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(values) == 46_080


def test_equal_keys_give_equal_values() -> None:
    assert uniform(1, 2, Purpose.DRAFT, 3) == uniform(1, 2, Purpose.DRAFT, 3)
    assert derive_seed(9, 0) == 9
    assert len({derive_seed(9, i) for i in range(1000)}) == 1000


def test_flips_at_the_ends() -> None:
    """Never at probability 0 and always at 1, whatever the uniform."""
    for i in range(1000):
        draws = KeyedDraws(1, i)
        assert not draws.flip(0.0, i)
        assert draws.flip(1.0, i)


# --- whole generations: no uniform is used twice, and the joint law is the target's ------


@dataclass(frozen=True)
class Recording(KeyedDraws):
    """Notes the key of every uniform that decides something."""

    used: Counter[tuple[int, Purpose, int]]

    def flip(self, probability: float, index: int) -> bool:
        self.used[self.position, Purpose.ACCEPT, index] += 1
        return super().flip(probability, index)

    def residual(self, law: Law, index: int = 0) -> int:
        self.used[self.position, Purpose.RESIDUAL, index] += 1
        return super().residual(law, index)

    def target(self, law: Law, depth: int) -> int:
        self.used[self.position + depth, Purpose.TARGET, 0] += 1
        return super().target(law, depth)

    def draft(self, index: int) -> float:
        self.used[self.position, Purpose.DRAFT, index] += 1
        return super().draft(index)


class SharedWithDraft(KeyedDraws):
    """Fault: acceptance draws from the draft's stream."""

    def flip(self, probability: float, index: int) -> bool:
        return self.draft(index) < probability


class KeyedByToken(KeyedDraws):
    """Fault: the flip of a drafted token is keyed by that token's own position, so that the
    next round sees uniforms again on which this round's outcome depended."""

    def flip(self, probability: float, index: int) -> bool:
        return uniform(self.seed, self.position + index, Purpose.ACCEPT) < probability


LENGTH = 4
WIDTHS = {"chain": (1, 1, 1), "tree": (2, 1)}


def draft(world: World, context: tuple[int, ...], widths: tuple[int, ...], d: KeyedDraws):  # type: ignore[no-untyped-def]
    """A tree drawn from the world's q, with its own laws."""
    paths, parents, drawn = [()], [-1], 0
    for node, s in enumerate(paths):
        if len(s) < min(len(widths), LENGTH - len(context) - 1):
            us = [d.draft(drawn + j) for j in range(widths[len(s)])]
            drawn += len(us)
            for token in draw_siblings(world.q[(*context, *s)], us):
                paths.append((*s, token))
                parents.append(node)
    inner = set(parents)
    laws = tuple(world.q[(*context, *s)] if u in inner else None for u, s in enumerate(paths))
    tokens = (0, *(s[-1] for s in paths[1:]))
    if len(paths) == 1:
        return TokenTree(tokens, tuple(parents))
    return TokenTree(tokens, tuple(parents), Proposal.SAMPLED, laws)


def generate(
    world: World, rule: AcceptanceRule, widths: tuple[int, ...], make: Callable[[int], KeyedDraws]
) -> tuple[int, ...]:
    """LENGTH tokens in as many rounds as it takes; positions count from the start."""
    tokens: tuple[int, ...] = ()
    while len(tokens) < LENGTH:
        draws = make(len(tokens))
        tree = draft(world, tokens, widths, draws)
        below = World(
            world.size,
            world.q_size,
            world.depth,
            {s[len(tokens) :]: law for s, law in world.p.items() if s[: len(tokens)] == tokens},
            world.q,
        )
        verdict = rule.accept(tree, target_laws(below, tree), draws)
        tokens = (*tokens, *verdict.emitted(tree))
    return tokens


def surprise(
    rule: AcceptanceRule, shape: str, kind: type[KeyedDraws], count: int = 15_000
) -> float:
    """Chi-square p-value of the joint of LENGTH tokens against the target's."""
    world = worlds.dirichlet(np.random.default_rng(33), 2, LENGTH)
    seen = Counter(
        generate(world, rule, WIDTHS[shape], lambda at, seed=seed: kind(seed, at))
        for seed in range(count)
    )
    statistic, cells = 0.0, 0
    for s in itertools.product(range(2), repeat=LENGTH):
        p = float(np.prod([world.p[s[:i]].probability(s[i]) for i in range(LENGTH)]))
        if p == 0.0:
            assert seen[s] == 0
            continue
        statistic += (seen[s] - count * p) ** 2 / (count * p)
        cells += 1
    return float(chi2.sf(statistic, cells - 1))


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (Walk(), "chain"),
        (TokenRejection(), "chain"),
        (BlockVerification(), "chain"),
        (RecursiveRejection(), "tree"),
        (TraversalVerification(), "tree"),
    ],
    ids=lambda v: v if isinstance(v, str) else v.name,
)
def test_generations_of_several_rounds_follow_the_target(rule: AcceptanceRule, shape: str) -> None:
    """15,000 generations of four tokens at 1e-7: false-alarm odds 5e-7 for all rules."""
    assert surprise(rule, shape, KeyedDraws) > 1e-7


@pytest.mark.parametrize("kind", [SharedWithDraft, KeyedByToken])
def test_shared_uniforms_are_caught(kind: type[KeyedDraws]) -> None:
    """A sound stream would pass for a fault with odds 1e-7 each."""
    assert surprise(BlockVerification(), "chain", kind, 6_000) < 1e-7


@pytest.mark.parametrize("rule", [Walk(), TokenRejection(), BlockVerification(),
                                  TraversalVerification()], ids=lambda r: r.name)  # fmt: skip
def test_no_uniform_decides_twice(rule: AcceptanceRule) -> None:
    """Over whole generations, draft included: each key is used once."""
    world = worlds.dirichlet(np.random.default_rng(33), 2, LENGTH)
    for seed in range(300):
        used: Counter[tuple[int, Purpose, int]] = Counter()
        generate(world, rule, (1, 1, 1), lambda at, s=seed, u=used: Recording(s, at, u))
        assert max(used.values()) == 1
