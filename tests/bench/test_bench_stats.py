"""Intervals cover what they say."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.bench.stats import paired_speedup, spread, tail_share


def simulate(rng: np.random.Generator, prompts: int, repeats: int) -> tuple:
    """Times of prompts whose speed-ups vary around 1.5, with noise shared by a pair."""
    length = rng.lognormal(0, 0.3, (prompts, 1))
    gain = rng.lognormal(np.log(1.5), 0.2, (prompts, 1))
    drift = rng.lognormal(0, 0.3, (prompts, repeats))  # hits plain and fast alike
    plain = length * drift * rng.lognormal(0, 0.03, (prompts, repeats))
    fast = length / gain * drift * rng.lognormal(0, 0.03, (prompts, repeats))
    return plain, fast


@pytest.mark.parametrize("prompts", [5, 20])
def test_the_interval_covers_the_truth_at_its_rate(prompts: int) -> None:
    """300 intervals (fixed seed). Fewer than 264 hits have odds of 5e-7 where the rate is
    95 %, and 0.99 where it is 85 %."""
    # The expectation of the ratio's two sums: E[length * drift] / E[length / gain * drift].
    truth = 1.5 / np.exp(0.2**2 / 2)
    rng = np.random.default_rng(7)
    hits = 0
    for i in range(300):
        e = paired_speedup(*simulate(rng, prompts, 5), seed=i, resamples=400)
        assert e.low <= e.value <= e.high
        hits += e.low <= truth <= e.high
    assert hits >= 264, hits


def test_luck_that_prompts_share_widens_the_interval() -> None:
    """Side by side, a repeat's noise hits all prompts. 300 intervals of 8 prompts that are
    really one number a repeat (fixed seed): with five of these the rate is 0.9, so fewer than
    238 hits have odds below 1e-7. Taken for independent, the prompts hide the noise."""
    rng = np.random.default_rng(5)
    hits = {True: 0, False: 0}
    for i in range(300):
        luck = rng.lognormal(0, 0.05, (1, 5))
        fast = np.ones((8, 1)) * luck / np.exp(0.05**2 / 2)
        for shared in hits:
            e = paired_speedup(np.ones((8, 5)), fast, shared=shared, seed=i)
            hits[shared] += e.low <= 1.0 <= e.high
    assert hits[True] >= 238, hits
    assert hits[False] < 200, hits


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(1)
    drift = rng.lognormal(0, 1.0, (8, 5))
    e = paired_speedup(2 * drift, drift)
    assert e.value == pytest.approx(2)
    assert (e.low, e.high) == (pytest.approx(2), pytest.approx(2))


def test_few_units_give_wide_intervals() -> None:
    assert tail_share(100, 0.95) == pytest.approx(0.024, abs=0.002)
    assert tail_share(5, 0.95) < 0.002
    assert tail_share(2, 0.95) < 1e-9
    one = paired_speedup(np.array([[3.0]]), np.array([[2.0]]))
    assert (one.low, one.value, one.high) == (1.5, 1.5, 1.5)
    only_repeats = paired_speedup(np.array([[3.0, 2.0, 4.0]]), np.array([[2.0, 2.0, 2.0]]))
    assert only_repeats.low < 1.5 < only_repeats.high


def test_unpaired_times_are_refused() -> None:
    with pytest.raises(ValueError, match="pair up"):
        paired_speedup(np.ones((2, 3)), np.ones((2, 2)))


def test_spread() -> None:
    s = spread([4.0, 1.0, 2.0, 3.0])
    assert (s.n, s.mean, s.p50, s.min, s.max) == (4, 2.5, 2.5, 1.0, 4.0)
    empty = spread([])
    assert empty.n == 0
    assert empty.mean is None
