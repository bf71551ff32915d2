"""Measuring costs: a machine whose costs are known is measured right."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_machine import CONFIG, DRAFT, SMALL, TARGET, VOCAB, Machine, SimulatedClock, machines

from paceline.core.latency import HostCost
from paceline.draft.cache import DraftCache
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.vocabulary import SameVocabulary
from paceline.engine.engine import EngineConfig
from paceline.engine.fitting import (
    Run,
    Session,
    Step,
    at_one_speed,
    fit_host,
    fit_target,
    settled,
)
from paceline.engine.measure import FULL, QUICK, measure
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError


@pytest.mark.parametrize(
    ("depth", "noise", "within"), [(FULL, 0.0, 0.01), (FULL, 0.05, 0.04), (QUICK, 0.0, 0.03)]
)
def test_known_costs_are_found(depth, noise, within):
    clock = SimulatedClock(noise)
    target, drafter = machines(clock)
    found = measure(target, {"d": drafter}, CONFIG, depth=depth, clock=clock)
    lift = 1.0 + noise / 2  # what a noisy machine takes on the median
    for n in (1, 2, 4, 5, 9, 16):
        assert found.target([n], [0]) == pytest.approx(lift * TARGET([n], [0]), rel=within)
        assert found.target([n], [1000]) == pytest.approx(lift * TARGET([n], [1000]), rel=within)
    d = found.drafts["d"]
    for batch, k in ((1, 1), (1, 4), (1, 8), (4, 4)):
        # After a round whose drafts were all accepted the draft lacks two tokens.
        rows = 8e-3 * k + 0.1e-3 * (batch * (k + 1) - k)
        reads = k * batch * 64 * 0.5e-6
        assert d(k, [64] * batch) == pytest.approx(lift * (rows + reads), rel=0.02 + 2 * within)
    if depth is FULL:
        assert found.target.rows(512) == pytest.approx(lift * TARGET.rows(512), rel=0.1)
        prompt = DRAFT.rows(512) + DRAFT.rows(512) - 2 * DRAFT.rows(1)
        if not noise:  # measured once, so an interruption shows
            assert d.catch_up(1024) == pytest.approx(prompt, rel=0.3)
            reading = d(4, [2064]) - d(4, [64])
            assert reading == pytest.approx(4 * 2000 * 0.5e-6, rel=0.15)
    assert found.meta["seconds"] < 60 * (1 + 2 * noise)
    assert drafter.usage().blocks_used == 0


def test_a_draft_reads_its_cache():
    """A tenth of its time behind 2,000 tokens, which one noisy measurement finds within a factor
    of two; the median of nine within a third."""
    found = []
    for seed in range(9):
        clock = SimulatedClock(0.05)
        clock.rng = np.random.default_rng(seed)
        target, drafter = machines(clock)
        d = measure(target, {"d": drafter}, CONFIG, depth=FULL, clock=clock).drafts["d"]
        found.append(d(4, [2064]) - d(4, [64]))
    assert np.median(found) == pytest.approx(1.025 * 4 * 2000 * 0.5e-6, rel=0.33)


@pytest.mark.parametrize("depth", [QUICK, FULL])
def test_what_a_draft_does_but_once_is_no_cost_of_prompts(depth):
    """Packing weights, first touching memory: 0.5 s in the draft's first pass."""
    clock = SimulatedClock()
    target = Machine(clock, TARGET)

    class Cold(Machine):
        passes = 0

        def forward(self, *args, **more):
            self.passes += 1
            clock.work(0.5 if self.passes == 1 else 0.0)
            return super().forward(*args, **more)

    cache = DraftCache(Cold(clock, DRAFT), n_blocks=CONFIG.n_blocks, block_size=32, max_batch=8)
    drafter = ModelDrafter(cache, SameVocabulary(VOCAB))
    found = measure(target, {"d": drafter}, CONFIG, depth=depth, clock=clock)
    for n in (16, 32, 128) if depth is FULL else (16, 32):
        reading = DRAFT.rows(n) - DRAFT.rows(1)
        assert found.drafts["d"].catch_up(n) == pytest.approx(reading, rel=0.15)


