"""Predicted against measured speed-up over a held matrix: is the advisor right?

    python benchmarks/advisor_accuracy.py --minutes 25 --out accuracy.jsonl

For each target and domain, some prompts are traced and others measured, so nothing is predicted
from what it is compared with. Plain decoding and every k run in turn on each measured prompt
(outputs of equal length, one request at a time). Finished cells are kept in --out; the same
command goes on where it stopped, each model's costs measured anew. Last line: JSON, over all
cells of the file:

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
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench import advise
from paceline.bench.advise import Bench, Question
from paceline.bench.predict import Prediction, Predictor
from paceline.bench.trace import Setting, trace_requests
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


def seconds(engine: Engine, prompt: Prompt, setting: Setting, k: int, n: int, seed: int) -> float:
    """One whole request of exactly n tokens."""
    engine.policy = FixedBudget(k)
    params = setting.params(max_tokens=n, seed=seed, ignore_eos=True)
    if not engine.drafter.example(params.greedy).is_chain:
        params = replace(params, rule=None)  # a tree of chosen tokens: judged by the walk
    (i,) = engine.submit(Request(prompt=prompt, params=params))
    while not engine.idle:
        engine.step()
    stats = engine.result(i).stats
    assert stats.finished is not None
    return stats.finished - stats.submitted


def measure(
    bench: Bench, label: str, prompts: list[Prompt], setting: Setting, ks: list[int], n: int
) -> dict[int, float]:
    """Speed-up by k: plain over speculative seconds, summed over prompts. A plain run stands
    at both ends and after every second k; each k is compared with the nearest ones."""
    engine = Engine(
        bench.model, bench.drafters[label], FixedBudget(0), CONFIG, vocab_size=bench.vocab_size
    )
    seconds(engine, prompts[0], setting, max(ks), 8, 0)
    plain = dict.fromkeys(ks, 0.0)
    fast = dict.fromkeys(ks, 0.0)
    for number, prompt in enumerate(prompts):
        order = ks if number % 2 == 0 else ks[::-1]
        before = seconds(engine, prompt, setting, 0, n, number)
        for pair in _pairs(order):
            times = [seconds(engine, prompt, setting, k, n, number) for k in pair]
            after = seconds(engine, prompt, setting, 0, n, number)
            for k, t in zip(pair, times, strict=True):
                fast[k] += t
                plain[k] += (before + after) / 2
            before = after
    return {k: plain[k] / fast[k] for k in ks}


def _pairs(values: list[int]) -> Iterator[list[int]]:
    return (values[i : i + 2] for i in range(0, len(values), 2))


def spread_without_model_error(predictor: Predictor, p: Prediction) -> float:
    """Standard deviation of the logarithm from prompts and profile alone."""
    bare = Predictor(
        predictor.profile, predictor.setting, predictor.traced, requests=predictor.requests,
        model_error=0.0,
    ).predict(p.draft, p.k).latency  # fmt: skip
    return math.log(bare.high / bare.low) / (2 * 1.96)


def block(
    bench: Bench, predictors: dict[Setting, Predictor], setting: Setting, measured: list[Prompt],
    label: str, ks: list[int], n: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    predictor = predictors[setting]
    found = measure(bench, label, measured, setting, ks, n)
    for k, speedup in found.items():
        p = predictor.predict(label, k)
        yield {
            "draft": label,
            "k": k,
            "temperature": setting.temperature,
            "seeded": setting.seeded,
            "predicted": round(p.latency.value, 4),
            "low": round(p.latency.low, 4),
            "high": round(p.latency.high, 4),
            "measured": round(speedup, 4),
            "sd": round(spread_without_model_error(predictor, p), 5),
            "tau": round(p.tau, 3),
        }


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
    if not todo:
        return
    note(f"{model}: measuring costs")
    profile = advise.profile_of(bench, fresh=True)
    predictors: dict[str, dict[Setting, Predictor]] = {}
    held: dict[str, list[Prompt]] = {}
    for number, (workload, setting, label, ks) in enumerate(todo, 1):
        if time.monotonic() > stop:
            note("out of time: the same command goes on from here")
            return
        if workload not in held:
            own = Question(**{**vars(question), "workload": workload})
            _, prompts = advise.load_prompts(own, bench)
            held[workload] = prompts[: args.measured]
            predictors[workload] = {
                s: Predictor(
                    profile, s,
                    trace_requests(
                        bench.model, bench.drafters, {n: i.most for n, i in bench.infos.items()},
                        prompts[args.measured :], s, CONFIG, max_tokens=args.max_tokens,
                        vocab_size=bench.vocab_size, seed=1000, ignore_eos=True,
                    ),
                    requests=args.measured,
                )
                for s in settings
            }  # fmt: skip
        found = block(
            bench, predictors[workload], setting, held[workload], label, ks, args.max_tokens
        )
        for cell in found:
            cell = {"model": model, "workload": workload, **cell}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(cell) + "\n")
            note(
                f"{number}/{len(todo)} {workload} {label} {setting.label} k={cell['k']}: predicted "
                f"{cell['predicted']:.2f} ({cell['low']:.2f} to {cell['high']:.2f}), measured "
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
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--out", type=Path, default=Path("advisor_accuracy.jsonl"))
    args = parser.parse_args()
    if args.traced < 4 or args.measured < 2:
        parser.error("--traced needs 4 prompts or more, --measured 2")

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
