"""`paceline train layerskip`: which sub-layers a model should skip to draft for itself."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.api import LLM
from paceline.cli import common as c
from paceline.draft.layerskip import MAX_DRAFT, MaskFile, mask_path
from paceline.errors import UserError
from paceline.models.loading import open_checkpoint
from paceline.train.layerskip import (
    SearchResult,
    SearchSettings,
    find_mask,
    journal_path,
    open_self,
)
from paceline.train.layerskip_search import Step, design_size
from paceline.train.seeds import Seed, from_folders, from_jsonl

_PHASES = {"answers": "plain answers", "trials": "masks predicted", "runs": "masks measured"}


def layerskip(
    prompts: Annotated[
        Path,
        typer.Option(
            help="Sample prompts: a .jsonl file (turns or prompt), or a folder of texts and code."
        ),
    ],
    model: c.Model = c.DEFAULT_MODEL,
    trials: Annotated[int, typer.Option(help="Masks to try; a few times the layers.")] = 300,
    out: Annotated[
        Path | None,
        typer.Option(help="Mask file to write.", show_default="where --draft layerskip finds it"),
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts to use.")] = 12,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Of each answer.")] = 64,
    max_draft: Annotated[int, typer.Option(help="Tokens drafted a round at most.")] = MAX_DRAFT,
    finalists: Annotated[int, typer.Option(help="Best masks to measure end to end.")] = 4,
    seed: Annotated[int, typer.Option(help="Equal seeds try equal masks.")] = 0,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 4096,
    as_json: c.Json = False,
) -> None:
    """Search a layer mask for `--draft layerskip` (Draft & Verify): Bayesian optimisation of
    predicted speed, then measurement of the best. Ctrl-C keeps the best so far; the same
    command goes on."""
    settings = SearchSettings(
        trials=trials, seed=seed, max_tokens=max_tokens, max_draft=max_draft, finalists=finalists
    )
    if samples < 1:
        raise UserError(f"samples = {samples} is out of range: use 1 or more")
    found = _read(prompts, samples, seed)
    target = open_checkpoint(model, dtype=dtype, device=device)
    path = out or mask_path(target.source.name)
    if path.is_dir():
        raise UserError(f"--out '{path}' is a folder: name a file in it, like {path}/mask.json")
    if trials <= design_size(target.config.n_layers):
        c.console.print(
            f"note: the optimiser begins after {design_size(target.config.n_layers)} masks that "
            f"are known beforehand; with {trials} trials it has none",
            highlight=False,
        )
    with c.loading(model) as on_pack:
        llm = open_self(
            model,
            n_layers=target.config.n_layers,
            kv_tokens=kv_tokens,
            dtype=dtype,
            device=device,
            on_pack=on_pack,
        )
    tokens = [_tokens(llm, s) for s in found]
    with _Bars() as bars:
        result = find_mask(
            target,
            llm,
            tokens,
            path,
            settings,
            command=c.own_command(),
            progress=bars.show,
        )
    report(result, path)
    if as_json:
        c.print_json(
            {
                "out": str(path),
                "trials": result.trials,
                "interrupted": result.interrupted,
                "predicted": result.predicted,
                "mask": result.file.model_dump(mode="json"),
            }
        )


def _read(path: Path, samples: int, seed: int) -> list[Seed]:
    """So many prompts, evenly spaced in a file, or cut from a folder's files by `seed`."""
    if path.suffix != ".jsonl":
        return list(islice(from_folders([path], seed), samples))
    all_of_it = list(from_jsonl(path))
    if not all_of_it:
        raise UserError(f"{path} holds no prompt")
    n = min(samples, len(all_of_it))
    return [all_of_it[i * len(all_of_it) // n] for i in range(n)]


def _tokens(llm: LLM, seed: Seed) -> tuple[int, ...]:
    """The first turn, under the chat template where there is one and it is no raw text."""
    if seed.raw or llm.tokenizer.chat_template is None:
        return llm.tokens(seed.turns[0])
    return llm.chat_tokens([{"role": "user", "content": seed.turns[0]}])


class _Bars:
    """One bar for each phase, with the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=c.console,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, step: Step) -> None:
        if step.phase not in self._tasks:
            # Started where it stands, so that a resumed phase's time left is of this run.
            self._tasks[step.phase] = self._progress.add_task(
                _PHASES[step.phase], total=step.total, completed=step.done - 1, note=""
            )
        note = "" if step.best is None else f"best so far {step.best:.2f} times plain"
        self._progress.update(self._tasks[step.phase], completed=step.done, note=note)


def report(result: SearchResult, path: Path) -> None:
    """Say what was found, and where plain decoding is the better choice."""
    file = result.file
    say = [_what(file), f"predicted {result.predicted:.2f} times plain decoding"]
    measured = file.measured
    if measured is not None:
        say.append(
            f"measured {measured.tok_s:.1f} tok/s against {measured.plain_tok_s:.1f} plain "
            f"({measured.speedup:.2f} times), tau {measured.tau:.2f}"
        )
    else:
        say.append("not measured")
    c.console.print("; ".join(say), highlight=False, soft_wrap=True)
    if measured is not None and measured.speedup < 1.0:
        c.console.print(
            "plain decoding is faster than layer skipping here: the mask was written, but "
            "--draft none (or another draft) is the better choice",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    c.console.print(
        f"wrote {path}; use it with --draft layerskip"
        + ("" if path == mask_path(file.target.name) else f":{path}"),
        highlight=False,
        soft_wrap=True,
    )
    if result.interrupted:
        c.console.print(
            f"ended early after {result.trials} masks; the same command goes on from "
            f"{journal_path(path)}",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _what(file: MaskFile) -> str:
    n = file.target.n_layers
    return (
        f"skips {len(file.skip_attention)} of {n} attentions and {len(file.skip_mlp)} of {n} "
        f"MLPs, gamma {file.gamma:g}, up to {file.max_draft} tokens a round"
    )
