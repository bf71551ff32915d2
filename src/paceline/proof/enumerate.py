"""The proof by enumeration: every rule, on every way of drafting, in many tiny worlds.

For each combination of rule, drafting and group of laws, and each of its cases (one pair
of tiny random models), every possible draft is weighed with its probability and the
production rule runs along every branch of every draft. The output, continued with the
target, must be the target's own joint law to 1e-12. All rules see the same worlds, so
their tau compare pairwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from paceline.core.rules import (
    AcceptanceRule,
    BlockVerification,
    GreedyMatch,
    RecursiveRejection,
    TokenRejection,
    TraversalVerification,
    Typical,
    Walk,
)
from paceline.proof.drafts import BestPaths, ChosenTree, Drafting, SampledTree
from paceline.proof.judge import Drafts, judge
from paceline.proof.optimum import optimal_tau
from paceline.proof.report import ProofReport, Row
from paceline.proof.worlds import GROUPS, World

Progress = Callable[[int, int, str], None]

_TREE_RULES: tuple[AcceptanceRule, ...] = (
    GreedyMatch(),
    Walk(),
    RecursiveRejection(),
    TraversalVerification(),
)
_CHAIN_RULES = (*_TREE_RULES, TokenRejection(), BlockVerification())


@dataclass(frozen=True)
class Plan:
    """A way of drafting, the rules that judge it, and the vocabulary sizes in turn."""

    drafting: Drafting
    rules: tuple[AcceptanceRule, ...]
    sizes: tuple[int, ...]


DEFAULT: tuple[Plan, ...] = (
    Plan(ChosenTree(()), _CHAIN_RULES, (2, 3, 4)),
    Plan(ChosenTree((1, 1, 1)), _CHAIN_RULES, (2, 3)),
    Plan(ChosenTree((2, 2)), (*_TREE_RULES, Typical()), (2, 3, 4)),
    Plan(BestPaths(5, 3), _TREE_RULES, (2, 3)),
    Plan(SampledTree((1, 1)), _CHAIN_RULES, (2, 3, 4)),
    Plan(SampledTree((1, 1, 1)), (*_CHAIN_RULES, Typical()), (2, 3)),
    Plan(SampledTree((1, 1, 1), stop_below=0.35), _CHAIN_RULES, (2, 3)),
    Plan(SampledTree((3,)), _TREE_RULES, (2, 3, 4)),
    Plan(SampledTree((2, 1)), _TREE_RULES, (2, 3)),
    Plan(SampledTree((1, 2)), _TREE_RULES, (2, 3)),
    Plan(SampledTree((2, 2)), _TREE_RULES, (2, 2, 2, 2, 3)),
    Plan(SampledTree((2, 1), replacement=True), _TREE_RULES, (2, 2, 3)),
    Plan(SampledTree((2, 2), replacement=True), _TREE_RULES, (2,)),
)

_FULL_ONLY: tuple[Plan, ...] = (
    Plan(SampledTree((1, 1, 1, 1)), _CHAIN_RULES, (2,)),
    Plan(SampledTree((1, 1, 1)), _CHAIN_RULES, (4,)),
    Plan(SampledTree((2, 2)), _TREE_RULES, (3,)),
    Plan(SampledTree((2, 1, 1)), _TREE_RULES, (2, 3)),
    Plan(SampledTree((2, 1), stop_below=0.35), _TREE_RULES, (2, 3)),
    Plan(SampledTree((3, 2)), _TREE_RULES, (2,)),
    Plan(SampledTree((3, 1), replacement=True), _TREE_RULES, (2, 3)),
    Plan(BestPaths(8, 3), _TREE_RULES, (3, 4)),
)

#: Cases per combination.
DEFAULT_CASES = 40
FULL_CASES = 120


def run(full: bool = False, progress: Progress | None = None, *, seed: int = 1) -> ProofReport:
    """Prove every combination. `progress(done, total, what)` is called along the way."""
    started = time.perf_counter()
    plans = DEFAULT + _FULL_ONLY if full else DEFAULT
    cases = FULL_CASES if full else DEFAULT_CASES
    rows: list[Row] = []
    total = len(plans) * len(GROUPS)
    for i, plan in enumerate(plans):
        for j, group in enumerate(GROUPS):
            if progress is not None:
                progress(i * len(GROUPS) + j, total, f"{plan.drafting.name}, {group} laws")
            rows += prove(plan, group, cases, seed=(seed, i, j))
    if progress is not None:
        progress(total, total, "done")
    return ProofReport(tuple(rows), time.perf_counter() - started)


def prove(plan: Plan, group: str, cases: int, seed: tuple[int, ...]) -> list[Row]:
    """One row per rule of `plan`, over the same `cases` worlds of a group of laws."""
    tallies = [_Tally(rule) for rule in plan.rules]
    makers = GROUPS[group]
    for case in range(cases):
        rng = np.random.default_rng((*seed, case))
        size = plan.sizes[case % len(plan.sizes)]
        maker = makers[(case // len(plan.sizes)) % len(makers)]
        if "tensors" in maker.__name__:  # production's tensors take longer
            size = min(plan.sizes)
        world = maker(rng, size, plan.drafting.depth)
        drafts = list(plan.drafting.trees(world))
        best = optimal_tau(drafts, world, plan.drafting.depth)
        for tally in tallies:
            tally.add(plan.drafting, world, drafts, best)
    return [tally.row(plan.drafting.name, group) for tally in tallies]


@dataclass
class _Tally:
    rule: AcceptanceRule
    cases: int = 0
    error: float = 0.0
    gap: float = 0.0
    fault: str | None = None
    #: tau of every case, and of those whose optimum is known, with that optimum
    taus: list[float] = field(default_factory=list)
    solved: list[tuple[float, float]] = field(default_factory=list)

    def add(self, drafting: Drafting, world: World, drafts: Drafts, optimum: float | None) -> None:
        self.cases += 1
        greedy = self.rule.name == "greedy"
        try:
            found = judge(self.rule, drafting, world, greedy=greedy, drafts=drafts)
        except (AssertionError, ValueError) as wrong:
            self.fault = f"{type(wrong).__name__}: {wrong}"
            self.error = math.inf
            return
        self.error = max(self.error, found.max_abs_error)
        self.taus.append(found.tau)
        if optimum is not None and not greedy:
            self.solved.append((found.tau, optimum))
            self.gap = max(self.gap, abs(found.tau - optimum))

    def row(self, draft: str, laws: str) -> Row:
        taus = [tau for tau, _ in self.solved] or self.taus or [math.nan]
        optima = [optimum for _, optimum in self.solved]
        return Row(
            rule=self.rule.name,
            draft=draft,
            laws=laws,
            guarantee=self.rule.guarantee,
            cases=self.cases,
            max_abs_error=self.error,
            tau=sum(taus) / len(taus),
            tau_optimum=sum(optima) / len(optima) if optima else None,
            gap=self.gap if optima else None,
            solved=len(optima),
            fault=self.fault,
        )
