"""Laws: exact quantiles, zero-probability tokens, residuals, siblings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.law import (
    BLOCK,
    Law,
    PointLaw,
    WeightLaw,
    block_sums,
    draw_siblings,
    probabilities,
    residual,
    weight_laws,
)

SIZES = (1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5)
DTYPES = (torch.float32, torch.float64)
JUST_BELOW_ONE = 1.0 - 2.0**-53


def integer_law(size: int, dtype: torch.dtype, seed: int) -> tuple[WeightLaw, np.ndarray]:
    """Weights 0 to 3 (exact in both types) with zeros at both ends of every block."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, size)
    if size > 2:
        weights[::BLOCK] = 0
        weights[BLOCK - 1 :: BLOCK] = 0
        weights[-1] = 0
    if not weights.any():
        weights[size // 2] = 1
    return WeightLaw(torch.from_numpy(weights).to(dtype)), weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_quantile_of_an_integer_law_is_exact(size: int, dtype: torch.dtype) -> None:
    """The middle of each of the T equal steps of the quantile function, and so the whole
    distribution, without any sampling."""
    law, weights = integer_law(size, dtype, size)
    owner = np.repeat(np.arange(size), weights)
    total = len(owner)
    assert law.total == total
    assert [law.sample((i + 0.5) / total) for i in range(total)] == owner.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_ends_never_give_a_zero_probability_token(size: int, dtype: torch.dtype) -> None:
    law, weights = integer_law(size, dtype, size + 100)
    positive = np.flatnonzero(weights)
    assert law.sample(0.0) == positive[0]
    assert law.sample(5e-324) == positive[0]
    assert law.sample(JUST_BELOW_ONE) == positive[-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_sums_never_give_a_zero_probability_token(dtype: torch.dtype) -> None:
    """Weights whose float32 block sums are off, on either side of what the block holds."""
    for seed in range(200):
        rng = np.random.default_rng(seed)
        weights = np.exp(rng.normal(0.0, 8.0, 2 * BLOCK + 3))
        weights[rng.random(len(weights)) < 0.5] = 0.0
        weights[-3:] = 0.0
        law = WeightLaw(torch.from_numpy(weights).to(dtype))
        sums = block_sums(law.weights_V).numpy().cumsum() / law.total
        edges = [0.0, JUST_BELOW_ONE, *(min(v, JUST_BELOW_ONE) for v in sums)]
        near = [v * (1.0 + s * 1e-16) for v in edges for s in (-1, 0, 1)]
        for u in near:
            if 0.0 <= u < 1.0:
                assert law.probability(law.sample(u)) > 0.0


def test_half_open_uniforms_only() -> None:
    law = WeightLaw(torch.ones(3))
    for u in (1.0, -1e-9, math.nan):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            law.sample(u)


@pytest.mark.parametrize("bad", [0.0, math.inf, math.nan])
def test_a_law_needs_a_finite_positive_total(bad: float) -> None:
    with pytest.raises(ValueError, match="finite positive total"):
        WeightLaw(torch.full((4,), bad))


def test_equal_weights_have_the_lowest_mode() -> None:
    weights = torch.zeros(3 * BLOCK)
    weights[[700, 90, 1400]] = 2.0
    assert WeightLaw(weights).mode() == 90


def test_rows_of_one_tensor_are_the_laws_of_its_rows() -> None:
    weights = torch.rand(5, 1000, generator=torch.Generator().manual_seed(1))
    for law, row in zip(weight_laws(weights), weights, strict=True):
        alone = WeightLaw(row)
        assert law.total == alone.total
        assert all(law.sample(u) == alone.sample(u) for u in np.linspace(0.0, 0.999, 50))


weights_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=2, max_size=6
).filter(any)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(weights_lists, weights_lists, st.floats(0.0, 1.0))
def test_excess_is_the_formula(p: list[float], q: list[float], scale: float) -> None:
    """Sizes may differ: q is zero on what it lacks, what p lacks is ignored."""
    a, b = np.array(p) / sum(p), np.array(q) / sum(q)
    padded = np.zeros(len(a))
    padded[: len(b)] = b[: len(a)]
    expected = np.maximum(scale * a - padded, 0.0)
    found = WeightLaw(torch.tensor(p, dtype=torch.float64)).excess(
        WeightLaw(torch.tensor(q, dtype=torch.float64)), scale
    )
    assert found.mass == pytest.approx(expected.sum(), abs=1e-14)
    if expected.sum() > 1e-12:
        assert found.law is not None
        np.testing.assert_allclose(found.law.dense(), expected / expected.sum(), atol=1e-12)
        assert abs(float(found.law.dense().sum()) - 1.0) < 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_laws_leave_nothing(dtype: torch.dtype) -> None:
    weights = torch.rand(2000, generator=torch.Generator().manual_seed(2), dtype=dtype)
    found = WeightLaw(weights).excess(WeightLaw(weights.clone()))
    assert found.mass == 0.0
    assert found.law is None
    assert residual(WeightLaw(weights), WeightLaw(weights)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-7, 1e-30, 1e-45, 1e-200, 5e-324, 0.0])
