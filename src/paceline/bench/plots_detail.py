"""Figures about why: acceptance by position, the cost of a pass, and the advisor's predictions.

As in `plots`: a figure, or None where the results hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from paceline.bench.plots import (
    COLOURS,
    GREY,
    Styles,
    columns_for,
    errors,
    grid,
    legend,
    proposer,
    temperature_note,
)
from paceline.bench.results import BenchResult, CellResult, Estimate
from paceline.core.latency import Profile


def acceptance_by_position(cells: Seq[CellResult]) -> Figure | None:
    """A panel for each drafter: the cell with the longest proposals of each workload and
    temperature. Conditional: given that all before were accepted. Joint: all up to here."""
    chosen: dict[tuple[str, str, float], CellResult] = {}
    for cell in cells:
        if not any(x is not None for x in cell.speculative.acceptance.conditional):
            continue
        key = proposer(cell.config), cell.workload.label, cell.config.temperature
        old = chosen.get(key)
        if old is None or _length(cell) > _length(old):
            chosen[key] = cell
    if not chosen:
        return None
    names = list(dict.fromkeys(name for name, _, _ in chosen))
    lines = Styles(f"{w}, t = {t:g}" for _, w, t in chosen)
    figure, axes = grid(len(names))
    for ax, name in zip(axes, names, strict=True):
        ax.set_title(name, fontsize=9)
        for (who, workload, temperature), cell in chosen.items():
            if who == name:
                _acceptance_lines(ax, cell, lines, f"{workload}, t = {temperature:g}")
        ax.set_ylim(-0.03, 1.03)
        ax.grid(True, color="#E4E4E4", linewidth=0.6)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("position in the proposal")
    for ax in axes[:: columns_for(len(axes))]:
        ax.set_ylabel("share accepted")
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=lines.colour(key), marker=lines.marker(key), label=key)
        for key in lines.names
    ]
    handles += [
        Line2D([], [], color=GREY, label="conditional"),
        Line2D([], [], color=GREY, linestyle="--", label="joint"),
    ]
    legend(figure, handles)
    return figure


def _length(cell: CellResult) -> tuple[int, int]:
    """Longer proposals first, then fewer requests at a time."""
    return len(cell.speculative.acceptance.conditional), -cell.config.concurrency


def _acceptance_lines(ax: Axes, cell: CellResult, styles: Styles, key: str) -> None:
    a = cell.speculative.acceptance
    for values, line in ((a.conditional, "-"), (a.joint, "--")):
        points = [(i, v) for i, v in enumerate(values, 1) if v is not None]
        if points:
            ax.plot(
                *zip(*points, strict=True),
                color=styles.colour(key),
                marker=styles.marker(key),
                markersize=4,
                linewidth=1.2,
                linestyle=line,
            )


def predicted_against_measured(cells: Seq[CellResult]) -> Figure | None:
    """The advisor's predictions, where it was asked beforehand."""
    asked = [(c, c.predicted) for c in cells if c.predicted is not None]
    if not asked:
        return None
    drafters = Styles(proposer(c.config) for c, _ in asked)
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    ax = figure.add_subplot()
    for cell, predicted in asked:
        colour = drafters.colour(proposer(cell.config))
        ax.errorbar(
            predicted.value,
            cell.speedup.value,
            xerr=errors([predicted]),
            yerr=errors([cell.speedup]),
            marker=drafters.marker(proposer(cell.config)),
            markerfacecolor=colour if cell.config.temperature == 0 else "white",
            color=colour,
            markersize=5,
            elinewidth=0.7,
            linestyle="none",
            zorder=3,
        )
    ends = [v for c, p in asked for v in (p.low, p.high, c.speedup.low, c.speedup.high)]
    low, high = max(min(ends) * 0.95, 0.0), max(ends) * 1.05
    span = [low, high]
    ax.fill_between(
        span, [0.9 * x for x in span], [1.1 * x for x in span], color="#DDE8F0", linewidth=0
    )
    ax.plot(span, span, color=GREY, linewidth=1)
    ax.axhline(1.0, color=GREY, linewidth=0.7, linestyle=":")
    ax.axvline(1.0, color=GREY, linewidth=0.7, linestyle=":")
    ax.set_xlim(low, high)
    ax.set_ylim(low, high)
    ax.set_aspect("equal")
    near = sum(within(c.speedup.value, p) for c, p in asked)
    ax.set_title(f"within 10 %: {near} of {len(asked)} cells", fontsize=10)
    ax.set_xlabel("predicted speed-up")
    ax.set_ylabel("measured speed-up")
    handles: list[Line2D | Patch] = [
        Line2D(
            [],
            [],
            linestyle="none",
            color=drafters.colour(d),
            marker=drafters.marker(d),
            label=d,
        )
        for d in drafters.names
    ]
    if any(c.config.temperature > 0 for c, _ in asked):
        handles.append(temperature_note())
    handles.append(Patch(color="#DDE8F0", label="within 10 %"))
    legend(figure, handles)
    return figure


