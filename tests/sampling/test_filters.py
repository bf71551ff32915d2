"""Logits to laws: the filters, against their plainest form and against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_law import plain_filters
from transformers.generation import logits_process as hf

from paceline.core.law import PointLaw
from paceline.sampling.filters import (
    Filters,
    _nucleus_by_bins,
    _nucleus_by_sorting,
    transform,
)
from paceline.sampling.law import BadLogits, _scan_at_once, _scan_on_cpu, build_laws
from paceline.types import SamplingParams


@pytest.mark.parametrize("size", [7, 512, 1000, 50_000])
def test_filters_equal_their_plain_form(size: int) -> None:
    cases = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, typical_p=y)
        for t in (0.5, 1.0, 2.0)
        for k in (0, 1, 5)
        for p in (1.0, 0.9, 0.2)
        for m in (0.0, 0.1)
        for y in (1.0, 0.7, 0.1)
    ]
    logits = torch.from_numpy(
        np.random.default_rng(0).normal(0, 3, (len(cases), size)).astype(np.float32)
    )
    for row, law, params in zip(logits.numpy(), build_laws(logits, cases), cases, strict=True):
        got = law.dense().double().numpy()
        want = plain_filters(row, params)
        assert ((got > 0) == (want > 0)).all(), params
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.1, 20.0])
@pytest.mark.parametrize("filters", [{"top_p": 0.5}, {"top_p": 0.999}, {"typical_p": 0.5}])
def test_flat_and_steep_laws_over_a_real_vocabulary(spread: float, filters: dict) -> None:
    """Where the kept mass ends among thousands of nearly equal tokens, float64 sums may put
    the border a token or two elsewhere than a float64 law does; never more mass than that.
    Typical-p keeps all that are as typical as the last one kept, to float32's precision."""
    params = SamplingParams(temperature=1.0, **filters)
    row = np.random.default_rng(0).normal(0, spread, 151_936).astype(np.float32)
    got = build_laws(torch.from_numpy(row)[None], [params])[0].dense().double().numpy()
    want = plain_filters(row, params)
    slack = 1e-4 * (want > 0).sum() + 1
    if "typical_p" in filters:
        if spread == 0.0:
            assert (got > 0).all()  # all are equally typical
            return
        surprise = np.log(np.exp(row.astype(np.float64)).sum()) - row.astype(np.float64)
        away = np.abs(surprise - (np.exp(-surprise) * surprise).sum())
        slack += (np.abs(away - away[want > 0].max()) < np.finfo(np.float32).eps).sum()
    assert abs(int((got > 0).sum()) - int((want > 0).sum())) <= slack
    assert np.abs(got - want).sum() < 1e-3


def test_filters_equal_those_of_transformers() -> None:
    """On random rows without near-ties at a border (transformers sums in float32)."""
    cases = [(5, 0.9, 0.05, 0.8), (50, 0.7, 0.0, 0.3), (0, 0.95, 0.02, 0.95), (20, 1.0, 0.0, 1.0)]
    for case, (k, p, m, y) in enumerate(cases):
        logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(case)) * 2
        warpers = [hf.TemperatureLogitsWarper(0.8)]
        warpers += [hf.TopKLogitsWarper(k)] if k else []
        warpers += [hf.TopPLogitsWarper(p)] if p < 1 else []
        warpers += [hf.MinPLogitsWarper(m)] if m else []
        warpers += [hf.TypicalLogitsWarper(y)] if y < 1 else []
        scores = logits.clone()
        for warper in warpers:
            scores = warper(torch.zeros(20, 1, dtype=torch.long), scores)
        params = SamplingParams(temperature=0.8, top_k=k, top_p=p, min_p=m, typical_p=y)
        laws = build_laws(logits, [params] * 20)
        got = torch.stack([law.dense() for law in laws])
        torch.testing.assert_close(got, scores.softmax(-1), rtol=1e-4, atol=1e-7)


