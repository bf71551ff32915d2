"""Predictions on simulated machines whose truth is known, verdicts, files, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom
from typer.testing import CliRunner

from paceline.bench.advise import Question
from paceline.bench.forecast import Forecast
from paceline.bench.predict import Predictor
from paceline.bench.results import CellConfig
from paceline.bench.trace import DraftInfo, Guesses, Setting, Trace, Traced
from paceline.bench.verdict import from_file, restricted, to_file, verdicts_on
from paceline.cli import app
from paceline.core.latency import (
    Curve,
    DraftCost,
    HostCost,
    Profile,
    TargetCost,
    constant,
    plain_seconds,
    round_seconds,
)
from paceline.errors import UserError

GREEDY = Setting()


def make_profile(step=0.1, spread=0.0, rows=0.05, **drafts) -> Profile:
    """Times of one row's pass; a draft token takes `step`, a row more `rows`."""
    cost = DraftCost(first=Curve.level(step), step=Curve.level(step))
    return Profile(
        target=TargetCost(
            rows=Curve(xs=(1.0, 2.0), ys=(1.0, 1.0 + rows)), per_entry=Curve.level(0.0)
        ),
        drafts={"d": cost, **drafts},
        host={m: HostCost(step=0.02, sequence=0.0, row=0.0) for m in ("greedy", "sampled")},
        spread={"target": spread},
    )


def requests(rng, n, *, alpha=0.7, spread=8.0, output=40) -> list[Traced]:
    """Outputs whose draft is right independently with a probability of the request's own."""
    many = []
    for a in rng.beta(alpha * spread, (1 - alpha) * spread, n):
        right = (rng.random(output - 1) < a).astype(float)
        g = Guesses(kind="ratio", value=tuple(right))
        many.append(Traced(prompt=20, output=output, cut=False, guesses={"d": g}))
    return many


def exact(profile, many, **kwargs) -> Predictor:
    return Predictor(profile, GREEDY, many, model_error=0.0, **kwargs)


@pytest.mark.parametrize("k", [1, 4, 8])
def test_constant_acceptance_gives_the_formula(k):
    """Acceptance 0.7 throughout, 100 outputs of 1000 tokens: tau within 5 standard errors
    (0.065) and what first and last rounds make of it (0.02)."""
    rng = np.random.default_rng(1)
    profile = make_profile()
    found = exact(profile, requests(rng, 100, spread=1e6, output=1000)).predict("d", k)
    tau = constant(0.7, k)
    assert found.tau == pytest.approx(tau, abs=0.085)
    assert found.alpha == pytest.approx(0.7, abs=0.01)
    t_plain = plain_seconds(profile, [500], "greedy")
    t_round = round_seconds(profile, "d", k, [500], "greedy")
    assert found.decode.value == pytest.approx(tau * t_plain / t_round, rel=0.03)
    assert found.t_round == pytest.approx(t_round)
    # Reading the prompt is shared by both, which draws the ratio to 1.
    assert abs(math.log(found.latency.value)) < abs(math.log(found.decode.value))


def test_intervals_cover_at_their_rate():
    """200 machines, each with 20 requests traced and costs measured with an error of 2 %. If
    the rate is between 92 % and 97.5 % the odds of a false alarm are below 1e-6 each way."""
    rng = np.random.default_rng(2)
    profile = make_profile()
    truth = exact(profile, requests(rng, 4000)).predict("d", 4).latency.value
    trials, hits = 200, 0
    for _ in range(trials):
        off = make_profile(spread=0.02)
        five = profile.target.rows(5) * math.exp(rng.normal(0, 0.02))
        rows = Curve(xs=(1.0, 5.0), ys=(1.0, five))
        off = replace(off, target=replace(off.target, rows=rows))
        got = exact(off, requests(rng, 20)).predict("d", 4).latency
        hits += got.low <= truth <= got.high
    assert binom.ppf(1e-6, trials, 0.92) <= hits <= binom.isf(1e-6, trials, 0.975)


def test_intervals_for_a_measured_figure_are_wider():
    """The mean of 8 further requests has an error of its own; coverage as above."""
    rng = np.random.default_rng(3)
    profile = make_profile()
    trials, hits = 200, 0
    for _ in range(trials):
        many = requests(rng, 20)
        measured = exact(profile, requests(rng, 8)).predict("d", 4).latency.value
        got = exact(profile, many, requests=8).predict("d", 4).latency
        narrow = exact(profile, many).predict("d", 4).latency
        assert narrow.low > got.low
        assert narrow.high < got.high
        hits += got.low <= measured <= got.high
    assert binom.ppf(1e-6, trials, 0.92) <= hits <= binom.isf(1e-6, trials, 0.975)