def test_a_fast_model_is_measured_over_some_seconds():
    """A machine that is slow for the first four seconds, in passes of many rows above all, was
    so for a small part of what is measured."""
    clock = SimulatedClock()

    class Disturbed(Machine):
        def forward(self, batch, *args, **more):
            if clock.now < 4.0:
                clock.work(5e-4 * batch.n_rows)
            return super().forward(batch, *args, **more)

    found = measure(Disturbed(clock, SMALL), {}, CONFIG, depth=FULL, clock=clock)
    for n in (1, 2, 5, 9):
        assert found.target([n], [0]) == pytest.approx(SMALL([n], [0]), rel=0.03)


def test_a_machine_settles():
    """For 40 ms after another kind of pass each takes a fifth longer, as where clocks and caches
    adapt; what an engine does for long is what counts."""
    clock = SimulatedClock()

    class Inert(Machine):
        rows, since = 0, 0.0

        def forward(self, batch, *args, **more):
            if batch.n_rows != self.rows:
                self.rows, self.since = batch.n_rows, clock.now
            if clock.now - self.since < 40e-3:
                clock.work(0.2 * SMALL([batch.n_rows], [0]))
            return super().forward(batch, *args, **more)

    found = measure(Inert(clock, SMALL), {}, CONFIG, depth=FULL, clock=clock)
    for n in (1, 2, 5, 9):
        assert found.target([n], [0]) == pytest.approx(SMALL([n], [0]), rel=0.02)


def test_the_quick_depth_is_quick():
    """With a pass of 50 ms and drafts of 8 ms a token, as its docstring says."""
    clock = SimulatedClock()
    target, drafter = machines(clock)
    measure(target, {"d": drafter}, CONFIG, depth=QUICK, clock=clock)
    assert clock.now < 5.1


