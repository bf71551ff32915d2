"""Every possible draft of a drafter in a tiny world, with its probability.

Node numbers run level by level, so they differ from depth-first order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from paceline.core.law import Law
from paceline.core.tree import Proposal, TokenTree
from paceline.proof.worlds import Prefix, World

Weighted = Iterator[tuple[float, TokenTree]]


class Drafting(Protocol):
    """How drafts come about. `depth` tokens at most below the root."""

    @property
    def name(self) -> str: ...

    @property
    def depth(self) -> int: ...

    def trees(self, world: World) -> Weighted:
        """(probability, draft) for all drafts; the probabilities sum to one."""
        ...


@dataclass(frozen=True)
class SampledTree:
    """`widths[d]` children for each node of depth d, drawn from q (fewer where q has fewer
    tokens). With `stop_below`, a node whose own probability was lower gets no children:
    the draft stops *after* an unlikely token, as Draft & Verify does."""

    widths: tuple[int, ...]
    replacement: bool = False
    stop_below: float = 0.0

    @property
    def name(self) -> str:
        how = " with replacement" if self.replacement else ""
        stop = ", stops after an unlikely token" if self.stop_below else ""
        if all(w == 1 for w in self.widths):
            return f"sampled chain k={self.depth}{stop}"
        return f"sampled tree {'x'.join(map(str, self.widths))}{how}{stop}"

    @property
    def depth(self) -> int:
        return len(self.widths)

    def trees(self, world: World) -> Weighted:
        return self._grow(world, [()], [-1], [1.0], 0, 1.0)

    def _grow(
        self,
        world: World,
        paths: list[Prefix],
        parents: list[int],
        chances: list[float],
        node: int,
        chance: float,
    ) -> Weighted:
        """Give `node` and all after it their children, in every possible way."""
        while node < len(paths) and (
            len(paths[node]) >= self.depth or chances[node] < self.stop_below
        ):
            node += 1
        if node == len(paths):
            yield chance, self._tree(world, paths, parents)
            return
        law = world.q[paths[node]]
        for part, tokens, each in _siblings(law, self.widths[len(paths[node])], self.replacement):
            yield from self._grow(
                world,
                [*paths, *((*paths[node], x) for x in tokens)],
                [*parents, *(node for _ in tokens)],
                [*chances, *each],
                node + 1,
                chance * part,
            )

    def _tree(self, world: World, paths: list[Prefix], parents: list[int]) -> TokenTree:
        tokens = (0, *(s[-1] for s in paths[1:]))
        if len(paths) == 1:
            return TokenTree(tokens, tuple(parents))
        proposal = Proposal.REPLACED if self.replacement else Proposal.SAMPLED
        inner = set(parents)
        laws = tuple(world.q[s] if u in inner else None for u, s in enumerate(paths))
        return TokenTree(tokens, tuple(parents), proposal, laws)


def _siblings(
    law: Law | None, width: int, replacement: bool
) -> Iterator[tuple[float, tuple[int, ...], tuple[float, ...]]]:
    """(probability of all, tokens, probability of each) of `width` draws in order."""
    if width == 0 or law is None:
        yield 1.0, (), ()
        return
    for x in range(law.size):
        v = law.probability(x)
        if v > 0.0:
            left = law if replacement else law.without(x)
            for part, tokens, each in _siblings(left, width - 1, replacement):
                yield v * part, (x, *tokens), (v, *each)


@dataclass(frozen=True)
class ChosenTree:
    """Deterministic: the `widths[d]` most probable tokens of q below each node."""

    widths: tuple[int, ...]

    @property
    def name(self) -> str:
        if all(w == 1 for w in self.widths):
            return f"chosen chain k={self.depth}" if self.widths else "nothing proposed"
        return f"chosen tree {'x'.join(map(str, self.widths))}"

    @property
    def depth(self) -> int:
        return len(self.widths)

    def trees(self, world: World) -> Weighted:
        paths: list[Prefix] = [()]
        parents = [-1]
        for node, s in enumerate(paths):  # grows while it is read
            if len(s) < self.depth:
                law = world.q[s]
                ranked = sorted(range(law.size), key=law.probability, reverse=True)
                for x in ranked[: self.widths[len(s)]]:
                    paths.append((*s, x))
                    parents.append(node)
        yield 1.0, TokenTree((0, *(s[-1] for s in paths[1:])), tuple(parents))


@dataclass(frozen=True)
class BestPaths:
    """Deterministic: the `nodes` most probable paths of q, at most `depth` long."""

    nodes: int
    depth: int

    @property
    def name(self) -> str:
        return f"{self.nodes} best paths, depth {self.depth}"

    def trees(self, world: World) -> Weighted:
        paths: list[Prefix] = []
        parents: list[int] = []
        heap: list[tuple[float, Prefix, int]] = [(-1.0, (), -1)]
        while heap and len(paths) <= self.nodes:
            weight, s, parent = heapq.heappop(heap)
            node = len(paths)
            paths.append(s)
            parents.append(parent)
            if len(s) < self.depth:
                law = world.q[s]
                for x in range(law.size):
                    heapq.heappush(heap, (weight * law.probability(x), (*s, x), node))
        yield 1.0, TokenTree((0, *(s[-1] for s in paths[1:])), tuple(parents))
