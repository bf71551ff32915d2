"""Does the adaptive policy ever lose against plain decoding? Real models, three ways to make it.

    python benchmarks/never_slower.py --model qwen2.5-coder-1.5b:qwen2.5-coder-0.5b --data DIR

wrong   a drafter whose tokens the target never picks, at the price of an n-gram
load    1 request in flight, then 16, then 1, in one engine session, switched mid-request,
        greedily; windows of equally many tokens are compared
matrix  humaneval, gsm8k, mt-bench (--data: a folder of such JSONL files), and the suite's writing
        and code-edit, by ngram, the model's DRAFT and each --draft, by temperature

Plain and adaptive alternate (A B B A), their outputs are equally long, one policy decides for all
requests of a part, as it would in a server. Ratios are tokens per second of adaptive over plain
with a 95 % bootstrap interval. Predicted before measuring, from the ledger's bound (1 % of plain
time, and 26 plain steps once):

wrong   0.97 or more at both temperatures, tau 1.00 to 1.02
load    no window near a switch below 0.85 (a window is a few dozen rounds, in which a batch of
        another size is tried anew), 0.97 or more over the whole session
matrix  no interval wholly below 0.97; writing 0.97 to 1.1 with ngram, code-edit above 1.3

Last line: JSON. `below` names what fell short of these marks ("surely": its whole interval did),
`ended_at` where the time was over.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline import LLM
from paceline.bench.folder import ResultFolder
from paceline.bench.load import changing_loop
from paceline.bench.matrix import Axes
from paceline.bench.measure import Context, measure
from paceline.bench.prepare import Message, Subject, prepare
from paceline.bench.results import CellConfig, CellResult, cell_key
from paceline.bench.runner import Runner, Settings, Watcher
from paceline.bench.stats import paired_speedup
from paceline.bench.workloads import load_workload
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import EngineConfig
from paceline.engine.purse import AdaptiveConfig
from paceline.engine.sessions import RandomDrafter
from paceline.errors import UserError
from paceline.types import Request, SamplingParams

FILES = ("humaneval", "gsm8k", "mt-bench")
OWN = ("suite:writing", "code-edit")
K = 8
LOADS = (1, 16, 1)
#: Windows behind a switch that count as near it.
NEAR = 2
MARK, MARK_NEAR = 0.97, 0.85


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class OutOfTime(Exception):
    pass


class Wrong(RandomDrafter):
    """Always has something to propose, which the target picks once in a vocabulary. Its name is
    that of n-grams, so that it is believed to be as cheap."""

    name = "ngram"


@dataclass
class Watch(Watcher):
    """Says what is done, and ends a run when its time is over."""

    stop: float
    total: int = 0
    done: int = 0
    what: str = ""

    def plan(self, requests: int, finished: int) -> None:
        self.total, self.done = requests, 0
        note(f"matrix: {requests} requests to decode, {finished} cells are there already")

    def doing(self, what: str) -> None:
        self.what = what
        note(f"{what} ({self.done}/{self.total})" if self.total else what)

    def note(self, text: str) -> None:
        note(f"note: {text}")

    def advance(self, requests: int) -> None:
        self.done += requests
        if time.monotonic() > self.stop:
            raise OutOfTime

    def cell(self, result: CellResult) -> None:
        s = result.speedup
        note(
            f"{result.workload.name}, {result.config.drafter}, temperature "
            f"{result.config.temperature:g}: {s.value:.3f} [{s.low:.3f}, {s.high:.3f}], tau "
            f"{result.tau:.2f}, {result.lossless.verdict}"
        )


# --- one engine ------------------------------------------------------------------------------


def open_subject(model: str, draft: str) -> tuple[LLM, Subject]:
    note(f"loading {model} and {draft}")
    config = EngineConfig(max_batch=max(LOADS), prefix_cache=False)
    llm = LLM(model, draft=draft, k=K, engine=config)

    def render(messages: list[Message]) -> tuple[int, ...]:
        if llm.tokenizer.chat_template is None:
            return llm.tokens("\n\n".join(m["content"] for m in messages))
        return llm.chat_tokens(messages)

    policy = llm.engine.policy
    assert isinstance(policy, AdaptivePolicy)
    return llm, Subject(llm.engine, llm.engine.drafter, render, adaptive=policy)


def always_wrong(
    llm: LLM, subject: Subject, settings: Settings, watch: Watch
) -> Iterator[dict[str, Any]]:
    """A cell for each temperature, with a fresh policy that knows nothing of the drafter but
    its price."""
    assert subject.adaptive is not None
    protocol = settings.protocol(None)
    workload = load_workload(OWN[0], prompts=settings.prompts)
    context = Context(protocol=protocol, workload=workload, models=(), run=0, bandwidth=None)
    for temperature in settings.axes.temperatures:
        drafter = Wrong(llm.tokenizer.vocab_size, np.random.default_rng(0))
        policy = AdaptivePolicy(subject.adaptive.costs.profile, drafter, AdaptiveConfig(most=K))
        own = Subject(subject.engine, drafter, subject.render, adaptive=policy)
        cell = CellConfig(
            workload=workload.name, drafter="wrong", policy="adaptive", k=K,
            temperature=temperature, concurrency=1,
        )  # fmt: skip
        prepared = prepare(own, workload, protocol, temperature, max(LOADS))
        keyed = [(cell_key(protocol, cell, workload.sha256), cell)]
        (result,) = measure(own, keyed, prepared, context, watch.advance)
        watch.cell(result)
        usage = policy.usage()
        kept = ("plain_rounds", "rounds_by_drafter", "ledger_debt_s", "ledger_bound_s")
        yield {**result.summary(), **{name: usage[name] for name in kept}}


# --- load ------------------------------------------------------------------------------------


def changing_load(
    draft: str, subject: Subject, settings: Settings, args: Any, watch: Watch
) -> dict[str, Any]:
    """Window by window: how long as many tokens took in a plain and in an adaptive session."""
    items = zip(*(load_workload(w, prompts=8).items for w in OWN), strict=True)
    # So long that hardly any ends: a window would hold a prompt that the other way's does not.
    params = SamplingParams(max_tokens=4 * args.windows * args.rounds, ignore_eos=True)
    prompts = [[{"role": "user", "content": i.turns[0]}] for pair in items for i in pair]
    requests = [Request(prompt=subject.render(p), params=params) for p in prompts]
    cell = CellConfig(
        workload="load", drafter=draft, policy="adaptive", k=K, temperature=0.0, concurrency=1
    )
    taken: dict[bool, list[Any]] = {False: [], True: []}
    for repeat in range(-1, settings.repeats):  # the first, a short one, warms up
        for fast in (False, True) if repeat % 2 == 0 else (True, False):
            watch.doing(f"load, {draft}: repeat {repeat + 1} of {settings.repeats}")
            watch.advance(0)
            if fast:
                subject.use(cell)
            else:
                subject.plain()
            windows = args.windows if repeat >= 0 else 1
            phases = [(load, load * args.rounds * windows) for load in LOADS]
            curves = changing_loop(subject.engine, requests, phases)
            if repeat >= 0:
                taken[fast].append(window_seconds(curves, args.windows, args.rounds))
    plain_WR, fast_WR = np.array(taken[False]).T, np.array(taken[True]).T
    found = [
        {
            "load": load,
            "near_switch": w >= args.windows and w % args.windows < NEAR,
            "plain_tok_s": round(load * args.rounds / float(plain_WR[w].mean()), 2),
            "adaptive_tok_s": round(load * args.rounds / float(fast_WR[w].mean()), 2),
            **ratio(plain_WR[w], fast_WR[w]),
        }
        for w, load in enumerate(load for load in LOADS for _ in range(args.windows))
    ]
    near = min((w for w in found if w["near_switch"]), key=lambda w: w["speedup"])
    whole = ratio(plain_WR.sum(0), fast_WR.sum(0))
    note(f"load, {draft}: {whole['speedup']} in all, {near['speedup']} at worst near a switch")
    return {"drafter": draft, **whole, "worst_near_switch": near, "windows": found}


def window_seconds(curves: Seq[tuple[list[float], list[int]]], n: int, rounds: int) -> list[float]:
    """Of each of n windows in a phase: `rounds` tokens for every request in flight."""
    found: list[float] = []
    for load, (times, counts) in zip(LOADS, curves, strict=True):
        edges = np.arange(n + 1) * load * rounds
        found += np.diff(np.interp(edges, counts, times)).tolist()
    return found


def ratio(plain_R: Any, fast_R: Any) -> dict[str, float]:
    """Of the same tokens' seconds in each repeat, with its interval, named as a cell's."""
    found = paired_speedup(plain_R[None], fast_R[None])
    return {
        "speedup": round(found.value, 4),
        "speedup_low": round(found.low, 4),
        "speedup_high": round(found.high, 4),
    }


# --- all of it -------------------------------------------------------------------------------


def below(found: dict[str, Any]) -> list[str]:
    """What fell short of its mark by its value; surely where its interval did, if it has one."""
    checks = [(part, r, MARK) for part in ("wrong", "load", "matrix") for r in found[part]]
    for r in found["load"]:
        near = {**r["worst_near_switch"], "drafter": r["drafter"]}
        checks.append(("load near a switch", near, MARK_NEAR))
    return [
        f"{part}, {r['drafter']}"
        + (f", {r['workload']}, temperature {r['temperature']:g}" if "workload" in r else "")
        + f": {r['speedup']:.3f}"
        + (", surely" if r["speedup_low"] < r["speedup_high"] < mark else "")
        for part, r, mark in checks
        if r["speedup"] < mark
    ]


def run(args: Any, settings: Settings, folder: ResultFolder) -> dict[str, Any]:
    begin = time.monotonic()
    watch = Watch(begin + 60 * args.minutes)
    found: dict[str, Any] = {"model": settings.model, "wrong": [], "load": [], "ended_at": None}
    runner = Runner(settings, folder, watch)  # refuses what is wrong before any work
    try:
        for draft in settings.axes.drafts:
            llm, subject = open_subject(settings.model, draft)
            if draft == "ngram":
                for cell in always_wrong(llm, subject, settings, watch):
                    found["wrong"].append(cell)
            found["load"].append(changing_load(draft, subject, settings, args, watch))
            del llm, subject
            gc.unfreeze()  # the next model shall not find this one's memory taken
            gc.collect()
        runner.run()
    except OutOfTime:
        found["ended_at"] = watch.what
        note("out of time")
    found["matrix"] = [c.summary() for c in folder.cells]
    return {**found, "below": below(found), "seconds": round(time.monotonic() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", metavar="MODEL[:DRAFT]")
    parser.add_argument("--draft", action="append", default=[], help="a trained head; repeatable")
    parser.add_argument("--data", type=Path, help=f"folder of {', '.join(FILES)} (.jsonl)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=5, help="of each workload")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each output, exactly")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--windows", type=int, default=4, help="of each load")
    parser.add_argument("--rounds", type=int, default=32, help="plain rounds of a window")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin nothing after that")
    parser.add_argument("--out", help="keep the matrix's cells there; a rerun goes on")
    parser.add_argument("--quick", action="store_true", help="a small run: 2 prompts, 2 repeats")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.repeats, args.max_tokens, args.windows, args.rounds = 2, 2, 32, 3, 16
    model, _, draft = args.model.partition(":")
    files = [str(args.data / f"{name}.jsonl") for name in FILES] if args.data else []
    try:
        axes = Axes(
            workloads=(*files, *OWN), drafts=("ngram", *([draft] if draft else []), *args.draft),
            ks=(K,), policies=("adaptive",), temperatures=tuple(args.temperature),
        )  # fmt: skip
        settings = Settings(
            model=model, axes=axes, repeats=args.repeats, max_tokens=args.max_tokens,
            lengths="fixed", prompts=args.prompts,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            found = run(args, settings, ResultFolder.open(args.out or scratch))
    except UserError as e:
        parser.error(str(e))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
