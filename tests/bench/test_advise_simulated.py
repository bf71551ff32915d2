"""The whole advisor on a simulated machine: costs measured by `measure`, acceptance traced, and
the prediction held against an engine's time on the same machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import VOCAB, draft_cache
from simulated_machine import VOCAB as MACHINE_VOCAB
from simulated_machine import Machine, SimulatedClock, Timed

from paceline.bench.predict import Predictor
from paceline.bench.trace import Setting, trace_requests
from paceline.core.latency import Curve, TargetCost
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.vocabulary import SameVocabulary
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.measure import measure
from paceline.engine.policy import FixedBudget
from paceline.models.toy import TabularModel
from paceline.types import Request

CONFIG = EngineConfig(
    kv_tokens=4096, block_size=16, max_batch=4, prefill_chunk=64, prefix_cache=False
)
TARGET = TargetCost(
    rows=Curve(xs=(1.0, 4.0, 64.0), ys=(50e-3, 56e-3, 236e-3)), per_entry=Curve.level(2e-6)
)
DRAFT = TargetCost(rows=Curve(xs=(1.0, 64.0), ys=(8e-3, 15e-3)), per_entry=Curve.level(0.2e-6))
OUTPUT = 32


def target():
    return TabularModel(VOCAB, order=2)


def noisy():
    """The target's table and noise."""

    def change(context, logits):
        rng = np.random.default_rng([7, len(context), *context])
        return (logits + rng.normal(0, 0.9, len(logits))).astype(np.float32)

    return TabularModel(VOCAB, order=2, change=change)


def drafters(draft, vocab):
    cache = draft_cache(draft, CONFIG)
    return {
        "model": ModelDrafter(cache, SameVocabulary(vocab)),
        "ngram": NgramDrafter(longest=3, shortest=1),
    }


@pytest.fixture(scope="module")
def profile():
    """What `measure` finds; it sees the machine's costs only through the clock."""
    clock = SimulatedClock()
    many = drafters(Machine(clock, DRAFT, "draft"), MACHINE_VOCAB)
    return measure(Machine(clock, TARGET), many, CONFIG, clock=clock)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(8)
    return [tuple(rng.integers(0, VOCAB, n).tolist()) for n in rng.integers(4, 100, 12)]


def seconds(label, k, setting, prompts, at_once):
    """Simulated seconds of an engine that serves so many requests at once."""
    clock = SimulatedClock()
    config = replace(CONFIG, max_batch=at_once)
    drafter = drafters(Timed(noisy(), clock, DRAFT), VOCAB)[label]
    engine = Engine(Timed(target(), clock, TARGET), drafter, FixedBudget(k), config, clock=clock)
    for i, prompt in enumerate(prompts):
        params = setting.params(max_tokens=OUTPUT, seed=i, ignore_eos=True)
        engine.submit(Request(prompt=prompt, params=params))
    for _ in engine.stream():
        pass
    return clock.now


@pytest.mark.parametrize(
    "setting", [Setting(), Setting(temperature=1.0, seeded=True)], ids=lambda s: s.label
)
def test_predicted_is_what_the_engine_takes(profile, prompts, setting):
    """The same texts traced and run: alone within 2 %, four at once within 6 % (the last
    requests of a run have less company than the prediction has)."""
    many = drafters(noisy(), VOCAB)
    traced = trace_requests(
        target(), many, dict.fromkeys(many, 8), prompts, setting, CONFIG, max_tokens=OUTPUT,
        ignore_eos=True,
    )  # fmt: skip
    predictor = Predictor(profile, setting, traced, chunk=CONFIG.prefill_chunk)
    for at_once, within in ((1, 0.02), (4, 0.06)):
        plain = seconds("ngram", 0, setting, prompts, at_once)
        for label in many:
            for k in (1, 4):
                predicted = predictor.predict(label, k, at_once)
                measured = plain / seconds(label, k, setting, prompts, at_once)
                assert predicted.throughput.value == pytest.approx(measured, rel=within), (
                    f"{label}, k = {k}, {at_once} at once"
                )


def test_drawn_proposals_are_predicted_too(profile, prompts):
    """Temperature 1 under block verification: texts differ, so the measured figure is another
    sample; with 12 requests it is within 15 % (about 5 standard errors of either)."""
    setting = Setting(temperature=1.0)
    many = drafters(noisy(), VOCAB)
    traced = trace_requests(
        target(), many, dict.fromkeys(many, 8), prompts, setting, CONFIG, max_tokens=OUTPUT,
        seed=500, ignore_eos=True,
    )  # fmt: skip
    predictor = Predictor(profile, setting, traced, chunk=CONFIG.prefill_chunk, requests=12)
    plain = seconds("model", 0, setting, prompts, 1)
    for k in (1, 4):
        measured = plain / seconds("model", k, setting, prompts, 1)
        assert predictor.predict("model", k).latency.value == pytest.approx(measured, rel=0.15)
