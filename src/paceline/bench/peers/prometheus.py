"""What a server's Prometheus page says about speculation.

Names as the servers publish them: vLLM `vllm:spec_decode_*_total`, llama.cpp
`llamacpp:spec_decode_*_total` (formerly `llamacpp:tokens_drafted*_total`), both counters; SGLang
`sglang:spec_accept_length` and `sglang:spec_accept_rate`, gauges of the latest batches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.bench.peers.base import Speculation

_LINE = re.compile(
    r"^(?P<name>[A-Za-z_:][\w:]*)\s*(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*$"
)
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')

#: (rounds, drafted tokens, accepted tokens, accepted tokens by position).
_COUNTERS = {
    "vLLM": (
        "vllm:spec_decode_num_drafts",
        "vllm:spec_decode_num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
    ),
    "llama.cpp server": (
        "llamacpp:spec_decode_num_drafts",
        "llamacpp:spec_decode_num_draft_tokens",
        "llamacpp:spec_decode_num_accepted_tokens",
        "llamacpp:spec_decode_num_accepted_tokens_per_pos",
    ),
    "llama.cpp server (older)": (
        "",
        "llamacpp:tokens_drafted",
        "llamacpp:tokens_drafted_accepted",
        "",
    ),
}
_PREFIXES = {"vllm:": "vLLM", "sglang:": "SGLang", "llamacpp:": "llama.cpp server"}


@dataclass(frozen=True)
class Page:
    """A scrape: (name, labels) -> value, without the `_total` of counters."""

    samples: Mapping[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Page:
        """Text exposition format. Lines that are none of it are passed over: a page may hold
        whatever a proxy adds, and one odd line is no reason to lose the rest."""
        samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for line in text.splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            try:
                value = float(match["value"])
            except ValueError:
                continue
            labels = tuple(sorted(_LABEL.findall(match["labels"] or "")))
            samples[match["name"].removesuffix("_total"), labels] = value
        return cls(samples)

    def total(self, name: str) -> float | None:
        """Sum over all labels; None where the page has no such metric."""
        found = [v for (n, _), v in self.samples.items() if n == name and math.isfinite(v)]
        return sum(found) if found else None

    def mean(self, name: str) -> float | None:
        """Mean over all labels (gauges of several workers); None where there are none."""
        found = [v for (n, _), v in self.samples.items() if n == name and math.isfinite(v)]
        return sum(found) / len(found) if found else None

    def by_position(self, name: str) -> dict[int, float]:
        """Sums by the label `position`."""
        out: dict[int, float] = {}
        for (n, labels), value in self.samples.items():
            position = dict(labels).get("position", "")
            if n == name and position.isdigit():
                out[int(position)] = out.get(int(position), 0.0) + value
        return out

    @property
    def software(self) -> str | None:
        """Which server published it, by the names of its metrics."""
        for name, _ in self.samples:
            for prefix, software in _PREFIXES.items():
                if name.startswith(prefix):
                    return software
        return None


def speculation(before: Page, after: Page) -> Speculation | None:
    """What was speculated between two scrapes; None where the server publishes nothing about
    it, or nothing happened. A counter that is missing before is zero (servers create them
    with the first request), and one that fell was restarted: it counts from zero."""
    for software, (rounds, drafted, accepted, position) in _COUNTERS.items():
        if after.total(drafted) is None:
            continue
        n_drafted, n_accepted = _rise(before, after, drafted), _rise(before, after, accepted)
        n_rounds = _rise(before, after, rounds) if after.total(rounds) is not None else None
        if not n_drafted:
            return None
        old, new = before.by_position(position), after.by_position(position)
        joint = (
            tuple((new[i] - old.get(i, 0.0)) / n_rounds for i in sorted(new)) if n_rounds else ()
        )
        return Speculation.of_counts(
            n_rounds, n_drafted, n_accepted, f"counters of {software}", joint
        )
    tau, rate = after.mean("sglang:spec_accept_length"), after.mean("sglang:spec_accept_rate")
    if not tau and not rate:  # zero: it has not speculated yet
        return None
    return Speculation(tau=tau or None, acceptance_rate=rate, source="gauge of SGLang")


def _rise(before: Page, after: Page, name: str) -> int:
    start, end = before.total(name) or 0.0, after.total(name) or 0.0
    return round(end - start if end >= start else end)