@pytest.mark.parametrize("depth", [QUICK, FULL])
def test_a_step_is_told_from_its_sequences(depth):
    """In both modes: with one batch size alone, least squares would give a step's whole host
    cost to its sequences, and a batch of 16 would seem to take 16 times as long."""
    clock = SimulatedClock()

    class Slow(FixedBudget):
        def budgets(self, seqs):
            clock.work(4e-3 + 1e-3 * len(seqs))
            return super().budgets(seqs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.engine.sessions.FixedBudget", Slow)
        found = measure(Machine(clock, TARGET), {}, CONFIG, depth=depth, clock=clock)
    for host in found.host.values():
        for batch in (1, 4, 16):
            assert host(batch, batch) == pytest.approx(4e-3 + 1e-3 * batch, rel=0.1)


def test_interruptions_leave_medians_alone():
    """One step in twenty takes ten times as long; means would be 45 % too high."""
    clock = SimulatedClock(noise=1e-9, interrupted=0.05)
    target, _ = machines(clock)
    found = measure(target, {}, CONFIG, depth=FULL, clock=clock)
    assert found.target([1], [0]) == pytest.approx(50e-3, rel=0.02)
    assert found.target([9], [0]) == pytest.approx(TARGET([9], [0]), rel=0.05)
    assert found.drafts == {}


def test_a_light_drafter_costs_next_to_nothing():
    clock = SimulatedClock()
    found = measure(Machine(clock, TARGET), {"ngram": NgramDrafter()}, CONFIG, clock=clock)
    assert found.drafts["ngram"](4, [64]) < 1e-4


def test_time_to_find_nothing_is_drafting_time():
    clock = SimulatedClock()

    class Slow(NoDrafter):
        """Nothing to propose, and 3 ms to find that out."""

        def propose(self, seqs, budgets):
            clock.work(3e-3)
            return super().propose(seqs, budgets)

    found = measure(Machine(clock, TARGET), {"slow": Slow()}, CONFIG, clock=clock)
    assert found.drafts["slow"](4, [64]) == pytest.approx(3e-3, rel=0.05)
    assert found.drafts["slow"](1, [64]) == pytest.approx(3e-3, rel=0.05)
    assert found.drafts["slow"](0, [64]) < 1e-4
    assert found.host["greedy"](1, 1) < 1e-3


def test_host_cost_by_sequences_and_rows():
    known = HostCost(step=4e-4, sequence=1e-4, row=5e-5)
    steps = [
        Step(
            session=Session(batch=n, budgets=(0, k), rounds=1, prompt=8), k=k, drafted=n * k,
            contexts=(8,) * n, t_p=1.0, t_q=0.0, t_o=known(n, n * (k + 1)),
        )
        for n in (1, 4)
        for k in (0, 2, 8)
    ]  # fmt: skip
    runs = [Run(s.session, (s,), 0.0, s.session.prompt) for s in steps]
    found = fit_host(runs, TARGET, "greedy")
    for name in ("step", "sequence", "row"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)


IN_ENGINE = {1: 1.1, 5: 1.5, 9: 1.3}
"""How much longer a pass of so many rows takes between other work than after another one."""


def run_of(budgets, seconds, *, sampled=False, prompt=16, t_o=1e-3):
    """A session of one sequence; seconds: of the pass, by draft tokens."""
    session = Session(sampled=sampled, budgets=budgets, rounds=1, prompt=prompt)
    steps = tuple(
        Step(session=session, k=k, drafted=k, contexts=(prompt,), t_p=seconds(k), t_q=0.0, t_o=t_o)
        for k in budgets
    )
    return Run(session, steps, 0.0, prompt)


def test_passes_cost_what_they_cost_in_the_engine():
    """Not what they cost one after another, nor at the speed that the machine had by chance."""

    def greedy(speed):
        return lambda k: speed * IN_ENGINE[k + 1] * TARGET([k + 1], [16])

    speeds = (1.0, 1.6, 1.0, 1.5, 0.9)
    cycles = [[run_of((0, 0, 4, 8), greedy(v))] for v in speeds]

    def reading(k):
        read = 1.2 * 2000 * TARGET.per_entry(k + 1)
        return 1.3 * (IN_ENGINE[k + 1] * TARGET.rows(k + 1) + read)

    far = run_of((0, 4), reading, prompt=2000)
    cycles.append([run_of((0, 0), greedy(1.3)), far])
    found, spread = fit_target(TARGET, at_one_speed(cycles))
    unit = found.rows(1) / (IN_ENGINE[1] * TARGET.rows(1))
    assert 0.9 <= unit <= 1.6
    for n, factor in IN_ENGINE.items():
        assert found.rows(n) / unit == pytest.approx(factor * TARGET.rows(n), rel=0.01)
    assert found.per_entry(5) / unit == pytest.approx(1.2 * TARGET.per_entry(5), rel=0.05)
    assert spread < 0.01


def test_sampling_displaces_the_weights():
    """Between steps that sample a pass takes longer: that is the host's cost of sampling."""
    plain = run_of((0, 4), lambda k: TARGET([k + 1], [16]))
    drawn = run_of((0, 4), lambda k: TARGET([k + 1], [16]) + 5e-3 + 2e-3 * k, sampled=True)
    assert fit_host([plain, drawn], TARGET, "greedy")(1, 5) == pytest.approx(1e-3, rel=1e-6)
    sampled = fit_host([plain, drawn], TARGET, "sampled")
    assert sampled(1, 1) == pytest.approx(6e-3, rel=1e-6)
    assert sampled(1, 5) == pytest.approx(14e-3, rel=1e-6)


def test_drafting_is_measured_at_the_speed_of_the_passes():
    """A session on a machine that is slow for a while: all its times shrink alike."""
    host = dict.fromkeys(("greedy", "sampled"), HostCost(step=1e-3, sequence=0.0, row=0.0))
    run = run_of((0, 0, 4), lambda k: 2.0 * TARGET([k + 1], [16]), t_o=2e-3)
    found = settled(run, TARGET, host)
    assert [s.t_o for s in found.steps] == pytest.approx([1e-3] * 3)
    assert found.steps[2].t_p == pytest.approx(TARGET([5], [16]))


def test_a_pool_too_small_to_measure_in():
    clock = SimulatedClock()
    config = EngineConfig(kv_tokens=16, block_size=16, max_batch=1)
    with pytest.raises(UserError, match="kv_tokens = 16"):
        measure(Machine(clock, TARGET), {"ngram": NgramDrafter()}, config, clock=clock)


@pytest.mark.parametrize("tokens", [64, 256])
def test_small_pools_and_contexts(tokens):
    """What does not fit is left out, and a profile comes out all the same."""
    clock = SimulatedClock()
    config = EngineConfig(kv_tokens=tokens, block_size=16, max_batch=1, prefill_chunk=32)
    target = Machine(clock, TARGET, max_context=tokens)
    found = measure(target, {"ngram": NgramDrafter()}, config, depth=QUICK, clock=clock)
    assert found.target([1], [0]) == pytest.approx(50e-3, rel=0.05)
    assert set(found.host) == {"greedy", "sampled"}
