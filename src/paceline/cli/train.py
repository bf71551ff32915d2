"""`paceline train`: drafters from captured answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from paceline.cli import common as c
from paceline.cli.train_capture import Out, capture, clock, progress_bar
from paceline.cli.train_layerskip import layerskip
from paceline.cli.train_prompts import prompts as write_prompts
from paceline.errors import UserError
from paceline.models.loading import open_checkpoint
from paceline.train import curve, runs
from paceline.train.loop import Result, Snapshot, TrainConfig
from paceline.train.losses import KINDS, Kind

app = typer.Typer(
    name="train",
    help="Train drafters for a target: capture its answers to prompts, its own or others, then "
    "train a head (docs/training.md).",
    no_args_is_help=True,
)

app.command(name="prompts")(write_prompts)
app.command()(capture)
app.command()(layerskip)


Data = Annotated[
    list[Path], typer.Option(help="A folder that `paceline train capture` wrote; may be repeated.")
]
Vocabulary = Annotated[
    int, typer.Option(help="Tokens that the head can propose, the most frequent; 0 for all.")
]
Loss = Annotated[str, typer.Option(help="ce (soft targets), or overlap (acceptance itself).")]
LossWarmup = Annotated[int, typer.Option(help="Updates with ce before overlap begins.")]
Decay = Annotated[float, typer.Option(help="Weight of draft step i is decay ** i.")]
Prompts = Annotated[
    bool, typer.Option("--prompts/--answers", help="Learn from prompts too, or answers alone.")
]
Epochs = Annotated[float, typer.Option(help="Passes over the data.")]
Minutes = Annotated[float | None, typer.Option(help="End the schedule by then.")]
Lr = Annotated[float, typer.Option(help="Largest learning rate.")]
PackTokens = Annotated[int, typer.Option(help="Rows that are trained on at once.")]
Accumulate = Annotated[int, typer.Option(help="Packs of one update.")]
SaveEvery = Annotated[int, typer.Option(help="Updates between checkpoints.")]
EvalEvery = Annotated[int, typer.Option(help="Updates between evaluations.")]
Seed = Annotated[int, typer.Option(help="Of order, first weights and noise.")]
SaveDtype = Annotated[str, typer.Option(help="Of the written head: bfloat16, float32 or int8.")]
Threads = Annotated[int | None, typer.Option(help="Of torch.", show_default="all cores")]
F32 = Annotated[bool, typer.Option("--f32", help="Products in float32, not bfloat16 (slower).")]


@app.command()
def eagle3(
    data: Data,
    out: Out,
    model: c.Model = c.DEFAULT_MODEL,
    steps: Annotated[int, typer.Option(help="Draft steps to unroll (3 to 7).")] = 5,
    grow: Annotated[
        float, typer.Option(help="Share of the schedule over which unrolled steps grow from 1.")
    ] = 0.3,
    init: Annotated[
        str,
        typer.Option(help="target (its last layer), random, or the folder of a head to train on."),
    ] = "target",
    vocabulary: Vocabulary = 8192,
    loss: Loss = "ce",
    loss_warmup: LossWarmup = 200,
    decay: Decay = 0.5,
    prompts: Prompts = True,
    epochs: Epochs = 2.0,
    minutes: Minutes = None,
    lr: Lr = 1e-3,
    pack_tokens: PackTokens = 1024,
    accumulate: Accumulate = 1,
    save_every: SaveEvery = 100,
    eval_every: EvalEvery = 100,
    seed: Seed = 0,
    save_dtype: SaveDtype = "bfloat16",
    device: c.Device = "auto",
    threads: Threads = None,
    f32: F32 = False,
    as_json: c.Json = False,
) -> None:
    """One decoder layer on three of the target's states, trained as it will draft."""
    options = runs.HeadOptions(
        objective="eagle3",
        vocabulary=vocabulary or None,
        loss=_kind(loss),
        loss_warmup=loss_warmup,
        decay=decay,
        prompts=prompts,
        steps=steps,
        grow=grow,
        init=init,
    )
    config = TrainConfig(
        lr=lr, epochs=epochs, minutes=minutes, pack_tokens=pack_tokens, accumulate=accumulate,
        save_every=save_every, eval_every=eval_every, eval_steps=steps, seed=seed,
        autocast=not f32,
    )  # fmt: skip
    _train(model, data, out, options, config, device, threads, save_dtype, as_json)


@app.command()
def eagle1(
    data: Data,
    out: Out,
    model: c.Model = c.DEFAULT_MODEL,
    vocabulary: Vocabulary = 8192,
    prompts: Prompts = True,
    epochs: Epochs = 2.0,
    minutes: Minutes = None,
    lr: Lr = 3e-4,
    pack_tokens: PackTokens = 1024,
    accumulate: Accumulate = 1,
    save_every: SaveEvery = 100,
    eval_every: EvalEvery = 100,
    seed: Seed = 0,
    save_dtype: SaveDtype = "bfloat16",
    device: c.Device = "auto",
    threads: Threads = None,
    f32: F32 = False,
    as_json: c.Json = False,
) -> None:
    """One decoder layer that predicts the target's next feature (EAGLE-1, EAGLE-2)."""
    options = runs.HeadOptions(objective="eagle1", vocabulary=vocabulary or None, prompts=prompts)
    config = TrainConfig(
        lr=lr, epochs=epochs, minutes=minutes, pack_tokens=pack_tokens, accumulate=accumulate,
        save_every=save_every, eval_every=eval_every, seed=seed, autocast=not f32,
    )  # fmt: skip
    _train(model, data, out, options, config, device, threads, save_dtype, as_json)


