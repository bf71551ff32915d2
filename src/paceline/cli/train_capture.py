"""`paceline train capture`: a target's answers with its hidden states."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.api import LLM
from paceline.cli import common as c
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.models.memory import parse_bytes
from paceline.train import capture as cap
from paceline.train import seeds
from paceline.train.data import CaptureInfo, ShardWriter
from paceline.train.overlap import Forbidden
from paceline.train.target import target_sha256

Out = Annotated[Path, typer.Option(help="Folder to write; the same command goes on in it.")]


def capture(
    out: Out,
    tokens: Annotated[int, typer.Option(help="Stop when so many are captured.")],
    model: c.Model = c.DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help='JSON lines with "turns" or "prompt"; may be repeated.'),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Code and text to ask about; may be repeated."),
    ] = None,
    invent: Annotated[
        bool, typer.Option(help="Also prompts from built-in templates (the only source if none).")
    ] = True,
    avoid: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Benchmark prompts (JSON lines) never to train on."),
    ] = None,
    taps: Annotated[
        str | None,
        typer.Option(help="Layers whose input states are kept.", show_default="EAGLE-3's three"),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option("--temperature", "-t", help="Of answers, in turn.", show_default="0 and 0.7"),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Of one answer.")] = 256,
    max_prompt: Annotated[int, typer.Option(help="Longer prompts are passed over.")] = 768,
    batch: Annotated[int, typer.Option(help="Conversations at once.")] = 32,
    seed: Annotated[int, typer.Option(help="Of prompts and answers.")] = 0,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    memory_limit: c.MemoryLimit = None,
    as_json: c.Json = False,
) -> None:
    """Let the target answer prompts, and keep its hidden states for training."""
    plan = cap.CapturePlan(
        tokens=tokens,
        temperatures=tuple(temperature or (0.0, 0.7)),
        max_tokens=max_tokens,
        max_prompt=max_prompt,
    )
    forbidden = Forbidden.from_files(avoid or ())
    if not avoid:
        c.console.print(
            "note: no benchmark file was given with --avoid, so nothing keeps its prompts out",
            highlight=False,
        )
    sources = _sources(prompts or [], text or [], invent, seed)
    stats = seeds.SeedStats()
    target = open_checkpoint(model, dtype=dtype, device=device)
    chosen = _taps(taps, target)
    writer = ShardWriter(out, _info(target, plan, chosen, _described(prompts, text, invent, seed)))
    if writer.tokens >= tokens:
        c.console.print(f"{out} holds {writer.tokens} tokens already", highlight=False)
    engine = EngineConfig(
        kv_tokens=batch * (max_prompt + max_tokens + 32),
        max_batch=batch,
        prefill_chunk=256,
        prefix_cache=False,
    )
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    with c.loading(model) as on_pack:
        llm = LLM(
            model, dtype=dtype, device=device, engine=engine, memory_limit=limit, on_pack=on_pack
        )
    before, began = writer.tokens, time.perf_counter()
    bar = progress_bar()
    task = bar.add_task("capturing", total=tokens, completed=before, note="")

    def report(p: cap.Progress) -> None:
        speed = (p.tokens - before) / (time.perf_counter() - began)
        left = (tokens - p.tokens) / speed if speed else 0.0
        note = f"{p.answers} answers, {speed:.0f} tok/s, {clock(left)} left"
        bar.update(task, completed=min(p.tokens, tokens), note=note)

    interrupted = False
    with bar:
        try:
            admitted = seeds.admissible(seeds.mixed(sources), forbidden, stats)
            done = cap.capture(llm, admitted, writer, plan, chosen, report)
        except KeyboardInterrupt:
            writer.close()
            interrupted = True
    seconds = time.perf_counter() - began
    fresh = writer.tokens - before
    c.console.print(
        f"{writer.tokens} tokens in {out} ({fresh} new, {fresh / seconds:.0f} tok/s); seeds: "
        f"{stats.taken} taken, {stats.duplicates} repeated, {stats.forbidden} overlapping a "
        "benchmark",
        highlight=False,
    )
    if interrupted:
        c.console.print("interrupted; the same command goes on", style="yellow")
        raise typer.Exit(130)
    if done.tokens < tokens:
        c.console.print(f"the prompts ended before {tokens} tokens: give more", style="yellow")
    if as_json:
        c.print_json(
            {
                "tokens": writer.tokens,
                "new_tokens": fresh,
                "seconds": round(seconds, 2),
                "answers": done.answers,
                "failed": done.failed,
                "too_long": done.too_long,
                "seeds": vars(stats),
                "engine": llm.engine.stats.as_dict(),
            }
        )


def _sources(
    prompts: list[Path], text: list[Path], invent: bool, seed: int
) -> list[Iterator[seeds.Seed]]:
    # Read now, so that a mistake in them is found before the model is loaded.
    sources = [iter(list(seeds.from_jsonl(p))) for p in prompts]
    if text:
        asked = seeds.from_folders(text, seed)
        sources.append(chain([next(asked)], asked))
    if invent:
        sources.append(seeds.invented(seed))
    if not sources:
        raise UserError("there is nothing to ask: give --prompts or --text, or drop --no-invent")
    return sources


def _described(prompts: list[Path] | None, text: list[Path] | None, invent: bool, seed: int) -> str:
    parts = [f"prompts {p.name}" for p in prompts or ()]
    parts += [f"text {p.name}" for p in text or ()]
    return ", ".join([*parts, *(["templates"] if invent else []), f"seed {seed}"])


def _taps(text: str | None, target: Checkpoint) -> tuple[int, ...]:
    n_layers = target.config.n_layers
    if text is None:
        return cap.default_taps(n_layers)
    try:
        wanted = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--taps {text!r} is not understood: write layers, like 2,15,27") from None
    return cap.check_taps(wanted, n_layers)


def _info(
    target: Checkpoint, plan: cap.CapturePlan, taps: tuple[int, ...], described: str
) -> CaptureInfo:
    return CaptureInfo(
        model=target.source.name,
        target_sha256=target_sha256(target),
        hidden_size=target.config.hidden_size,
        n_layers=target.config.n_layers,
        vocab_size=target.config.vocab_size,
        taps=taps,
        temperatures=plan.temperatures,
        max_tokens=plan.max_tokens,
        seeds=described,
    )


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes}:{rest:02}"


def progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=c.console,
    )