def test_a_tiny_scale_leaves_no_nan(scale: float, dtype: torch.dtype) -> None:
    """Prefix weights are products of ratios and get this small."""
    p = WeightLaw(torch.tensor([0.0, 4.0, 4.0, 0.0], dtype=dtype))
    q = WeightLaw(torch.tensor([0.0, 3.0, 0.0, 1.0], dtype=dtype))
    mass, law = p.excess(q, scale)
    assert mass == pytest.approx(0.5 * scale, rel=1e-6, abs=1e-38)
    assert law is None or law.probability(2) == 1.0


def test_point_laws_as_either_side() -> None:
    p = WeightLaw(torch.tensor([0.5, 0.25, 0.25]))
    left = residual(p, PointLaw(0, 3))
    assert left is not None
    assert left.dense().tolist() == [0.0, 0.5, 0.5]
    assert residual(p, PointLaw(7, 8)) is not None  # outside the target's vocabulary
    assert PointLaw(1, 3).excess(p).mass == 0.75
    assert PointLaw(1, 3).excess(p, 0.2).law is None
    assert PointLaw(1, 3).without(1) is None
    assert PointLaw(1, 3).without(2) == PointLaw(1, 3)
    assert PointLaw(1, 3).entropy() == 0.0


def test_excess_does_not_change_its_arguments() -> None:
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8])
    WeightLaw(p).excess(WeightLaw(q), 0.5)
    WeightLaw(p).without(0)
    assert (p.tolist(), q.tolist()) == (
        torch.tensor([0.7, 0.3]).tolist(),
        torch.tensor([0.2, 0.8]).tolist(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_keeps_its_digits_where_the_token_dominates(dtype: torch.dtype) -> None:
    """1e-9 beside 1: total minus weight would leave rounding noise."""
    weights = torch.full((BLOCK + 2,), 1e-9, dtype=dtype)
    weights[3] = 1.0
    left = WeightLaw(weights).without(3)
    assert left is not None
    assert left.probability(3) == 0.0
    assert left.probability(4) == pytest.approx(1.0 / (BLOCK + 1), rel=1e-6)
    assert WeightLaw(torch.tensor([0.0, 2.0])).without(1) is None


def test_entropy_is_in_nats() -> None:
    assert WeightLaw(torch.tensor([3.0, 3.0, 0.0])).entropy() == pytest.approx(math.log(2.0))


def test_probabilities_at_once_equal_one_by_one() -> None:
    laws: list[Law] = [WeightLaw(torch.rand(9)), PointLaw(2, 9), WeightLaw(torch.rand(5))]
    tokens = [4, 2, 8]
    assert probabilities(laws, tokens) == [
        law.probability(x) for law, x in zip(laws, tokens, strict=True)
    ]
    assert probabilities(laws, tokens)[2] == 0.0


def test_siblings_without_replacement_end_with_the_support() -> None:
    law = WeightLaw(torch.tensor([1.0, 0.0, 3.0]))
    assert draw_siblings(law, [0.9, 0.9, 0.9]) == (2, 0)
    assert draw_siblings(law, [0.9, 0.9, 0.1], replacement=True) == (2, 2, 0)
