"""`paceline report`: results as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.bench.report import write_report
from paceline.cli import common as c
from paceline.engine.profile import read_profile


def report(
    folder: Annotated[
        Path, typer.Argument(help="Folder of `paceline bench --out` or `paceline peers --out`.")
    ],
    profile: Annotated[
        Path | None, typer.Option(help="Costs to draw, as JSON (default: those in the results).")
    ] = None,
    as_json: c.Json = False,
) -> None:
    """Write report.html, which needs nothing else, and its figures as PNG files."""
    with c.status(f"drawing the results in {folder}"):
        written = write_report(folder, None if profile is None else read_profile(profile))
    c.console.print(f"report: {written.html}", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        c.print_json({"report": str(written.html), "files": [str(f) for f in written.files]})
