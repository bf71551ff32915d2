"""Figures of a benchmark report. Every configuration is drawn, losses as plainly as gains.

Each function takes results and returns a figure, or None where they hold nothing to draw.
Colours are Okabe and Ito's, which colour-blind readers can tell apart; markers, fillings and
line styles say the same once more. Figures are objects of their own (no pyplot state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from paceline.bench.results import CellConfig, CellResult, Estimate

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#7F7F7F",
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")
_LINES = ("-", "--", ":", "-.")
LOSS = "#FBE9E7"
GREY = "#555555"

X = TypeVar("X")
Panel = tuple[str, float, int]


class Styles:
    """A fixed look for each name, in order of appearance."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = list(dict.fromkeys(names))

    def _at(self, name: str, values: Seq[X], every: int = 1) -> X:
        return values[self.names.index(name) // every % len(values)]

    def colour(self, name: str) -> str:
        return self._at(name, COLOURS)

    def marker(self, name: str) -> str:
        return self._at(name, _MARKERS)

    def line(self, name: str) -> str:
        return self._at(name, _LINES, len(COLOURS))


def proposer(config: CellConfig) -> str:
    """Who drafts, whatever k and policy are."""
    parts = [config.drafter]
    if config.tree is not None:
        parts.append(f"tree {config.tree}")
    if config.vocabulary != "same":
        parts.append(config.vocabulary)
    if config.weights != "fast":
        parts.append(f"{config.weights} weights")
    return " ".join(parts)


def panel_title(workload: str, temperature: float, concurrency: int | None = None) -> str:
    text = f"{workload}\ntemperature {temperature:g}"
    return text if concurrency is None else f"{text}, concurrency {concurrency}"


def panel_of(cell: CellResult) -> Panel:
    c = cell.config
    return cell.workload.label, c.temperature, c.concurrency


def errors(values: Seq[Estimate]) -> list[list[float]]:
    return [[v.value - v.low for v in values], [v.high - v.value for v in values]]


def columns_for(n: int) -> int:
    """Columns of n panels: at most three, and no row with a single one where two do."""
    return 2 if n == 4 else min(n, 3)


def grid(n: int, *, width: float = 4.1, height: float = 3.1) -> tuple[Figure, list[Axes]]:
    columns = columns_for(n)
    rows = -(-n // columns)
    figure = Figure(
        figsize=(width * columns + (2.2 if columns < 3 else 1.6), height * rows + 0.4),
        layout="constrained",
    )
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(n)]
    return figure, axes


def _speed_axis(ax: Axes, values: Iterable[Estimate]) -> None:
    """Losses are shaded, and plain decoding's own speed is a line; both are always in sight."""
    known = list(values)
    low = min([v.low for v in known] + [0.9])
    high = max([v.high for v in known] + [1.15])
    pad = 0.06 * (high - low)
    ax.set_ylim(max(low - pad, 0.0), high + pad)
    ax.axhspan(0.0, 1.0, color=LOSS, zorder=0, linewidth=0)
    ax.axhline(1.0, color=GREY, linewidth=1.1, zorder=1)
    ax.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}x"))
    ax.grid(True, axis="both", color="#E4E4E4", linewidth=0.6, zorder=0.5)
    ax.set_axisbelow(False)


def legend(figure: Figure, handles: Seq[Line2D | Patch], title: str | None = None) -> None:
    """Beside the panels, never over the data."""
    figure.legend(
        handles=list(handles),
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        title=title,
        alignment="left",
    )


def temperature_note() -> Line2D:
    look = {"linestyle": "none", "marker": "o", "color": GREY, "markerfacecolor": "white"}
    return Line2D([], [], label="temperature above 0", **look)  # type: ignore[arg-type]


def _heading(text: str) -> Line2D:
    return Line2D([], [], linestyle="none", label=f"$\\bf{{{text}}}$")


