"""Pairs of tiny language models, p and q, for the enumeration: random, edge, filtered.

A world gives every prefix its own pair of laws. Prefixes are tuples of tokens below the
last committed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.law import Law, PointLaw, WeightLaw
from paceline.proof.laws import ExactLaw
from paceline.sampling.filters import Filters, transform

Prefix = tuple[int, ...]
Table = npt.NDArray[np.float64]  # [prefixes, V]
NONSENSE = PointLaw(0, 1)
Maker = Callable[[np.random.Generator, int, int], "World"]


@dataclass(frozen=True)
class World:
    """p over `size` tokens for every prefix up to `depth` of them, q likewise.

    q's vocabulary may be larger or smaller (`q_size`). After a token that the target lacks,
    p is `NONSENSE`: rules may read it, but it must not matter.
    """

    size: int
    q_size: int
    depth: int
    p: dict[Prefix, Law]
    q: dict[Prefix, Law]

    def target(self, prefix: Prefix) -> Law:
        return self.p.get(prefix, NONSENSE)


def prefixes(size: int, depth: int) -> list[Prefix]:
    """All token strings of length 0 to depth."""
    return [s for length in range(depth + 1) for s in itertools.product(range(size), repeat=length)]


def world(p_table: Table, q_table: Table, depth: int, *, tensors: bool = False) -> World:
    """[prefixes, V] weights of p and q, rows in the order of `prefixes`."""
    make: Callable[[Table], Law] = (
        (lambda row: WeightLaw(torch.from_numpy(row.copy())))
        if tensors
        else (lambda row: ExactLaw(row.tolist()))
    )
    size, q_size = p_table.shape[1], q_table.shape[1]
    p = {s: make(row) for s, row in zip(prefixes(size, depth), p_table, strict=True)}
    q = {s: make(row) for s, row in zip(prefixes(q_size, depth), q_table, strict=True)}
    return World(size, q_size, depth, p, q)


def _table(rng: np.random.Generator, size: int, depth: int) -> Table:
    """Dirichlet rows; entries under a percent become 0 (`tiny` has the small ones)."""
    alpha = float(rng.choice([0.3, 1.0, 3.0]))
    table = rng.dirichlet(np.full(size, alpha), len(prefixes(size, depth)))
    table[table < 0.01] = 0.0
    return table


def _positive(rng: np.random.Generator, size: int, depth: int) -> Table:
    return rng.uniform(0.05, 1.0, (len(prefixes(size, depth)), size))


def dirichlet(rng: np.random.Generator, size: int, depth: int) -> World:
    return world(_table(rng, size, depth), _table(rng, size, depth), depth)


def tensors(rng: np.random.Generator, size: int, depth: int) -> World:
    """As `dirichlet`, on the float64 tensors of production."""
    return world(_table(rng, size, depth), _table(rng, size, depth), depth, tensors=True)


def close(rng: np.random.Generator, size: int, depth: int) -> World:
    """A good draft: most of q's mass is p's."""
    p = _table(rng, size, depth)
    mix = rng.random()
    return world(p, (1.0 - 0.3 * mix) * p + 0.3 * mix * _table(rng, size, depth), depth)


def equal(rng: np.random.Generator, size: int, depth: int) -> World:
    p = _table(rng, size, depth)
    return world(p, p, depth)


def disjoint(rng: np.random.Generator, size: int, depth: int) -> World:
    """No token that the draft proposes can come from the target (one prefix in two)."""
    p, q = _positive(rng, size, depth), _positive(rng, size, depth)
    rows = rng.random(len(p)) < 0.5
    split = int(rng.integers(1, size))
    p[np.ix_(rows, np.arange(split))] = 0.0
    q[np.ix_(rows, np.arange(split, size))] = 0.0
    return world(p, q, depth)


def zeros(rng: np.random.Generator, size: int, depth: int) -> World:
    """Random supports, down to a single token."""
    p, q = _positive(rng, size, depth), _positive(rng, size, depth)
    for table in (p, q):
        drop = rng.random(table.shape) < 0.45
        drop[np.arange(len(table)), rng.integers(0, size, len(table))] = False
        table[drop] = 0.0
    return world(p, q, depth)


def ties(rng: np.random.Generator, size: int, depth: int) -> World:
    """Small integer weights: equal probabilities, ratios of exactly one, zeros."""
    shape = (len(prefixes(size, depth)), size)
    p, q = rng.integers(0, 3, shape).astype(float), rng.integers(0, 3, shape).astype(float)
    for table in (p, q):
        table[table.sum(1) == 0.0] = 1.0
    return world(p, q, depth)


def tiny(rng: np.random.Generator, size: int, depth: int) -> World:
    """Probabilities from 1 down to 1e-30, and drafts that differ from p by rounding."""
    return world(*_tiny(rng, size, depth), depth)


def tiny_tensors(rng: np.random.Generator, size: int, depth: int) -> World:
    return world(*_tiny(rng, size, depth), depth, tensors=True)


def _tiny(rng: np.random.Generator, size: int, depth: int) -> tuple[Table, Table]:
    shape = (len(prefixes(size, depth)), size)
    p, q = 10.0 ** rng.uniform(-30.0, 0.0, shape), 10.0 ** rng.uniform(-30.0, 0.0, shape)
    same = rng.random(shape[0]) < 0.5
    q[same] = p[same] * (1.0 + 1e-15 * rng.normal(size=p[same].shape))
    return p, q


def ends(rng: np.random.Generator, size: int, depth: int) -> World:
    """Token 0 ends the sequence: after it the target emits nothing else, the draft may."""
    p, q = _positive(rng, size, depth), _positive(rng, size, depth)
    for row, s in enumerate(prefixes(size, depth)):
        if 0 in s:
            p[row] = np.eye(size)[0]
    return world(p, q, depth)


def larger(rng: np.random.Generator, size: int, depth: int) -> World:
    """The draft's vocabulary has a token that the target lacks."""
    return world(_table(rng, size, depth), _table(rng, size + 1, depth), depth)


