"""A training run as a picture: loss and acceptance against tokens seen."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any


def draw(log: Seq[Mapping[str, Any]], path: Path, title: str) -> None:
    """Write a PNG from the entries of `log.jsonl`; nothing without entries."""
    if not log:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    loss, rate = figure.subplots(1, 2)
    tokens = [e["tokens"] for e in log]
    loss.plot(tokens, [e["loss"] for e in log], linewidth=0.8)
    loss.set(xlabel="tokens seen", ylabel="training loss", title=title)
    evaluated = [e for e in log if "held_out" in e]
    rates = [(e["tokens"], (e.get("held_out") or e)["agree"]) for e in evaluated or log]
    for depth in range(max(len(agree) for _, agree in rates)):
        # unrolled steps grow: early entries are not as deep
        at = [(tokens, agree[depth]) for tokens, agree in rates if depth < len(agree)]
        rate.plot(*zip(*at, strict=True), marker=".", label=f"step {depth + 1}")
    where = "held-out" if evaluated else "training"
    rate.set(xlabel="tokens seen", ylabel="greedy agreement", title=f"{where} acceptance")
    rate.set_ylim(0, 1)
    rate.legend(title="draft step", fontsize="small")
    for axes in (loss, rate):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
