"""From lists to cells."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.bench.matrix import Axes, expand
from paceline.errors import UserError


def test_light_drafts_have_no_trees_and_trees_have_their_own_k() -> None:
    axes = Axes(
        drafts=("ngram", "some-model"),
        trees=("chain", "3x2x1", "sequoia:12"),
        ks=(2, 4),
        policies=("fixed", "adaptive"),
    )
    found = [(c.drafter, c.tree, c.policy, c.k) for group in expand(axes) for c in group.cells]
    assert found == [
        ("ngram", None, "fixed", 2),
        ("ngram", None, "fixed", 4),
        ("ngram", None, "adaptive", 4),
        ("some-model", None, "fixed", 2),
        ("some-model", None, "fixed", 4),
        ("some-model", None, "adaptive", 4),
        ("some-model", "3x2x1", "fixed", 15),
        ("some-model", "3x2x1", "adaptive", 15),
        ("some-model", "sequoia:12", "fixed", 12),
        ("some-model", "sequoia:12", "adaptive", 12),
    ]


@pytest.mark.parametrize("draft", ["some-model", "eagle3", "medusa"])
@pytest.mark.parametrize(("tree", "k"), [("paths:12", 12), ("paths:60x10", 60), ("chain", 4)])
def test_paths_have_their_nodes_whatever_their_width(draft: str, tree: str, k: int) -> None:
    (group,) = expand(Axes(drafts=(draft,), trees=(tree,), ks=(4,), policies=("fixed",)))
    assert [c.k for c in group.cells] == [k]


def test_groups_share_all_but_policy_and_k_and_stay_small() -> None:
    axes = Axes(
        workloads=("suite", "code-edit"),
        ks=tuple(range(1, 10)),
        temperatures=(0.0, 1.0),
        concurrencies=(1, 4),
        rates=(None, 2.0),
    )
    groups = expand(axes)
    assert sum(len(g.cells) for g in groups) == 2 * 9 * 2 * 2 * 2
    for group in groups:
        assert len(group.cells) <= 4
        shared = {(c.workload, c.temperature, c.concurrency, c.rate) for c in group.cells}
        assert len(shared) == 1
    assert len({c for g in groups for c in g.cells}) == 144


def test_ablations_fill_one_axis_unless_it_was_given() -> None:
    axes = Axes(drafts=("ngram", "model"), ks=(5,))
    assert len(axes.ablate("k").ks) > 4
    assert axes.ablate("k", frozenset({"k"})) == axes
    assert len(axes.ablate("temperature").temperatures) > 2
    trees = axes.ablate("tree").trees
    assert trees[0] == "chain"
    assert expand(axes.ablate("tree"))
    assert axes.ablate("draft") == axes
    with pytest.raises(UserError, match="needs a draft model"):
        Axes().ablate("tree")
    with pytest.raises(UserError, match="two drafts"):
        Axes().ablate("draft")
    with pytest.raises(UserError, match="colour"):
        axes.ablate("colour")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ks": (0,)}, "k = 0"),
        ({"ks": (65,)}, "k = 65"),
        ({"ks": (2, 2)}, "without repetition"),
        ({"drafts": ("none",)}, "'none'"),
        ({"policies": ("clever",)}, "clever"),
        ({"concurrencies": (0,)}, "concurrency = 0"),
        ({"rates": (0.0,)}, "rate = 0"),
        ({"trees": ("9x9",)}, "9x9"),
        ({"workloads": ()}, "workloads"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        Axes(**change)
