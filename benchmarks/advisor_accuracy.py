"""Predicted against measured speed-up over a held matrix: is the advisor right?

    python benchmarks/advisor_accuracy.py --minutes 25 --out accuracy.jsonl

For each target and domain, some prompts are traced and others measured, so nothing is predicted
from what it is compared with. Plain decoding and every k run in turn on each measured prompt
(outputs of equal length, one request at a time), --repeats times. Costs are measured before each
domain and behind it, and their mean predicts: what a shared machine changes in those minutes is no
fault of the advisor's. Finished domains are kept in --out; the same command goes on where it
stopped. Last line: JSON, over all cells of the file:

    within_10     share of cells whose measured speed-up is within 10 % of the predicted one
    coverage      share of cells in the 95 % interval (for so many measured prompts)
    model_error   spread of log(measured / predicted) beyond prompts and profile, which
                  `paceline.bench.predict.MODEL_ERROR` should be
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench import advise
from paceline.bench.advise import Bench, Question
from paceline.bench.predict import Prediction, Predictor
from paceline.bench.trace import Setting, Traced, trace_requests
from paceline.core.latency import Profile
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.types import Request

Prompt = tuple[int, ...]
CONFIG = EngineConfig(kv_tokens=8192, prefix_cache=False)
#: Log of a ratio within so much: 10 %.
WITHIN = 0.10


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class Ran:
    """Of one k, or of the plain runs beside it: seconds, tokens and rounds of whole requests, and
    seconds behind the first token."""

    seconds: float = 0.0
    decoding: float = 0.0
    tokens: int = 0
    rounds: int = 0

    def add(self, other: Ran) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tau(self) -> float:
        return self.tokens / self.rounds

    def ms_round(self, requests: int) -> float:
        """Mean of a round behind the first token."""
        return 1e3 * self.decoding / (self.rounds - requests)


def run(engine: Engine, prompt: Prompt, setting: Setting, k: int, n: int, seed: int) -> Ran:
    """One whole request of exactly n tokens."""
    engine.policy = FixedBudget(k)
    params = setting.params(max_tokens=n, seed=seed, ignore_eos=True)
    if not engine.drafter.example(params.greedy).is_chain:
        params = replace(params, rule=None)  # a tree of chosen tokens: judged by the walk
    (i,) = engine.submit(Request(prompt=prompt, params=params))
    while not engine.idle:
        engine.step()
    s = engine.result(i).stats
    assert s.finished is not None
    assert s.first_token is not None
    return Ran(s.finished - s.submitted, s.finished - s.first_token, s.emitted, s.rounds)


def measure(
    bench: Bench, label: str, prompts: list[Prompt], setting: Setting, ks: list[int], n: int,
    repeats: int,
) -> dict[int, dict[str, float]]:  # fmt: skip
    """By k: speed-up, plain over speculative seconds, summed over prompts and repeats; tau; ms of
    a plain and of a speculative round. A plain run stands at both ends and after every second k;
    each k is compared with the nearest ones."""
    engine = Engine(
        bench.model, bench.drafters[label], FixedBudget(0), CONFIG, vocab_size=bench.vocab_size
    )
    run(engine, prompts[0], setting, max(ks), 8, 0)
    plain, fast = ({k: Ran() for k in ks} for _ in range(2))
    turns = repeats * list(enumerate(prompts))
    for turn, (number, prompt) in enumerate(turns):
        order = ks if turn % 2 == 0 else ks[::-1]
        before = run(engine, prompt, setting, 0, n, number)
        for pair in _pairs(order):
            ran = [run(engine, prompt, setting, k, n, number) for k in pair]
            after = run(engine, prompt, setting, 0, n, number)
            for k, mine in zip(pair, ran, strict=True):
                fast[k].add(mine)
                plain[k].add(before)
                plain[k].add(after)
            before = after
    return {
        k: {
            "measured": round(plain[k].seconds / 2 / fast[k].seconds, 4),
            "measured_tau": round(fast[k].tau, 3),
            "measured_ms_plain": round(plain[k].ms_round(2 * len(turns)), 3),
            "measured_ms_round": round(fast[k].ms_round(len(turns)), 3),
        }
        for k in ks
    }


def _pairs(values: list[int]) -> Iterator[list[int]]:
    return (values[i : i + 2] for i in range(0, len(values), 2))


def spread_without_model_error(predictor: Predictor, p: Prediction) -> float:
    """Standard deviation of the logarithm from prompts and profile alone."""
    bare = Predictor(
        predictor.profile, predictor.setting, predictor.traced, requests=predictor.requests,
        model_error=0.0,
    ).predict(p.draft, p.k).latency  # fmt: skip
    return math.log(bare.high / bare.low) / (2 * 1.96)


def cell_of(predictor: Predictor, label: str, k: int, found: dict[str, float]) -> dict[str, Any]:
    p = predictor.predict(label, k)
    return {
        "draft": label,
        "k": k,
        "temperature": p.setting.temperature,
        "seeded": p.setting.seeded,
        "predicted": round(p.latency.value, 4),
        "low": round(p.latency.low, 4),
        "high": round(p.latency.high, 4),
        "sd": round(spread_without_model_error(predictor, p), 5),
        "tau": round(p.tau, 3),
        "ms_plain": round(1e3 * p.t_plain, 3),
        "ms_round": round(1e3 * p.t_round, 3),
        **found,
    }


def mean_profile(a: Profile, b: Profile) -> Profile:
    """Of two measurements of the same things."""

    def mean(x: Any, y: Any) -> Any:
        if isinstance(x, dict):
            return {name: mean(x[name], y[name]) for name in x}
        if isinstance(x, list):
            return [mean(*pair) for pair in zip(x, y, strict=True)]
        return (x + y) / 2

    one, other = a.to_json(), b.to_json()
    kept = {name: one.pop(name) for name in ("format", "meta")}
    return Profile.from_json({**mean(one, {n: other[n] for n in one}), **kept})


def budgets(bench: Bench, label: str, turn: int) -> list[int]:
    """1, 3, 5, 7 or 2, 4, 6, 8 in turn; a tree has the one size that it has."""
    info = bench.infos[label]
    return [info.most] if info.tree else list(range(1 + turn, 9, 2))


def run_model(
    model: str, args: argparse.Namespace, done: set[tuple[Any, ...]], stop: float, out: Path
) -> None:
    drafts = tuple(d for m, d in args.pairs if m == model)
    question = Question(
        model=model, drafts=drafts, prompts=args.traced + args.measured, max_tokens=args.max_tokens,
        budgets=tuple(range(1, 9)),
    )  # fmt: skip
    bench = advise.open_bench(question, config=CONFIG)
    settings = [Setting(temperature=t, seeded=args.seeded and t > 0) for t in args.temperature]
    todo = [
        (workload, setting, label, ks)
        for w, workload in enumerate(args.workload)
        for s, setting in enumerate(settings)
        for d, label in enumerate(bench.drafters)
        if (ks := [
            k for k in budgets(bench, label, (w + s + d) % 2)
            if (model, workload, setting.temperature, setting.seeded, label, k) not in done
        ])
    ]  # fmt: skip
    profile: Profile | None = None
    for workload in dict.fromkeys(w for w, *_ in todo):
        if time.monotonic() > stop:
            note("out of time: the same command goes on from here")
            return
        own = Question(**{**vars(question), "workload": workload})
        _, prompts = advise.load_prompts(own, bench)
        blocks = [block for w, *block in todo if w == workload]
        note(f"{model}, {workload}: measuring costs and tracing")
        before = profile or advise.profile_of(bench, fresh=True)
        traced, measured = trace_and_measure(bench, prompts, blocks, args)
        profile = advise.profile_of(bench, fresh=True)
        costs = mean_profile(before, profile)
        for (setting, label, _), found in zip(blocks, measured, strict=True):
            predictor = Predictor(costs, setting, traced[setting], requests=args.measured)
            for k, mine in found.items():
                cell = {"model": model, "workload": workload, **cell_of(predictor, label, k, mine)}
                write(cell, out)


def trace_and_measure(
    bench: Bench, prompts: list[Prompt], blocks: list[Any], args: argparse.Namespace
) -> tuple[dict[Setting, tuple[Traced, ...]], list[dict[int, dict[str, float]]]]:
    """The traces of a domain by setting, and what was measured of each block (setting, draft,
    budgets) on its other prompts."""
    traced = {
        setting: trace_requests(
            bench.model, bench.drafters, {n: i.most for n, i in bench.infos.items()},
            prompts[args.measured :], setting, CONFIG, max_tokens=args.max_tokens,
            vocab_size=bench.vocab_size, seed=1000, ignore_eos=True,
        )
        for setting in dict.fromkeys(s for s, *_ in blocks)
    }  # fmt: skip
    measured = []
    for number, (setting, label, ks) in enumerate(blocks, 1):
        note(f"{number}/{len(blocks)}: {label}, {setting.label}, k = {ks}")
        held, n = prompts[: args.measured], args.max_tokens
        measured.append(measure(bench, label, held, setting, ks, n, args.repeats))
    return traced, measured


def write(cell: dict[str, Any], out: Path) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(cell) + "\n")
    note(
        f"{cell['workload']} {cell['draft']} temperature {cell['temperature']:g} k={cell['k']}: "
        f"predicted {cell['predicted']:.2f} ({cell['low']:.2f} to {cell['high']:.2f}), measured "
        f"{cell['measured']:.2f}"
    )


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [math.log(c["measured"] / c["predicted"]) for c in cells]
    excess = sum(e**2 - c["sd"] ** 2 for e, c in zip(errors, cells, strict=True)) / len(cells)
    by: dict[str, float] = {}
    for name in ("model", "workload", "draft", "temperature"):
        for value in sorted({str(c[name]) for c in cells}):
            mine = [e for e, c in zip(errors, cells, strict=True) if str(c[name]) == value]
            by[f"{name}={value}"] = round(sum(_near(e) for e in mine) / len(mine), 3)
    return {
        "cells": len(cells),
        "within_10": round(sum(map(_near, errors)) / len(cells), 4),
        "coverage": round(
            sum(c["low"] <= c["measured"] <= c["high"] for c in cells) / len(cells), 4
        ),
        "median_abs_error": round(median(abs(math.expm1(e)) for e in errors), 4),
        "bias": round(math.expm1(sum(errors) / len(errors)), 4),
        "model_error": round(math.sqrt(max(excess, 0.0)), 4),
        "within_10_by": by,
    }


def _near(error: float) -> bool:
    return abs(math.expm1(error)) <= WITHIN


def _pair(text: str) -> tuple[str, str]:
    model, _, draft = text.partition(":")
    if not draft:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form MODEL:DRAFT")
    return model, draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pairs", type=_pair, nargs="+", metavar="MODEL:DRAFT",
        default=[
            ("smollm2-135m", "ngram"),
            ("qwen2.5-coder-1.5b", "ngram"),
            ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"),
            ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b@stored"),
        ],
    )  # fmt: skip
    parser.add_argument(
        "--workload", nargs="+", default=["suite:coding", "suite:summarization", "suite:writing"]
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--seeded", action="store_true", help="requests name a seed")
    parser.add_argument("--traced", type=int, default=12, help="prompts to predict from")
    parser.add_argument("--measured", type=int, default=6, help="other prompts to measure")
    parser.add_argument("--repeats", type=int, default=2, help="of each measured prompt")
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=Path("advisor_accuracy.jsonl"))
    args = parser.parse_args()
    if args.traced < 4 or args.measured < 2 or args.repeats < 1:
        parser.error("--traced needs 4 prompts or more, --measured 2, --repeats 1")

    stop = time.monotonic() + 60 * args.minutes
    cells = _read(args.out)
    done = {
        (c["model"], c["workload"], c["temperature"], c["seeded"], c["draft"], c["k"])
        for c in cells
    }
    for model in dict.fromkeys(m for m, _ in args.pairs):
        try:
            run_model(model, args, done, stop, args.out)
        except UserError as e:
            note(f"{model}: left out: {e}")
    cells = _read(args.out)
    if not cells:
        parser.error("no cell was measured")
    print(json.dumps(summary(cells)))


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
