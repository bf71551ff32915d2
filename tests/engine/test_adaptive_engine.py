"""The real engine under the adaptive policy, on a clock that jitters: same text, same law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from devices import DRAFTERS, PROMPTS, ids, make_engine, run

from paceline.core.latency import MODES, Curve, DraftCost, HostCost, Profile, TargetCost
from paceline.draft.auto import AutoDrafter
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import Engine
from paceline.engine.policy import FixedBudget
from paceline.engine.purse import AdaptiveConfig
from paceline.proof import engine as prove
from paceline.proof import toys
from paceline.types import SamplingParams

GREEDY = SamplingParams(max_tokens=40)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=7)


class Clock:
    """Seconds that pass by chance with every look."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += float(self._rng.exponential(0.001))
        return self._now


def cheap() -> Profile:
    """Drafting costs little, so that all budgets come up."""
    rows = Curve(xs=(1.0, 64.0), ys=(0.001, 0.002))
    draft = DraftCost(fixed=1e-5, first=Curve.level(1e-5), step=Curve.level(1e-5))
    names = ("ngram", "model", "tree", "slem")
    host = HostCost(step=1e-3, sequence=1e-5, row=1e-5)
    return Profile(
        target=TargetCost(rows=rows, per_entry=Curve.level(0.0)),
        drafts=dict.fromkeys(names, draft),
        host=dict.fromkeys(MODES, host),
    )


def adapt(engine: Engine, seed: int, most: int = 8) -> Engine:
    clock = Clock(seed)
    config = AdaptiveConfig(most=most, eps=0.2, start=20.0)
    policy = AdaptivePolicy(cheap(), engine.drafter, config, clock=clock)
    engine.policy = policy
    if isinstance(engine.drafter, AutoDrafter):
        engine.drafter.route = policy.route
    return engine


def adaptive(drafter: str, seed: int = 0) -> Engine:
    return adapt(make_engine(drafter, clock=Clock(seed + 100)), seed)


def drafted(outputs) -> int:
    return sum(o.stats.drafted for o in outputs)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_text_is_that_of_plain_decoding(drafter: str, params: SamplingParams) -> None:
    outputs = run(adaptive(drafter), PROMPTS, params)
    assert ids(outputs) == ids(run(make_engine(), PROMPTS, params))
    if drafter in ("self", "noisy", "ngram+noisy", "widths"):
        assert drafted(outputs) > 0


def test_requests_with_their_own_k_make_no_room():
    """Their rounds are nobody's choice: eps of their time is not the others' to lose."""
    engine = adaptive("noisy")
    assert isinstance(engine.policy, AdaptivePolicy)
    ledger = engine.policy.ledger
    for k in (0, 3):
        run(engine, PROMPTS, replace(GREEDY, k=k))
        assert (ledger.elapsed, ledger.plain, ledger.balance) == (0.0, 0.0, 0.0)
    run(engine, PROMPTS[:2], GREEDY)
    assert ledger.elapsed > 0.0
    assert ledger.plain > 0.0


@pytest.mark.parametrize("drafter", ["noisy", "anti", "widths", "ngram+noisy"])
def test_a_seed_has_one_text(drafter: str) -> None:
    """Alone, twice, among seven others, with k fixed at 0 to 6, and whatever the clock says."""
    expected = ids(run(make_engine(k=0), [PROMPTS[2]], SEEDED))
    for k in range(7):
        assert ids(run(make_engine(drafter, k=k), [PROMPTS[2]], SEEDED)) == expected
    seen = set()
    for seed in range(4):
        outputs = run(adaptive(drafter, seed), [PROMPTS[2]], SEEDED)
        assert ids(outputs) == expected
        seen.add(drafted(outputs))
    if drafter != "anti":
        assert len(seen) > 1, "the clock should have changed the budgets"
    others = [SamplingParams(max_tokens=20, temperature=1.0, seed=i) for i in range(7)]
    prompts = [PROMPTS[i % 5] for i in range(7)]
    crowd = run(adaptive(drafter, 9), [*prompts, PROMPTS[2]], [*others, SEEDED])
    assert [crowd[-1].token_ids] == expected


