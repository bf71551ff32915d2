"""The parts of `benchmarks/never_slower.py` that decide what it says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import devices as d
import numpy as np
import pytest

from paceline.types import SamplingParams

FILE = Path(__file__).parents[2] / "benchmarks" / "never_slower.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("never_slower", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_wrong_drafter_always_drafts_and_changes_nothing(
    script: ModuleType, temperature: float
) -> None:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    plain = d.run(d.make_engine("none"), d.PROMPTS, params)
    engine = d.make_engine(script.Wrong(d.VOCAB, np.random.default_rng(0)), k=4)
    wrong = d.run(engine, d.PROMPTS, params)
    assert d.ids(wrong) == d.ids(plain)
    totals = engine.stats.totals
    assert totals.drafted > 3 * totals.rounds
    assert totals.accepted < 0.25 * totals.drafted  # one in 13 is right by chance


def test_windows_hold_equally_many_tokens(script: ModuleType) -> None:
    """Phases of 1, 16 and 1 in flight, two windows of four plain rounds each."""
    slow = ([0.0, 2.0, 4.0], [0, 4, 8])
    jumps = ([0.0, 1.0, 5.0], [0, 64, 192])  # the last step brings more than is asked
    assert script.window_seconds([slow, jumps, slow], 2, 4) == [2.0, 2.0, 1.0, 2.0, 2.0, 2.0]


def test_what_falls_short_of_its_mark_is_named(script: ModuleType) -> None:
    def cell(value: float, high: float, **more: object) -> dict[str, object]:
        known = {"drafter": "ngram", "speedup": value, "speedup_high": high}
        return {**known, "speedup_low": 0.7, **more}

    where = {"workload": "x", "temperature": 0.0}
    found = {
        "wrong": [cell(0.975, 1.0, **where)],
        "load": [cell(1.2, 1.3, worst_near_switch=cell(0.8, 0.84))],
        "matrix": [
            cell(0.96, 0.99, **where),
            cell(1.5, 1.6, **where),
            cell(0.9, 0.9, speedup_low=0.9, **where),  # one run has no interval
        ],
    }
    assert script.below(found) == [
        "matrix, ngram, x, temperature 0: 0.960",
        "matrix, ngram, x, temperature 0: 0.900",
        "load near a switch, ngram: 0.800, surely",
    ]
