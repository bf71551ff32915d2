"""What the advisor said beforehand, for the cells of a matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from paceline.bench.predict import Interval, Predictor
from paceline.bench.results import CellConfig, Estimate
from paceline.bench.trace import Setting, Trace
from paceline.bench.verdict import from_file
from paceline.core.latency import Profile
from paceline.models.config import load_json


@dataclass(frozen=True)
class Forecast:
    """A saved trace and its profile, asked for single cells."""

    trace: Trace
    profile: Profile
    _known: dict[tuple[Setting, str, int, int], Interval] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Forecast:
        """From a file of `paceline advise --save`; UserError where it is none."""
        return Forecast(*from_file(load_json(path), path))

    def of(self, cell: CellConfig, seeded: bool) -> Estimate | None:
        """The predicted speed-up; None where the trace says nothing of such a cell: another
        drafter, tree or way to sample, more tokens than traced, an open loop, or a policy
        that decides for itself."""
        setting = Setting(temperature=cell.temperature, seeded=seeded and cell.temperature > 0.0)
        label = cell.drafter if cell.weights == "fast" else f"{cell.drafter}@{cell.weights}"
        info = self.trace.drafts.get(label)
        traced = self.trace.requests.get(setting)
        known = info is not None and traced is not None and label in self.profile.drafts
        if not known or cell.policy != "fixed" or cell.rate is not None or cell.tree is not None:
            return None
        assert info is not None
        assert traced is not None
        if cell.k > info.most or info.tree:
            return None
        key = (setting, label, cell.k, cell.concurrency)
        if key not in self._known:
            predictor = Predictor(self.profile, setting, traced)
            prediction = predictor.predict(label, cell.k, cell.concurrency)
            self._known[key] = prediction.throughput
        found = self._known[key]
        return Estimate(value=found.value, low=found.low, high=found.high)
