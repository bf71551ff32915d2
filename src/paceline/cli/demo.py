"""`paceline demo`: plain and speculative decoding side by side."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import typer
from rich.columns import Columns
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from paceline.api import LLM
from paceline.cli import common as c
from paceline.registry import best_shipped
from paceline.types import RequestOutput, SamplingParams

_CODE = '''\
def monthly_report(orders, customers, month):
    """Total, count and average of a month's orders for each customer."""
    totals = {}
    counts = {}
    for order in orders:
        if order["month"] != month:
            continue
        customer = order["customer"]
        totals[customer] = totals.get(customer, 0) + order["amount"]
        counts[customer] = counts.get(customer, 0) + 1
    lines = []
    for customer in sorted(totals):
        name = customers[customer]["name"]
        average = totals[customer] / counts[customer]
        lines.append(f"{name}: {totals[customer]} in {counts[customer]} orders ({average})")
    return "\\n".join(lines)
'''

#: (name, prompt): an ordinary question, and an edit that mostly copies its input.
PROMPTS = (
    ("ordinary", "Explain in a few sentences why leaves change their colour in autumn."),
    (
        "code edit",
        "Rewrite this Python function with the variable `customer` renamed to `client`. "
        f"Give the whole function and change nothing else.\n\n```python\n{_CODE}```",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Outputs of interleaved plain and speculative runs of one prompt."""

    name: str
    plain: list[RequestOutput]
    speculative: list[RequestOutput]

    @property
    def identical(self) -> bool:
        return len({o.token_ids for o in (*self.plain, *self.speculative)}) == 1

    def as_dict(self) -> dict[str, Any]:
        plain, fast = list(map(_speed, self.plain)), list(map(_speed, self.speculative))
        return {
            "name": self.name,
            "identical": self.identical,
            "plain_tok_s": round(median(plain), 2),
            "speculative_tok_s": round(median(fast), 2),
            # Of neighbouring runs: a machine's speed drifts from one pair to the next.
            "speedup": round(median(f / p for f, p in zip(fast, plain, strict=True)), 3),
            "tau": round(median(o.stats.tau for o in self.speculative), 3),
            "tokens": len(self.plain[0].tokens),
        }


def _speed(output: RequestOutput) -> float:
    """Tokens per second behind the first token."""
    stats = output.stats
    assert stats.finished is not None
    assert stats.first_token is not None
    return (len(output.tokens) - 1) / max(stats.finished - stats.first_token, 1e-9)


def demo(
    model: c.Model = c.DEFAULT_MODEL,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            help="As of generate.",
            show_default="ngram+eagle3 where a head ships for the model, else ngram",
        ),
    ] = None,
    policy: c.Policy = "adaptive",
    k: c.K = None,
    max_tokens: c.MaxTokens = 192,
    repeats: Annotated[
        int, typer.Option(min=1, help="Interleaved runs of each kind; medians count.")
    ] = 5,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
) -> None:
    """Decode an ordinary and a copy-heavy prompt plainly and speculatively; compare."""
    draft = best_shipped(model) if draft is None else draft
    llm = c.load(model, draft=draft, policy=policy, k=k, dtype=dtype, device=device)
    comparisons = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=c.console
    ) as progress:
        for name, prompt in PROMPTS:
            tokens = llm.chat_tokens([{"role": "user", "content": prompt}])
            task = progress.add_task(name)
            comparisons.append(_compare(llm, name, tokens, max_tokens, repeats, progress, task))
            progress.remove_task(task)
    for comparison in comparisons:
        _print_pair(llm, comparison)
    how = f"{policy}, k = {llm.k}"
    _print_table(comparisons, f"draft {draft}, {how}, greedy")
    info = llm.engine.model.info
    c.print_json(
        {
            "model": info.name,
            "draft": draft,
            "policy": policy,
            "k": llm.k,
            "dtype": info.dtype,
            "prompts": [x.as_dict() for x in comparisons],
            "numerics": info.numerics.value,
            "guarantee": comparisons[0].speculative[0].guarantee.value,
        }
    )


def _compare(
    llm: LLM,
    name: str,
    tokens: tuple[int, ...],
    max_tokens: int,
    repeats: int,
    progress: Progress,
    task: Any,
) -> Comparison:
    """Warm up, then plain and speculative in the order A B B A A B ..."""
    llm.generate(tokens, SamplingParams(max_tokens=8))
    outputs: dict[str, list[RequestOutput]] = {"plain": [], "speculative": []}
    for run in range(2 * repeats):
        kind = "plain" if run % 4 in (0, 3) else "speculative"
        progress.update(task, description=f"{name}: {kind} decoding, run {run // 2 + 1}")
        params = SamplingParams(max_tokens=max_tokens, k=0 if kind == "plain" else None)
        outputs[kind] += llm.generate(tokens, params)
    return Comparison(name, outputs["plain"], outputs["speculative"])


def _print_pair(llm: LLM, comparison: Comparison) -> None:
    panels = []
    for title, output in (
        ("plain", comparison.plain[0]),
        ("speculative", comparison.speculative[0]),
    ):
        text = c.Painter(llm).paint(output.tokens)
        panels.append(Panel(text, title=f"{comparison.name}: {title}", width=c.console.width // 2))
    c.console.print(Columns(panels, padding=0))
    legend = Text("accepted draft", style="green")
    legend.append(" · ").append("replacement", style="red")
    legend.append(" · ").append("bonus", style="cyan")
    c.console.print(legend)


def _print_table(comparisons: list[Comparison], title: str) -> None:
    table = Table(title=title, caption="medians; speed-up: of neighbouring runs")
    for column in ("prompt", "same text", "plain tok/s", "speculative tok/s", "speed-up", "tau"):
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for comparison in comparisons:
        d = comparison.as_dict()
        table.add_row(
            d["name"],
            "yes" if d["identical"] else "NO",
            f"{d['plain_tok_s']:.1f}",
            f"{d['speculative_tok_s']:.1f}",
            f"{d['speedup']:.2f}x",
            f"{d['tau']:.2f}",
        )
    c.console.print(table)
