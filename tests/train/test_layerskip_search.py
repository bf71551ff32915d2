"""The search for a layer mask: predictions, the optimiser, resuming, the command."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import optuna
import pytest
import typer
from devices import ids, run
from skip_devices import KINDS, tiny
from typer.testing import CliRunner

from paceline.cli.train_layerskip import layerskip, report
from paceline.draft.layerskip import (
    LayerSkipDrafter,
    MaskFile,
    MaskTarget,
    Measured,
    SkipPlan,
    read_mask,
    skip_mask,
)
from paceline.draft.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.base import LayerMask, TargetModel
from paceline.models.loading import open_checkpoint
from paceline.train.layerskip import SearchResult, SearchSettings, find_mask, open_self
from paceline.train.layerskip_screen import Costs, Screen, Text, measure_costs
from paceline.train.layerskip_search import (
    Step,
    complete_trials,
    design_size,
    open_study,
    ranked,
    search,
)
from paceline.train.target import target_sha256
from paceline.types import Request, SamplingParams

K = 4
PROMPTS = [(5, 9, 2), tuple(range(20, 35)), (1,), (7, 8, 9, 7, 8, 9)]
#: Sub-layers are all that costs, and MLPs cost twice what attentions do.
COSTS = Costs(base=0.5, attention=1.0, mlp=2.0, verify=(13.0,) * (K + 1))
CONFIG = EngineConfig(kv_tokens=1024, block_size=4)
LAYERS = 4
PLANTED = (("attention", 1), ("mlp", 1), ("mlp", 2))


def texts(model: TargetModel, n: int = 40) -> list[Text]:
    engine = Engine(model, NoDrafter(), FixedBudget(0), CONFIG)
    outputs = run(engine, PROMPTS, SamplingParams(max_tokens=n))
    return [Text((*p, *o), len(p)) for p, o in zip(PROMPTS, ids(outputs), strict=True)]


def planted_mask() -> LayerMask:
    return skip_mask(
        LAYERS,
        attention=[i for part, i in PLANTED if part == "attention"],
        mlp=[i for part, i in PLANTED if part == "mlp"],
    )


@pytest.fixture(scope="module")
def screen() -> Screen:
    model = tiny("native", layers=LAYERS, weak=PLANTED)
    return Screen(model, texts(model), max_draft=K)


def study() -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(direction="maximize")


# Predictions.


@pytest.mark.parametrize("kind", KINDS)
def test_matches_are_those_of_the_engine(kind: str) -> None:
    """At each place of the screen, the engine's round that begins there accepts as many."""
    weak = [("mlp", 1), ("attention", 2)]
    model = tiny(kind, weak=weak, strength=0.15)
    mask = skip_mask(3, mlp=[1], attention=[2])
    found = Screen(model, texts(model), max_draft=K)
    found.places = [p for p in found.places if p.at >= p.text.n_prompt]
    accepted = []
    for place in found.places:
        drafter = LayerSkipDrafter(SkipPlan(mask=mask, gamma=0.0))
        engine = Engine(model, drafter, FixedBudget(K), CONFIG)
        prompt = place.text.tokens[: place.at]  # the root is the first token, never drafted for
        engine.submit(Request(prompt=prompt, params=SamplingParams(max_tokens=K + 2)))
        seq = engine.scheduler.waiting[0]
        while seq.n_output < 2:
            engine.step()
        assert seq.stats.drafted == K
        accepted.append(seq.stats.accepted)
    reach = found.reach(mask)
    assert 0 < reach[-1] < reach[0] < 1
    assert reach == tuple(sum(a > d for a in accepted) / len(accepted) for d in range(K))


@pytest.mark.parametrize("kind", KINDS)
def test_what_skips_nothing_always_matches(kind: str) -> None:
    model = tiny(kind, layers=LAYERS, weak=PLANTED)
    found = Screen(model, texts(model), max_draft=K)
    assert found.reach(skip_mask(LAYERS)) == (1.0,) * K
    assert found.reach(planted_mask()) == (1.0,) * K
    assert found.reach(skip_mask(LAYERS, attention=range(4), mlp=range(4)))[-1] < 0.2
    # Drafts leave the texts' entries alone: the same answer again.
    assert found.reach(skip_mask(LAYERS)) == (1.0,) * K


def test_short_answers_are_refused() -> None:
    with pytest.raises(UserError, match="raise --max-tokens"):
        Screen(tiny("torch"), [Text((1, 2, 3, 4), 3)], max_draft=8)


