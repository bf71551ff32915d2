"""Sampling through the engine: filters hold, bad logits fail alone, tiny temperatures."""

from __future__ import annotations

import numpy as np
import pytest
from devices import PROMPTS, VOCAB, ids, make_engine, model_drafter, run, target
from scipy import stats

from paceline.core.rules import Guarantee
from paceline.errors import UserError
from paceline.types import FinishReason, SamplingParams


@pytest.mark.parametrize("drafter", ["none", "self", "noisy", "anti", "tree"])
@pytest.mark.parametrize(
    "filters", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.4}, {"top_k": 4, "top_p": 0.7}]
)
def test_every_token_lies_in_the_filtered_set(drafter: str, filters: dict) -> None:
    """Recomputed from plain logits; a draft's favourite outside the set never appears."""
    temperature = 0.9
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, **filters)
    for output in run(make_engine(drafter), PROMPTS, params):
        context = output.prompt_tokens
        for token in output.token_ids:
            assert token in allowed(target().logits(context) / temperature, **filters)
            context = (*context, token)


def allowed(logits: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """The filters in their plainest form: sort everything, in float64."""
    probs = np.exp(logits.astype(np.float64) - logits.max())
    order = np.argsort(-probs, kind="stable")
    if top_k:
        order = order[:top_k]
    probs = probs / probs[order].sum()
    if top_p < 1.0:
        before = np.cumsum(probs[order]) - probs[order]
        order = order[before < top_p]
    return {int(i) for i in order if probs[i] >= min_p * probs.max()}


@pytest.mark.parametrize("temperature", [1e-7, 1e-6, 1e-5])
@pytest.mark.parametrize("drafter", ["none", "noisy", "tree"])
def test_tiny_temperatures_equal_greedy(drafter: str, temperature: float) -> None:
    greedy = ids(run(make_engine(), PROMPTS, SamplingParams(max_tokens=30)))
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1)
    assert ids(run(make_engine(drafter), PROMPTS, params)) == greedy


@pytest.mark.parametrize("drafter", ["none", "noisy", "tree"])
def test_top_k_one_equals_greedy(drafter: str) -> None:
    greedy = ids(run(make_engine(), PROMPTS, SamplingParams(max_tokens=30)))
    params = SamplingParams(max_tokens=30, temperature=1.0, top_k=1, seed=1)
    assert ids(run(make_engine(drafter), PROMPTS, params)) == greedy


def test_top_k_without_temperature_zero_is_not_greedy() -> None:
    greedy = ids(run(make_engine(), PROMPTS, SamplingParams(max_tokens=30)))
    params = SamplingParams(max_tokens=30, temperature=1.0, top_k=8, seed=1)
    assert ids(run(make_engine(), PROMPTS, params)) != greedy


def test_ties_break_alike_everywhere() -> None:
    """Every logit appears twice: plain, chains and trees choose the lower id."""

    def doubled(context, logits):
        logits[1::2] = logits[: VOCAB - 1 : 2]
        return logits

    model = target(change=doubled)
    plain = run(make_engine(model=model), PROMPTS, SamplingParams(max_tokens=30))
    for k in (1, 4):
        engine = make_engine(model_drafter(target(change=doubled)), model=model, k=k)
        assert ids(run(engine, PROMPTS, SamplingParams(max_tokens=30))) == ids(plain)
    assert all(t % 2 == 0 for o in plain for t in o.token_ids)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_fail_their_request_alone(value: float, temperature: float) -> None:
    """From some context on one row is NaN or infinite: that request names it and ends."""
    good = [(1, 2), (3, 1, 4), (5,)]
    params = SamplingParams(max_tokens=25, temperature=temperature, seed=3)

    def poison(context, logits):
        if context[0] == 9 and len(context) > 8:
            logits[3] = value
        return logits

    model = target(change=poison)
    engine = make_engine(model_drafter(target()), model=model)
    outputs = run(engine, [good[0], (9, 9), *good[1:]], params)
    bad = outputs.pop(1)
    assert bad.finish_reason is FinishReason.ERROR
    assert bad.error is not None
    assert "NaN or infinite" in bad.error
    assert len(bad.token_ids) <= 7  # a block is dropped whole with its first bad row
    assert ids(outputs) == ids(run(make_engine("self"), good, params))


def test_a_broken_draft_does_not_stop_the_target(caplog) -> None:
    def broken(context, logits):
        return np.full_like(logits, np.nan)

    plain = ids(run(make_engine(), PROMPTS, SamplingParams(max_tokens=20)))
    engine = make_engine(model_drafter(target(change=broken)))
    assert ids(run(engine, PROMPTS, SamplingParams(max_tokens=20))) == plain
    assert sum("NaN" in r.message for r in caplog.records) == 1


@pytest.mark.parametrize("drafter", ["none", "self", "noisy", "anti", "ngram", "tree"])
@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05}]
)
def test_the_joint_law_of_three_tokens(drafter: str, filters: dict) -> None:
    """Chi-square of 2,000 samples against the exact joint law; the false-alarm probability
    of each of these 12 tests is 1e-8, of all together below 1e-6."""
    params = {"temperature": 1.0, **filters}
    n = 2000
    counts: dict[tuple[int, ...], int] = {}
    for part in range(n // 1000):
        request = SamplingParams(max_tokens=3, seed=2024 + part, n=1000, **params)
        for output in run(make_engine(drafter, k=2), [(4, 4)], request):
            counts[output.token_ids] = counts.get(output.token_ids, 0) + 1
    law = joint((4, 4), 3, **params)
    assert set(counts) <= set(law)
    observed, expected, rest_o, rest_e = [], [], 0.0, 0.0
    for path, p in law.items():
        if p * n >= 8:
            observed.append(counts.get(path, 0))
            expected.append(p * n)
        else:
            rest_o += counts.get(path, 0)
            rest_e += p * n
    if rest_e > 0:
        observed.append(rest_o)
        expected.append(rest_e)
    scale = sum(observed) / sum(expected)
    assert stats.chisquare(observed, [e * scale for e in expected]).pvalue > 1e-8


def joint(
    prompt: tuple[int, ...], depth: int, temperature: float, **filters: float
) -> dict[tuple[int, ...], float]:
    paths = {(): 1.0}
    for _ in range(depth):
        grown = {}
        for path, mass in paths.items():
            logits = target().logits((*prompt, *path)).astype(np.float64) / temperature
            keep = sorted(allowed(logits, **filters))  # type: ignore[arg-type]
            probs = np.exp(logits - logits.max())
            total = probs[keep].sum()
            for token in keep:
                grown[(*path, token)] = mass * probs[token] / total
        paths = grown
    return paths


def test_guarantees_are_reported() -> None:
    cases = [
        (SamplingParams(max_tokens=4), Guarantee.EXACT_GREEDY),
        (SamplingParams(max_tokens=4, temperature=1.0), Guarantee.EXACT_SAMPLING),
    ]
    for params, guarantee in cases:
        assert run(make_engine("noisy"), [(1,)], params)[0].guarantee is guarantee


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("seed", -1),
        ("n", 0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("logprobs", -1),
        ("k", -1),
        ("k", 1000),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{field} = "):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
