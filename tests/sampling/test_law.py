"""Logits to laws, against the plainest form of each filter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.law import PointLaw
from paceline.sampling.law import BadLogits, build_laws, transform
from paceline.types import SamplingParams

RNG = np.random.default_rng(0)


def plain(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """Sort everything, in float64."""
    probs = np.exp((logits.astype(np.float64) - logits.max()) / p.temperature)
    order = np.argsort(-logits, kind="stable")
    if p.top_k:
        probs[order[p.top_k :]] = 0.0
    probs /= probs.sum()
    if p.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= p.top_p]] = 0.0
    probs[probs < p.min_p * probs.max()] = 0.0
    return probs / probs.sum()


@pytest.mark.parametrize("size", [7, 512, 1000, 50_000])
def test_filters_equal_their_plain_form(size: int) -> None:
    cases = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in (0.5, 1.0, 2.0)
        for k in (0, 1, 5)
        for p in (1.0, 0.9, 0.2)
        for m in (0.0, 0.1)
    ]
    logits = torch.from_numpy(RNG.normal(0, 3, (len(cases), size)).astype(np.float32))
    for row, law, params in zip(logits.numpy(), build_laws(logits, cases), cases, strict=True):
        got = law.dense().double().numpy()
        want = plain(row, params)
        assert ((got > 0) == (want > 0)).all()
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-9)


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    law = build_laws(logits, [SamplingParams(temperature=1.0, top_k=2)])[0]
    assert law.dense().tolist() == [0, 0.5, 0.5, 0, 0]


def test_nucleus_keeps_the_lowest_ids_among_equals() -> None:
    logits = torch.zeros(1, 10)
    law = build_laws(logits, [SamplingParams(temperature=1.0, top_p=0.35)])[0]
    assert law.dense().nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_greedy_is_a_point_and_mixed_rows_keep_their_own_parameters() -> None:
    logits = torch.from_numpy(RNG.normal(0, 1, (4, 100)).astype(np.float32))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=3),
    ]
    laws = build_laws(logits, params)
    assert [isinstance(law, PointLaw) for law in laws] == [True, False, True, False]
    assert laws[0].mode() == int(logits[0].argmax())
    assert int((laws[1].dense() > 0).sum()) == 100
    assert int((laws[3].dense() > 0).sum()) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_rows_raise_when_asked_and_others_do_not(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    laws = build_laws(logits, [SamplingParams(temperature=1.0)] * 2)
    assert laws[0].probability(0) == pytest.approx(0.2)
    with pytest.raises(BadLogits):
        laws[1].sample(0.5)


def test_masked_rows_may_hold_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 0.0]])
    law = build_laws(logits, [SamplingParams(temperature=1.0)], masked=True)[0]
    assert law.dense().tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("temperature", [1e-7, 1e-5, 1e-3, 1e-2, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[60.0, 59.0, -60.0, 1e30]])
    weights = transform(logits, temperature, 0, 1.0, 0.0)
    assert torch.isfinite(weights).all()
    assert weights[0, 3] == 1.0
