"""Helpers of the mutation tests: worlds to judge in, and faults planted in source text."""

from __future__ import annotations

import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator

import numpy as np

from paceline.core.rules import AcceptanceRule
from paceline.core.tree import TokenTree
from paceline.proof import worlds
from paceline.proof.drafts import Drafting, SampledTree
from paceline.proof.judge import Drafts, judge
from paceline.proof.worlds import World

CHAIN = SampledTree((1, 1))
LONG = SampledTree((1, 1, 1))
TREE = SampledTree((2, 1))
WIDE = SampledTree((3,))
RAGGED = SampledTree((2, 1), stop_below=0.35)
REPLACED = SampledTree((2, 1), replacement=True)

Makers = tuple[worlds.Maker, ...]
RANDOM: Makers = (worlds.dirichlet, worlds.close)

#: What the sound version stays under, and a planted fault must exceed, in the same worlds.
SOUND, CAUGHT = 1e-12, 1e-3


def some_worlds(depth: int, makers: Makers = RANDOM, size: int = 3) -> Iterator[World]:
    for case in range(12):
        yield makers[case % len(makers)](np.random.default_rng((21, case)), size, depth)


def worst(
    rule: AcceptanceRule,
    drafting: Drafting,
    makers: Makers = RANDOM,
    *,
    drafts: Callable[[World], Drafts] | None = None,
    seen: Callable[[World], World] | None = None,
    shared: bool = False,
) -> float:
    """The largest error over a dozen worlds; infinite where a promise is broken."""
    errors = []
    for world in some_worlds(drafting.depth, makers):
        try:
            found = judge(
                rule,
                drafting,
                world,
                drafts=drafts(world) if drafts else None,
                seen=seen(world) if seen else None,
                spans=draft_spans if shared else None,
            )
        except AssertionError:
            return math.inf
        errors.append(found.max_abs_error)
    return max(errors)


def planted(module: types.ModuleType, rule: str, *edits: tuple[str, str]) -> AcceptanceRule:
    """The rule class of a copy of `module` whose source is edited."""
    source = inspect.getsource(module)
    for old, new in edits:
        assert source.count(old) == 1, f"the place of the fault has moved: {old!r}"
        source = source.replace(old, new)
    name = f"{module.__name__}_faulty"
    faulty = types.ModuleType(name)
    sys.modules[name] = faulty  # dataclasses look their module up
    try:
        exec(compile(source, name, "exec"), faulty.__dict__)
    finally:
        del sys.modules[name]
    made: AcceptanceRule = getattr(faulty, rule)()
    return made


def draft_spans(tree: TokenTree) -> dict[int, tuple[float, float]]:
    """The uniform of flip i where it is also the one that drew the chain's token i + 1."""
    spans = {}
    for i in range(1, len(tree)):
        law, x = tree.law(i - 1), tree.tokens[i]
        low = math.fsum(law.probability(y) for y in range(x))
        spans[i - 1] = (low, low + law.probability(x))
    return spans
