"""`paceline train prompts`: a chat model writes the prompts that it will answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from paceline.api import LLM
from paceline.cli import common as c
from paceline.cli.train_capture import clock, progress_bar
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.train.overlap import Forbidden
from paceline.train.own_prompts import PromptPlan, Written, write_prompts


def prompts(
    out: Annotated[Path, typer.Option(help="JSON lines to write; the same command goes on in it.")],
    count: Annotated[int, typer.Option(help="Stop when there are so many.")],
    model: c.Model = c.DEFAULT_MODEL,
    avoid: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Benchmark prompts (JSON lines) never to train on."),
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="Of drawing.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Of drawing.")] = 0.95,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Of one prompt.")] = 256,
    batch: Annotated[int, typer.Option(help="Prompts at once.")] = 32,
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    as_json: c.Json = False,
) -> None:
    """Let a chat model write prompts, for `paceline train capture --prompts`."""
    if out.is_dir():
        raise UserError(f"--out '{out}' is a folder: name a file in it, like {out}/prompts.jsonl")
    plan = PromptPlan(
        count=count, seed=seed, temperature=temperature, top_p=top_p, max_tokens=max_tokens,
        batch=batch,
    )  # fmt: skip
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("a", encoding="utf-8").close()
    except OSError as e:
        raise UserError(f"--out '{out}' can't be written: {e.strerror or e}") from None
    forbidden = Forbidden.from_files(avoid or ())
    if not avoid:
        c.console.print(
            "note: no benchmark file was given with --avoid, so nothing keeps its prompts out",
            highlight=False,
        )
    engine = EngineConfig(kv_tokens=batch * (max_tokens + 96), max_batch=batch)
    with c.loading(model) as on_pack:
        llm = LLM(model, draft="none", dtype=dtype, device=device, engine=engine, on_pack=on_pack)
    bar, began = progress_bar(), time.perf_counter()
    task = bar.add_task("writing", total=count, note="")
    before: list[int] = []

    def report(w: Written) -> None:
        before.append(w.prompts)
        speed = (w.prompts - before[0]) / (time.perf_counter() - began)
        left = f", {clock((count - w.prompts) / speed)} left" if speed else ""
        note = f"{w.duplicates} repeated, {w.unfinished} unfinished{left}"
        bar.update(task, completed=min(w.prompts, count), note=note)

    try:
        with bar:
            done = write_prompts(llm, out, plan, forbidden, report)
    except KeyboardInterrupt:
        c.console.print("interrupted; the same command goes on", style="yellow")
        raise typer.Exit(130) from None
    c.console.print(
        f"{done.prompts} prompts in {out}; {done.duplicates} repeated, {done.unfinished} "
        f"unfinished, {done.forbidden} overlapping a benchmark",
        highlight=False,
    )
    if done.prompts < count:
        c.console.print("the model has no more new prompts to give", style="yellow")
    if as_json:
        c.print_json({**vars(done), "seconds": round(time.perf_counter() - began, 2)})