def smaller(rng: np.random.Generator, size: int, depth: int) -> World:
    """The draft lacks the target's last token."""
    p = _table(rng, size, depth)
    return world(p, _table(rng, max(size - 1, 1), depth), depth)


def apply(logits: Table, filters: Filters) -> Table:
    """[prefixes, V] logits to weights, by production's transforms."""
    return transform(torch.from_numpy(logits), filters).numpy().astype(np.float64)


PLAIN = Filters()
FILTERS = (
    Filters(temperature=0.6),
    Filters(temperature=1.7),
    Filters(top_k=2),
    Filters(top_p=0.7),
    Filters(min_p=0.3),
    Filters(temperature=0.8, top_k=3, top_p=0.9, min_p=0.05),
)


def filtered(p_filter: Filters, q_filter: Filters) -> Maker:
    """Random logits through production's transforms, the same or different ones per side."""

    def make(rng: np.random.Generator, size: int, depth: int) -> World:
        shape = (len(prefixes(size, depth)), size)
        logits = rng.normal(0.0, 1.5, shape)
        q_logits = logits + rng.normal(0.0, rng.choice([0.3, 1.5]), shape)
        return world(apply(logits, p_filter), apply(q_logits, q_filter), depth)

    return make


GROUPS: dict[str, tuple[Maker, ...]] = {
    "random": (dirichlet, dirichlet, close, dirichlet, close, tensors),
    "edge": (equal, disjoint, zeros, ties, tiny, ends, larger, smaller, tiny_tensors),
    "filtered": (
        *(filtered(f, f) for f in FILTERS),
        *(filtered(f, PLAIN) for f in FILTERS),
        *(filtered(PLAIN, f) for f in FILTERS),
    ),
}