def speed_against_tau(cells: Seq[CellResult]) -> Figure | None:
    """Every cell: what its accepted length bought."""
    if not cells:
        return None
    drafters = Styles(proposer(c.config) for c in cells)
    workloads = Styles(c.workload.label for c in cells)
    figure = Figure(figsize=(9.2, 5.4), layout="constrained")
    ax = figure.add_subplot()
    many = len(cells) > 60
    for cell in cells:
        c, colour = cell.config, drafters.colour(proposer(cell.config))
        adaptive = c.policy != "fixed"
        ax.errorbar(
            cell.tau,
            cell.speedup.value,
            yerr=errors([cell.speedup]),
            marker=workloads.marker(cell.workload.label),
            markersize=(5.0 if many else 6.5) + 1.5 * adaptive,
            color=colour,
            markerfacecolor=colour if c.temperature == 0 else "white",
            markeredgecolor="black" if adaptive else colour,
            markeredgewidth=1.5 if adaptive else 1.0,
            ecolor=colour,
            elinewidth=0.7 if many else 1.1,
            capsize=0 if many else 2,
            alpha=0.75 if many else 1.0,
            linestyle="none",
            zorder=3,
        )
    _speed_axis(ax, [c.speedup for c in cells])
    top = max(c.tau for c in cells)
    ax.plot([1, 1.06 * top + 0.1], [1, 1.06 * top + 0.1], ":", color=GREY, linewidth=1)
    ax.set_xlim(min(1.0, *(c.tau for c in cells)) - 0.08, 1.05 * top + 0.1)
    ax.set_xlabel("accepted length tau (tokens committed a round, pooled)")
    ax.set_ylabel("speed-up over plain decoding, 95 % interval")
    legend(figure, _taulegend(cells, drafters, workloads))
    return figure


def _taulegend(cells: Seq[CellResult], drafters: Styles, workloads: Styles) -> list[Line2D | Patch]:
    def dot(**look: Any) -> Line2D:
        return Line2D([], [], **({"linestyle": "none", "marker": "o", "color": GREY} | look))

    handles: list[Line2D | Patch] = [_heading("drafter")]
    handles += [dot(color=drafters.colour(d), label=d) for d in drafters.names]
    handles += [_heading("workload")]
    handles += [dot(marker=workloads.marker(w), label=w) for w in workloads.names]
    if any(c.config.temperature > 0 for c in cells):
        handles.append(temperature_note())
    if any(c.config.policy != "fixed" for c in cells):
        edge = {"markeredgecolor": "black", "markeredgewidth": 1.5}
        handles += [dot(label="adaptive policy", **edge)]
    handles += [
        Line2D([], [], linestyle=":", color=GREY, label="if a round cost\none plain step"),
        Patch(color=LOSS, label="slower than plain"),
    ]
    return handles


def _closed(cells: Seq[CellResult]) -> list[CellResult]:
    """Cells of a closed loop: an open loop's concurrency is a limit, not a load."""
    return [c for c in cells if c.config.rate is None]


