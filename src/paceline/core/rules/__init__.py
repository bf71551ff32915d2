"""Acceptance rules, by name and by default. One file per family; see `base`."""

from __future__ import annotations

from paceline.core.rules.base import (
    AcceptanceRule,
    Guarantee,
    Origin,
    Verdict,
    acceptance,
)
from paceline.core.rules.chains import BlockVerification, TokenRejection
from paceline.core.rules.match import GreedyMatch, Walk
from paceline.core.rules.trees import RecursiveRejection, TraversalVerification
from paceline.core.rules.typical import Typical
from paceline.core.tree import Proposal, TokenTree

__all__ = [
    "RULES",
    "AcceptanceRule",
    "BlockVerification",
    "GreedyMatch",
    "Guarantee",
    "Origin",
    "RecursiveRejection",
    "TokenRejection",
    "TraversalVerification",
    "Typical",
    "Verdict",
    "Walk",
    "acceptance",
    "default_rule",
    "rule_named",
]

RULES: dict[str, type[AcceptanceRule]] = {
    rule.name: rule
    for rule in (
        GreedyMatch,
        Walk,
        TokenRejection,
        BlockVerification,
        RecursiveRejection,
        TraversalVerification,
        Typical,
    )
}


def rule_named(name: str) -> AcceptanceRule:
    """The rule of that name with its default parameters; ValueError lists the names."""
    if name not in RULES:
        raise ValueError(f"unknown acceptance rule {name!r}; choose one of: {', '.join(RULES)}")
    return RULES[name]()


def default_rule(tree: TokenTree, greedy: bool) -> AcceptanceRule:
    """The best exact rule for a proposal (the selection table of docs/guarantees.md)."""
    if greedy:
        return GreedyMatch()
    if tree.proposal is Proposal.DELTA:
        return Walk()
    return BlockVerification() if tree.is_chain else TraversalVerification()
