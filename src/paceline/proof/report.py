"""What the proof found: one row per combination, and the totals."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.rules import Guarantee

#: An exact combination fails above this deviation, float64 rounding included.
MAX_ERROR = 1e-12
#: Block verification fails where it misses the linear program's optimum by more.
MAX_GAP = 1e-9


@dataclass(frozen=True, kw_only=True)
class Row:
    """A combination: a rule, a way of drafting and a group of laws.

    max_abs_error: largest deviation of any string's probability from the target's.
    tau, tau_optimum: committed tokens per round, of this rule and of the best exact one, means
        over the `solved` cases, those that the linear program could handle (where there
        are none: tau over all cases and no optimum).
    gap: largest difference of the two in one case.
    fault: what the rule did wrong besides, if anything.
    """

    rule: str
    draft: str
    laws: str
    guarantee: Guarantee
    cases: int
    max_abs_error: float
    tau: float
    tau_optimum: float | None = None
    gap: float | None = None
    solved: int = 0
    fault: str | None = None

    @property
    def combination(self) -> str:
        return f"{self.rule} / {self.draft} / {self.laws}"

    @property
    def exact(self) -> bool:
        return self.guarantee is not Guarantee.APPROXIMATE

    @property
    def ok(self) -> bool:
        """True for approximate rules: they promise nothing that could fail here."""
        if self.fault is not None:
            return False
        if not self.exact:
            return True
        optimal = self.rule != "block" or self.gap is None or self.gap <= MAX_GAP
        return self.max_abs_error <= MAX_ERROR and optimal


@dataclass(frozen=True)
class ProofReport:
    rows: tuple[Row, ...]
    seconds: float

    @property
    def cases(self) -> int:
        return sum(row.cases for row in self.rows)

    @property
    def max_abs_error(self) -> float:
        """Over the exact combinations."""
        return max((row.max_abs_error for row in self.rows if row.exact), default=0.0)

    @property
    def failed(self) -> int:
        return sum(not row.ok for row in self.rows)

    @property
    def block_vs_optimum_gap(self) -> float:
        gaps = [row.gap for row in self.rows if row.rule == "block" and row.gap is not None]
        return max(gaps, default=0.0)

    def summary(self) -> tuple[Row, ...]:
        """One row per rule and draft, over all groups of laws."""
        merged: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            merged.setdefault((row.rule, row.draft), []).append(row)
        return tuple(_merge(rows) for rows in merged.values())

    def to_json(self) -> dict[str, int | float]:
        return {
            "combinations": len(self.rows),
            "cases": self.cases,
            "max_abs_error": self.max_abs_error,
            "failed": self.failed,
            "block_vs_optimum_gap": self.block_vs_optimum_gap,
        }


def _merge(rows: list[Row]) -> Row:
    solved = sum(row.solved for row in rows)
    weights = [row.solved if solved else row.cases for row in rows]
    optima = [row.solved * row.tau_optimum for row in rows if row.tau_optimum is not None]
    gaps = [row.gap for row in rows if row.gap is not None]
    return Row(
        rule=rows[0].rule,
        draft=rows[0].draft,
        laws=", ".join(row.laws for row in rows),
        guarantee=rows[0].guarantee,
        cases=sum(row.cases for row in rows),
        max_abs_error=max(row.max_abs_error for row in rows),
        tau=sum(w * row.tau for w, row in zip(weights, rows, strict=True)) / sum(weights),
        tau_optimum=sum(optima) / solved if solved else None,
        gap=max(gaps) if gaps else None,
        solved=solved,
        fault=next((row.fault for row in rows if row.fault), None),
    )
