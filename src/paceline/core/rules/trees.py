"""Rules for trees drawn from a law: recursive rejection and traversal verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.draws import Draws
from paceline.core.law import Law
from paceline.core.rules.base import Guarantee, Verdict, acceptance, origin_at, ratio, share
from paceline.core.tree import TokenTree


@dataclass(frozen=True)
class RecursiveRejection:
    """Offer a node's children one after the other, each against what the last one left.

    Child x, drawn from Q, is taken with min(1, P(x) / Q(x)); if not, P becomes
    norm(max(P - Q, 0)) and Q the law of the next draw (without x; the same with
    replacement; the next chosen token of a deterministic tree, which is EAGLE's rule).
    None taken: the target adds a token of P. SpecInfer (Miao et al. 2023, algorithm 2),
    without replacement as in Sequoia (Chen et al. 2024, algorithm 2).
    """

    name: ClassVar[str] = "recursive"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_SAMPLING

    def check(self, tree: TokenTree, greedy: bool) -> None:
        return None

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        path: list[int] = []
        node = 0
        while tree.children[node]:
            taken, p = self._offer(tree, node, laws[node], draws)
            if taken is None:
                return Verdict(tuple(path), draws.residual(p), origin_at(tree, node))
            path.append(taken)
            node = taken
        return Verdict(tuple(path), draws.target(laws[node], len(path)), origin_at(tree, node))

    @staticmethod
    def _offer(tree: TokenTree, node: int, p: Law, draws: Draws) -> tuple[int | None, Law]:
        """The child of `node` that is taken, if any, and what is left of the target's law."""
        children = tree.children[node]
        q = tree.first_law(children[0])
        for j, child in enumerate(children):
            if j:
                q = tree.next_law(q, children[j - 1], child)
            token = tree.tokens[child]
            if draws.flip(acceptance(p.probability(token), q.probability(token)), child - 1):
                return child, p
            # No mass left means that P and Q agree up to rounding: P itself is right.
            p = p.excess(q).law or p
        return None, p


@dataclass(frozen=True)
class TraversalVerification:
    """Judge leaves in depth-first order and cut those that fail, from the bottom up.

    A node's weight is a(child) = min(1, a(u) P_u(c) / Q_u(c)), a(root) = 1. The first leaf,
    with siblings in drawing order, is taken with its weight; the target then adds a token
    of P there. Otherwise it is cut, and at its parent u, with R = max(a(u) P_u - Q_u, 0)
    of mass S: a(u) <- S / (S + 1 - a(u)), P_u <- R / S, and Q_u becomes the law of the next
    draw. A parent whose children are all cut is a leaf. On a chain this is block
    verification. Traversal Verification (Weng et al. 2025, algorithm 1).

    Weights are computed on the way down, so those below a changed node are always current.
    A node of weight zero is cut with all that hangs below it.
    """

    name: ClassVar[str] = "traversal"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_SAMPLING

    def check(self, tree: TokenTree, greedy: bool) -> None:
        return None

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        weight = [1.0] * len(tree)
        cut = [0] * len(tree)  # how many of a node's children are cut
        p = list(laws)  # what is left of the target's law at each node
        q: dict[int, Law] = {}  # the law that a node's first uncut child was drawn from
        node = 0
        while True:
            while cut[node] < len(tree.children[node]) and weight[node] > 0.0:
                child = tree.children[node][cut[node]]
                q[node] = _drawn_from(tree, node, cut[node], q)
                x = tree.tokens[child]
                odds = ratio(p[node].probability(x), q[node].probability(x))
                weight[child] = min(1.0, weight[node] * odds)
                node = child
            if node == 0 or draws.flip(weight[node], node - 1):
                path = tree.path(node)
                law = p[node]
                token = draws.residual(law) if cut[node] else draws.target(law, len(path))
                return Verdict(path, token, origin_at(tree, node))
            node = tree.parents[node]
            cut[node] += 1
            mass, left = p[node].excess(q[node], weight[node])
            p[node] = left or p[node]  # none left: P and Q agree up to rounding
            weight[node] = share(mass, weight[node])


def _drawn_from(tree: TokenTree, node: int, index: int, q: dict[int, Law]) -> Law:
    """The law of a node's index-th child, after its elder siblings were refused."""
    children = tree.children[node]
    if index == 0:
        return tree.first_law(children[0])
    return tree.next_law(q[node], children[index - 1], children[index])
