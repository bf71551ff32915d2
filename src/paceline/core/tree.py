"""Proposals as trees of tokens. Legend: N nodes, V vocabulary."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

from paceline.core.law import Law, PointLaw


class Proposal(enum.StrEnum):
    """How the tokens of a tree came about."""

    DELTA = "delta"  # chosen deterministically
    SAMPLED = "sampled"  # drawn from the tree's laws, siblings without replacement
    REPLACED = "sampled_with_replacement"  # drawn from the tree's laws, siblings independently


@dataclass(frozen=True)
class TokenTree:
    """A proposal of N - 1 tokens below the last committed one.

    tokens[0] is the last committed token, whose key and value are not computed yet;
    parents[0] == -1 and parents[i] < i. Siblings stand in the order in which they were
    drawn. For sampled proposals `laws[u]` is the law that node u's first child was really
    drawn from (later siblings: that law without the earlier ones, or the same law again
    under REPLACED); None where u has no children.
    A chain is a tree; plain decoding is a tree of one node.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    proposal: Proposal = Proposal.DELTA
    laws: tuple[Law | None, ...] | None = None

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if n == 0 or len(self.parents) != n or self.parents[0] != -1:
            raise ValueError("a tree needs one parent per token and a root with parent -1")
        if any(not 0 <= p < i for i, p in enumerate(self.parents) if i):
            raise ValueError(f"every parent must come before its child, got {self.parents}")
        if self.proposal is not Proposal.REPLACED:
            edges = set(zip(self.parents[1:], self.tokens[1:], strict=True))
            if len(edges) != n - 1:
                raise ValueError(
                    "siblings must be different tokens; draws with replacement are "
                    "Proposal.REPLACED"
                )
        if self.proposal is Proposal.DELTA:
            if self.laws is not None:
                raise ValueError("a deterministic proposal has no sampled laws")
            return
        if self.laws is None or len(self.laws) != n:
            raise ValueError("a sampled proposal needs the law of every node's children")
        if any(self.laws[u] is None for u in self.parents[1:]):
            raise ValueError("a node with children lacks the law they were drawn from")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Node ids of each node's children, in drawing order."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for i, p in enumerate(self.parents):
            if i:
                lists[p].append(i)
        return tuple(tuple(c) for c in lists)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0] * len(self.tokens)
        for i, p in enumerate(self.parents):
            if i:
                depths[i] = depths[p] + 1
        return tuple(depths)

    @cached_property
    def is_chain(self) -> bool:
        return all(p == i - 1 for i, p in enumerate(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """Node ids from the root's child down to `node` (empty for the root)."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def law(self, node: int) -> Law:
        """The law that the children of `node` were drawn from (sampled proposals)."""
        law = self.laws[node] if self.laws is not None else None
        assert law is not None
        return law

    def first_law(self, child: int) -> Law:
        """The law of a node's first child: drawn, or a point mass where it was chosen."""
        if self.proposal is Proposal.DELTA:
            return PointLaw(self.tokens[child], self.tokens[child] + 1)
        return self.law(self.parents[child])

    def next_law(self, law: Law, refused: int, child: int) -> Law:
        """The law that `child` was drawn from, after its elder sibling `refused` came from
        `law`: the same one (with replacement), or that one without the refused token."""
        if self.proposal is Proposal.DELTA:
            return self.first_law(child)
        if self.proposal is Proposal.REPLACED:
            return law
        left = law.without(self.tokens[refused])
        if left is None:
            raise ValueError(
                f"node {child} can't have been drawn without replacement: its elder siblings "
                "are the law's whole support"
            )
        return left


def chain(
    root: int,
    tokens: Seq[int] = (),
    laws: Seq[Law] | None = None,
) -> TokenTree:
    """A chain below `root`; `laws[i]` is what `tokens[i]` was drawn from, None for Delta."""
    parents = tuple(range(-1, len(tokens)))
    if laws is None or not tokens:
        return TokenTree((root, *tokens), parents)
    return TokenTree((root, *tokens), parents, Proposal.SAMPLED, (*laws, None))


def best_paths(tokens: Seq[int], parents: Seq[int], scores: Seq[float], size: int) -> TokenTree:
    """The tree of the `size` best nodes of a larger one, the root aside; among equals the
    first. A parent's score must be its child's at least, so that the choice is a tree
    (EAGLE-2, Li et al. 2024, section 4.2)."""
    nodes = sorted(range(1, len(tokens)), key=lambda u: (-scores[u], u))
    chosen = [0, *sorted(nodes[:size])]
    place = {u: i for i, u in enumerate(chosen)}
    return TokenTree(
        tuple(tokens[u] for u in chosen),
        (-1, *(place[parents[u]] for u in chosen[1:])),
    )
