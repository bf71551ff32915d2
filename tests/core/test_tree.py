"""Proposals: what a tree refuses, and what it knows about its nodes."""

from __future__ import annotations

import pytest
import torch

from paceline.core.law import PointLaw, WeightLaw
from paceline.core.tree import Proposal, TokenTree, chain

LAW = WeightLaw(torch.tensor([0.5, 0.25, 0.25]))


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((), (), "root"),
        ((1,), (0,), "root"),
        ((1, 2), (-1,), "one parent per token"),
        ((1, 2), (-1, 1), "before its child"),
        ((1, 2, 3), (-1, 2, 0), "before its child"),
        ((1, 2), (-1, -1), "before its child"),
        ((1, 2, 2), (-1, 0, 0), "siblings must be different"),
    ],
)
def test_malformed_trees_are_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokenTree(tokens, parents)


def test_laws_must_fit_the_proposal() -> None:
    with pytest.raises(ValueError, match="no sampled laws"):
        TokenTree((0, 1), (-1, 0), Proposal.DELTA, (LAW, None))
    with pytest.raises(ValueError, match="needs the law"):
        TokenTree((0, 1), (-1, 0), Proposal.SAMPLED)
    with pytest.raises(ValueError, match="needs the law"):
        TokenTree((0, 1), (-1, 0), Proposal.SAMPLED, (LAW,))
    with pytest.raises(ValueError, match="lacks the law"):
        TokenTree((0, 1), (-1, 0), Proposal.SAMPLED, (None, LAW))
    with pytest.raises(ValueError, match="siblings must be different"):
        TokenTree((0, 1, 1), (-1, 0, 0), Proposal.SAMPLED, (LAW, None, None))


def test_equal_siblings_are_fine_with_replacement() -> None:
    tree = TokenTree((0, 1, 1), (-1, 0, 0), Proposal.REPLACED, (LAW, None, None))
    assert tree.next_law(LAW, 1, 2) is LAW


def test_equal_cousins_are_fine() -> None:
    tree = TokenTree((0, 1, 2, 1, 1), (-1, 0, 0, 1, 2))
    assert tree.children == ((1, 2), (3,), (4,), (), ())
    assert tree.depths == (0, 1, 1, 2, 2)
    assert tree.path(4) == (2, 4)
    assert tree.path(0) == ()
    assert not tree.is_chain


def test_next_law_without_replacement() -> None:
    tree = TokenTree((0, 0, 2), (-1, 0, 0), Proposal.SAMPLED, (LAW, None, None))
    left = tree.next_law(tree.first_law(1), 1, 2)
    assert left.dense().tolist() == [0.0, 0.5, 0.5]


def test_an_exhausted_law_can_have_no_further_child() -> None:
    law = WeightLaw(torch.tensor([0.0, 0.0, 1.0]))
    tree = TokenTree((0, 2, 1), (-1, 0, 0), Proposal.SAMPLED, (law, None, None))
    with pytest.raises(ValueError, match="whole support"):
        tree.next_law(law, 1, 2)


def test_chosen_tokens_come_from_point_laws() -> None:
    tree = TokenTree((0, 5, 7), (-1, 0, 0))
    first = tree.first_law(1)
    assert first == PointLaw(5, 6)
    assert tree.next_law(first, 1, 2) == PointLaw(7, 8)


def test_chains() -> None:
    assert chain(3).is_chain
    assert chain(3, (1, 2)).proposal is Proposal.DELTA
    sampled = chain(3, (1, 2), (LAW, LAW))
    assert sampled.is_chain
    assert sampled.law(1) is LAW
    assert sampled.proposal is Proposal.SAMPLED