@app.command()
def medusa(
    data: Data,
    out: Out,
    model: c.Model = c.DEFAULT_MODEL,
    heads: Annotated[int, typer.Option(help="Tokens that are predicted beside each other.")] = 4,
    shared_head: Annotated[
        bool, typer.Option(help="Use the target's output projection for all heads (small).")
    ] = False,
    joint: Annotated[
        bool, typer.Option("--joint", help="Medusa-2: adapt the target too (a new target).")
    ] = False,
    rank: Annotated[int, typer.Option(help="With --joint: of the adapters.")] = 8,
    heads_first: Annotated[
        int, typer.Option(help="With --joint: updates of the heads alone, at first.")
    ] = 50,
    vocabulary: Vocabulary = 8192,
    loss: Loss = "ce",
    loss_warmup: LossWarmup = 200,
    decay: Decay = 0.5,
    prompts: Prompts = True,
    epochs: Epochs = 2.0,
    minutes: Minutes = None,
    lr: Lr = 1e-3,
    pack_tokens: PackTokens = 1024,
    accumulate: Accumulate = 1,
    save_every: SaveEvery = 100,
    eval_every: EvalEvery = 100,
    seed: Seed = 0,
    save_dtype: SaveDtype = "bfloat16",
    device: c.Device = "auto",
    threads: Threads = None,
    f32: F32 = False,
    as_json: c.Json = False,
) -> None:
    """Residual heads on the final feature, the target frozen (Medusa-1); or with low-rank
    adapters of a safetensors target, which is written anew (Medusa-2)."""
    options = runs.HeadOptions(
        objective="medusa2" if joint else "medusa",
        rank=rank,
        heads_first=heads_first,
        vocabulary=vocabulary or None,
        loss=_kind(loss),
        loss_warmup=loss_warmup,
        decay=decay,
        prompts=prompts,
        heads=heads,
        shared_head=shared_head,
    )
    config = TrainConfig(
        lr=lr, epochs=epochs, minutes=minutes, pack_tokens=pack_tokens, accumulate=accumulate,
        save_every=save_every, eval_every=eval_every, eval_steps=heads, seed=seed,
        autocast=not f32,
    )  # fmt: skip
    _train(model, data, out, options, config, device, threads, save_dtype, as_json)


def _kind(loss: str) -> Kind:
    if loss not in KINDS:
        raise UserError(f"unknown loss {loss!r}: use {' or '.join(KINDS)}")
    return loss


def _train(
    model: str,
    data: list[Path],
    out: Path,
    options: runs.HeadOptions,
    config: TrainConfig,
    device: str,
    threads: int | None,
    save_dtype: str,
    as_json: bool,
) -> None:
    if threads is not None:
        if threads < 1:
            raise UserError(f"threads = {threads} is out of range: use 1 or more")
        torch.set_num_threads(threads)
    target = open_checkpoint(model, device=device)
    bar = progress_bar()
    task = bar.add_task(options.objective, total=None, note="")

    def report(s: Snapshot) -> None:
        held = "" if s.held_out is None else f" | held out {_rates(s.held_out.agree)}"
        note = (
            f"loss {s.loss:.3f} | agree {_rates(s.rates.agree)}{held} | "
            f"{s.tokens_per_s:.0f} tok/s, {clock(s.left_s)} left"
        )
        bar.update(task, total=s.total, completed=s.step, note=note)

    with bar:
        result = runs.train_head(
            target, data, out, options, config,
            command=c.own_command(), save_dtype=save_dtype, report=report, note=_say,
        )  # fmt: skip
    curve.draw(result.log, out / "curve.png", options.objective)
    _summary(result, out)
    if as_json:
        c.print_json(_as_json(result, options.objective))
    if not result.finished:
        c.console.print("interrupted; the same command goes on", style="yellow")
        raise typer.Exit(130)


def _summary(result: Result, out: Path) -> None:
    rate = result.tokens / max(result.elapsed, 1e-9)
    held = ""
    if result.held_out is not None:
        found = result.held_out
        held = (
            f"; held out: agree {_rates(found.agree)}, overlap {_rates(found.overlap)}, tau "
            f"about {found.tau:.2f}"
        )
    what = f"head in {out / 'head'}" if result.finished else f"checkpoint in {out}"
    c.console.print(
        f"{what}: {result.step} updates, {result.tokens} tokens, {rate:.0f} tok/s{held}",
        highlight=False,
    )


def _as_json(result: Result, objective: str) -> dict[str, Any]:
    value: dict[str, Any] = {
        "objective": objective,
        "finished": result.finished,
        "updates": result.step,
        "tokens": result.tokens,
        "seconds": round(result.elapsed, 2),
    }
    if result.held_out is not None:
        value["held_out_agree"] = [round(a, 4) for a in result.held_out.agree]
        value["held_out_overlap"] = [round(a, 4) for a in result.held_out.overlap]
        value["tau_estimate"] = round(result.held_out.tau, 3)
    return value


def _rates(by_step: tuple[float, ...]) -> str:
    return " ".join(f"{a:.2f}".lstrip("0") for a in by_step)


def _say(text: str) -> None:
    c.console.print(f"note: {text}", markup=False, highlight=False)
