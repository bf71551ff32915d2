"""`paceline peers`: other systems on the same prompts, in the same run."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from paceline.api import LLM
from paceline.bench import tables
from paceline.bench.peers.choose import PeerOptions, context_of, open_peers, peer_prompts
from paceline.bench.peers.compare import compare
from paceline.bench.peers.ours import Ours
from paceline.bench.peers.records import Arm, PeerResult
from paceline.bench.provenance import provenance
from paceline.bench.results import Estimate
from paceline.cli import common as c
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.memory import parse_bytes
from paceline.models.native import default_threads


def peers(
    peer: Annotated[
        list[str],
        typer.Option(
            "--peer",
            help="transformers, llamacpp, or the URL of an OpenAI-compatible server, with a name "
            "as NAME=URL if you like; may be repeated.",
        ),
    ],
    model: c.Model = c.DEFAULT_MODEL,
    draft: c.Draft = "ngram",
    k: Annotated[
        int, typer.Option("-k", help="Tokens to draft a round: peers exactly, ours by its policy.")
    ] = 4,
    policy: c.Policy = "adaptive",
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", help="As of `paceline bench`; the first turns are used."),
    ] = "code-edit",
    prompts: Annotated[int, typer.Option(help="Prompts of the workload at most.")] = 8,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="New tokens of every output, exactly.")
    ] = 64,
    repeats: Annotated[int, typer.Option(help="Interleaved runs of each arm.")] = 3,
    seed: Annotated[int, typer.Option(help="Of random prompts and of intervals.")] = 0,
    peer_python: Annotated[
        str | None,
        typer.Option(help="Python that has llama-cpp-python (default: one is built, minutes)."),
    ] = None,
    peer_model: Annotated[
        str | None, typer.Option(help="What a server calls the model (default: its first).")
    ] = None,
    peer_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Holds the key of a server.")
    ] = None,
    peer_dtype: Annotated[str, typer.Option(help="Weights of transformers.")] = "bfloat16",
    out: Annotated[Path | None, typer.Option(help="Folder for the result and a report.")] = None,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 16384,
    memory_limit: c.MemoryLimit = None,
    as_json: c.Json = False,
) -> None:
    """Decode the same prompts with our engine and with others, greedily, in turn, in one run.

    Outputs are equally long (end-of-sequence is passed over), one request runs at a time, and
    each system is compared with our plain decoding and with its own.
    """
    for name, value in (("--prompts", prompts), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} {value} is out of range: use 1 or more")
    if max_tokens < 2:
        raise UserError(f"--max-tokens {max_tokens} leaves no decoding to time: use 2 or more")
    options = PeerOptions(
        specs=tuple(peer),
        model=model,
        draft=draft,
        k=k,
        threads=default_threads(),
        python=peer_python,
        served_model=peer_model,
        key_env=peer_key_env,
        dtype=peer_dtype,
    )
    with c.loading(model, draft) as on_pack:
        llm = LLM(
            model,
            draft=draft,
            k=k,
            policy=policy,
            dtype=dtype,
            device=device,
            engine=EngineConfig(kv_tokens=kv_tokens, prefix_cache=False),
            memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
            on_pack=on_pack,
        )
    chosen = peer_prompts(llm, workload, prompts=prompts, max_tokens=max_tokens, seed=seed)
    run = provenance(0, threads=options.threads, bandwidth=None)
    with ExitStack() as stack:
        others = open_peers(
            options, stack, n_ctx=context_of(chosen, max_tokens, k),
            device=llm.engine.model.info.device.split()[0],  # without its instruction set
            say=lambda text: c.console.print(text, style="dim", highlight=False, markup=False),
        )  # fmt: skip
        arms = _measure(
            [Ours(llm, run.paceline, draft, policy), *others], chosen, max_tokens, repeats, seed
        )
    result = PeerResult(
        run=run,
        model=llm.engine.model.info.name,
        draft=draft,
        k=k,
        workload=workload,
        synthetic_items=sum(p.synthetic for p in chosen),
        prompts=len(chosen),
        max_tokens=max_tokens,
        repeats=repeats,
        arms=arms,
    )
    show(result)
    if out is not None:
        _write(result, out)
    if as_json:
        c.print_json(summary(result))


def _measure(
    systems: list[Any], chosen: list[Any], max_tokens: int, repeats: int, seed: int
) -> tuple[Arm, ...]:
    with Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=c.console,
        transient=True,
    ) as bar:
        task = bar.add_task("")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        return compare(
            systems, chosen, max_tokens=max_tokens, repeats=repeats, seed=seed, progress=progress
        )


def _write(result: PeerResult, out: Path) -> None:
    from paceline.bench.report import write_report  # matplotlib takes a moment to import

    try:
        saved = result.save(out)
    except OSError as e:
        raise UserError(f"--out '{out}' can't be written: {e}") from None
    for path in (saved, write_report(out).html):
        c.console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)


def _ratio(value: Estimate | None) -> Text:
    if value is None:
        return Text("")
    style = "green" if value.low > 1 else "red" if value.high < 1 else ""
    return Text(f"{value.value:.2f}x [{value.low:.2f}, {value.high:.2f}]", style=style)


def show(result: PeerResult) -> None:
    """A table for people, with what they must know to read it."""
    table = Table(
        title=f"{result.model} on {result.workload_label}: {result.prompts} prompts x "
        f"{result.max_tokens} tokens x {result.repeats}, greedy",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("system", no_wrap=True)
    for name in ("tok/s", "over our plain", "over own", "TTFT ms", "tau", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in result.arms:
        if arm.error is not None:
            table.add_row(arm.label, Text("failed", style="red"))
            continue
        table.add_row(
            arm.label,
            "" if arm.decode_tok_s is None else f"{arm.decode_tok_s.value:.1f}",
            _ratio(arm.versus_ours),
            "" if arm.speedup is None else f"{arm.speedup.value:.2f}x",
            "" if arm.ttft_s is None else tables.milliseconds(arm.ttft_s.p50),
            "" if arm.tau is None else f"{arm.tau:.2f}",
            "" if arm.compared is None else f"{arm.same_text}/{arm.compared}",
        )
    c.console.print(table)
    seen: set[str] = set()
    for arm in result.arms:
        parts = [arm.version, arm.precision, tables.peer_notes(arm)]
        note = f"{arm.system}: {'; '.join(p for p in parts if p)}"
        if note not in seen:
            seen.add(note)
            c.console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)


def summary(result: PeerResult) -> dict[str, Any]:
    """The JSON line: everything but single generations and the machine's details."""
    value = result.model_dump(exclude={"run": True, "arms": {"__all__": {"shots"}}})
    return {"date": result.run.date, "command": result.run.command, **value}
