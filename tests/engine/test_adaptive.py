"""The adaptive policy on simulated time: it wins where something is to be won, and never
loses. Seeds are fixed, so nothing here fails by chance."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from simulated import Alpha, SimDrafter, Simulation, profile, scaled

from paceline.core.latency import Curve
from paceline.draft.base import Arm
from paceline.engine import course as courses
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.plan import Choice, Choices, Plan, work_of
from paceline.engine.policy import FixedBudget
from paceline.engine.purse import AdaptiveConfig
from paceline.types import Sequence

#: (arrival, prompt tokens, output tokens).
REQUESTS = [(0.0, 100, 128)] * 8
JITTER = (0.7, 1.5)
#: A look at it takes a microsecond, or none.
CLOCK = {"tick": 0.0, "now": 0.0}


def clock() -> float:
    CLOCK["now"] += CLOCK["tick"]
    return CLOCK["now"]


@pytest.fixture(autouse=True, params=["at once", "in a while"])
def deciding(request, monkeypatch) -> None:
    """In no time, so that every round is decided on; and in so much that plain rounds are taken
    some 14 at a time without a thought, and choices to draft are kept for 8 rounds."""
    slow = request.param == "in a while"
    monkeypatch.setitem(CLOCK, "tick", 1e-6 if slow else 0.0)
    monkeypatch.setattr(courses, "THINKING", 7e-6)


def simulate(
    alpha: Alpha,
    names: tuple[str, ...] = ("model",),
    *,
    k: int | None = None,
    requests=REQUESTS,
    max_batch: int = 1,
    true=profile(),  # noqa: B008
    believed=None,
    matches=lambda i, n: True,
    **more,
) -> Simulation:
    """Run to the end: adaptive, or with k fixed."""
    drafter = SimDrafter(names, matches)
    policy = AdaptivePolicy(believed or true, drafter, clock=clock) if k is None else FixedBudget(k)
    run = Simulation(true, drafter, alpha, policy, np.random.default_rng(1), **more)
    run.run(requests, max_batch)
    return run


def speed(run: Simulation) -> float:
    return run.tokens / run.work


def against_plain(alpha: Alpha, names: tuple[str, ...] = ("model",), **more) -> float:
    plain = {n: v for n, v in more.items() if n != "believed"}
    return speed(simulate(alpha, names, **more)) / speed(simulate(alpha, names, k=0, **plain))


def best_fixed(alpha: Alpha, names: tuple[str, ...], **more) -> float:
    return max(speed(simulate(alpha, names, k=k, **more)) for k in (0, 1, 2, 3, 4, 6, 8))


@pytest.mark.parametrize("noise", [(1.0, 1.0), JITTER])
@pytest.mark.parametrize("max_batch", [1, 12])
@pytest.mark.parametrize("names", [("model",), ("ngram",), ("ngram", "model")])
def test_a_draft_that_is_always_wrong_costs_next_to_nothing(names, max_batch, noise) -> None:
    requests = [(0.0, 100, 128)] * max(8, 2 * max_batch)
    ratio = against_plain(
        lambda i, t, d: 0.0, names, requests=requests, max_batch=max_batch, noise=noise
    )
    assert ratio >= 0.97


@pytest.mark.parametrize("noise", [(1.0, 1.0), JITTER])
def test_copying_reaches_the_best_fixed_budget(noise) -> None:
    def alpha(i: int, t: int, d: str) -> float:
        return 0.95

    requests = [(0.0, 100, 128)] * 16
    found = speed(simulate(alpha, ("ngram",), requests=requests, noise=noise))
    assert found >= 0.95 * best_fixed(alpha, ("ngram",), requests=requests, noise=noise)


def test_a_good_model_is_used_nearly_as_well_as_by_hindsight() -> None:
    def alpha(i: int, t: int, d: str) -> float:
        return 0.8

    assert speed(simulate(alpha)) >= 0.95 * best_fixed(alpha, ("model",))


@pytest.mark.parametrize(
    ("ngram", "model"), [(0.9, 0.7), (0.1, 0.7), (0.9, 0.0)], ids=["both", "model", "ngram"]
)
def test_each_stretch_of_text_gets_the_drafter_that_serves_it(ngram: float, model: float) -> None:
    """n-grams match in every other stretch of 20 tokens: better than any fixed k with both."""

    def alpha(i: int, t: int, d: str) -> float:
        return ngram if d == "ngram" else model

    def matches(i: int, n: int) -> bool:
        return n // 20 % 2 == 0

    names = ("ngram", "model")
    assert speed(simulate(alpha, names, matches=matches)) >= best_fixed(
        alpha, names, matches=matches
    )


@pytest.mark.parametrize("good_first", [True, False])
def test_acceptance_that_switches_is_followed(good_first: bool) -> None:
    def alpha(i: int, t: int, d: str) -> float:
        return 0.9 if (t // 400 % 2 == 0) == good_first else 0.02

    requests = [(0.0, 50, 1600)]
    run = simulate(alpha, ("ngram",), requests=requests)
    fixed = best_fixed(alpha, ("ngram",), requests=requests)
    assert speed(run) > 1.05 * fixed


def test_load_from_1_to_16_and_back_does_not_collapse() -> None:
    """One long request; 15 more arrive while it runs; another long one after them."""

    def alpha(i: int, t: int, d: str) -> float:
        return 0.8

    requests = [(0.0, 50, 400), *[(1.5, 50, 100)] * 15, (8.0, 50, 400)]
    run = simulate(alpha, requests=requests, max_batch=16)
    plain = simulate(alpha, requests=requests, max_batch=16, k=0)
    assert speed(run) >= speed(plain)
    for i, ended in run.finished.items():
        assert ended <= 1.05 * plain.finished[i], f"request {i} ended late"
    alone = simulate(alpha, requests=[(0.0, 50, 400)])
    assert run.finished[16] - 8.0 <= 1.1 * alone.now, "it does not find back"


@pytest.mark.parametrize("accepted", [0.3, 0.5, 0.7])
def test_slow_memory_says_nothing_of_large_batches(accepted: float) -> None:
    """Since the profile was measured memory has become 1.9 times as slow, which a pass of sixteen
    rows, all arithmetic, does not feel: for one request drafts pay more than ever, for sixteen
    they do not, and a policy that took all passes for slow would draft for them."""
    believed = profile()
    rows = believed.target.rows
    slow = Curve(xs=rows.xs, ys=tuple(max(y, 0.019) for y in rows.ys))
    true = replace(believed, target=replace(believed.target, rows=slow))
    requests = [(0.0, 50, 600), *[(1.5, 50, 200)] * 15]
    more = {"true": true, "requests": requests, "max_batch": 16}
    adaptive = simulate(lambda i, t, d: accepted, ("ngram",), believed=believed, **more)
    plain = simulate(lambda i, t, d: accepted, ("ngram",), k=0, **more)
    # On average: where some get on faster than others, the last ones end in a smaller batch.
    ended = [
        np.mean([world.finished[i] - 1.5 for i in range(1, 16)]) for world in (adaptive, plain)
    ]
    assert ended[0] <= 1.02 * ended[1]
    assert adaptive.now < 0.95 * plain.now  # alone the first request is faster


@pytest.mark.parametrize("rows", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("draft", [0.5, 1.0, 2.0])
def test_a_wrong_profile_is_corrected(rows: float, draft: float) -> None:
    def alpha(i: int, t: int, d: str) -> float:
        return 0.8

    requests = [(0.0, 100, 128)] * 12
    found = simulate(alpha, requests=requests, believed=scaled(profile(), rows=rows, draft=draft))
    assert speed(found) >= 0.93 * best_fixed(alpha, ("model",), requests=requests)
    wrong = against_plain(lambda i, t, d: 0.0, believed=scaled(profile(), rows=rows, draft=draft))
    assert wrong >= 0.97


def test_a_machine_that_jumps_between_speeds_does_not_mislead() -> None:
    """Three times as slow in every other second: what was slow then is not blamed."""

    def slow(t: float) -> float:
        return 3.0 if int(t) % 2 else 1.0

    assert against_plain(lambda i, t, d: 0.8, requests=REQUESTS * 2, speed=slow) >= 1.15
    assert against_plain(lambda i, t, d: 0.0, requests=REQUESTS * 2, speed=slow) >= 0.95


def test_single_interruptions_do_not_stop_speculation() -> None:
    def pauses(t: float) -> float:
        return 20.0 if int(t * 1000) % 50 == 0 else 1.0

    def alpha(i: int, t: int, d: str) -> float:
        return 0.9

    run = simulate(alpha, ("ngram",), requests=REQUESTS * 3, speed=pauses)
    usage = run.policy.usage()
    assert usage["rounds_by_drafter"]["ngram"] > 5 * usage["plain_rounds"]


def test_what_was_refused_is_done_as_soon_as_there_is_room() -> None:
    """Nothing may be lost at first, and weighing the choices takes as much as five plain steps
    make room for: it is done once, and again when there is room for what it found."""
    true, drafter = profile(), SimDrafter(["ngram"])
    config = AdaptiveConfig(start=0.0, trial=0.0)
    now, decisions, drafted = 0.0, [], []
    policy = AdaptivePolicy(true, drafter, config, clock=lambda: now)
    best, budgets = policy._best, policy.budgets

    def slowly(*args):
        nonlocal now
        now += 5 * config.eps * 0.0103
        decisions.append(1)
        return best(*args)

    def until_drafted(seqs):
        found = budgets(seqs)
        if any(found):
            drafted.append((seqs[0].n_output, found[0]))
        return found

    policy._best, policy.budgets = slowly, until_drafted
    Simulation(true, drafter, lambda i, t, d: 1.0, policy, np.random.default_rng(1)).run(
        [(0.0, 20, 200)]
    )
    # One row more takes 5 % longer: 0.1 + 1.25 * 0.05 of a plain step must be there.
    wanted = 0.163 / config.eps
    assert wanted < drafted[0][0] < wanted + 20
    assert len(decisions) < 40
    # There was room for one node, more would have been worth more.
    assert drafted[0][1] == 1 < drafted[1][1]


def test_what_others_were_refused_is_not_saved_for() -> None:
    """Sixteen requests want more room for a round than one alone does."""
    policy = AdaptivePolicy(profile(), SimDrafter(["ngram"]), clock=lambda: 0.0)
    rng = np.random.default_rng(1)
    world = Simulation(profile(), policy._drafter, lambda i, t, d: 0.9, policy, rng)
    world.run([(0.0, 20, 30)], max_batch=1)
    policy._purse.save_for(1e6, 0.01)
    before = policy.usage()["plain_rounds"]
    world.run([(world.now, 20, 1), (world.now, 20, 200)], max_batch=1)
    assert policy.usage()["plain_rounds"] - before < 30


def test_what_a_prompt_leaves_behind_is_not_charged() -> None:
    """The first step behind a prompt takes three times as long, whoever takes it."""
    true = profile()

    def debt(factor: float) -> float:
        policy = AdaptivePolicy(true, SimDrafter(["ngram"]), clock=lambda: 0.0)
        rng, behind_prompt = np.random.default_rng(1), False
        world = Simulation(true, policy._drafter, lambda i, t, d: 0.0, policy, rng)
        world.speed = lambda t: factor if behind_prompt else 1.0
        step = world.step

        def stepped(running):
            nonlocal behind_prompt
            behind_prompt = running[0].n_output == 1
            step(running)

        world.step = stepped
        world.run([(0.0, 20, 5)] * 30, max_batch=1)
        return policy.ledger.debt

    assert debt(3.0) == pytest.approx(debt(1.0), rel=0.05)


def test_deciding_does_not_eat_the_room_to_act(monkeypatch) -> None:
    """A plain round's bookkeeping takes 0.8 % of it, a decision 2.4 %, more than eps; and every
    round sees a longer match. 2,000 tokens of text that is never copied use up the room; then
    comes one that is."""
    monkeypatch.setitem(CLOCK, "tick", 0.8e-4)
    true, drafter = profile(), SimDrafter(["ngram"])
    drafter.bucket = lambda n: 2 + n
    policy = AdaptivePolicy(true, drafter, clock=clock)

    def alpha(i: int, t: int, d: str) -> float:
        return 0.95 if i == 20 else 0.0

    run = Simulation(true, drafter, alpha, policy, np.random.default_rng(1))
    requests = [(0.0, 20, 100)] * 20
    run.run([*requests, (0.0, 20, 400)], 1)
    copied = run.finished[20] - run.finished[19]
    plain = simulate(alpha, ("ngram",), k=0, requests=[(0.0, 20, 400)]).now
    assert copied < plain / 1.5


def test_a_choice_is_kept_where_making_it_takes_time(monkeypatch) -> None:
    """All rounds that drafted were decided on, or one in four or so (their passes are long)."""
    asked = []
    weigh = Choices.better
    monkeypatch.setattr(Choices, "better", lambda *a: asked.append(1) or weigh(*a))
    run = simulate(lambda i, t, d: 0.9, requests=REQUESTS * 4)
    rounds = run.policy.usage()["rounds_by_drafter"]["model"]
    assert run.policy.usage()["plain_rounds"] < 0.08 * rounds, "a plain one is one, not a course"
    assert len(asked) >= rounds if CLOCK["tick"] == 0.0 else len(asked) < 0.35 * rounds


def test_a_kept_choice_ends_when_it_loses_or_sees_something_else() -> None:
    arms = {7: [Arm(drafter="model"), Arm(drafter="ngram", bucket=2)]}
    course = held(arms, drafts=True, took=1.0)
    assert course.rounds == courses.LONGEST_COURSE - 1
    assert course.passed == ("ngram",)
    assert course.goes_on(arms)
    course.add(0.02, 0.011)
    assert course.rounds == courses.LONGEST_COURSE - 2, "less than a plain step is lost"
    course.add(0.02, 0.01)
    assert course.rounds == 0
    for other in (
        {7: [Arm(drafter="model"), Arm(drafter="ngram", bucket=3)]},
        {7: [Arm(drafter="model")]},
        {7: arms[7], 8: arms[7]},
        {8: arms[7]},
    ):
        course = held(arms, drafts=True, took=1.0)
        assert not course.goes_on(other)
        assert course.rounds == 0
    assert held(arms, drafts=True, took=0.0).rounds == 0


def test_a_plain_course_ends_when_somebody_sees_more() -> None:
    arms = {7: [Arm(drafter="model"), Arm(drafter="ngram", bucket=2)]}
    for other, goes_on in (
        (arms, True),
        ({}, True),
        ({7: [Arm(drafter="ngram", bucket=1)]}, True),
        ({7: [Arm(drafter="ngram", bucket=3)]}, False),
        ({8: [Arm(drafter="ngram", bucket=1)]}, False),
    ):
        course = held(arms, drafts=False, took=1.0)
        assert course.rounds == courses.LONGEST_REST - 1
        assert course.goes_on(other) == goes_on
        assert course.rounds == (courses.LONGEST_REST - 2 if goes_on else 0)


def held(arms: dict[int, list[Arm]], *, drafts: bool, took: float) -> courses.Course:
    """A course of 20 ms rounds of "model", or of plain ones, after a decision that took so long."""
    choice = Choice(arms[7][0] if drafts else None, 4 if drafts else 0, True, "greedy")
    plan = Plan({7: choice}, work_of([choice], [choice.budget], [100]), 0.0, 0.02)
    course = courses.Course()
    course.decided(took, plain=0.01)
    course.hold(plan, arms, ["ngram"])
    return course


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    """Reading 3000 tokens takes the draft longer than it could save on 20."""
    run = simulate(lambda i, t, d: 0.9, requests=[(0.0, 3000, 20)] * 4)
    assert run.policy.usage()["rounds_by_drafter"] == {}


def test_the_bound_is_reported_and_kept() -> None:
    usage = simulate(lambda i, t, d: 0.0, noise=JITTER).policy.usage()
    assert usage["ledger_debt_s"] <= usage["ledger_bound_s"]
    assert usage["ledger_bound_s"] <= 0.02 * usage["ledger_plain_s"] + (2 + 24) * 0.03
    assert sum(usage["drafted_histogram"].values()) > 1000


class Counted(SimDrafter):
    """asked: how often it was asked what it could do."""

    def __init__(self, names: tuple[str, ...], blind: bool) -> None:
        super().__init__(names)
        self.blind, self.asked = blind, 0

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        self.asked += 1
        return super().arms(seq)


def test_a_blind_drafter_is_let_sleep(monkeypatch) -> None:
    """Where a drafter's arms never change it need not be asked while the policy rests (some 13
    rounds at a time), and all that is decided stays the same: probes on time, new requests seen."""
    monkeypatch.setattr(courses, "THINKING", 1.5e-4)
    found, asked = [], []
    for blind in (False, True):
        ticks = itertools.count()
        drafter = Counted(("model",), blind)
        policy = AdaptivePolicy(profile(), drafter, clock=lambda: 2e-5 * next(ticks))  # noqa: B023
        world = Simulation(
            profile(), drafter, lambda i, t, d: float(i == 3), policy, np.random.default_rng(1)
        )
        world.run([(0.0, 30, 200)] * 4, max_batch=2)
        asked.append(drafter.asked)
        usage = policy.usage()
        found.append(
            [usage[key] for key in ("plain_rounds", "rounds_by_drafter", "probes")]
            + [world.tokens, pytest.approx(world.now, rel=1e-3)]
        )
        assert policy.usage()["probes"] > 3
    assert found[0] == found[1]
    assert asked[1] < 0.7 * asked[0]
