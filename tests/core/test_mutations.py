"""The proof can fail: classic faults in rules and draws, planted one at a time, are caught.

A fault is planted in the source of the production rule where that is possible (`planted`).
Each must move some string's probability by more than 1e-3 in the same worlds in which the
sound version stays under 1e-12. Faults in laws and drafts: test_mutations_laws.py.
"""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
from planting import CAUGHT, CHAIN, LONG, RAGGED, SOUND, TREE, WIDE, planted, worst

from paceline.core.rules import (
    AcceptanceRule,
    BlockVerification,
    RecursiveRejection,
    TokenRejection,
    TraversalVerification,
    Verdict,
    chains,
    trees,
)
from paceline.core.rules.base import origin_at, ratio, share
from paceline.core.tree import TokenTree
from paceline.proof.drafts import Drafting

RULES = (TokenRejection, BlockVerification, RecursiveRejection, TraversalVerification)


RULE_FAULTS: dict[str, tuple[types.ModuleType, str, Drafting, tuple[tuple[str, str], ...]]] = {
    "token: rejected token kept": (
        chains,
        "TokenRejection",
        CHAIN,
        (("Verdict(tuple(range(1, i + 1)), draws.residual(left)",
          "Verdict(tuple(range(1, i + 2)), draws.residual(left)"),),
    ),
    "token: suffix kept after a rejection": (
        chains,
        "TokenRejection",
        CHAIN,
        (("Verdict(tuple(range(1, i + 1)), draws.residual(left)",
          "Verdict((*range(1, i + 1), *range(i + 2, last + 1)), draws.residual(left)"),),
    ),
    "token: replacement from p, not from the residual": (
        chains, "TokenRejection", CHAIN, (("draws.residual(left)", "draws.residual(p)"),)
    ),
    "token: one uniform for all decisions": (
        chains, "TokenRejection", CHAIN, (("acceptance(p_K[i], q_K[i]), i)",
                                           "acceptance(p_K[i], q_K[i]), 0)"),)
    ),
    "block: one eta for all prefixes": (
        chains,
        "BlockVerification",
        LONG,
        (("draws.flip(reach[last], last - 1)", "draws.flip(reach[last], 0)"),
         ("reach[i]), i - 1)", "reach[i]), 0)")),
    ),
    "block: clipped ratios": (
        chains,
        "BlockVerification",
        CHAIN,
        (("min(1.0, reach[-1] * ratio(p_x, q_x))", "reach[-1] * min(1.0, ratio(p_x, q_x))"),),
    ),
    "block: ratios never clipped": (
        chains,
        "BlockVerification",
        CHAIN,
        (("reach.append(min(1.0, reach[-1] * ratio(p_x, q_x)))",
          "reach.append(reach[-1] * ratio(p_x, q_x))"),
         ("reach = _prefix_weights(*_drafted(tree, laws))",
          "reach = [min(1.0, v) for v in _prefix_weights(*_drafted(tree, laws))]")),
    ),
    "block: residual of p, not of P p": (
        chains,
        "BlockVerification",
        CHAIN,
        (("rest = rest or laws[i].excess(tree.first_law(i + 1), reach)",
          "rest = laws[i].excess(tree.first_law(i + 1))"),),
    ),
    "block: prefixes taken with P_i, as if each were the last": (
        chains, "BlockVerification", CHAIN,
        (("share(rest.mass if rest else 0.0, reach[i])", "reach[i]"),)
    ),
    "recursive: residual of the first p, not of what is left": (
        trees,
        "RecursiveRejection",
        WIDE,
        (("q = tree.first_law(children[0])\n        for", "q = tree.first_law(children[0])\n"
          "        first = p\n        for"),
         ("p = p.excess(q).law or p", "p = first.excess(q).law or p")),
    ),
    "recursive: ratio to the first p, not to what is left": (
        trees,
        "RecursiveRejection",
        WIDE,
        (("q = tree.first_law(children[0])\n        for", "q = tree.first_law(children[0])\n"
          "        first = p\n        for"),
         ("acceptance(p.probability(token)", "acceptance(first.probability(token)")),
    ),
    "recursive: q keeps refused tokens": (
        trees, "RecursiveRejection", TREE,
        (("q = tree.next_law(q, children[j - 1], child)", "pass"),)
    ),
    "traversal: clipped ratios": (
        trees, "TraversalVerification", TREE,
        (("min(1.0, weight[node] * odds)", "weight[node] * min(1.0, odds)"),)
    ),
    "traversal: residual of the first p, not of what is left": (
        trees, "TraversalVerification", WIDE,
        (("mass, left = p[node].excess", "mass, left = laws[node].excess"),)
    ),
    "traversal: a parent keeps its weight when a child is cut": (
        trees, "TraversalVerification", TREE,
        (("weight[node] = share(mass, weight[node])", "pass"),)
    ),
    "traversal: q keeps refused tokens": (
        trees, "TraversalVerification", TREE,
        (("return tree.next_law(q[node], children[index - 1], children[index])",
          "return q[node]"),)
    ),
    "traversal: one uniform for all leaves": (
        trees, "TraversalVerification", TREE,
        (("draws.flip(weight[node], node - 1)", "draws.flip(weight[node], 0)"),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", RULE_FAULTS)
def test_a_fault_in_a_rule_is_caught(fault: str) -> None:
    module, rule, drafting, edits = RULE_FAULTS[fault]
    assert worst(planted(module, rule), drafting) < SOUND
    assert worst(planted(module, rule, *edits), drafting) > CAUGHT


class EarlyBreak(BlockVerification):
    """Block verification that stops at the first prefix that says no."""

    def accept(self, tree, laws, draws):  # type: ignore[no-untyped-def]
        last, reach, at = len(tree) - 1, 1.0, (0, 1.0)
        for i in range(1, last + 1):
            token = tree.tokens[i]
            q = tree.first_law(i)
            reach = min(1.0, reach * ratio(laws[i - 1].probability(token), q.probability(token)))
            mass = laws[i].excess(tree.first_law(i + 1), reach).mass if i < last else 0.0
            if not draws.flip(share(mass, reach) if i < last else reach, i - 1):
                break
            at = (i, reach)
        i, reach = at
        path = tuple(range(1, i + 1))
        if i == last:
            return Verdict(path, draws.target(laws[i], i), origin_at(tree, i))
        left = laws[i].excess(tree.first_law(i + 1), reach).law or laws[i]
        return Verdict(path, draws.residual(left), origin_at(tree, i))


def test_block_verification_with_an_early_break_is_caught() -> None:
    assert worst(BlockVerification(), LONG) < SOUND
    assert worst(EarlyBreak(), LONG) > CAUGHT


class LeavesByIndex(TraversalVerification):
    """Leaves by node number, with no regard to their elder siblings' subtrees."""

    def accept(self, tree, laws, draws):  # type: ignore[no-untyped-def]
        order = _index_order(tree)
        numbered = {u: i for i, u in enumerate(order)}
        # Judging by index is judging depth-first a tree whose siblings stand by index of
        # their first leaf: the drawing order is lost.
        parents = tuple(-1 if u == 0 else numbered[tree.parents[u]] for u in order)
        laws_by = tuple(tree.laws[u] for u in order) if tree.laws else None
        moved = TokenTree(tuple(tree.tokens[u] for u in order), parents, tree.proposal, laws_by)
        verdict = super().accept(moved, [laws[u] for u in order], draws)
        return replace(verdict, path=tuple(order[u] for u in verdict.path))


def _index_order(tree: TokenTree) -> list[int]:
    """Depth-first, but siblings by the smallest leaf number below them."""
    least: dict[int, int] = {}
    for u in reversed(range(len(tree))):
        least[u] = min((least[c] for c in tree.children[u]), default=u)

    def visit(u: int) -> list[int]:
        below = sorted(tree.children[u], key=least.__getitem__)
        return [u, *(x for c in below for x in visit(c))]

    return visit(0)


def test_leaves_by_index_are_caught() -> None:
    """Node 1 has a child with number 3, node 2 has none: by index, node 2 comes first."""
    assert worst(TraversalVerification(), RAGGED) < SOUND
    assert worst(LeavesByIndex(), RAGGED) > CAUGHT


@pytest.mark.parametrize("rule", RULES)
def test_a_stream_shared_by_draft_and_acceptance_is_caught(rule: type[AcceptanceRule]) -> None:
    assert worst(rule(), CHAIN) < SOUND
    assert worst(rule(), CHAIN, shared=True) > CAUGHT