def test_predicted_speed_is_the_articles_formula() -> None:
    """k = 4, alpha = 0.8, T_q = 0.08, T_p(5) = 1.15, T_o = 0.05 beside T_p(1) = 0.95:
    3.3616 / 1.52; a draft token more or less is slower."""
    costs = Costs(
        base=0.02, attention=0.02, mlp=0.04, verify=(0.95, 1.0, 1.05, 1.1, 1.15, 9.0), host=0.05
    )
    mask = skip_mask(2, attention=[0], mlp=[1])
    assert costs.draft(mask) == pytest.approx(0.08)
    speed, k = costs.best(mask, [0.8 ** (j + 1) for j in range(5)])
    assert k == 4
    assert speed == pytest.approx(3.3616 / (0.32 + 1.15 + 0.05), abs=1e-4)
    assert Costs.from_json(json.loads(json.dumps(costs.to_json()))) == costs


def test_costs_are_told_apart_by_what_is_skipped() -> None:
    """A clock that ticks by the work of each pass gives back what the work costs."""
    model = tiny("torch")
    forward, now = model.forward, [0.0]

    def counted(batch, kv, *, taps=(), layer_mask=None):
        mask = layer_mask or skip_mask(3)
        now[0] += (7 + 2 * sum(mask.attention_L) + 3 * sum(mask.mlp_L)) * math.sqrt(batch.n_rows)
        return forward(batch, kv, taps=taps, layer_mask=layer_mask)

    model.forward = counted  # type: ignore[method-assign]
    costs = measure_costs(model, context=20, max_draft=3, host=0.5, clock=lambda: now[0])
    assert (costs.base, costs.attention, costs.mlp) == pytest.approx((7.0, 2.0, 3.0))
    assert costs.verify == pytest.approx([22 * math.sqrt(n) for n in range(1, 5)])


# The optimiser.


def speed(screen: Screen, mask: LayerMask) -> float:
    return COSTS.best(mask, screen.reach(mask))[0]


def test_it_finds_the_best_mask_of_all(screen: Screen) -> None:
    """256 masks; the best by exhaustion skips what was planted, and 60 trials find it."""
    every = [
        LayerMask(attention_L=s[:LAYERS], mlp_L=s[LAYERS:])
        for s in product((False, True), repeat=2 * LAYERS)
    ]
    best = max(every, key=lambda m: speed(screen, m))
    assert best == planted_mask()
    found = study()
    search(found, LAYERS, lambda m: speed(screen, m), trials=60, seed=0)
    mask, value = ranked(found, LAYERS)[0]
    assert mask == best
    assert value == speed(screen, best) > 1.2


def test_the_optimiser_gets_where_the_design_does_not() -> None:
    """Single skips are valued upside down, so the design combines the wrong ones; 150 trials
    of 64 masks find the best all the same."""
    wanted = np.array([0, 1, 1, 0, 1, 0], bool)

    def value(mask: LayerMask) -> float:
        runs = np.array([*mask.attention_L, *mask.mlp_L])
        right = float((runs == wanted).sum())
        return -right if (~runs).sum() == 1 else right

    short, long = study(), study()
    search(short, 3, value, trials=design_size(3), seed=1)
    search(long, 3, value, trials=150, seed=1)
    assert short.best_value < long.best_value == 6.0


@pytest.mark.parametrize("stop", [3, 12, 20])
def test_a_resumed_search_is_the_uninterrupted_one(tmp_path: Path, stop: int) -> None:
    """Killed while a mask was evaluated, at any stage of the search: the same trials."""

    def value(mask: LayerMask) -> float:
        runs = (*mask.attention_L, *mask.mlp_L)
        return sum((i + 1) * (r == (i % 3 > 0)) for i, r in enumerate(runs)) / 21

    calls = 0

    def killed(mask: LayerMask) -> float:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise KeyboardInterrupt
        return value(mask)

    whole = study()
    search(whole, 3, value, trials=30, seed=5)
    path = tmp_path / "trials.log"
    with pytest.raises(KeyboardInterrupt):
        search(open_study(path, {"seed": 5}), 3, killed, trials=30, seed=5)
    again = open_study(path, {"seed": 5})
    before = len(complete_trials(again))
    assert before >= stop - 1
    seen = []
    search(again, 3, value, trials=30, seed=5, progress=seen.append)
    assert [t.params for t in complete_trials(again)] == [t.params for t in complete_trials(whole)]
    assert (seen[0].done, seen[-1].done, seen[-1].total) == (before + 1, 30, 30)
    with pytest.raises(UserError, match=r"another search \(its seed differ\)"):
        open_study(path, {"seed": 6})


# The whole run, on real weights.

