"""From logits to laws: the only place where sampling parameters meet logits.

Order of the transforms (that of transformers): `sampling.adjust` on logits (bias,
penalties, bans, grammar), then `sampling.filters` (temperature, top-k, top-p, min-p,
typical-p). What is left is what is sampled, divided by, and taken residuals of, so that no
transform stands outside the law.

Legend: R rows, V vocabulary. Everything runs in float32, sums in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.core.law import Excess, Law, PointLaw, weight_laws
from paceline.sampling.adjust import NoTokenLeft, OutsideLanguage, adjust
from paceline.sampling.context import Row
from paceline.sampling.filters import Filters, transform
from paceline.types import SamplingParams

__all__ = ["BadLogits", "BrokenLaw", "EmptyLaw", "NoTokenLeft", "build_laws"]


class BadLogits(Exception):
    """A row's logits are NaN or infinite."""


@dataclass(frozen=True)
class BrokenLaw:
    """Stands for the law of a row with unusable logits; BadLogits when it is asked."""

    size: int

    def probability(self, token: int) -> float:
        raise BadLogits

    def sample(self, u: float) -> int:
        raise BadLogits

    def mode(self) -> int:
        raise BadLogits

    def entropy(self) -> float:
        raise BadLogits

    def dense(self) -> torch.Tensor:
        raise BadLogits

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        raise BadLogits

    def without(self, token: int) -> Law | None:
        raise BadLogits

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        raise BadLogits


@dataclass(frozen=True)
class EmptyLaw:
    """No token may follow: no child is ever accepted, and NoTokenLeft when one is drawn.

    It answers questions about probabilities, because rules ask them of nodes that they then
    don't reach, where plain decoding would not have asked either.
    """

    size: int

    def probability(self, token: int) -> float:
        return 0.0

    def sample(self, u: float) -> int:
        raise NoTokenLeft

    def mode(self) -> int:
        raise NoTokenLeft

    def entropy(self) -> float:
        return 0.0

    def dense(self) -> torch.Tensor:
        return torch.zeros(self.size)

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        return Excess(0.0, None)

    def without(self, token: int) -> Law | None:
        return None

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        return weights_V.clone()


def build_laws(
    logits_RV: torch.Tensor, rows: Seq[Row | SamplingParams], *, masked: bool = False
) -> list[Law]:
    """The law of each row under its request's parameters and tokens so far (parameters that
    need none may stand alone).

    masked: the rows are a draft's, whose single -inf logits are tokens that it can't draw.

    A BrokenLaw where a row's logits are NaN or infinite; an EmptyLaw where no token may
    follow; a PointLaw where only one may, and at temperature 0. A row outside its grammar's
    language or behind its end is one that no rule reaches, or that is cut off behind the
    end: any law will do, and a draft's is empty, so that it proposes no more.
    """
    size = logits_RV.shape[-1]
    laws: list[Law] = [BrokenLaw(size)] * len(rows)
    if not rows:
        return laws
    if logits_RV.dtype.itemsize < 4:
        logits_RV = logits_RV.float()
    groups: dict[Filters, list[_Part]] = {}
    for i, (given, scan) in enumerate(zip(rows, _scan(logits_RV), strict=True)):
        row = Row(given) if isinstance(given, SamplingParams) else given
        if not scan.healthy(masked):
            continue
        logits_V = logits_RV[i]
        if row.params.adjusts:
            try:
                adjusted = adjust(logits_V, row)
            except NoTokenLeft:
                laws[i] = EmptyLaw(size)
                continue
            except OutsideLanguage:
                laws[i] = EmptyLaw(size) if masked else PointLaw(0, size)
                continue
            if isinstance(adjusted, int):
                possible = math.isfinite(float(logits_V[adjusted]))
                laws[i] = PointLaw(adjusted, size) if possible else EmptyLaw(size)
                continue
            logits_V = adjusted
            scan = _scan(logits_V.unsqueeze(0))[0]
            if scan.high == -math.inf:
                laws[i] = EmptyLaw(size)
                continue
        if row.params.greedy:
            laws[i] = PointLaw(scan.mode, size)
        else:
            groups.setdefault(Filters.of(row.params), []).append(_Part(i, logits_V, scan.high))
    for filters, parts in groups.items():
        for batch in [parts] if logits_RV.is_cuda else [[part] for part in parts]:
            _fill(laws, batch, filters)
    return laws


@dataclass(frozen=True)
class _Scan:
    """mode: the first of a row's largest logits; NaN counts as the largest."""

    mode: int
    high: float
    low: float

    def healthy(self, masked: bool) -> bool:
        return math.isfinite(self.high) and (masked or math.isfinite(self.low))


@dataclass(frozen=True)
class _Part:
    row: int
    logits_V: torch.Tensor
    high: float


def _scan(logits_RV: torch.Tensor) -> list[_Scan]:
    """One look at every row."""
    return _scan_on_cpu(logits_RV) if logits_RV.device.type == "cpu" else _scan_at_once(logits_RV)


def _scan_on_cpu(logits_RV: torch.Tensor) -> list[_Scan]:
    """numpy's argmax takes a tenth of the time of torch's, and the second pass over a row
    reads it from the core's own cache."""
    scans = []
    for logits_V in logits_RV.numpy():
        mode = int(logits_V.argmax())
        scans.append(_Scan(mode, float(logits_V[mode]), float(logits_V.min())))
    return scans


def _scan_at_once(logits_RV: torch.Tensor) -> list[_Scan]:
    """All rows with one device synchronisation."""
    high_R, mode_R = logits_RV.max(-1)
    found = torch.stack([mode_R.double(), high_R.double(), logits_RV.amin(-1).double()], -1)
    return [_Scan(int(mode), high, low) for mode, high, low in found.tolist()]


def _fill(laws: list[Law], parts: Seq[_Part], filters: Filters) -> None:
    """The laws of rows with the same filters: together on a GPU, on the CPU one by one, so
    that all passes over a row but the first find it in the core's cache."""
    if len(parts) == 1:
        part = parts[0]
        weights_RV = transform(part.logits_V.unsqueeze(0), filters, part.high)
    else:
        logits_RV = torch.stack([part.logits_V for part in parts])
        weights_RV = transform(logits_RV, filters, logits_RV.amax(-1, keepdim=True))
    for part, law in zip(parts, weight_laws(weights_RV), strict=True):
        laws[part.row] = law
