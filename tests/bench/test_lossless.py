"""Verdicts: equal texts, allowed differences, and planted failures."""

from __future__ import annotations

from dataclasses import replace

import bench_devices as b
import devices as d
import numpy as np
import pytest
from scipy import stats

from paceline.bench.lossless import Conditions, Pair, judge, output_logits, transforms
from paceline.engine.engine import Engine
from paceline.models.base import Numerics
from paceline.models.toy import TabularModel
from paceline.types import SamplingParams

GREEDY = Conditions(temperature=0.0, comparable=True)
SEEDLESS = Conditions(temperature=1.0, comparable=False)
SEEDED = Conditions(temperature=1.0, comparable=True)


def tolerant(**kwargs: object) -> TabularModel:
    model = d.target(**kwargs)
    model.info = replace(model.info, numerics=Numerics.TOLERANT)
    return model


def argmax(model: TabularModel, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(model.logits(tuple(tokens)).argmax()))
    return tuple(tokens[len(prompt) :])


def sampled(model: TabularModel, n: int, length: int, warp: float = 1.0) -> list[Pair]:
    """Texts drawn by hand from the model's law at temperature `warp`, each beside another."""
    rng = np.random.default_rng(11)
    pairs = []
    for i in range(n):
        tokens = [1 + i % 12]
        for _ in range(length):
            logits = model.logits(tuple(tokens)).astype(np.float64) / warp
            p = np.exp(logits - logits.max())
            tokens.append(int(rng.choice(d.VOCAB, p=p / p.sum())))
        pairs.append(Pair((tokens[0],), (0,) * length, tuple(tokens[1:])))
    return pairs


def test_logits_are_those_that_each_token_was_chosen_from() -> None:
    model = d.target()
    tokens = tuple(int(t) for t in np.random.default_rng(0).integers(0, d.VOCAB, 300))
    for n in (1, 2, 130, 299):
        rows = list(output_logits(model, tokens, n))
        assert len(rows) == n
        for i, row in enumerate(rows):
            expected = model.logits(tokens[: len(tokens) - n + i])
            assert (row.numpy() == expected).all()


def test_equal_texts_are_identical() -> None:
    verdict = judge([Pair((1,), (2, 3), (2, 3))] * 3, d.target(), GREEDY)
    assert (verdict.verdict, verdict.ok, verdict.compared) == ("identical", True, 3)


@pytest.mark.parametrize("conditions", [GREEDY, SEEDED])
def test_a_difference_under_exact_numerics_is_a_failure(conditions: Conditions) -> None:
    pairs = [Pair((1,), (2, 3), (2, 3)), Pair((1,), (2, 3, 4), (2, 5, 4))]
    verdict = judge(pairs, d.target(), conditions)
    assert (verdict.verdict, verdict.ok, verdict.differing) == ("different", False, 1)
    assert "token 2" in verdict.detail


def test_a_near_tie_is_allowed_where_numerics_are_tolerant() -> None:
    prompt = (1, 2, 3)
    plain = argmax(d.target(), prompt, 4)
    rival = (plain[1] + 1) % d.VOCAB
    at = (*prompt, plain[0])

    def tie(context: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        if context == at:
            logits = logits.copy()
            logits[rival] = logits.max() - 5e-4
        return logits

    pair = Pair(prompt, plain, (plain[0], rival, 0, 0))
    verdict = judge([pair], tolerant(change=tie), GREEDY)
    assert (verdict.verdict, verdict.ok) == ("near_tie", True)
    assert verdict.largest_margin == pytest.approx(5e-4, rel=1e-2)
    assert judge([pair], d.target(change=tie), GREEDY).verdict == "different"
    # A token that is far from the best is no tie, and neither is an end too early.
    assert judge([pair], tolerant(), GREEDY).verdict == "different"
    assert judge([Pair(prompt, plain, plain[:2])], tolerant(), GREEDY).verdict == "different"


def test_samples_of_the_law_pass() -> None:
    """False alarm 1e-6 by construction (fixed seed)."""
    model = d.target()
    pairs = sampled(model, 60, 20)
    verdict = judge(pairs, model, SEEDLESS)
    assert (verdict.verdict, verdict.ok) == ("law", True)
    assert verdict.false_alarm == 1e-6
    values = transforms(pairs, model, SEEDLESS)
    assert len(values) == 1200
    assert stats.kstest(values, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("warp", [0.7, 1.5])
def test_samples_of_another_temperature_do_not(warp: float) -> None:
    model = d.target()
    verdict = judge(sampled(model, 60, 20, warp), model, SEEDLESS)
    assert (verdict.verdict, verdict.ok) == ("different", False)


def test_an_impossible_token_is_a_failure() -> None:
    def cut(context: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        logits = logits.copy()
        logits[5] = -1e30
        return logits

    model = d.target(change=cut)
    pairs = [*sampled(model, 5, 4), Pair((1,), (2,), (5,))]
    verdict = judge(pairs, model, SEEDLESS)
    assert verdict.verdict == "different"
    assert "1 tokens are impossible" in verdict.detail


@pytest.mark.parametrize(("engine", "expected"), [(Engine, "law"), (b.LossyEngine, "different")])
def test_the_engine_s_samples_pass_and_those_of_a_lossy_rule_do_not(
    engine: type[Engine], expected: str
) -> None:
    """The draft is sharper than the target (false alarm 1e-6, fixed seeds)."""
    sharp = d.model_drafter(d.target(change=lambda context, logits: 2 * logits), b.CONFIG)
    s = b.subject(sharp, b.FakeClock(), engine=engine)
    s.use(b.cell(k=4))
    pairs = []
    for seed in range(50):
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed)
        (out,) = d.run(s.engine, [(1 + seed % 12, 3)], params)
        pairs.append(Pair(out.prompt_tokens, (0,) * 12, out.token_ids))
    verdict = judge(pairs, s.engine.model, SEEDLESS)
    assert verdict.verdict == expected, verdict.detail