def test_throughput_counts_all_rows_of_the_batch():
    """Where a row costs half a pass, drafts that pay alone lose among eight."""
    rng = np.random.default_rng(4)
    many = requests(rng, 20, alpha=0.8)
    curve = Curve(xs=(1.0, 5.0, 6.0), ys=(1.0, 1.1, 1.6))
    profile = make_profile()
    profile = replace(profile, target=replace(profile.target, rows=curve))
    alone = exact(profile, many).predict("d", 4)
    together = exact(profile, many).predict("d", 4, 8)
    assert alone.throughput == alone.latency
    assert together.latency.value == pytest.approx(alone.latency.value)
    assert together.latency.value > 1.5
    assert together.throughput.value < 1.0


def test_reading_a_long_prompt_is_charged():
    rng = np.random.default_rng(5)
    many = [replace(r, prompt=1000) for r in requests(rng, 10)]
    slow = DraftCost(
        first=Curve.level(0.1), step=Curve.level(0.1), feed=Curve(xs=(1.0, 1000.0), ys=(0.1, 30.0))
    )
    profile = make_profile(slow=slow)
    many = [replace(r, guesses={**r.guesses, "slow": r.guesses["d"]}) for r in many]
    p = exact(profile, many)
    assert p.predict("slow", 4).decode.value < 0.7 * p.predict("d", 4).decode.value


def test_a_prediction_needs_two_requests():
    with pytest.raises(ValueError, match="two"):
        exact(make_profile(), requests(np.random.default_rng(6), 1))


# --- verdicts ---


def make_trace(many, synthetic=False, **infos) -> Trace:
    drafts = infos or {"d": DraftInfo(most=8, flags="--draft d", memory={"weights": 10**9})}
    return Trace(
        model="m", workload="w", synthetic=synthetic, drafts=drafts, requests={GREEDY: tuple(many)}
    )


def test_a_draft_that_pays_is_recommended():
    trace = make_trace(requests(np.random.default_rng(7), 30, alpha=0.85))
    advice = verdicts_on(trace, make_profile())
    (verdict,) = advice.verdicts
    assert verdict.kind == "use"
    assert verdict.text.startswith(f"Use d: --draft d -k {verdict.best.k}; expect ")
    assert verdict.best.latency.low > 1.0
    best = max(advice.predictions, key=lambda p: p.latency.value)
    assert verdict.best == best
    assert [p.k for p in advice.predictions] == list(range(1, 9))


def test_a_draft_that_costs_too_much_is_refused_with_the_reason():
    trace = make_trace(requests(np.random.default_rng(8), 30, alpha=0.4))
    (verdict,) = verdicts_on(trace, make_profile(step=0.6)).verdicts
    assert verdict.kind == "dont"
    assert verdict.best.k == 1
    assert "Don't speculate" in verdict.text
    assert "drafting its token takes 0.59 of a plain step" in verdict.text
    assert "would break even" in verdict.text
    assert verdict.best.alpha < (verdict.best.break_even or 1.0)


def test_drafts_dearer_than_the_target_never_pay():
    trace = make_trace(requests(np.random.default_rng(9), 30, alpha=0.9))
    (verdict,) = verdicts_on(trace, make_profile(step=1.5)).verdicts
    assert verdict.kind == "dont"
    assert "even perfect drafts" in verdict.text


def test_nothing_to_propose_is_the_reason():
    silent = Guesses(kind="match", value=(0.0,) * 39, nodes=(1,) + (0,) * 38)
    many = [Traced(prompt=20, output=40, cut=False, guesses={"d": silent})] * 10
    (verdict,) = verdicts_on(make_trace(many), make_profile(step=0.01)).verdicts
    assert verdict.kind == "dont"
    assert "something to propose in 3% of rounds only" in verdict.text


def test_what_may_be_a_loss_is_not_recommended():
    trace = make_trace(requests(np.random.default_rng(10), 5, alpha=0.75, spread=2.0))
    (verdict,) = verdicts_on(trace, make_profile(step=0.5), budgets=(1,)).verdicts
    assert verdict.best.latency.low < 1.0 < verdict.best.latency.value
    assert verdict.kind == "unsure"
    assert "Not clear" in verdict.text


def test_the_verdict_is_on_throughput_where_several_run():
    trace = make_trace(requests(np.random.default_rng(11), 30, alpha=0.9))
    curve = Curve(xs=(1.0, 5.0, 6.0), ys=(1.0, 1.1, 1.9))
    profile = make_profile()
    profile = replace(profile, target=replace(profile.target, rows=curve))
    assert verdicts_on(trace, profile).verdicts[0].kind == "use"
    assert verdicts_on(trace, profile, concurrency=8).verdicts[0].kind == "dont"


