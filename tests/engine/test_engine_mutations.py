"""The engine's part of the mutation check: each classic fault is planted, one at a time,
and the checks of `paceline prove` (or the caches' own audit) must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.core.draws import KeyedDraws, Purpose, uniform
from paceline.draft import model as draft_model
from paceline.engine import engine as engine_module
from paceline.engine import step
from paceline.proof import engine as proof
from paceline.sampling.context import Row
from paceline.types import SamplingParams

Plant = Callable[[pytest.MonkeyPatch], None]


def keep_rejected_entries(patch: pytest.MonkeyPatch) -> None:
    """The cache grows by everything that was verified."""
    whole = engine_module.truncate

    def truncate(items, trees, judged, logits, ends):
        commits = whole(items, trees, judged, logits, ends)
        return [
            replace(c, kept=tuple(range(1, len(t)))) if t is not None and c.tokens else c
            for c, t in zip(commits, trees, strict=True)
        ]

    patch.setattr(engine_module, "truncate", truncate)


def forget_to_move_accepted_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine_module, "kv_moves", lambda items, commits, block: None)


def see_one_token_a_round(patch: pytest.MonkeyPatch) -> None:
    """Penalties, bans and grammar know the committed tokens, not the node's own path."""
    rows = step.tree_rows
    patch.setattr(
        step,
        "tree_rows",
        lambda seq, tokens, parents: [replace(r, path=()) for r in rows(seq, tokens, parents)],
    )


def draw_the_target_by_round(patch: pytest.MonkeyPatch) -> None:
    """The target's draws depend on where the round began."""

    def target(self, law, depth):
        return law.sample(uniform(self.seed, self.position, Purpose.TARGET, depth))

    patch.setattr(KeyedDraws, "target", target)


def share_a_stream(patch: pytest.MonkeyPatch) -> None:
    """A token and its acceptance are decided by the same uniform."""

    def draft(self, index):
        return uniform(self.seed, self.position, Purpose.ACCEPT, index)

    patch.setattr(KeyedDraws, "draft", draft)


def record_the_law_before_the_filter(patch: pytest.MonkeyPatch) -> None:
    """q in the ratio is not what was drawn from."""
    build = draft_model.build_laws

    def laws(logits, rows, masked=False):
        drawn = build(logits, rows, masked=masked)
        plain = build(logits, [Row(SamplingParams(temperature=1.0)) for _ in rows], masked=True)
        return [_Lying(d, p) for d, p in zip(drawn, plain, strict=True)]

    patch.setattr(draft_model, "build_laws", laws)
    patch.setattr(draft_model.DraftHealth, "usable", lambda self, law: True)


class _Lying:
    """Draws from one law and shows another."""

    def __init__(self, drawn, shown) -> None:
        self._drawn, self._shown = drawn, shown

    def sample(self, u):
        return self._drawn.sample(u)

    def mode(self):
        return self._drawn.mode()

    def __getattr__(self, name):
        return getattr(self._shown, name)


def filter_the_target_alone(patch: pytest.MonkeyPatch) -> None:
    """The draft draws from its unfiltered law and says so: that is exact. But the target's
    law is unfiltered too in the ratio, and filtered only when it emits."""
    build = step.build_laws

    def laws(logits, rows):
        filtered = build(logits, rows)
        plain = build(logits, [Row(SamplingParams(temperature=1.0)) for _ in rows])
        return [_Lying(f, p) for f, p in zip(filtered, plain, strict=True)]

    patch.setattr(step, "build_laws", laws)


def parity(drafter: str) -> bool:
    """Whether greedy and seeded text equal plain decoding, as `paceline prove` checks it."""
    return all(row.ok for row in proof._parity(drafter, PLAIN))


def law(drafter: str, rule: str) -> bool:
    return proof.check_law(drafter, rule, 150).ok


PLAIN = {key: proof._texts("none", key) for key in proof._parity_keys()}

FAULTS: list[tuple[Plant, Callable[[], bool]]] = [
    (keep_rejected_entries, lambda: parity("model")),
    (keep_rejected_entries, lambda: parity("model, tree paths:7")),
    (forget_to_move_accepted_rows, lambda: parity("model, tree top:2x2")),
    (see_one_token_a_round, lambda: parity("model")),
    (draw_the_target_by_round, lambda: parity("model")),
    (share_a_stream, lambda: law("model", "token")),
    (record_the_law_before_the_filter, lambda: law("model", "token")),
    (filter_the_target_alone, lambda: law("model", "block")),
]


@pytest.mark.parametrize(("plant", "check"), FAULTS)
def test_the_fault_is_caught(plant: Plant, check: Callable[[], bool], monkeypatch) -> None:
    plant(monkeypatch)
    try:
        passed = check()
    except AssertionError:
        return  # an invariant of the caches noticed it first
    assert not passed


@pytest.mark.parametrize("check", [FAULTS[0][1], FAULTS[2][1], FAULTS[-1][1]])
def test_without_a_fault_the_checks_pass(check: Callable[[], bool]) -> None:
    assert check()
