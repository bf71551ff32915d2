"""The latency model: the article's example, limits, and arithmetic on curves."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.latency import (
    Curve,
    DraftCost,
    HostCost,
    Profile,
    TargetCost,
    break_even,
    constant,
    expected_tokens,
    expected_tokens_tree,
    mode_of,
    plain_seconds,
    round_seconds,
    speedup,
)


def make_profile(**drafts: DraftCost) -> Profile:
    return Profile(
        target=TargetCost(
            rows=Curve(xs=(1.0, 2.0, 5.0), ys=(1.0, 1.05, 1.15)),
            per_entry=Curve(xs=(1.0, 5.0), ys=(1e-3, 2e-3)),
        ),
        drafts=drafts,
        host={
            "greedy": HostCost(step=0.03, sequence=0.0, row=0.0),
            "sampled": HostCost(step=0.03, sequence=0.01, row=0.02),
        },
        spread={"target": 0.01},
        meta={"machine": "none"},
    )


def test_the_articles_example():
    """k = 4, alpha = 0.8; a draft step costs 0.08 T_p(1), verification 1.15, overhead 0.05."""
    assert constant(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens([0.8] * 4) == pytest.approx(3.3616)
    assert speedup(3.3616, 1.0, 4 * 0.08 + 1.15 + 0.05) == pytest.approx(2.2116, abs=1e-4)
    draft = DraftCost(fixed=0.02, first=Curve.level(0.08), step=Curve.level(0.08))
    profile = make_profile(article=draft)
    t_round = round_seconds(profile, "article", 4, [0], "greedy")
    assert t_round == pytest.approx(0.32 + 1.15 + 0.05)
    plain_without_host = profile.target([1], [0])
    assert speedup(constant(0.8, 4), plain_without_host, t_round) == pytest.approx(2.21, abs=5e-3)


@given(st.floats(0.0, 1.0), st.integers(0, 16))
def test_constant_is_the_sum_of_powers(alpha, k):
    assert constant(alpha, k) == pytest.approx(sum(alpha**i for i in range(k + 1)), rel=1e-6)


def test_constant_refuses_what_is_no_probability():
    with pytest.raises(ValueError, match=r"1\.5"):
        constant(1.5, 4)


@given(st.lists(st.floats(0.0, 1.0), max_size=6))
def test_a_chain_is_a_tree(alphas):
    parents = range(-1, len(alphas))
    tree = expected_tokens_tree(list(parents), [1.0, *alphas])
    assert tree == pytest.approx(expected_tokens(alphas))


def test_tree_against_enumeration():
    """Children of a node are exclusive; E[tau] by listing every set of outcomes."""
    parents = [-1, 0, 0, 1, 1]
    reach = [1.0, 0.5, 0.2, 0.6, 0.3]
    by_hand = 0.0
    for first, second in itertools.product((1, 2, None), (3, 4, None)):
        p = {1: 0.5, 2: 0.2, None: 0.3}[first] * {3: 0.6, 4: 0.3, None: 0.1}[second]
        depth = 0 if first is None else 1 + (first == 1 and second is not None)
        by_hand += p * (1 + depth)
    assert expected_tokens_tree(parents, reach) == pytest.approx(by_hand)


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, -1]])
def test_broken_trees_are_refused(parents):
    with pytest.raises(ValueError):  # noqa: PT011
        expected_tokens_tree(parents, [1.0] * len(parents))


def test_curve_goes_through_its_points_and_on():
    curve = Curve(xs=(1.0, 3.0, 4.0), ys=(1.0, 2.0, 4.0))
    assert [curve(x) for x in (0.0, 1.0, 2.0, 3.0, 3.5, 4.0, 6.0)] == [1, 1, 1.5, 2, 3, 4, 8]
    assert Curve.level(7.0)(123) == 7.0
    assert Curve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


@pytest.mark.parametrize(
    ("xs", "ys"), [((), ()), ((1.0,), ()), ((1.0, 1.0), (1.0, 1.0)), ((1.0,), (math.nan,))]
)
def test_broken_curves_are_refused(xs, ys):
    with pytest.raises(ValueError, match="curve"):
        Curve(xs=xs, ys=ys)


def test_target_cost_counts_rows_together_and_reading_apart():
    cost = make_profile().target
    assert cost([1, 1], [100, 0]) == pytest.approx(1.05 + 0.1)
    assert cost([5], [100]) == pytest.approx(1.15 + 0.2)
    assert cost.extra(4, 1) == pytest.approx(0.15)


def test_draft_cost_of_unequal_budgets():
    """Each depth costs what the sequences cost that go so deep."""
    by_batch = Curve(xs=(1.0, 3.0), ys=(1.0, 3.0))
    cost = DraftCost(
        fixed=0.5, idle=0.1, first=Curve.level(4.0), step=by_batch, per_entry=0.01, sampling=0.001,
        feed=Curve(xs=(1.0, 100.0), ys=(1.0, 10.0)),
    )  # fmt: skip
    assert cost(0, [5, 5]) == 0.1
    assert cost([0, 0], [5, 5]) == 0.1
    assert cost(2, [10]) == pytest.approx(0.5 + 4.0 + 1.0 + 0.01 * 20)
    assert cost([3, 1, 2], [10, 0, 0]) == pytest.approx(0.5 + 4.0 + 2.0 + 1.0 + 0.01 * 30)
    assert cost([3, 1], [0, 0], "sampled") == pytest.approx(cost([3, 1], [0, 0]) + 0.004)
    mixed = cost([3, 1], [0, 0], ["greedy", "sampled"])
    assert mixed == pytest.approx(cost([3, 1], [0, 0]) + 0.001)
    assert cost.catch_up(1) == 0.0
    assert cost.catch_up(100) == pytest.approx(9.0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_draft_cost_is_the_sum_over_depths(budgets):
    step = Curve(xs=(1.0, 3.0), ys=(1.0, 2.5))
    cost = DraftCost(first=Curve.level(4.0), step=step)
    depths = range(1, max(budgets))
    steps = sum(step(sum(b > depth for b in budgets)) for depth in depths)
    expected = 4.0 + steps if any(budgets) else 0.0
    assert cost(budgets, [0] * len(budgets)) == pytest.approx(expected)


def test_host_cost_by_mode():
    profile = make_profile(free=DraftCost())
    assert mode_of(0.0) == "greedy"
    assert mode_of(0.7) == "sampled"
    assert plain_seconds(profile, [0], "sampled") == pytest.approx(1.0 + 0.03 + 0.01 + 0.02)
    assert round_seconds(profile, "free", [1, 0], [0, 0], "sampled") == pytest.approx(
        profile.target([2, 1], [0, 0]) + 0.03 + 0.02 + 0.06
    )


def test_profile_survives_json():
    profile = make_profile(ngram=DraftCost(fixed=1e-5, step=Curve(xs=(1.0, 2.0), ys=(0.1, 0.2))))
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize("broken", [[], {}, {"format": 0}, "host", "target"])
def test_what_is_no_profile_is_refused(broken):
    value = make_profile().to_json()
    if isinstance(broken, str):
        value[broken] = {}
        broken = value
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_json(broken)


@given(st.floats(1.0, 10.0), st.floats(0.2, 20.0), st.integers(1, 12))
def test_break_even_is_where_nothing_is_won(t_plain, t_round, k):
    alpha = break_even(t_plain, t_round, k)
    if alpha is None:
        assert speedup(constant(1.0, k), t_plain, t_round) < 1.0
    elif alpha == 0.0:
        assert t_round <= t_plain
    else:
        assert speedup(constant(alpha, k), t_plain, t_round) == pytest.approx(1.0, rel=1e-6)
