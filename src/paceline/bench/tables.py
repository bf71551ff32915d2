"""Tables of a benchmark report, as values: `report` renders them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from paceline.bench.peers.records import Arm, PeerResult
from paceline.bench.results import BenchResult, CellResult, Estimate, Provenance, Side, Spread


@dataclass(frozen=True)
class Column:
    """number: aligned to the right. wrap: long text."""

    name: str
    number: bool = False
    wrap: bool = False


@dataclass(frozen=True)
class Value:
    """What a cell shows. kind `ratio`: an Estimate, coloured where its interval is clear of 1.
    good: of a verdict."""

    value: str | Estimate
    kind: Literal["text", "ratio", "verdict", "synthetic"] = "text"
    good: bool = True


#: Stands where a value could not be had.
MISSING = "\N{EN DASH}"

Row = tuple[Value, ...]


@dataclass(frozen=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows)

    def cells(self, row: Row) -> Iterator[tuple[Column, Value]]:
        return zip(self.columns, row, strict=True)


#: How verdicts are written.
VERDICTS = {
    "identical": "identical",
    "near_tie": "near tie",
    "law": "law",
    "different": "DIFFERENT",
}


def text(value: object) -> Value:
    return Value(MISSING if value is None or value == "" else str(value))


def number(value: float | None, digits: int = 2) -> Value:
    return Value(MISSING if value is None else f"{value:.{digits}f}")


def milliseconds(value: float | None) -> str:
    """Two or three significant digits."""
    if value is None:
        return MISSING
    ms = 1e3 * value
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def ratio(value: Estimate | None) -> Value:
    return text(None) if value is None else Value(value, "ratio")


def _workload(cell: CellResult) -> Value:
    if cell.workload.synthetic_items == 0:
        return text(cell.workload.name)
    if cell.workload.synthetic_items < cell.workload.items:
        return Value(f"{cell.workload.name} (partly)", "synthetic")
    return Value(cell.workload.name, "synthetic")


def load(cell: CellResult) -> str:
    """Requests at a time, or arrivals a second."""
    c = cell.config
    return str(c.concurrency) if c.rate is None else f"{c.rate:g}/s"


_WHO = (
    Column("workload"),
    Column("drafter"),
    Column("policy"),
    Column("k", number=True),
    Column("temperature", number=True),
    Column("concurrency", number=True),
)


def _who(cell: CellResult) -> Row:
    from paceline.bench.plots import proposer  # plots need matplotlib, tables do not

    c = cell.config
    return (
        _workload(cell),
        text(proposer(c)),
        text(c.policy),
        text(c.k),
        text(f"{c.temperature:g}"),
        text(load(cell)),
    )


def verdicts(cells: Seq[CellResult]) -> Table:
    """Every cell: what it bought, and whether the text is plain decoding's."""
    columns = (
        *_WHO,
        Column("speed-up [95 %]", number=True),
        Column("tau", number=True),
        Column("verdict"),
        Column("compared", number=True),
        Column("why", wrap=True),
    )
    rows = tuple(
        (
            *_who(cell),
            ratio(cell.speedup),
            number(cell.tau),
            Value(VERDICTS[cell.lossless.verdict], "verdict", cell.lossless.ok),
            text(cell.lossless.compared),
            text(_why(cell)),
        )
        for cell in cells
    )
    return Table(columns, rows)


def _why(cell: CellResult) -> str:
    v, parts = cell.lossless, [cell.lossless.detail]
    if v.verdict == "near_tie" and v.largest_margin is not None:
        parts.append(f"largest margin {v.largest_margin:.2g}, tolerance {v.tolerance:.2g}")
    if v.test is not None:
        parts.append(f"{v.test}: p = {v.p_value:.2g}" if v.p_value is not None else v.test)
    if v.false_alarm is not None:
        parts.append(f"false alarm {v.false_alarm:.0e}")
    return "; ".join(p for p in parts if p)


def speeds(cells: Seq[CellResult]) -> Table:
    columns = (
        *_WHO,
        Column("request [95 %]", number=True),
        Column("decoding [95 %]", number=True),
        Column("server", number=True),
        Column("plain tok/s", number=True),
        Column("speculative tok/s", number=True),
        Column("predicted [95 %]", number=True),
    )
    rows = tuple(
        (
            *_who(cell),
            ratio(cell.speedup),
            ratio(cell.decode_speedup),
            Value(f"{cell.server_speedup:.2f}x"),
            number(cell.plain.throughput.server_tok_s, 1),
            number(cell.speculative.throughput.server_tok_s, 1),
            ratio(cell.predicted),
        )
        for cell in cells
    )
    return Table(columns, rows)


def latencies(cells: Seq[CellResult]) -> Table:
    """Plain and speculative side by side, milliseconds, p50 / p95 / p99."""
    columns = (
        *_WHO,
        Column("first token, plain"),
        Column("speculative"),
        Column("inter-token, plain"),
        Column("speculative"),
        Column("between bursts"),
        Column("request p50, plain"),
        Column("speculative"),
    )
    rows = []
    for cell in cells:
        p, s = cell.plain.latency, cell.speculative.latency
        rows.append(
            (
                *_who(cell),
                text(percentiles(p.ttft_s)),
                text(percentiles(s.ttft_s)),
                text(percentiles(p.itl_token_s)),
                text(percentiles(s.itl_token_s)),
                text(percentiles(s.itl_round_s)),
                text(milliseconds(p.request_s.p50)),
                text(milliseconds(s.request_s.p50)),
            )
        )
    return Table(columns, tuple(rows))


def percentiles(spread: Spread | None) -> str:
    if spread is None or spread.n == 0:
        return MISSING
    return " / ".join(milliseconds(x) for x in (spread.p50, spread.p95, spread.p99))


