"""The enumeration itself: what it covers, what it reports, and that its parts are right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.core.rules import BlockVerification, Guarantee, TokenRejection, Walk
from paceline.proof import enumerate as proof
from paceline.proof import worlds
from paceline.proof.branches import branches
from paceline.proof.drafts import BestPaths, ChosenTree, SampledTree
from paceline.proof.judge import judge
from paceline.proof.laws import ExactLaw
from paceline.proof.optimum import optimal_tau
from paceline.proof.report import ProofReport, Row


@pytest.fixture(scope="module")
def report() -> ProofReport:
    return proof.run()


def test_every_combination_holds(report: ProofReport) -> None:
    assert [row.combination for row in report.rows if not row.ok] == []
    assert report.failed == 0
    assert report.max_abs_error < 1e-12
    assert report.block_vs_optimum_gap < 1e-9
    assert report.cases >= 5_000
    assert set(report.to_json()) == {
        "combinations",
        "cases",
        "max_abs_error",
        "failed",
        "block_vs_optimum_gap",
    }


def test_every_rule_and_every_group_of_laws_is_covered(report: ProofReport) -> None:
    pairs = {(row.rule, row.laws) for row in report.rows}
    assert {rule for rule, _ in pairs} == {
        "greedy", "walk", "token", "block", "recursive", "traversal", "typical",
    }  # fmt: skip
    assert all((rule, group) in pairs for rule, _ in pairs for group in worlds.GROUPS)


def test_the_optimum_bounds_every_exact_rule_and_block_attains_it(report: ProofReport) -> None:
    solved = [row for row in report.rows if row.tau_optimum is not None and row.exact]
    assert all(row.tau <= row.tau_optimum + 1e-9 for row in solved if row.tau_optimum)
    blocks = [row for row in solved if row.rule == "block"]
    assert sum(row.solved for row in blocks) > 300
    assert all(row.gap is not None and row.gap < 1e-9 for row in blocks)
    # It is a bound and no more: token rejection misses it.
    assert any(row.gap is not None and row.gap > 0.01 for row in solved if row.rule == "token")


def test_block_beats_token_and_traversal_beats_recursive(report: ProofReport) -> None:
    tau = {(row.rule, row.draft, row.laws): row.tau for row in report.rows}
    better = {"token": "block", "recursive": "traversal"}
    pairs = [
        (v, tau[better[rule], draft, laws])
        for (rule, draft, laws), v in tau.items()
        if rule in better
    ]
    assert all(low <= high + 1e-12 for low, high in pairs)
    assert any(low < high - 0.005 for low, high in pairs)


def test_typical_is_shown_as_approximate_with_its_deviation(report: ProofReport) -> None:
    rows = [row for row in report.rows if row.rule == "typical"]
    assert rows
    assert all(row.guarantee is Guarantee.APPROXIMATE and row.ok for row in rows)
    assert all(row.max_abs_error > 0.01 for row in rows)


def test_deterministic_drafts_are_judged_optimally_by_the_walk(report: ProofReport) -> None:
    rows = [r for r in report.rows if r.rule == "walk" and r.draft.startswith(("chosen", "5"))]
    assert rows
    assert all(row.gap is not None and row.gap < 1e-9 for row in rows)


@pytest.mark.slow
def test_the_full_run_holds() -> None:
    full = proof.run(full=True)
    assert full.failed == 0
    assert full.max_abs_error < 1e-12
    assert full.block_vs_optimum_gap < 1e-9


def test_progress_is_told() -> None:
    plan = proof.Plan(SampledTree((1,)), (TokenRejection(),), (2,))
    rows = proof.prove(plan, "edge", 8, (1,))
    assert [row.cases for row in rows] == [8]


def test_a_rule_that_breaks_a_promise_fails_with_its_fault() -> None:
    class Twice(TokenRejection):
        def accept(self, tree, laws, draws):  # type: ignore[no-untyped-def]
            draws.target(laws[0], 0)
            draws.target(laws[0], 0)
            return super().accept(tree, laws, draws)

    (row,) = proof.prove(proof.Plan(SampledTree((1,)), (Twice(),), (2,)), "random", 2, (1,))
    assert not row.ok
    assert "used twice" in (row.fault or "")
    assert ProofReport((row,), 0.0).failed == 1


def test_a_gap_fails_block_verification_alone() -> None:
    row = Row(
        rule="block", draft="", laws="", guarantee=Guarantee.EXACT_SAMPLING, cases=1,
        max_abs_error=0.0, tau=1.0, tau_optimum=1.1, gap=0.1,
    )  # fmt: skip
    assert not row.ok


# --- parts ---------------------------------------------------------------------------


def test_branches_have_the_probabilities_of_their_answers() -> None:
    law = ExactLaw([1.0, 3.0])

    def play(draws):  # type: ignore[no-untyped-def]
        if draws.flip(0.25, 0):
            return "a"
        return "b" if draws.flip(0.5, 1) else draws.residual(law)

    assert {r: v for v, r in branches(play)} == {
        "a": 0.25, "b": 0.375, 0: 0.375 * 0.25, 1: 0.375 * 0.75,
    }  # fmt: skip


def test_questions_to_one_uniform_depend_on_each_other() -> None:
    found = {r: v for v, r in branches(lambda d: (d.flip(0.5, 0), d.flip(0.25, 0)))}
    assert found == {(True, True): 0.25, (True, False): 0.25, (False, False): 0.5}
    known = {r: v for v, r in branches(lambda d: d.flip(0.5, 0), {0: (0.4, 0.8)})}
    assert known[True] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "drafting",
    [
        SampledTree((1, 1)),
        SampledTree((2, 2)),
        SampledTree((3, 1)),
        SampledTree((2, 1), replacement=True),
        SampledTree((1, 1), stop_below=0.5),
        ChosenTree((2, 1)),
        BestPaths(4, 2),
    ],
    ids=lambda d: d.name,
)
def test_drafts_are_complete(drafting: SampledTree | ChosenTree | BestPaths) -> None:
    world = worlds.zeros(np.random.default_rng(3), 3, 2)
    assert math.fsum(v for v, _ in drafting.trees(world)) == pytest.approx(1.0, abs=1e-14)


def test_best_paths_are_the_best() -> None:
    world = worlds.dirichlet(np.random.default_rng(4), 3, 2)
    ((_, tree),) = BestPaths(5, 2).trees(world)
    q = world.q
    every = {(x,): q[()].probability(x) for x in range(3)}
    every |= {(x, y): every[(x,)] * q[(x,)].probability(y) for x in range(3) for y in range(3)}
    chosen = {tuple(tree.tokens[u] for u in tree.path(v)) for v in range(1, len(tree))}
    assert chosen == set(sorted(every, key=every.__getitem__, reverse=True)[:5])


def test_tau_of_token_rejection_is_the_closed_form() -> None:
    """E[tau] = (1 - alpha^(k+1)) / (1 - alpha) where alpha does not depend on the prefix
    (Leviathan et al. 2022, equation 1)."""
    p, q = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.3, 0.5]])
    count = len(worlds.prefixes(3, 3))
    world = worlds.world(p.repeat(count, 0), q.repeat(count, 0), 3)
    found = judge(TokenRejection(), SampledTree((1, 1, 1)), world)
    alpha = float(np.minimum(p, q).sum())
    assert found.tau == pytest.approx((1.0 - alpha**4) / (1.0 - alpha), abs=1e-12)


def test_block_of_one_token_is_token_rejection() -> None:
    world = worlds.dirichlet(np.random.default_rng(8), 4, 1)
    taus = {
        judge(rule, SampledTree((1,)), world).tau
        for rule in (BlockVerification(), TokenRejection())
    }
    assert max(taus) - min(taus) < 1e-15


def test_the_optimum_of_one_sampled_token_is_the_overlap() -> None:
    p, q = np.array([[0.6, 0.3, 0.1]]), np.array([[0.2, 0.3, 0.5]])
    world = worlds.world(p.repeat(4, 0), q.repeat(4, 0), 1)
    drafts = list(SampledTree((1,)).trees(world))
    assert optimal_tau(drafts, world, 1) == pytest.approx(1.6, abs=1e-9)


def test_a_foreign_target_is_noticed() -> None:
    """The comparison is against the target's own joint, not against whatever came out."""
    world = worlds.dirichlet(np.random.default_rng(5), 3, 1)
    other = worlds.dirichlet(np.random.default_rng(6), 3, 1)
    assert judge(Walk(), ChosenTree((1,)), world, seen=other).max_abs_error > 0.01
