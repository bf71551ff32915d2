"""The report of a folder of results: one HTML page that needs nothing else, and PNG files."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from paceline.bench import plots, plots_detail, tables
from paceline.bench.peers.records import PeerResult, load_peers
from paceline.bench.results import BenchResult, CellResult, load_results
from paceline.bench.tables import Table
from paceline.core.latency import Profile
from paceline.errors import UserError

#: Tables with more rows are folded.
_LONG = 40
_DPI = 120


@dataclass(frozen=True)
class Picture:
    """name: of the PNG file. caption: how to read it."""

    name: str
    title: str
    caption: str
    png: bytes

    @property
    def data(self) -> str:
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True)
class Section:
    title: str
    table: Table
    note: str = ""

    @property
    def folded(self) -> bool:
        return len(self.table.rows) > _LONG


@dataclass(frozen=True)
class Report:
    """html: the page. files: what was written, the page first."""

    html: Path
    files: tuple[Path, ...]


def write_report(folder: str | Path, profile: Profile | None = None) -> Report:
    """Read `results.json` and `peers-*.json` of a folder, and write `report.html` and a PNG
    for each figure beside them. profile: costs to draw (default: those in the results).
    UserError where there is nothing to report."""
    folder = Path(folder)
    others = load_peers(folder) if folder.is_dir() else []
    result = None
    if not others or (folder / "results.json").exists():
        result = load_results(folder)
    if result is not None and not result.cells and not others:
        raise UserError(f"'{folder}' holds no finished cell yet: run `paceline bench` on")
    if result is not None and profile is not None:
        result = result.model_copy(update={"profile": profile.to_json()})
    pictures = draw(result) if result is not None else []
    page = folder / "report.html"
    files = [page]
    for picture in pictures:
        path = folder / f"{picture.name}.png"
        path.write_bytes(picture.png)
        files.append(path)
    page.write_text(render(result, others, pictures), "utf-8")
    return Report(page, tuple(files))


def draw(result: BenchResult) -> list[Picture]:
    """The figures that the results have data for."""
    cells = result.cells
    wanted = [
        (
            "speed-against-tau", plots.speed_against_tau(cells),
            "What accepted length bought",
            "Every configuration that was measured, with its 95 % interval. The line at 1x is "
            "plain decoding with the same weights, kernels and machine. The further a point lies "
            "below the dotted line, the more its rounds cost beside a plain step (and the more of "
            "its time is prefill, which drafts do not shorten).",
        ),
        (
            "speed-against-k", plots.speed_against_k(cells),
            "Speed against speculation length",
            "Longer proposals are accepted ever less often and cost ever more: the best k depends "
            "on the workload. Bands are the adaptive policy, which chooses k itself, up to its "
            "maximum.",
        ),
        (
            "speed-against-concurrency", plots.speed_against_concurrency(cells),
            "Speed against concurrency",
            "Requests that run at the same time share the target's passes; what rows of drafts "
            "cost then, plain decoding uses for other requests. Below: all tokens over elapsed "
            "time.",
        ),
        (
            "acceptance-by-position", plots_detail.acceptance_by_position(cells),
            "Acceptance by position",
            "Of each drafter's longest proposals. Conditional: how often a position is accepted "
            "when all before it were. Joint: how often it is reached and accepted.",
        ),
        (
            "pass-cost", plots_detail.pass_cost(result),
            "What a pass over n rows costs",
            "The target's measured cost profile. While the curve is flat, verifying drafts is "
            "nearly free; the floor is the time to read the weights once.",
        ),
        (
            "predicted-against-measured", plots_detail.predicted_against_measured(cells),
            "Predicted against measured",
            "What the advisor said beforehand from a short trace and the cost profile, with its "
            "95 % interval.",
        ),
    ]  # fmt: skip
    return [
        Picture(name, title, caption, png(figure))
        for name, figure, title, caption in wanted
        if figure is not None
    ]


def png(figure: Figure) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=_DPI, metadata={"Software": "paceline"})
    return out.getvalue()


def render(result: BenchResult | None, others: Seq[PeerResult], pictures: Seq[Picture]) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("paceline.bench"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    cells = result.cells if result is not None else ()
    runs = list(result.runs) if result is not None else []
    runs += [o.run for o in others]
    model = result.protocol.model if result is not None else others[0].model
    return environment.get_template("report.html.j2").render(
        title=f"Speculative decoding of {model}, measured",
        subtitle=_subtitle(result, others),
        n_cells=len(cells),
        failures=[_name(c) for c in cells if not c.lossless.ok],
        summary=summarise(cells),
        figures=pictures,
        sections=_sections(cells, others),
        method=_method(result),
        commands=list(dict.fromkeys(r.command for r in runs)),
        provenance=tables.machine(runs[-1], result),
    )


def _subtitle(result: BenchResult | None, others: Seq[PeerResult]) -> str:
    parts = []
    if result is not None:
        run = result.runs[-1]
        target = next((m for c in result.cells for m in c.models if m.role == "target"), None)
        how = "" if target is None else f"{target.dtype} on {target.device}, {target.numerics}"
        parts = [f"{len(result.cells)} cells", how, run.cpu, run.date[:10]]
    if others:
        parts.append(f"{len(others)} comparison{'s' if len(others) > 1 else ''} with peers")
    return ", ".join(p for p in parts if p)


def _name(cell: CellResult) -> str:
    c = cell.config
    return (
        f"{cell.workload.label}, {plots.proposer(c)}, {c.policy}, k = {c.k}, temperature "
        f"{c.temperature:g}, concurrency {tables.load(cell)}"
    )


def summarise(cells: Seq[CellResult]) -> list[str]:
    """What a reader should know first, losses included."""
    if not cells:
        return []
    gains = [c for c in cells if c.speedup.low > 1]
    losses = [c for c in cells if c.speedup.high < 1]
    best = max(cells, key=lambda c: c.speedup.value)
    worst = min(cells, key=lambda c: c.speedup.value)
    lines = [
        f"Faster than plain decoding in {len(gains)} of {len(cells)} cells, slower in "
        f"{len(losses)}, within chance of it in {len(cells) - len(gains) - len(losses)} (95 % "
        "intervals).",
        f"Most: {best.speedup.value:.2f}x ({_name(best)}).",
    ]
    if worst is not best:
        lines.append(f"Least: {worst.speedup.value:.2f}x ({_name(worst)}).")
    adaptive = [c for c in cells if c.config.policy == "adaptive"]
    if adaptive:
        low = min(adaptive, key=lambda c: c.speedup.value)
        lines.append(
            f"The adaptive policy's slowest cell: {low.speedup.value:.2f}x ({_name(low)})."
        )
    counts = Counter(c.lossless.verdict for c in cells)
    said = ", ".join(f"{tables.VERDICTS[v]} {n}" for v, n in counts.items())
    lines.append(f"Text against plain decoding, by cells: {said}.")
    asked = [(c, c.predicted) for c in cells if c.predicted is not None]
    if asked:
        near = sum(plots_detail.within(c.speedup.value, p) for c, p in asked)
        covered = sum(p.low <= c.speedup.value <= p.high for c, p in asked)
        lines.append(
            f"The advisor was within 10 % in {near} of {len(asked)} cells, and its 95 % interval "
            f"covered the measured value in {covered}."
        )
    synthetic = sum(c.workload.synthetic_items > 0 for c in cells)
    if synthetic:
        lines.append(
            f"{synthetic} cells use synthetic prompts and are marked: they measure cost, and say "
            "little of acceptance on real text."
        )
    return lines


def _sections(cells: Seq[CellResult], others: Seq[PeerResult]) -> list[Section]:
    sections = [
        Section(
            f"Peers on {o.workload_label}",
            tables.peers(o),
            f"{o.prompts} prompts, {o.max_tokens} new tokens each, greedy, one request at a time, "
            f"{o.repeats} repeats, all systems in turn in one run; k = {o.k}. Rates are tokens "
            "behind the first arrival over the time behind it. Another system's text differs "
            "where its numerics do: that is no fault.",
        )
        for o in others
    ]
    if not cells:
        return sections
    sections += [
        Section(
            "Verdicts",
            tables.verdicts(cells),
            "identical: token ids equal plain decoding's. near tie: a difference begins between "
            "two tokens whose logits are closer than the tolerance. law: samples differ as samples "
            "do, and their law was tested. DIFFERENT: a failure.",
        ),
        Section(
            "Speed-ups",
            tables.speeds(cells),
            "request: whole requests, prefill included. decoding: behind the first token. server: "
            "all tokens over elapsed time.",
        ),
        Section(
            "Latency",
            tables.latencies(cells),
            "Milliseconds, p50 / p95 / p99. Inter-token: each token of a burst has an equal share "
            "of its round's time. Between bursts: what a reader of the stream sees.",
        ),
        Section(
            "Resources",
            tables.resources(cells),
            "Of the speculative runs. A dash: it could not be read here.",
        ),
    ]
    parts = tables.slices(cells)
    if parts.rows:
        sections.append(Section("Parts of the workloads", parts))
    return sections


def _method(result: BenchResult | None) -> list[str]:
    if result is None:
        return []
    p = result.protocol
    lengths = "as long as the plain answer" if p.lengths == "plain" else "of fixed length"
    notes = Counter(note for c in result.cells for note in c.notes)
    return [
        f"Plain and speculative runs alternate (A B B A), {p.repeats} repeats after a warm-up; "
        f"outputs {lengths}, at most {p.max_tokens} tokens; intervals are paired bootstraps over "
        "prompts and repeats. The plain reference is the same engine, weights and kernels with "
        "nothing drafted.",
        *(f"Of {n} of {len(result.cells)} cells: {note}." for note, n in notes.items()),
    ]
