"""Shapes of static draft trees: how many children each node gets, before any is drawn.

A shape lists parents (node 0 is the root, parents come first); a node's rank is its place
among its siblings. Any prefix of the list is a shape too, so a smaller budget cuts the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, cached_property

from paceline.errors import UserError


@dataclass(frozen=True)
class TreeShape:
    """parents[0] == -1, parents[i] < i."""

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        ok = bool(self.parents) and self.parents[0] == -1
        if not ok or any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"not a tree in which parents come first: {self.parents}")

    @property
    def nodes(self) -> int:
        """Nodes below the root: what the target has to verify beside it."""
        return len(self.parents) - 1

    @cached_property
    def depth(self) -> int:
        depths = [0] * len(self.parents)
        for i, p in enumerate(self.parents):
            if i:
                depths[i] = depths[p] + 1
        return max(depths)

    def cut(self, nodes: int) -> TreeShape:
        """The first `nodes` nodes below the root."""
        return self if nodes >= self.nodes else TreeShape(self.parents[: nodes + 1])


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A tree that is shaped as it grows: the best `width` nodes of a level propose their best
    `width` children, for `depth` levels; of all, the best `nodes` are proposed (EAGLE-2, Li et
    al. 2024, section 4)."""

    nodes: int
    width: int = 4
    depth: int = 6

    @property
    def scratch(self) -> int:
        """Cache rows that growing it takes at most, whatever the budget is."""
        return self.width * self.depth

    def __post_init__(self) -> None:
        for name, most in (("nodes", 256), ("width", 64), ("depth", 64)):
            if not 1 <= getattr(self, name) <= most:
                raise UserError(
                    f"tree {name} = {getattr(self, name)} is out of range: use 1 to {most}"
                )


def parse_beam(text: str, most: int) -> Beam:
    """`60`, `60x10` or `60x10x8`: nodes (`most` at most), width and depth of a Beam, the others its
    defaults. UserError where it is none of these."""
    match = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?(?:x(\d{1,4}))?", text)
    if match is None:
        raise UserError(
            f"paths:{text} is not understood: write paths:12, or with width and depth paths:60x10x8"
        )
    nodes, *rest = (int(n) for n in match.groups() if n is not None)
    if not 1 <= nodes <= most:
        raise UserError(f"paths:{text} has {nodes} nodes: use 1 to {most} nodes in all")
    return Beam(nodes=nodes, **dict(zip(("width", "depth"), rest, strict=False)))


def level_widths(widths: Seq[int]) -> TreeShape:
    """Every node at depth d has widths[d] children: (3, 2) is 3 children with 2 each."""
    if not widths or any(w < 1 for w in widths):
        raise ValueError(f"tree widths {tuple(widths)} are out of range: use 1 or more a level")
    parents, level = [-1], [0]
    for width in widths:
        grown = []
        for node in level:
            for _ in range(width):
                grown.append(len(parents))
                parents.append(node)
        level = grown
    return TreeShape(tuple(parents))


def best_shape(accepted_by_rank: Seq[float], nodes: int, max_depth: int = 8) -> TreeShape:
    """The shape of `nodes` nodes with the largest expected number of accepted tokens, where
    the child of rank i is accepted with probability accepted_by_rank[i], wherever it stands
    (Sequoia, Chen et al. 2024, section 3.1, with bounded depth).

    c(d, n) = 1 + max over sum(a_i) = n - 1 of sum_i r_i c(d - 1, a_i)
    """
    rates = tuple(accepted_by_rank)
    if nodes < 1 or max_depth < 1 or not rates or any(not 0.0 <= r <= 1.0 for r in rates):
        raise ValueError("need 1 node or more, 1 level or more, and rates between 0 and 1")

    @cache
    def value(depth: int, n: int) -> float:
        """Expected tokens of a subtree of n nodes, its top one (accepted) included."""
        if n <= 1 or depth == 0:
            return float(min(n, 1))
        return 1.0 + children(depth, 0, n - 1)[0]

    @cache
    def children(depth: int, rank: int, left: int) -> tuple[float, int]:
        """Best value of `left` nodes below children of this rank and later ones, and how
        many of them the child of this rank takes."""
        if left == 0 or rank == len(rates):
            return 0.0, 0
        best = (0.0, 0)
        for take in range(1, left + 1):
            own = rates[rank] * value(depth - 1, take)
            total = own + children(depth, rank + 1, left - take)[0]
            if total > best[0] + 1e-12:
                best = (total, take)
        return best

    # Lay the best tree out level by level, so that a cut keeps the upper levels.
    parents, level = [-1], [(0, max_depth, nodes + 1)]
    while level:
        grown = []
        for node, depth, size in level:
            left, rank = size - 1, 0
            while depth > 0 and left > 0 and rank < len(rates):
                take = children(depth, rank, left)[1]
                if take == 0:
                    break
                grown.append((len(parents), depth - 1, take))
                parents.append(node)
                left, rank = left - take, rank + 1
        level = grown
    return TreeShape(tuple(parents))


def expected_accepted(shape: TreeShape, accepted_by_rank: Seq[float]) -> float:
    """Expected accepted tokens of a shape under the same assumption."""
    reach, ranks, total = [1.0], [0] * len(shape.parents), 0.0
    for parent in shape.parents[1:]:
        rank = ranks[parent]
        ranks[parent] += 1
        rate = accepted_by_rank[rank] if rank < len(accepted_by_rank) else 0.0
        reach.append(reach[parent] * rate)
        total += reach[-1]
    return total
