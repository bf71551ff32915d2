"""`paceline bench`: speculative against plain decoding, over a matrix."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from paceline.bench.folder import ResultFolder
from paceline.bench.forecast import Forecast
from paceline.bench.matrix import ABLATIONS, Axes
from paceline.bench.report import write_report
from paceline.bench.results import CellResult
from paceline.bench.runner import Runner, Settings, Watcher, available_drafts
from paceline.cli import common as c
from paceline.errors import UserError
from paceline.models.memory import parse_bytes

_LIST = "comma-separated"
#: Columns of the table in a file or a pipe.
_WIDTH = 120

#: `--quick`: under five minutes on two cores.
_QUICK: dict[str, Any] = {
    "workloads": ("suite", "code-edit"),
    "drafts": ("ngram",),
    "ks": (2, 6),
    "policies": ("fixed", "adaptive"),
    "temperatures": (0.0, 1.0),
}
_QUICK_PROMPTS, _QUICK_TOKENS, _TOKENS = 6, 32, 128


def bench(
    model: c.Model = c.DEFAULT_MODEL,
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", "-d", help="ngram or a smaller model; may be repeated."),
    ] = None,
    k: Annotated[str | None, typer.Option("--k", "-k", help=f"Draft lengths, {_LIST}.")] = None,
    tree: Annotated[
        str | None,
        typer.Option(help=f"Trees of draft models, {_LIST}: chain, 3x2x1, top:3x2x1, paths:12."),
    ] = None,
    draft_vocab: c.DraftVocab = "same",
    draft_weights: c.DraftWeights = "fast",
    policy: Annotated[
        str | None, typer.Option(help=f"fixed (exactly k), adaptive (at most k), {_LIST}.")
    ] = None,
    temperature: Annotated[
        str | None, typer.Option("--temperature", "-t", help=f"Temperatures, {_LIST}.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help=f"Requests in flight, {_LIST} (closed loop).")
    ] = "1",
    rate: Annotated[
        str | None,
        typer.Option(
            help=f"Arrivals a second, {_LIST} (open loop; at most --concurrency in flight)."
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            "--workload",
            "-w",
            help="suite, suite:DOMAIN, code-edit, throughput, throughput:LENGTH, random:LENGTH or "
            "a file of JSON lines; may be repeated.",
        ),
    ] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts of each workload at most.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", help="New tokens at most.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="plain: each output as long as the plain one; fixed: --max-tokens.")
    ] = "plain",
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each way to decode.")] = 5,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    unseeded: Annotated[
        bool,
        typer.Option("--unseeded", help="Requests without seeds: draft models then sample."),
    ] = False,
    rule: Annotated[str | None, typer.Option(help="Acceptance rule of speculative runs.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Use the model's chat template.")
    ] = True,
    ablate: Annotated[
        str | None, typer.Option(help=f"A default grid of one axis: {', '.join(ABLATIONS)}.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small matrix in under five minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results; a rerun goes on where it ended.")
    ] = None,
    advice: Annotated[
        Path | None,
        typer.Option(help="A file of `paceline advise --save`: predictions beside the cells."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep finished cells of --out.")
    ] = True,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 16384,
    memory_limit: c.MemoryLimit = None,
    as_json: c.Json = False,
) -> None:
    """Measure what speculation gains or loses, with intervals, and whether the text is the same.

    Plain decoding by the same engine, weights and kernels runs beside every cell, interleaved.
    """
    begin = time.perf_counter()
    given = {
        "workloads": None if workload is None else tuple(workload),
        "drafts": None if draft is None else tuple(draft),
        "trees": None if tree is None else tuple(_split(tree)),
        "ks": None if k is None else tuple(_numbers("--k", k, int)),
        "policies": None if policy is None else tuple(_split(policy)),
        "temperatures": None
        if temperature is None
        else tuple(_numbers("--temperature", temperature, float)),
        "rates": None if rate is None else tuple(_numbers("--rate", rate, float)),
    }
    chosen = (_QUICK if quick else {}) | {n: v for n, v in given.items() if v is not None}
    axes = Axes(
        concurrencies=tuple(_numbers("--concurrency", concurrency, int)),
        vocabulary=draft_vocab,
        weights=draft_weights,
        **chosen,
    )
    if ablate is not None:
        axes = _ablation(axes, ablate, given, model, dtype, device)
    forecast = None if advice is None else Forecast.read(advice)
    default_tokens = _QUICK_TOKENS if quick else _TOKENS
    settings = Settings(
        model=model,
        axes=axes,
        dtype=dtype,
        device=device,
        repeats=repeats,
        max_tokens=default_tokens if max_tokens is None else max_tokens,
        lengths=lengths,
        prompts=_QUICK_PROMPTS if quick and prompts is None else prompts,
        seeded=not unseeded,
        seed=seed,
        rule=rule,
        chat=chat,
        kv_tokens=kv_tokens,
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        advice=forecast,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = ResultFolder.open(out or scratch, resume=resume)
        with _Screen(settings) as screen:
            try:
                results = Runner(settings, folder, screen).run()
            except KeyboardInterrupt:
                screen.interrupted(len(folder.cells), out)
                raise
    _wide().print(table(results))
    _print_problems(results)
    seconds = time.perf_counter() - begin
    if out is not None:
        c.console.print(f"results in {out} ({seconds:.0f} s)", markup=False, soft_wrap=True)
        page = write_report(out, forecast.profile if forecast else None).html
        c.console.print(f"report: {page}", markup=False, highlight=False, soft_wrap=True)
    if as_json or quick:
        c.print_json(
            {
                "model": results[0].models[0].name,
                "dtype": results[0].models[0].dtype,
                "numerics": results[0].models[0].numerics,
                "cells": [r.summary() for r in results],
                "seconds": round(seconds, 1),
                "out": None if out is None else str(out),
            }
        )
    if any(not r.lossless.ok for r in results):
        raise typer.Exit(1)


def _ablation(
    axes: Axes, what: str, given: dict[str, Any], model: str, dtype: str, device: str
) -> Axes:
    if what == "draft" and given["drafts"] is None:
        axes = replace(axes, drafts=available_drafts(model, dtype=dtype, device=device))
    names = {"ks": "k", "trees": "tree", "temperatures": "temperature"}
    return axes.ablate(what, frozenset(names[n] for n in names if given[n] is not None))


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    values = []
    for part in _split(text):
        try:
            values.append(kind(part))
        except ValueError:
            raise UserError(
                f"{option} {text!r}: {part!r} is no number; write it like 1,2,4"
            ) from None
    if not values:
        raise UserError(f"{option} is empty; write it like 1,2,4")
    return values


class _Screen(Watcher):
    """Progress with the time left, notes, and each cell as it ends."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=c.console,
        )
        self._task = self._progress.add_task("", total=None)
        self._what = ""
        self._seen: set[str] = set()

    def __enter__(self) -> _Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def plan(self, requests: int, finished: int) -> None:
        self._progress.update(self._task, total=requests)
        if finished:
            self._say(f"{finished} cells were measured earlier and are kept")

    def doing(self, what: str) -> None:
        self._what = what
        self._progress.update(self._task, description=what)

    def packing(self, name: str, share: float) -> None:
        self._progress.update(self._task, description=c.packing(name, share) or self._what)

    def advance(self, requests: int) -> None:
        self._progress.advance(self._task, requests)

    def note(self, text: str) -> None:
        if text not in self._seen:  # one note for all cells that it holds for
            self._seen.add(text)
            self._say(f"note: {text}")

    def cell(self, result: CellResult) -> None:
        s = result.speedup
        self._say(
            f"{result.workload.label}, {result.config.label}, temperature "
            f"{result.config.temperature:g}: {s.value:.2f}x [{s.low:.2f}, {s.high:.2f}], tau "
            f"{result.tau:.2f}, {result.lossless.verdict}"
        )

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def interrupted(self, cells: int, out: Path | None) -> None:
        if out is None:
            self._say("interrupted; with --out FOLDER finished cells would have been kept")
        else:
            self._say(
                f"interrupted: {cells} finished cells are in {out}; the same command goes on there"
            )


