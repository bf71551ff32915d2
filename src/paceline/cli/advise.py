"""`paceline advise`: does speculation pay here, and with which drafter?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.bench import advise as advisor
from paceline.bench.advise import Question
from paceline.bench.predict import Interval
from paceline.bench.trace import Setting, Trace, read_json
from paceline.bench.verdict import (
    BUDGETS,
    Advice,
    from_file,
    restricted,
    to_file,
    verdicts_on,
)
from paceline.cli import common as c
from paceline.core.latency import Profile
from paceline.engine.engine import EngineConfig
from paceline.engine.measure import DEPTHS
from paceline.engine.profile import read_profile, write_profile
from paceline.errors import UserError
from paceline.models.memory import parse_bytes, readable

_STYLES = {"use": "green", "unsure": "yellow", "dont": "red"}


def advise(
    model: c.Model = c.DEFAULT_MODEL,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            "-d",
            help="A drafter to judge, repeatable: ngram, NAME, or NAME@stored (--draft-weights "
            "stored); default: ngram, and downloaded models with the same vocabulary.",
        ),
    ] = None,
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", help="suite, code-edit, or a JSONL file of prompts."),
    ] = "suite",
    prompts: Annotated[int, typer.Option(help="Prompts to trace.")] = 20,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens to trace of each output at most.")
    ] = 128,
    k: Annotated[
        str, typer.Option("-k", help="Draft tokens a round to judge, like 1,2,4.")
    ] = ",".join(map(str, BUDGETS)),
    temperature: Annotated[
        str, typer.Option("--temperature", "-t", help="Temperatures to judge, like 0,1.")
    ] = "0",
    seeded: Annotated[
        bool, typer.Option("--seeded", help="Requests name a seed (above temperature 0).")
    ] = False,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", help="Requests in flight, for throughput.")
    ] = 1,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take prompts as they are, without chat template.")
    ] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Trace past the end-of-sequence token.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the traced outputs.")] = 0,
    trace: Annotated[
        Path | None, typer.Option(help="Judge from a saved trace; loads no model.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Save trace and costs for --trace.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Costs of another machine (--save-profile there).")
    ] = None,
    save_profile: Annotated[
        Path | None, typer.Option(help="Save this machine's costs for --profile elsewhere.")
    ] = None,
    depth: Annotated[
        str, typer.Option(help="How much to measure: quick (seconds) or full (under a minute).")
    ] = "full",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure costs anew although they are known.")
    ] = False,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 16384,
    memory_limit: c.MemoryLimit = None,
    as_json: c.Json = False,
) -> None:
    """Trace some of your prompts, measure this machine, and say which drafter pays with how many
    tokens a round, what to expect, or why none does."""
    if depth not in DEPTHS:
        raise UserError(f"unknown depth {depth!r}: use {' or '.join(DEPTHS)}")
    if fresh and profile is not None:
        raise UserError("--fresh measures this machine, --profile is another's: drop one of them")
    _writable(save, save_profile)
    budgets = _budgets(k)
    settings = _settings(_numbers("--temperature", temperature), seeded)
    costs = None if profile is None else read_profile(profile)
    if trace is not None:
        if fresh or save_profile is not None:
            raise UserError("--trace measures nothing: drop --fresh and --save-profile")
        traced, own = from_file(read_json(trace), trace)
        traced = restricted(traced, draft or ())
        costs = costs or own
    else:
        question = Question(
            model=model, drafts=tuple(draft or ()), workload=workload, prompts=prompts,
            max_tokens=max_tokens, budgets=budgets, settings=settings, chat=not raw, seed=seed,
            ignore_eos=ignore_eos, depth=depth,
        )  # fmt: skip
        traced, costs = _measure(
            question, costs, save_profile, fresh,
            dtype=dtype, device=device, kv_tokens=kv_tokens, memory_limit=memory_limit,
        )  # fmt: skip
    advice = verdicts_on(traced, costs, budgets=budgets, concurrency=concurrency)
    if save is not None:
        save.write_text(json.dumps(to_file(traced, costs)), encoding="utf-8")
    _print(advice)
    if as_json:
        c.print_json(advice.to_json())


def _writable(*paths: Path | None) -> None:
    """UserError now where a result could not be saved in the end."""
    for path in paths:
        if path is not None and not path.resolve().parent.is_dir():
            raise UserError(f"can't write '{path}': its folder does not exist")


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UserError(f"{option} {text!r} is not understood: write numbers like 1,2") from None


def _budgets(text: str) -> tuple[int, ...]:
    numbers = _numbers("-k", text)
    if any(n != int(n) for n in numbers):
        raise UserError(f"-k {text!r} is not understood: write whole numbers like 1,2")
    return tuple(map(int, numbers))


def _settings(temperatures: tuple[float, ...], seeded: bool) -> tuple[Setting, ...]:
    if seeded and not any(temperatures):
        raise UserError("--seeded changes nothing at temperature 0: give --temperature above 0")
    return tuple(Setting(temperature=t, seeded=seeded and t > 0.0) for t in temperatures)


def _measure(
    question: Question,
    costs: Profile | None,
    save_profile: Path | None,
    fresh: bool,
    *,
    dtype: str,
    device: str,
    kv_tokens: int,
    memory_limit: str | None,
) -> tuple[Trace, Profile]:
    """A trace, and this machine's costs where none are given."""
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    with c.loading(question.model, "its drafters") as on_pack:
        bench = advisor.open_bench(
            question,
            dtype=dtype,
            device=device,
            config=EngineConfig(kv_tokens=kv_tokens),
            memory_limit=limit,
            on_pack=on_pack,
        )
    with Progress(
        TextColumn("{task.description:<40}"), BarColumn(), TimeRemainingColumn(), console=c.console
    ) as bar:
        task = bar.add_task("tracing", total=1.0)

        def progress(done: float, what: str) -> None:
            bar.update(task, completed=done, description=what)

        traced = advisor.collect(question, bench, progress)
        if costs is None or save_profile is not None:
            bar.reset(task)
            own = advisor.profile_of(bench, question.depth, fresh=fresh, progress=progress)
            if save_profile is not None:
                write_profile(save_profile, own)
            costs = costs or own
    return traced, costs


