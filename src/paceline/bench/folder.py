"""The files of one `--out` folder: append as cells end, resume from what is there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.bench.results import (
    BenchResult,
    CellResult,
    Protocol,
    Provenance,
    T,
    flatten,
    parse,
)
from paceline.errors import UserError


class ResultFolder:
    """The files of one `--out` folder. Mutable: `begin` and `add` append to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[Provenance] = []
        self.cells: list[CellResult] = []
        self.protocol: Protocol | None = None

    @classmethod
    def open(cls, path: str | Path, *, resume: bool = True) -> ResultFolder:
        """An existing or new folder. UserError where it can't be made, or holds something
        else. resume False begins anew (the old results are removed)."""
        folder = cls(Path(path))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out '{path}' can't be made: {e}") from None
        if resume:
            folder._read()
        else:
            for name in ("cells.jsonl", "runs.jsonl", "protocol.json", "results.json"):
                (folder.path / name).unlink(missing_ok=True)
        return folder

    def _read(self) -> None:
        protocol = self.path / "protocol.json"
        if protocol.exists():
            self.protocol = parse(Protocol, protocol, protocol.read_text("utf-8"), 1)
        self.runs = _read_lines(Provenance, self.path / "runs.jsonl")
        self.cells = _read_lines(CellResult, self.path / "cells.jsonl")

    def check(self, protocol: Protocol) -> None:
        """UserError where the folder's cells were measured in another way."""
        if self.protocol is not None and self.protocol != protocol and self.cells:
            old, new = self.protocol.model_dump(), protocol.model_dump()
            differing = ", ".join(
                f"{name} was {old[name]!r} and is now {new[name]!r}"
                for name in old
                if old[name] != new[name]
            )
            raise UserError(
                f"'{self.path}' holds results of another protocol ({differing}): choose "
                "another --out, or begin anew with --no-resume"
            )

    def begin(self, protocol: Protocol, provenance: Provenance) -> None:
        """Note a run; `check` applies."""
        self.check(protocol)
        self.protocol = protocol
        _write(self.path / "protocol.json", protocol.model_dump_json(indent=1) + "\n")
        self.runs.append(provenance)
        _append(self.path / "runs.jsonl", provenance.model_dump_json())

    def finished(self, key: str) -> CellResult | None:
        return next((c for c in self.cells if c.key == key), None)

    def add(self, cell: CellResult) -> None:
        """Keep a finished cell, on disk before this returns."""
        self.cells.append(cell)
        _append(self.path / "cells.jsonl", cell.model_dump_json())
        _write(self.path / "results.json", self.result().model_dump_json(indent=1) + "\n")

    def result(self) -> BenchResult:
        assert self.protocol is not None, "`begin` first"
        return BenchResult(runs=tuple(self.runs), protocol=self.protocol, cells=tuple(self.cells))

    def write_parquet(self) -> None:
        """`cells.parquet` and `samples.parquet` of all cells so far."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [_cell_row(c) for c in self.cells]
        samples = [
            {"key": c.key, **flatten(c.config, "config."), **flatten(s)}
            for c in self.cells
            for s in c.samples
        ]
        for name, table in (("cells", rows), ("samples", samples)):
            if table:
                pq.write_table(pa.Table.from_pylist(table), self.path / f"{name}.parquet")


def _cell_row(cell: CellResult) -> dict[str, Any]:
    row = flatten(cell)
    del row["samples"]  # they have a table of their own
    return row


def _read_lines(kind: type[T], file: Path) -> list[T]:
    """Whole lines only: a last line without its end was cut off by a crash and is dropped."""
    if not file.exists():
        return []
    text = file.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        _write(file, whole)
    return [parse(kind, file, t, i) for i, t in enumerate(whole.splitlines(), 1) if t]


def _append(file: Path, line: str) -> None:
    with open(file, "a", encoding="utf-8") as f:
        f.write(line + "\n")
        f.flush()
        os.fsync(f.fileno())


def _write(file: Path, text: str) -> None:
    """All or nothing."""
    part = file.with_suffix(file.suffix + ".part")
    part.write_text(text, "utf-8")
    part.replace(file)