@pytest.mark.parametrize("rule", ["block", "token"])
def test_a_seed_with_another_rule_has_a_fixed_budget(rule: str) -> None:
    """What these rules emit depends on k, so k must not depend on the clock."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=5, rule=rule)
    texts = {tuple(ids(run(adaptive("ngram+noisy", s), PROMPTS, params))) for s in range(3)}
    assert len(texts) == 1
    assert drafted(run(adaptive("noisy"), PROMPTS, params)) > 0


def test_a_request_with_its_own_k_has_it() -> None:
    params = SamplingParams(max_tokens=20, k=3)
    given = run(adaptive("noisy"), [PROMPTS[1]], params)[0].stats
    fixed = run(make_engine("noisy", k=3), [PROMPTS[1]], params)[0].stats
    assert given.as_dict() == fixed.as_dict()
    assert max(given.proposed_at) == 2
    plain = run(adaptive("noisy"), [PROMPTS[1]], SamplingParams(max_tokens=20, k=0))
    assert drafted(plain) == 0


@pytest.mark.parametrize("name", ["model", "ngram+model"])
def test_budgets_that_follow_acceptance_and_time_do_not_bias_the_law(
    name: str, monkeypatch
) -> None:
    """Unseeded sampling under `block` (and `walk` where n-grams propose), budgets chosen from
    what was accepted before and from a random clock: chi-square of the joint law of the
    first three tokens. False alarm: below 1e-9 a transform, 6e-9 in all."""
    rng = np.random.default_rng(20)
    monkeypatch.setattr(
        "paceline.engine.engine.secrets.randbits", lambda n: int(rng.integers(0, 2**63))
    )
    build, _ = toys.DRAFTERS["model"]
    found, drafts = [], 0
    for number, transform in enumerate(("temperature", "top_k", "frequency_penalty")):
        drafter = build(prove.CONFIG)
        if name == "ngram+model":
            ngram, _ = toys.DRAFTERS["ngram"]
            drafter = AutoDrafter({"ngram": ngram(prove.CONFIG), "model": drafter})
        engine = Engine(
            toys.target(),
            drafter,
            FixedBudget(0),
            prove.CONFIG,
            eos_ids=frozenset({toys.EOS}),
            clock=Clock(number),
        )
        adapt(engine, number, most=4)
        params = SamplingParams(
            max_tokens=prove.DEPTH + 2, temperature=1.0, n=128, **_more(transform)
        )
        outputs = prove.generate(engine, prove.PROMPTS, params)
        drafts += drafted(outputs)
        found += [prove.quantiles(o.prompt_tokens, o.token_ids, params, rng) for o in outputs]
    assert None not in found
    assert drafts > len(found) / 4
    assert prove._p_value([q for q in found if q is not None], 4) > prove.FALSE_ALARM


def _more(transform: str) -> dict:
    more = dict(prove.TRANSFORMS[transform])
    more.pop("temperature", None)
    return more


def test_tied_proposals_are_accepted_at_least_as_often_as_argmax_ones() -> None:
    """Under `walk`, on the noisy draft: the token at the target's own quantile against the
    draft's most probable one. Seeds are fixed."""
    params = [SamplingParams(max_tokens=60, temperature=1.0, seed=s) for s in range(20)]
    prompts = [PROMPTS[s % 5] for s in range(20)]
    tied = run(make_engine("noisy", k=1), prompts, params)
    chosen = run(make_engine("top-widths", k=1), prompts, params)

    def rate(outputs) -> float:
        return sum(o.stats.accepted for o in outputs) / drafted(outputs)

    assert rate(tied) > rate(chosen)


def test_a_tied_proposal_of_the_target_itself_is_never_refused() -> None:
    output = run(
        make_engine("self"), [PROMPTS[2]], SamplingParams(max_tokens=200, temperature=1.0, seed=3)
    )[0]
    assert output.stats.accepted == output.stats.drafted > 0


def test_statistics_say_what_was_decided() -> None:
    engine = adaptive("ngram+noisy")
    assert engine.usage()["policy"]["plain_rounds"] == 0
    run(engine, PROMPTS, GREEDY)
    usage = engine.usage()["policy"]
    assert usage["policy"] == "adaptive"
    assert usage["plain_rounds"] > 0
    assert set(usage["rounds_by_drafter"]) <= {"ngram", "model"}
    assert sum(usage["rounds_by_drafter"].values()) > 0
    assert usage["ledger_debt_s"] <= usage["ledger_bound_s"] + 0.1


def test_plain_rounds_ask_no_drafter() -> None:
    """With budget 0 for all, propose is not called, and what a draft lacks grows."""
    engine = make_engine("noisy", k=0)
    run(engine, [PROMPTS[0]], GREEDY)
    assert engine.drafter.cache._states == {}
