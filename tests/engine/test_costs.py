"""What the policy expects a round to take: the latency model's formula, term by term."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from simulated import MODEL, SimDrafter, Simulation, profile

from paceline.core.latency import DraftCost, Profile, round_seconds
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.costs import Costs, Work
from paceline.engine.explore import FIRST_WAIT, Probe, Rates
from paceline.engine.tally import STALE, Tally

BUDGETS, CONTEXTS = (4, 1, 0, 2), (100, 50, 200, 10)


def sampling(seconds: float) -> Profile:
    return profile(model=replace(MODEL, sampling=seconds))


def work(modes: tuple[str, ...]) -> Work:
    return Work(
        budgets=BUDGETS, drafters=("model",) * 4, lags=(1,) * 4, contexts=CONTEXTS, modes=modes
    )


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_round_takes_what_the_latency_model_says(mode: str) -> None:
    known = sampling(1e-3)
    expected = round_seconds(known, "model", BUDGETS, CONTEXTS, mode)
    assert Costs(known).of(work((mode,) * 4)) == pytest.approx(expected)
    alone = Costs(known).alone("model", 3, 70, mode)
    assert alone == pytest.approx(known.drafts["model"](3, [70], mode))


def test_in_a_mixed_batch_those_that_sample_pay_for_sampling() -> None:
    costs = Costs(sampling(1e-3))
    mixed = costs.drafting(work(("sampled", "greedy", "greedy", "sampled")))
    greedy, sampled = (costs.drafting(work((m,) * 4)) for m in ("greedy", "sampled"))
    assert mixed - greedy == pytest.approx(1e-3 * (4 + 2))
    assert sampled - greedy == pytest.approx(1e-3 * sum(BUDGETS))


def long_rounds(temperature: float, cost: DraftCost) -> float:
    """Share of all rounds of ten requests that draft more than one token."""
    long = rounds = 0
    for seed in range(10):
        true, drafter = profile(model=cost), SimDrafter(["model"])
        policy = AdaptivePolicy(true, drafter, clock=lambda: 0.0)
        rng = np.random.default_rng(seed)
        run = Simulation(true, drafter, lambda i, t, d: 0.75, policy, rng, temperature=temperature)
        run.run([(0.0, 8, 120)])
        drafted = policy.usage()["drafted_histogram"]
        assert isinstance(drafted, dict)
        long += sum(n for k, n in drafted.items() if int(k) > 1)
        rounds += sum(drafted.values())
    return long / rounds


def test_a_request_that_samples_drafts_less_where_sampling_is_dear() -> None:
    """3 ms a token on top of 3: no second token pays."""
    cost = replace(MODEL, sampling=3e-3)
    assert long_rounds(0.0, cost) > 0.4
    assert long_rounds(1.0, cost) < 0.15
    assert long_rounds(1.0, MODEL) > 0.4


def test_each_size_of_batch_has_its_own_pace() -> None:
    """What slows passes of one sequence need not slow those of sixteen; what slows all is known
    of all as soon as it is seen of one."""

    def step(n: int, factor: float) -> None:
        plain = Work(
            budgets=(0,) * n, drafters=(None,) * n, lags=(0,) * n, contexts=(100,) * n,
            modes=("greedy",) * n,
        )  # fmt: skip
        costs.observe(plain, 0.0, factor * Costs(known).plain(plain.contexts, "greedy"))

    def pace(n: int) -> float:
        return costs.plain([100] * n, "greedy") / Costs(known).plain([100] * n, "greedy")

    known = profile()
    costs = Costs(known)
    for _ in range(5):
        step(1, 1.6)
    assert costs.plain_seen(1) == 5
    assert costs.plain_seen(16) == 0
    assert pace(16) == pytest.approx(1.6)
    step(16, 1.0)
    assert (pace(1), pace(16)) == pytest.approx((1.6, 1.0))
    for _ in range(20):
        step(16, 2.0)
    assert pace(16) == pytest.approx(2.0, rel=0.02)
    assert pace(1) > 1.8  # nothing says that this is of sixteen alone
    for _ in range(5):
        step(1, 1.6)
    assert pace(1) == pytest.approx(1.6, rel=0.1)


def test_plain_steps_of_another_size_of_batch_do_not_count() -> None:
    """Behind each plain step rounds of that size are counted; where it is long ago it is due."""
    tally = Tally()
    tally.add_plain(1)
    tally.add([0] * 16, set())
    for _ in range(5):
        tally.add([1] * 16, {"model"})
    assert (tally.since_plain(1), tally.since_plain(16)) == (0, 5)
    tally.add_plain(1)
    assert (tally.since_plain(1), tally.since_plain(16)) == (0, 5)
    for _ in range(STALE - 6):
        tally.add_plain(1)
    assert tally.since_plain(16) == 5
    tally.add_plain(1)
    assert (tally.since_plain(1), tally.since_plain(16)) == (0, math.inf)


def test_a_speed_up_is_never_more_than_tau():
    """Plain steps that were measured while something else ran look slow; what was gained over
    them is then absurd, and must not keep plain steps from being measured again."""
    rates = Rates()
    assert rates.speedup(1) == 1.0
    for _ in range(200):
        rates.add(1, 1, share=1.0, seconds=0.01)
    assert rates.speedup(1) == 1.0
    for _ in range(200):
        rates.add(1, 3, share=1.0, seconds=0.01)
    assert rates.speedup(1) == pytest.approx(3.0, rel=0.05)
    rates = Rates()
    for _ in range(200):
        rates.add(1, 3, share=0.01, seconds=0.02)
    assert rates.speedup(1) == pytest.approx(1.5, rel=0.05)


def test_a_probe_without_room_is_put_off():
    """A probe that stays due wakes the policy from every rest."""
    probe = Probe()
    assert probe.due
    for rounds, wait in ((3, FIRST_WAIT), (40, 40)):
        probe.postponed(rounds)
        for _ in range(wait):
            assert not probe.due
            probe.refused()
        assert probe.due


def test_upkeep_does_not_lock_the_ledger():
    """A drafter whose keeping takes more than eps of a plain step, useless for three requests
    and always right in the fourth: the room that was lost grows again."""
    drafter = SimDrafter(["model"])
    policy = AdaptivePolicy(profile(model=MODEL), drafter, clock=lambda: 0.0)
    world = Simulation(
        true=profile(model=MODEL), drafter=drafter, policy=policy, rng=np.random.default_rng(1),
        alpha=lambda request, at, name: float(request == 3), upkeep=1e-3,
    )  # fmt: skip
    world.run([(0.0, 16, 400)] * 3, max_batch=1)
    plain = world.now / world.tokens
    requests = [(world.now, 16, 1)] * 3 + [(world.now, 16, 800)]
    assert world.run(requests, max_batch=1) < 0.7 * plain * 803
