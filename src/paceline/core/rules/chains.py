"""Rules for chains drawn from a law: token rejection and block verification."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.draws import Draws
from paceline.core.law import Excess, Law, probabilities
from paceline.core.rules.base import (
    Guarantee,
    Verdict,
    acceptance,
    origin_at,
    ratio,
    require_chain,
    share,
)
from paceline.core.tree import TokenTree


@dataclass(frozen=True)
class TokenRejection:
    """Accept x with min(1, p(x) / q(x)); at the first rejection sample max(p - q, 0).

    Leviathan et al. 2022, algorithm 1; Chen et al. 2023, algorithm 2.
    """

    name: ClassVar[str] = "token"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_SAMPLING

    def check(self, tree: TokenTree, greedy: bool) -> None:
        require_chain(tree, self.name)

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        p_K, q_K = _drafted(tree, laws)
        last = len(tree) - 1
        for i in range(last):
            if not draws.flip(acceptance(p_K[i], q_K[i]), i):
                p = laws[i]
                # No mass left means that p and q agree up to rounding: p itself is right.
                left = p.excess(tree.first_law(i + 1)).law or p
                return Verdict(tuple(range(1, i + 1)), draws.residual(left), origin_at(tree, i))
        token = draws.target(laws[last], last)
        return Verdict(tuple(range(1, last + 1)), token, origin_at(tree, last))


@dataclass(frozen=True)
class BlockVerification:
    """Decide on the whole block: the longest prefix whose own flip comes up.

    With P_i = min(1, P_{i-1} p(X_i) / q(X_i)) and S_i = sum max(P_i p - q, 0) after X_i,
    prefix i is taken with h_i = S_i / (S_i + 1 - P_i), the whole chain with P_k; then the
    target adds a token of max(P_i p - q, 0), or of p after the whole chain. Optimal among
    exact rules that keep no memory between rounds (Sun et al. 2024, algorithm 2, theorem 2).

    Prefixes are asked from the longest down, because the longest one that says yes counts.
    So S_i is computed only after every longer prefix said no, and not where it can't
    matter: P_i = 1 always says yes, P_i = 0 never. The chain's length may depend on the
    drafted tokens themselves, as long as the last one is always included.
    """

    name: ClassVar[str] = "block"
    guarantee: ClassVar[Guarantee] = Guarantee.EXACT_SAMPLING

    def check(self, tree: TokenTree, greedy: bool) -> None:
        require_chain(tree, self.name)

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        last = len(tree) - 1
        reach = _prefix_weights(*_drafted(tree, laws))
        if last == 0 or draws.flip(reach[last], last - 1):
            token = draws.target(laws[last], last)
            return Verdict(tuple(range(1, last + 1)), token, origin_at(tree, last))
        for i in range(last - 1, 0, -1):
            if reach[i] == 0.0:
                continue
            rest = None if reach[i] == 1.0 else laws[i].excess(tree.first_law(i + 1), reach[i])
            if draws.flip(share(rest.mass if rest else 0.0, reach[i]), i - 1):
                return self._stop(tree, laws, draws, i, reach[i], rest)
        return self._stop(tree, laws, draws, 0, 1.0, None)

    @staticmethod
    def _stop(
        tree: TokenTree, laws: Seq[Law], draws: Draws, i: int, reach: float, rest: Excess | None
    ) -> Verdict:
        """Accept prefix i and let the target add a token of what the draft left."""
        rest = rest or laws[i].excess(tree.first_law(i + 1), reach)
        token = draws.residual(rest.law or laws[i])
        return Verdict(tuple(range(1, i + 1)), token, origin_at(tree, i))


def _drafted(tree: TokenTree, laws: Seq[Law]) -> tuple[list[float], list[float]]:
    """p and q of each drafted token of a chain, in order."""
    tokens = tree.tokens[1:]
    q_laws = [tree.first_law(i) for i in range(1, len(tree))]
    return probabilities(laws[: len(tokens)], tokens), probabilities(q_laws, tokens)


def _prefix_weights(p_K: Seq[float], q_K: Seq[float]) -> list[float]:
    """P_0 = 1 and P_i = min(1, P_{i-1} p(X_i) / q(X_i))."""
    reach = [1.0]
    for p_x, q_x in zip(p_K, q_K, strict=True):
        reach.append(min(1.0, reach[-1] * ratio(p_x, q_x)))
    return reach