def test_trees_have_the_size_that_was_traced():
    infos = {"d": DraftInfo(most=8, flags="--draft d", tree=True)}
    trace = make_trace(requests(np.random.default_rng(12), 10), **infos)
    assert [p.k for p in verdicts_on(trace, make_profile()).predictions] == [8]


def test_notes_say_what_to_mind():
    many = requests(np.random.default_rng(13), 10)
    infos = {n: DraftInfo(most=8, flags=f"--draft {n}") for n in ("d", "other")}
    trace = make_trace(many, synthetic=True, **infos)
    profile = replace(make_profile(), meta={"model": "elsewhere"})
    notes = " ".join(verdicts_on(trace, profile).notes)
    for word in ("other", "synthetic", "elsewhere"):
        assert word in notes


# --- files and refusals ---


@pytest.fixture
def saved(tmp_path):
    trace = make_trace(requests(np.random.default_rng(14), 12, alpha=0.85))
    profile = make_profile()
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(to_file(trace, profile)))
    return path, trace, profile


def run(*args):
    return CliRunner().invoke(app, ["advise", *map(str, args)])


def test_offline_equals_online(saved):
    path, trace, profile = saved
    again = from_file(json.loads(path.read_text()), path)
    assert again == (trace, profile)
    online = verdicts_on(trace, profile, concurrency=4).to_json()
    result = run("--trace", path, "--json", "-c", 4)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1]) == json.loads(json.dumps(online))
    assert "Use d" in result.stderr


def test_another_machine_changes_the_verdict(saved, tmp_path):
    path, *_ = saved
    other = tmp_path / "other.json"
    other.write_text(json.dumps(make_profile(step=2.0).to_json()))
    result = run("--trace", path, "--profile", other)
    assert result.exit_code == 0, result.output
    assert "Don't speculate" in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--trace", "{path}", "--fresh"], "measures nothing"),
        (["--trace", "{path}", "-d", "x"], "'x' is not in the trace"),
        (["--trace", "{path}", "-c", 0], "concurrency = 0"),
        (["--trace", "{path}", "-k", "9"], "beyond what was traced"),
        (["--trace", "nowhere.json"], "nowhere.json"),
        (["--trace", "{profile}"], "is no trace"),
        (["--trace", "{path}", "--profile", "{path}"], "not a profile"),
        (["--profile", "{profile}", "--fresh"], "drop one"),
        (["-k", "1.5"], "whole numbers"),
        (["-k", "x"], "not understood"),
        (["-k", "0"], "1 to 64"),
        (["--seeded"], "temperature 0"),
        (["--depth", "deep"], "quick or full"),
        (["--prompts", 2], "too few"),
        (["-n", 2], "too few"),
        (["-d", "ngram+x"], "one by one"),
        (["--save", "nowhere/trace.json"], "does not exist"),
    ],
)
def test_mistakes_are_named(saved, tmp_path, args, said):
    path, _, profile = saved
    other = tmp_path / "profile.json"
    other.write_text(json.dumps(profile.to_json()))
    filled = [str(a).format(path=path, profile=other) for a in args]
    result = run(*filled)
    assert isinstance(result.exception, UserError), result.output
    assert said in str(result.exception)


def test_a_profile_of_other_drafts_is_refused(saved):
    _, trace, profile = saved
    with pytest.raises(UserError, match="no costs of d, only of other"):
        verdicts_on(trace, replace(profile, drafts={"other": DraftCost()}))


@pytest.mark.parametrize("broken", [[], {"trace": {}, "profile": {}}, {"trace": 1, "profile": 2}])
def test_what_is_no_trace_is_refused(broken):
    with pytest.raises(UserError, match=r"t\.json"):
        from_file(broken, "t.json")


def test_some_of_the_traced_drafts(saved):
    _, trace, _ = saved
    assert restricted(trace, ()) == trace
    assert list(restricted(trace, ["d"]).drafts) == ["d"]


def test_a_question_refuses_no_temperature():
    with pytest.raises(UserError, match="no temperature"):
        Question(model="m", settings=())


def test_a_bench_shows_the_saved_predictions_for_the_cells_they_speak_of(saved):
    path, trace, profile = saved
    forecast = Forecast.read(path)
    cell = CellConfig(workload="w", drafter="d", k=3, temperature=0.0, concurrency=1)
    said = next(p for p in verdicts_on(trace, profile).predictions if p.k == 3).latency
    found = forecast.of(cell, seeded=True)
    assert found is not None
    assert (found.value, found.low, found.high) == (said.value, said.low, said.high)
    others = [
        {"k": 9},
        {"drafter": "e"},
        {"policy": "adaptive"},
        {"temperature": 1.0},
        {"rate": 2.0},
    ]
    for change in [*others, {"tree": "2x1"}, {"weights": "stored"}]:
        assert forecast.of(cell.model_copy(update=change), seeded=True) is None