def resources(cells: Seq[CellResult]) -> Table:
    columns = (
        *_WHO,
        Column("drafted/token", number=True),
        Column("target calls/token", number=True),
        Column("tau, request mean", number=True),
        Column("T_p : T_q : T_o"),
        Column("KV slots mean / peak / scratch"),
        Column("draft KV mean / peak"),
        Column("CPU cores", number=True),
        Column("bandwidth share", number=True),
        Column("J/token", number=True),
    )
    rows = tuple((*_who(cell), *_resources(cell.speculative)) for cell in cells)
    return Table(columns, rows)


def _resources(side: Side) -> Row:
    a, kv, m, t = side.acceptance, side.kv, side.machine, side.times
    total = t.T_p_s + t.T_q_s + t.T_o_s
    parts = " : ".join(f"{100 * x / total:.0f} %" for x in (t.T_p_s, t.T_q_s, t.T_o_s))
    return (
        number(a.drafted_per_token),
        number(a.target_calls_per_token),
        number(a.tau_request_mean),
        text(parts if total else None),
        text(f"{kv.mean_slots:.0f} / {kv.peak_slots} / {kv.scratch_peak_slots}"),
        text(f"{kv.draft_mean_slots:.0f} / {kv.draft_peak_slots}" if kv.draft_peak_slots else None),
        number(m.cpu_cores),
        text(None if m.read_share is None else f"{100 * m.read_share:.0f} %"),
        number(m.energy_j_per_token, 3),
    )


def slices(cells: Seq[CellResult]) -> Table:
    """Parts of the workloads: domains, tiers, input lengths."""
    columns = (
        *_WHO,
        Column("part"),
        Column("requests", number=True),
        Column("speed-up [95 %]", number=True),
        Column("tau", number=True),
    )
    rows = tuple(
        (
            *_who(cell),
            Value(f"{s.by} {s.name}", "synthetic" if s.synthetic else "text"),
            text(s.requests),
            ratio(s.speedup),
            number(s.tau),
        )
        for cell in cells
        for s in cell.slices
    )
    return Table(columns, rows)


def peers(result: PeerResult) -> Table:
    columns = (
        Column("system"),
        Column("mode"),
        Column("weights"),
        Column("tokens/s, decoding", number=True),
        Column("against our plain [95 %]", number=True),
        Column("against its own plain [95 %]", number=True),
        Column("first token ms, p50", number=True),
        Column("inter-token ms"),
        Column("tau", number=True),
        Column("accepted", number=True),
        Column("same text as ours"),
        Column("notes", wrap=True),
    )
    return Table(columns, tuple(_peer_row(arm) for arm in result.arms))


def _peer_row(arm: Arm) -> Row:
    same = None if arm.compared is None else f"{arm.same_text} of {arm.compared}"
    if arm.agreed is not None and arm.compared and arm.same_text != arm.compared:
        same = f"{same} (first {100 * arm.agreed:.0f} % alike)"
    rate = arm.acceptance_rate
    return (
        text(f"{arm.system} {arm.version}" if arm.ours else arm.version or arm.system),
        text(arm.mode),
        text(arm.precision),
        number(None if arm.decode_tok_s is None else arm.decode_tok_s.value, 1),
        ratio(arm.versus_ours),
        ratio(arm.speedup),
        text(milliseconds(None if arm.ttft_s is None else arm.ttft_s.p50)),
        text(percentiles(arm.itl_token_s)),
        number(arm.tau),
        text(None if rate is None else f"{100 * rate:.0f} %"),
        text(same),
        text(peer_notes(arm)),
    )


_COUNTED = {
    "usage": "only the total of tokens is known: no latency of single tokens",
    "chunks": "the server counts no tokens: chunks were counted, a lower bound",
}


def peer_notes(arm: Arm) -> str:
    if arm.error is not None:
        return f"NOT MEASURED: {arm.error}"
    parts = list(arm.notes)
    if arm.equal_lengths is False:
        parts.append("output lengths differ")
    if arm.counted in _COUNTED:
        parts.append(_COUNTED[arm.counted])
    if arm.speculation_source and arm.speculation_source.startswith("gauge"):
        parts.append("tau is the server's recent average")
    return "; ".join(parts)


def machine(run: Provenance, result: BenchResult | None) -> Table:
    git = run.git_revision or "no checkout"
    bandwidth = run.read_bandwidth_bytes_s
    rows = [
        ("date", run.date),
        ("paceline", f"{run.paceline}, {git}{', with changes' if run.git_dirty else ''}"),
        ("processor", f"{run.cpu}, {run.cores_logical} logical cores, {run.threads} threads"),
        ("instruction sets", " ".join(run.cpu_flags)),
        ("memory", f"{run.memory_bytes / 1e9:.1f} GB"),
        ("read bandwidth", None if bandwidth is None else f"{bandwidth / 1e9:.1f} GB/s"),
        ("GPU", run.gpu),
        ("system", f"{run.platform}, Python {run.python}"),
        ("libraries", ", ".join(f"{n} {v}" for n, v in run.libraries.items())),
        ("load before", " ".join(f"{x:g}" for x in run.load_average)),
    ]
    records = {} if result is None else {m.name: m for c in result.cells for m in c.models}
    for m in records.values():
        rows.append(
            (
                f"{m.role} {m.name}",
                f"{m.source}, {m.dtype} on {m.device or MISSING}, {m.weight_bytes / 1e6:.0f} MB, "
                f"{m.numerics or 'numerics unknown'}, sha256 {m.sha256 or MISSING}",
            )
        )
    columns = (Column(""), Column("", wrap=True))
    return Table(columns, tuple((text(name), text(value)) for name, value in rows))