def speed_against_k(cells: Seq[CellResult]) -> Figure | None:
    """A panel for each workload, temperature and concurrency with more than one k."""
    groups: dict[Panel, list[CellResult]] = {}
    for cell in _closed(cells):
        groups.setdefault(panel_of(cell), []).append(cell)
    groups = {
        key: group
        for key, group in groups.items()
        if len({c.config.k for c in group if c.config.policy == "fixed"}) > 1
    }
    if not groups:
        return None
    drafters = Styles(proposer(c.config) for group in groups.values() for c in group)
    figure, axes = grid(len(groups))
    for ax, (key, group) in zip(axes, groups.items(), strict=True):
        ax.set_title(panel_title(*key), fontsize=9)
        ks = sorted({c.config.k for c in group})
        for name in drafters.names:
            mine = [c for c in group if proposer(c.config) == name]
            _speed_line(ax, mine, drafters, name, lambda c: float(c.config.k))
            _adaptive_band(ax, mine, drafters.colour(name), (ks[0] - 0.3, ks[-1] + 0.3))
        _speed_axis(ax, [c.speedup for c in group])
        ax.xaxis.set_major_locator(FixedLocator(ks if len(ks) <= 10 else ks[:: -(-len(ks) // 10)]))
        ax.set_xlabel("k (tokens or nodes drafted a round)")
    for ax in axes[:: columns_for(len(axes))]:
        ax.set_ylabel("speed-up over plain")
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=drafters.colour(d), marker=drafters.marker(d), label=d)
        for d in drafters.names
    ]
    if any(c.config.policy != "fixed" for group in groups.values() for c in group):
        handles.append(Patch(color=GREY, alpha=0.3, label="adaptive policy\n(95 % interval)"))
    handles.append(Patch(color=LOSS, label="slower than plain"))
    legend(figure, handles)
    return figure


def _speed_line(
    ax: Axes,
    cells: Seq[CellResult],
    styles: Styles,
    name: str,
    x: Callable[[CellResult], float],
) -> None:
    fixed = sorted((c for c in cells if c.config.policy == "fixed"), key=x)
    if not fixed:
        return
    ax.errorbar(
        [x(c) for c in fixed],
        [c.speedup.value for c in fixed],
        yerr=errors([c.speedup for c in fixed]),
        color=styles.colour(name),
        marker=styles.marker(name),
        linestyle=styles.line(name),
        markersize=4.5,
        linewidth=1.3,
        capsize=2,
        zorder=3,
    )


def _adaptive_band(
    ax: Axes, cells: Seq[CellResult], colour: str, span: tuple[float, float]
) -> None:
    for cell in (c for c in cells if c.config.policy != "fixed"):
        s = cell.speedup
        ax.fill_between(span, s.low, s.high, color=colour, alpha=0.18, linewidth=0, zorder=2)
        ax.hlines(s.value, *span, color=colour, linestyle=(0, (5, 2)), linewidth=1.2, zorder=2)


def speed_against_concurrency(cells: Seq[CellResult]) -> Figure | None:
    """Speed-up, and the server's tokens per second, by requests at a time."""
    groups: dict[tuple[str, float], list[CellResult]] = {}
    for cell in _closed(cells):
        groups.setdefault((cell.workload.label, cell.config.temperature), []).append(cell)
    groups = {
        key: group
        for key, group in groups.items()
        if len({c.config.concurrency for c in group}) > 1
    }
    if not groups:
        return None
    drafters = Styles(proposer(c.config) for group in groups.values() for c in group)
    columns = columns_for(len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(4.1 * columns + 2.2, 5.4 * rows), layout="constrained")
    for i, (key, group) in enumerate(groups.items()):
        row, column = divmod(i, columns)
        top = figure.add_subplot(2 * rows, columns, 2 * row * columns + column + 1)
        low = figure.add_subplot(2 * rows, columns, (2 * row + 1) * columns + column + 1)
        top.set_title(panel_title(*key), fontsize=9)
        _concurrency_lines(top, low, group, drafters)
        if column == 0:
            top.set_ylabel("speed-up over plain")
            low.set_ylabel("server tokens/s")
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=drafters.colour(d), marker=drafters.marker(d), label=d)
        for d in drafters.names
    ]
    if any(c.config.policy != "fixed" for group in groups.values() for c in group):
        handles.append(
            Line2D([], [], color=GREY, linewidth=2.6, linestyle="--", label="adaptive policy")
        )
    handles += [
        Line2D([], [], color=GREY, linewidth=1, label="one line for each k"),
        Line2D([], [], color="black", marker=".", linewidth=2, label="plain decoding"),
        Patch(color=LOSS, label="slower than plain"),
    ]
    legend(figure, handles)
    return figure


def _concurrency_lines(top: Axes, low: Axes, group: Seq[CellResult], styles: Styles) -> None:
    levels = sorted({c.config.concurrency for c in group})
    by_label: dict[tuple[str, str, int], list[CellResult]] = {}
    for c in sorted(group, key=lambda c: c.config.concurrency):
        by_label.setdefault((proposer(c.config), c.config.policy, c.config.k), []).append(c)
    for (name, policy, k), line in by_label.items():
        look: dict[str, Any] = {
            "color": styles.colour(name),
            "marker": styles.marker(name),
            "markersize": 4,
            "linewidth": 1.0 if policy == "fixed" else 2.6,
            "linestyle": "-" if policy == "fixed" else "--",
            "zorder": 3,
        }
        xs = [c.config.concurrency for c in line]
        top.errorbar(
            xs,
            [c.speedup.value for c in line],
            yerr=errors([c.speedup for c in line]),
            capsize=2,
            elinewidth=0.8,
            **look,
        )
        low.plot(xs, [c.speculative.throughput.server_tok_s for c in line], **look)
        if policy == "fixed" and len(by_label) <= 5:
            top.annotate(
                f"k={k}", (xs[-1], line[-1].speedup.value), (5, 0), fontsize=7,
                textcoords="offset points", va="center", color=styles.colour(name),
            )  # fmt: skip
    plain = [
        max(c.plain.throughput.server_tok_s for c in group if c.config.concurrency == n)
        for n in levels
    ]
    low.plot(levels, plain, color="black", marker=".", linewidth=2, zorder=4)
    _speed_axis(top, [c.speedup for c in group])
    low.set_ylim(bottom=0)
    low.grid(True, color="#E4E4E4", linewidth=0.6)
    for ax in (top, low):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(levels))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.set_xlim(levels[0] / 1.25, levels[-1] * 1.45)
    low.set_xlabel("requests at a time")
