"""What every acceptance rule shares: guarantee, verdict, protocol, small helpers.

Rules are pure functions from a proposal and the target's laws to a verdict. They say what
they guarantee and which proposals they may judge; given anything else they raise
ValueError. `laws[u]` is the target's law after node u's path. Random choices come from a
`Draws`, so that the proof (`paceline prove`) runs these very functions.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

from paceline.core.draws import Draws
from paceline.core.law import Law
from paceline.core.tree import TokenTree


class Guarantee(enum.StrEnum):
    """What a complete algorithm promises; a combination has the weakest of its parts."""

    EXACT_SAMPLING = "exact_sampling"  # the output follows the target's law
    EXACT_GREEDY = "exact_greedy"  # the output is the target's argmax at every step
    APPROXIMATE = "approximate"

    @staticmethod
    def weakest(parts: Seq[Guarantee]) -> Guarantee:
        order = list(Guarantee)
        return max(parts, key=order.index)


class Origin(enum.StrEnum):
    """Who brought an emitted token."""

    ACCEPTED = "accepted"  # proposed by the draft and accepted
    REPLACEMENT = "replacement"  # the target's token where it refused the draft's
    BONUS = "bonus"  # the target's token after a path that was accepted to its end
    PLAIN = "plain"  # nothing was proposed


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root's child down; token: what the target adds."""

    path: tuple[int, ...]
    token: int
    origin: Origin

    def emitted(self, tree: TokenTree) -> tuple[int, ...]:
        return (*(tree.tokens[i] for i in self.path), self.token)


class AcceptanceRule(Protocol):
    """One method that decides; see the module's docstring. Frozen and stateless."""

    name: ClassVar[str]
    guarantee: ClassVar[Guarantee]

    def check(self, tree: TokenTree, greedy: bool) -> None:
        """ValueError where this rule can't judge such a proposal."""
        ...

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        """The accepted path and the target's token after it. Changes nothing.

        laws: one per node, the target's law after that node's path. At and below a node
        that can't be accepted (one outside the target's vocabulary, say) any law will do.
        """
        ...


def origin_at(tree: TokenTree, node: int) -> Origin:
    """The origin of the token that the target adds below `node`."""
    if len(tree) == 1:
        return Origin.PLAIN
    return Origin.REPLACEMENT if tree.children[node] else Origin.BONUS


def child_with(tree: TokenTree, node: int, token: int) -> int | None:
    """The first child of `node` that holds `token`."""
    return next((c for c in tree.children[node] if tree.tokens[c] == token), None)


def ratio(p_x: float, q_x: float) -> float:
    """p(x) / q(x) of a drafted token, not clipped; ValueError where q(x) = 0."""
    if q_x <= 0.0:
        raise ValueError(
            "a drafted token has probability 0 under the law it is said to come from; the "
            "proposal must carry the law that was really sampled"
        )
    return p_x / q_x


def acceptance(p_x: float, q_x: float) -> float:
    """min(1, p(x) / q(x)), the probability of taking a token drawn from q for one of p."""
    return min(1.0, ratio(p_x, q_x))


def share(mass: float, weight: float) -> float:
    """S / (S + 1 - P) with 0/0 -> 1: how likely block and traversal verification stop at a
    prefix of weight P that leaves mass S, given that nothing longer was taken."""
    return 1.0 if weight >= 1.0 else mass / (mass + (1.0 - weight))


def require_chain(tree: TokenTree, name: str) -> None:
    if not tree.is_chain:
        raise ValueError(
            f"rule {name!r} judges chains only; use 'traversal', 'recursive' or 'walk' for trees"
        )