def within(measured: float, predicted: Estimate, share: float = 0.1) -> bool:
    """Whether a prediction is near: measured over predicted within 1 +- share."""
    return abs(measured - predicted.value) <= share * predicted.value


def pass_cost(result: BenchResult) -> Figure | None:
    """T_p(n) of the profile, with the time that reading the weights takes at the bandwidth
    that was measured: no pass can be faster than this floor."""
    if result.profile is None:
        return None
    profile = Profile.from_json(result.profile)
    rows = profile.target.rows
    figure = Figure(figsize=(7.6, 4.4), layout="constrained")
    ax = figure.add_subplot()
    for (context, line), colour in zip(
        ((0, "-"), (1024, "--"), (4096, ":")), COLOURS, strict=False
    ):
        ys = [1e3 * (y + context * profile.target.per_entry(x)) for x, y in _points(rows)]
        label = f"context {context}" if context else "short context (measured)"
        mark = "o" if context == 0 else ""
        ax.plot(rows.xs, ys, color=colour, linestyle=line, marker=mark, markersize=4, label=label)
    for name, cost in profile.drafts.items():
        step = 1e3 * cost.step(1)
        if step > 0:
            ax.axhline(step, color=COLOURS[4], linewidth=1, linestyle="-.")
            ax.annotate(
                f"one draft token: {name}", (rows.xs[-1], step), (0, 3), fontsize=7, ha="right",
                textcoords="offset points", color=COLOURS[4],
            )  # fmt: skip
    floor = bandwidth_floor(result)
    if floor is not None:
        ax.axhline(1e3 * floor, color="black", linewidth=1.2)
        ax.annotate(
            "floor: weights read once at the measured bandwidth", (rows.xs[0], 1e3 * floor),
            (2, -10), fontsize=8, textcoords="offset points",
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("rows in the pass (plain decoding of one request: 1; k drafted tokens: k + 1)")
    ax.set_ylabel("T_p, milliseconds")
    one = 1e3 * rows(1)
    scale: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (
        lambda y: y / one,
        lambda y: y * one,
    )
    other = ax.secondary_yaxis("right", functions=scale)
    other.set_ylabel("T_p(n) / T_p(1)")
    ax.grid(True, color="#E4E4E4", linewidth=0.6)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return figure


def _points(curve: Any) -> list[tuple[float, float]]:
    return list(zip(curve.xs, curve.ys, strict=True))


def bandwidth_floor(result: BenchResult) -> float | None:
    """Seconds to read what a pass reads of the weights; None where either is unknown."""
    bandwidth = result.runs[-1].read_bandwidth_bytes_s if result.runs else None
    if not bandwidth:
        return None
    for cell in result.cells:
        side = cell.plain
        if side.machine.weight_read_bytes_s and side.times.steps:
            per_pass = side.machine.weight_read_bytes_s * side.times.T_p_s / side.times.steps
            return per_pass / bandwidth
    return None
