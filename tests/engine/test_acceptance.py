"""What is expected of a proposal before much is known of its kind."""

from __future__ import annotations

import pytest

from paceline.draft.base import Arm
from paceline.engine.acceptance import PRIOR, SAFER, Acceptance


def first(acceptance: Acceptance, bucket: int, seq_id: int = 1) -> float:
    return acceptance.of(seq_id, Arm(drafter="ngram", bucket=bucket)).gains(1)[0]


def test_a_longer_match_that_was_never_seen_is_expected_to_hold_more_often() -> None:
    """Two-token matches fare badly; nothing else is known."""
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.update(0, Arm(drafter="ngram", bucket=2), 4, 0)
    short = first(acceptance, 2)
    assert short < 0.1
    for bucket in (3, 4, 5, 6):
        expected = 1.0 - SAFER ** (bucket - 2) * (1.0 - short)
        assert first(acceptance, bucket) == pytest.approx(expected, abs=0.02)


def test_what_a_bucket_is_seen_to_do_outweighs_that() -> None:
    acceptance = Acceptance()
    for _ in range(100):
        acceptance.update(0, Arm(drafter="ngram", bucket=2), 1, 1)
        acceptance.update(0, Arm(drafter="ngram", bucket=5), 1, 0)
    assert first(acceptance, 5) < 0.1
    assert first(acceptance, 6) < 0.6, "the next smaller one counts, not the smallest"
    assert first(acceptance, 2) > 0.9


def test_the_first_bucket_seen_starts_with_the_drafters_prior() -> None:
    assert first(Acceptance(), 6) == pytest.approx(PRIOR)