def test_float64_logits_give_float64_laws() -> None:
    """As the proof by enumeration needs them."""
    params = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.9)
    logits = np.random.default_rng(0).normal(0, 2, (10, 300))
    for row, law in zip(logits, build_laws(torch.from_numpy(logits), [params] * 10), strict=True):
        np.testing.assert_allclose(law.dense().numpy(), plain_filters(row, params), rtol=1e-13)


def test_half_precision_logits_are_widened_first() -> None:
    logits = torch.randn(2, 300).bfloat16()
    params = [SamplingParams(temperature=0.7, top_p=0.9)] * 2
    for a, b in zip(build_laws(logits, params), build_laws(logits.float(), params), strict=True):
        assert torch.equal(a.dense(), b.dense())


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_what_runs_on_a_gpu_gives_the_same(spread: float) -> None:
    """The device's own forms of scan and nucleus, here on the CPU; with ties."""
    logits = (torch.randn(5, 9000) * spread).round(decimals=1)
    logits[3, 7] = float("nan")
    for one, other in zip(_scan_at_once(logits), _scan_on_cpu(logits), strict=True):
        assert one.mode == other.mode
        assert one.healthy(False) == other.healthy(False) == (one.high == one.high)
        if one.healthy(False):
            assert one == other
    for row in logits[:3]:
        weights = (row - row.max()).exp()
        total = float(weights.sum(dtype=torch.float64))
        one, other = weights.clone(), weights.clone()
        _nucleus_by_bins(one, 0.1 * total / 9000, 0.9 * total)
        _nucleus_by_sorting(other, 0.1 * total / 9000, 0.9 * total)
        assert torch.equal(one, other)


def test_rows_of_one_batch_on_a_gpu_are_transformed_together() -> None:
    logits = torch.randn(4, 600)
    filters = Filters(0.7, 20, 0.9, 0.01, 0.95)
    alone = torch.cat([transform(row[None], filters) for row in logits])
    assert torch.equal(transform(logits, filters), alone)


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    law = build_laws(logits, [SamplingParams(temperature=1.0, top_k=2)])[0]
    assert law.dense().tolist() == [0, 0.5, 0.5, 0, 0]


@pytest.mark.parametrize("size", [10, 10_000])
def test_nucleus_keeps_the_lowest_ids_among_equals(size: int) -> None:
    logits = torch.zeros(1, size)
    law = build_laws(logits, [SamplingParams(temperature=1.0, top_p=0.35)])[0]
    kept = law.dense().nonzero().flatten().tolist()
    assert kept == list(range(len(kept)))
    assert len(kept) == (4 if size == 10 else 3500)


def test_greedy_is_a_point_and_mixed_rows_keep_their_own_parameters() -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1, (4, 100)).astype(np.float32))
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


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit, whatever else is in the batch."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (6, 3000)).astype(np.float32))
    params = [SamplingParams(temperature=0.9, top_p=0.9, typical_p=0.9)] * 6
    together = build_laws(logits, params)
    for i, law in enumerate(together):
        alone = build_laws(logits[i : i + 1], params[:1])[0]
        assert torch.equal(law.dense(), alone.dense())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_raise_when_asked_and_others_do_not(bad: float, temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    laws = build_laws(logits, [SamplingParams(temperature=temperature, logit_bias={1: 2.0})] * 2)
    assert laws[0].mode() == 1
    with pytest.raises(BadLogits):
        laws[1].sample(0.5)


def test_masked_rows_may_hold_minus_infinity() -> None:
    logits = torch.tensor([[0.0, -float("inf"), 0.0]])
    law = build_laws(logits, [SamplingParams(temperature=1.0)], masked=True)[0]
    assert law.dense().tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1e-5, 1e-3, 1e-2, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[60.0, 59.0, -60.0, 1e30]])
    weights = transform(logits, Filters(temperature))
    assert torch.isfinite(weights).all()
    assert weights[0, 3] == 1.0
