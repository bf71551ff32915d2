"""`paceline prove`: exactness, shown on this machine."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.cli import common as c
from paceline.proof import engine, enumerate
from paceline.proof.engine import EngineReport
from paceline.proof.report import ProofReport


def prove(
    full: Annotated[
        bool, typer.Option("--full", help="More cases, larger trees, more samples.")
    ] = False,
    as_json: c.Json = False,
) -> None:
    """Enumerate every rule on every kind of proposal, then run the whole engine on models
    whose laws are known. Exit code 1 where anything fails."""
    torch.set_num_threads(1)  # tiny tensors: a second thread only waits
    with Progress(
        TextColumn("{task.description:<60}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=c.console,
    ) as bar:
        task = bar.add_task("")

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        rules = enumerate.run(full, progress)
        whole = engine.run(full, progress)
        bar.remove_task(task)
    _print_rules(rules)
    _print_engine(whole)
    failed = rules.failed + whole.failed
    c.console.print(
        f"{'FAILED' if failed else 'proven'}: {rules.cases} cases enumerated, largest error "
        f"{rules.max_abs_error:.1e}, block verification within {rules.block_vs_optimum_gap:.1e} "
        f"of the optimum; {len(whole.rows)} checks of the engine, odds of a false alarm below "
        f"{whole.to_json()['false_alarm_odds']:.0e}; {rules.seconds + whole.seconds:.0f} s",
        style="red" if failed else "green",
        highlight=False,
    )
    if as_json:
        value = rules.to_json() | {"failed": failed, "engine": whole.to_json()}
        c.print_json(value)
    if failed:
        raise typer.Exit(1)


def _print_rules(report: ProofReport) -> None:
    table = Table(
        title="Rules by enumeration (laws: random, edge cases, filtered)", box=SIMPLE_HEAD
    )
    table.add_column("rule and proposal", no_wrap=True)
    for name in ("cases", "error", "tau", "best", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.summary():
        verdict = ("ok" if row.exact else "approximate") if row.ok else "FAILED"
        table.add_row(
            f"{row.rule}, {row.draft}",
            str(row.cases),
            f"{row.max_abs_error:.0e}",
            f"{row.tau:.3f}",
            "" if row.tau_optimum is None else f"{row.tau_optimum:.3f}",
            verdict,
            style=None if row.ok else "red",
        )
    c.console.print(table)
    c.console.print(
        "error: largest deviation of any text's probability; tau: tokens per round; best: the "
        "most that any exact rule can have, by linear programming",
        style="dim",
        highlight=False,
    )


def _print_engine(report: EngineReport) -> None:
    transforms = len(engine.TRANSFORMS)
    table = Table(
        title=f"The engine on a tabular model ({transforms} transforms in each row)",
        box=SIMPLE_HEAD,
    )
    for name in ("drafter", "rule", "check"):
        table.add_column(name, no_wrap=True)
    for name in ("texts", "tau", "p-value", ""):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(
            row.drafter,
            row.rule,
            row.what,
            str(row.cases),
            f"{row.tau:.2f}",
            "" if row.p_value is None else f"{row.p_value:.3f}",
            "ok" if row.ok else "FAILED: " + ", ".join(row.failed),
            style=None if row.ok else "red",
        )
    c.console.print(table)