def _wide() -> Console:
    """Where stderr is no terminal, nothing says how wide it is: whole columns then."""
    known = c.console.is_terminal or "COLUMNS" in os.environ
    return c.console if known else Console(stderr=True, width=_WIDTH)


def table(results: list[CellResult]) -> Table:
    """All cells, losses in red."""
    grid = Table(
        title="Speculative against plain decoding, tokens per second",
        box=SIMPLE_HEAD,
        padding=(0, 1),
    )
    for name in ("workload", "draft", "policy", "temp", "load"):
        grid.add_column(name, no_wrap=True)
    for name in ("plain", "spec.", "speed-up", "95 %", "tau", "text"):
        grid.add_column(name, justify="right", no_wrap=True)
    for r in results:
        cell, s = r.config, r.speedup
        grid.add_row(
            r.workload.label,
            cell.drafter if cell.tree is None else f"{cell.drafter} {cell.tree}",
            f"k={cell.k}" if cell.policy == "fixed" else f"adaptive<={cell.k}",
            f"{cell.temperature:g}",
            f"{cell.rate:g}/s" if cell.rate is not None else f"{cell.concurrency}",
            f"{r.plain.throughput.server_tok_s:.0f}",
            f"{r.speculative.throughput.server_tok_s:.0f}",
            f"{s.value:.2f}x",
            f"{s.low:.2f}-{s.high:.2f}",
            f"{r.tau:.2f}",
            r.lossless.verdict if r.lossless.ok else r.lossless.verdict.upper(),
            style=_style(r),
        )
    return grid


def _style(result: CellResult) -> str | None:
    if not result.lossless.ok:
        return "bold red"
    if result.speedup.high < 1:
        return "red"
    return "green" if result.speedup.low > 1 else None


def _print_problems(results: list[CellResult]) -> None:
    losses = [r for r in results if r.speedup.high < 1]
    wins = [r for r in results if r.speedup.low > 1]
    c.console.print(
        f"{len(results)} cells: {len(wins)} faster, {len(losses)} slower, "
        f"{len(results) - len(wins) - len(losses)} within the interval of no difference",
        highlight=False,
    )
    for r in results:
        if not r.lossless.ok:
            c.console.print(
                f"NOT LOSSLESS: {r.workload.label}, {r.config.label}, temperature "
                f"{r.config.temperature:g}: {r.lossless.detail}",
                style="bold red",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
