"""The report: says what the results say, losses and failures included, for 1 cell and for 216."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_data import cell, matrix, provenance, result

from paceline.bench import plots, plots_detail, tables
from paceline.bench.peers.records import Arm, PeerResult
from paceline.bench.report import summarise, write_report
from paceline.bench.results import BenchResult, Estimate
from paceline.errors import UserError

VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Text by tag; refuses tags that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.rows = 0
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.rows += tag == "tr"
        self.images += [values["src"] or ""] if tag == "img" else []
        self.links += [v for k, v in attrs if k in ("href", "src") and v]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", self.text)


def write(folder: Path, value: BenchResult) -> Page:
    folder.mkdir(exist_ok=True)
    (folder / "results.json").write_text(value.model_dump_json())
    report = write_report(folder)
    for path in report.files[1:]:
        assert path.read_bytes().startswith(b"\x89PNG")
    return Page(report.html.read_text("utf-8"))


def test_one_cell_without_extras(tmp_path: Path) -> None:
    page = write(tmp_path, result(cell(predicted=False), with_profile=False))
    assert len(page.images) == 2
    assert all(src.startswith("data:image/png;base64,") for src in page.links)  # self-contained
    assert "paceline bench --quick" in page.words
    assert "Faster than plain decoding in 1 of 1 cells" in page.words
    assert "synthetic" not in page.words
    assert "Not lossless" not in page.words
    assert not (tmp_path / "speed-against-k.png").exists()


def test_a_whole_matrix(tmp_path: Path) -> None:
    cells = [c for c in matrix(np.random.default_rng(0)) if c.config.concurrency != 4]
    page = write(tmp_path, result(*cells))
    assert len(cells) == 144
    assert len(page.images) == 6
    assert page.rows > 5 * len(cells)
    losses = sum(c.speedup.high < 1 for c in cells)
    assert losses > 20
    assert f"slower in {losses}" in page.words
    worst = min(c.speedup.value for c in cells)
    assert f"Least: {worst:.2f}x" in page.words
    # Every row of a synthetic workload is marked, in each table.
    assert page.words.count("random:512 synthetic") >= 5 * 48


def test_failures_are_loud_and_texts_escaped(tmp_path: Path) -> None:
    bad = cell("<b>odd & name</b>", verdict="different", synthetic=3)
    page = write(tmp_path, result(bad, cell(verdict="near_tie"), cell("code-edit")))
    assert "Not lossless: 1 of 3 cells" in page.words
    assert "<b>odd & name</b>" in page.words  # as text: the tag was escaped
    assert "DIFFERENT" in page.words
    assert "near tie" in page.words
    assert "largest margin 0.004, tolerance 0.05" in page.words


def test_verdicts_have_a_row_for_every_cell() -> None:
    cells = [cell(verdict=v) for v in ("identical", "near_tie", "law", "different")]
    table = tables.verdicts(cells)
    shown = [next(v for c, v in table.cells(r) if c.name == "verdict") for r in table.rows]
    assert [v.value for v in shown] == ["identical", "near tie", "law", "DIFFERENT"]
    assert [v.good for v in shown] == [True, True, True, False]


def test_the_summary_counts_what_is_clear_of_chance() -> None:
    def at(low: float, value: float, high: float, **kind: str):
        e = Estimate(value=value, low=low, high=high)
        return cell(**kind).model_copy(update={"speedup": e})  # type: ignore[arg-type]

    cells = [at(1.1, 1.2, 1.3), at(0.9, 1.05, 1.2), at(0.5, 0.6, 0.7, policy="adaptive")]
    lines = summarise(cells)
    assert "in 1 of 3 cells, slower in 1, within chance of it in 1" in lines[0]
    assert "adaptive policy's slowest cell: 0.60x" in " ".join(lines)
    assert summarise([]) == []


def test_predictions_are_judged() -> None:
    near = Estimate(value=1.09, low=1.0, high=1.2)
    assert plots_detail.within(1.0, near)
    assert not plots_detail.within(1.0, Estimate(value=1.2, low=1.1, high=1.3))
    e = Estimate(value=1.0, low=0.9, high=1.1)
    cells = [
        cell().model_copy(update={"speedup": e, "predicted": near}),
        cell().model_copy(update={"speedup": e, "predicted": Estimate(value=2, low=1.9, high=3)}),
    ]
    text = " ".join(summarise(cells))
    assert (
        "within 10 % in 1 of 2 cells, and its 95 % interval covered the measured value in 1" in text
    )
    figure = plots_detail.predicted_against_measured(cells)
    assert figure is not None
    assert figure.axes[0].get_title() == "within 10 %: 1 of 2 cells"


def test_losses_are_in_sight_on_every_axis() -> None:
    """The line at 1x, and the lowest end of an interval, are inside the axis."""
    cells = [cell(k=k, concurrency=n) for k in (2, 8) for n in (1, 16)]
    low = min(c.speedup.low for c in cells)
    assert low < 0.9
    for draw in (plots.speed_against_tau, plots.speed_against_k, plots.speed_against_concurrency):
        figure = draw(cells)
        assert figure is not None
        bottoms = [ax.get_ylim() for ax in figure.axes if "x" in ax.yaxis.get_major_formatter()(1)]
        assert min(b for b, _ in bottoms) < low
        assert all(b < 1.0 < t for b, t in bottoms)


def test_every_cell_is_a_point() -> None:
    cells = matrix(np.random.default_rng(1))
    figure = plots.speed_against_tau(cells)
    assert figure is not None
    assert len(figure.axes[0].containers) == len(cells)


def test_open_loop_cells_are_no_points_of_a_load() -> None:
    cells = [cell(concurrency=n, rate=2.0) for n in (1, 4)]
    assert plots.speed_against_concurrency(cells) is None
    assert tables.load(cells[0]) == "2/s"


def test_the_floor_is_the_time_to_read_the_weights() -> None:
    value = result(cell())
    floor = plots_detail.bandwidth_floor(value)
    # 24 GB/s of weights over 30 ms a pass is 0.72 GB a pass; at 30 GB/s that takes 24 ms.
    assert floor == pytest.approx(0.024)
    dark = value.model_copy(update={"runs": ()})
    assert plots_detail.bandwidth_floor(dark) is None


def peer_result(**arm: object) -> PeerResult:
    base = {"system": "other", "mode": "plain", "ours": False, "version": "other 1", "model": "m"}
    return PeerResult(
        run=provenance(command="paceline peers --peer x"), model="m", draft="ngram", k=4,
        workload="code-edit", synthetic_items=0, prompts=2, max_tokens=8, repeats=2,
        arms=(Arm.model_validate({**base, "precision": "bf16", **arm}),),
    )  # fmt: skip


def test_peers_stand_beside_ours_or_alone(tmp_path: Path) -> None:
    slow = {
        "versus_ours": {"value": 0.5, "low": 0.4, "high": 0.6}, "counted": "chunks",
        "equal_lengths": False, "same_text": 1, "compared": 2, "agreed": 0.75,
    }  # fmt: skip
    peer_result(**slow).save(tmp_path)
    page = Page(write_report(tmp_path).html.read_text("utf-8"))
    assert "Peers on code-edit" in page.words
    assert "0.50x [0.40, 0.60]" in page.words
    assert "1 of 2 (first 75 % alike)" in page.words
    assert "a lower bound" in page.words
    assert "output lengths differ" in page.words
    assert "paceline peers --peer x" in page.words
    both = write(tmp_path, result(cell()))
    assert "Peers on code-edit" in both.words
    assert "Verdicts" in both.words


def test_a_peer_that_was_not_measured_says_why() -> None:
    arm = peer_result(error="died of SIGILL").arms[0]
    assert tables.peer_notes(arm) == "NOT MEASURED: died of SIGILL"


def test_folders_without_results(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no results"):
        write_report(tmp_path / "none")
    (tmp_path / "results.json").write_text(result().model_dump_json())
    with pytest.raises(UserError, match="no finished cell"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.1234, "123"), (0.01234, "12.3"), (0.001234, "1.23"), (None, "\N{EN DASH}")],
)
def test_milliseconds(seconds: float | None, text: str) -> None:
    assert tables.milliseconds(seconds) == text