SMALL = SearchSettings(trials=5, max_tokens=14, max_draft=4, finalists=1, repeats=1)


def test_an_interrupted_run_keeps_its_best_and_goes_on(smollm_path: Path, tmp_path: Path) -> None:
    """Ctrl-C in the search: the best mask so far is measured and written. Ctrl-C in the
    measurement: it is written unmeasured. The same search then goes on to its end."""
    target = open_checkpoint("smollm2-135m")
    llm = open_self("smollm2-135m", n_layers=30, kv_tokens=512)
    prompts = [llm.tokens("def fibonacci(n):\n    "), llm.tokens("Once upon a time")]
    out = tmp_path / "mask.json"
    steps: list[Step] = []

    def stop_at(phase: str, done: int):
        def progress(step: Step) -> None:
            steps.append(step)
            if (step.phase, step.done) == (phase, done):
                raise KeyboardInterrupt

        return progress

    ended = find_mask(target, llm, prompts, out, SMALL, progress=stop_at("trials", 3))
    assert (ended.interrupted, ended.trials) == (True, 3)
    assert read_mask(out) == ended.file
    assert ended.file.measured is not None
    assert ended.file.measured.plain_tok_s > 0
    assert [s.phase for s in steps] == ["answers"] * 2 + ["trials"] * 3 + ["runs"] * 6
    assert steps[-1].done == steps[-1].total

    steps.clear()
    ended = find_mask(target, llm, prompts, out, SMALL, progress=stop_at("runs", 1))
    assert (ended.interrupted, ended.trials) == (True, 5)
    assert read_mask(out).measured is None
    assert [(s.phase, s.done) for s in steps] == [("trials", 4), ("trials", 5), ("runs", 1)]

    whole = find_mask(target, llm, prompts, out, SMALL, command="the command")
    assert (whole.interrupted, whole.trials) == (False, 5)
    file = read_mask(out)
    assert file.target.sha256 == target_sha256(target)
    assert file.target.size == smollm_path.stat().st_size
    assert (file.command, file.search["prompts"]) == ("the command", 2)
    with pytest.raises(UserError, match="its prompts differ"):
        find_mask(target, llm, prompts[:1], out, SMALL)


def test_the_command(smollm_path: Path, tmp_path: Path) -> None:
    """From prompts to a mask file."""
    (tmp_path / "prompts.jsonl").write_text(
        '{"turns": ["Name three colours.", "And three more."]}\n{"prompt": "Count to ten."}\n'
    )
    out = tmp_path / "mask.json"
    args = f"--prompts {tmp_path}/prompts.jsonl --out {out} --trials 3 -n 14 --finalists 1"
    app = typer.Typer()
    app.command()(layerskip)
    result = CliRunner().invoke(app, [*args.split(), "--max-draft", "4", "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["mask"] == read_mask(out).model_dump(mode="json")
    assert value["trials"] == 3
    assert "the optimiser begins after 105 masks" in " ".join(result.stderr.split())
    assert "plain" in result.stderr


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("--trials 0", "trials = 0"),
        ("--max-draft 65", "max_draft = 65"),
        ("--samples 0", "samples = 0"),
        ("--prompts nowhere.jsonl", "nowhere.jsonl"),
        ("--out .", "is a folder"),
    ],
)
def test_mistakes_are_named_before_any_work(tmp_path: Path, args: str, why: str) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Count to ten."}\n')
    app = typer.Typer()
    app.command()(layerskip)
    result = CliRunner().invoke(
        app, ["--prompts", f"{tmp_path}/prompts.jsonl", *args.split()], catch_exceptions=True
    )
    assert isinstance(result.exception, UserError)
    assert why in str(result.exception)


@pytest.mark.parametrize("plain", [80.0, 125.0])
def test_the_report_is_honest(plain: float, capsys: pytest.CaptureFixture[str]) -> None:
    file = MaskFile(
        target=MaskTarget(name="tiny", n_layers=4, size=7, sha256="00"),
        skip_attention=(1,),
        skip_mlp=(2, 3),
        measured=Measured(tok_s=100.0, plain_tok_s=plain, tau=2.0, acceptance=0.5),
    )
    report(SearchResult(file=file, predicted=1.3, trials=9, interrupted=False), Path("m.json"))
    said = " ".join(capsys.readouterr().err.split())
    assert f"100.0 tok/s against {plain} plain ({100 / plain:.2f} times), tau 2.00" in said
    assert ("plain decoding is faster" in said) == (plain > 100)
    assert "skips 1 of 4 attentions and 2 of 4 MLPs" in said
    assert "--draft layerskip:m.json" in said