# --- printing --------------------------------------------------------------------------------


def _print(advice: Advice) -> None:
    trace = advice.trace
    for verdict in advice.verdicts:
        n = len(trace.requests[verdict.setting])
        table = Table(
            title=f"{trace.model}, {trace.workload} ({n} prompts), {verdict.setting.label}",
            box=SIMPLE_HEAD,
        )
        table.add_column("draft", overflow="fold")
        names = ["k", "tau", "accepted", "needed", "speed-up (95 %)"]
        if advice.concurrency > 1:
            names.append(f"{advice.concurrency} at once (95 %)")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for p in advice.predictions:
            if p.setting != verdict.setting:
                continue
            row = [
                p.draft, str(p.k), f"{p.tau:.2f}", f"{p.alpha:.0%}",
                "never" if p.break_even is None else f"{p.break_even:.0%}", _cell(p.latency),
            ]  # fmt: skip
            if advice.concurrency > 1:
                row.append(_cell(p.throughput))
            best = (p.draft, p.k) == (verdict.best.draft, verdict.best.k)
            table.add_row(*row, style="bold" if best else None)
        c.console.print(table)
    c.console.print(
        "tau: tokens a round; accepted: of the judged draft tokens; needed: acceptance at which "
        "k tokens a round just pay",
        style="dim",
        highlight=False,
    )
    for label, info in trace.drafts.items():
        if info.memory:
            parts = ", ".join(f"{what} {readable(size)}" for what, size in info.memory.items())
            _say(f"memory of {label}: {parts}")
        for note in info.notes:
            _say(f"note: {label}: {note}")
    for note in advice.notes:
        _say(f"note: {note}")
    for verdict in advice.verdicts:
        lead = f"{verdict.setting.label}: " if len(advice.verdicts) > 1 else ""
        _say(lead + verdict.text, _STYLES[verdict.kind])


def _cell(i: Interval) -> str:
    return f"{i.value:.2f} ({i.low:.2f}-{i.high:.2f})"


def _say(text: str, style: str | None = None) -> None:
    c.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
