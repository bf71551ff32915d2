"""Rules that let the target speak and follow it through the tree: greedy match and walk."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.draws import Draws
from paceline.core.law import Law
from paceline.core.rules.base import Guarantee, Verdict, child_with, origin_at
from paceline.core.tree import TokenTree


@dataclass(frozen=True)
class GreedyMatch:
    """Descend while a child is the target's most probable token, then emit that token."""

    name: ClassVar[str] = "greedy"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_GREEDY

    def check(self, tree: TokenTree, greedy: bool) -> None:
        if not greedy:
            raise ValueError(
                "rule 'greedy' gives the target's argmax and can't serve temperature > 0; "
                "use 'walk' for deterministic proposals or 'block' for sampled ones"
            )

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            token = laws[node].mode()
            child = child_with(tree, node, token)
            if child is None:
                return Verdict(tuple(path), token, origin_at(tree, node))
            path.append(child)
            node = child


@dataclass(frozen=True)
class Walk:
    """Sample the target at each node and descend while the sample is a child.

    Every emitted token is a plain sample of the target's law, whatever was proposed and
    however. So this is exact for every proposal, and with draws keyed by position the
    output is token for token that of plain decoding. It accepts as much as any rule can
    where the proposal is deterministic; sampled proposals have better rules, because a
    walk accepts sum(p * q) of them where sum(min(p, q)) is possible.
    """

    name: ClassVar[str] = "walk"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_SAMPLING

    def check(self, tree: TokenTree, greedy: bool) -> None:
        return None

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        path: list[int] = []
        node = 0
        while True:
            token = draws.target(laws[node], len(path))
            child = child_with(tree, node, token)
            if child is None:
                return Verdict(tuple(path), token, origin_at(tree, node))
            path.append(child)
            node = child
