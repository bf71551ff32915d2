"""Figures of hand-made traces."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.bench import metrics as m
from paceline.bench.load import RequestTrace
from paceline.core.rules import Guarantee, Origin
from paceline.types import FinishReason, RequestOutput, RequestStats, TokenOut


def trace(times: tuple[float, ...], counts: tuple[int, ...]) -> RequestTrace:
    tokens = tuple(TokenOut(id=i, origin=Origin.PLAIN) for i in range(sum(counts)))
    output = RequestOutput(
        request_id=0,
        index=0,
        prompt_tokens=(1,),
        tokens=tokens,
        text="",
        finish_reason=FinishReason.LENGTH,
        guarantee=Guarantee.EXACT_GREEDY,
        stats=RequestStats(),
    )
    return RequestTrace(10.0, times, counts, output)


def test_tokens_of_a_burst_share_their_round() -> None:
    """One token at 11.0, then bursts of 4 (after 0.2 s), 1 (0.1 s) and 2 (0.3 s)."""
    t = trace((11.0, 11.2, 11.3, 11.6), (1, 4, 1, 2))
    assert m.ttft(t) == pytest.approx(1.0)
    assert m.seconds(t) == pytest.approx(1.6)
    assert m.round_intervals(t) == pytest.approx([0.2, 0.1, 0.3])
    assert m.token_intervals(t) == pytest.approx([0.05] * 4 + [0.1] + [0.15] * 2)
    assert sum(m.token_intervals(t)) == pytest.approx(m.decode_seconds(t))
    assert m.decode_rate(t) == pytest.approx(7 / 0.6)


def test_one_burst_has_no_intervals() -> None:
    t = trace((11.0,), (3,))
    assert m.token_intervals(t) == []
    assert m.decode_rate(t) is None


def stats(rounds: int, accepted: int, proposed: dict, taken: dict) -> RequestStats:
    s = RequestStats(rounds=rounds, accepted=accepted, drafted=sum(proposed.values()))
    s.proposed_at, s.accepted_at = Counter(proposed), Counter(taken)
    s.target_calls = rounds + 1
    return s


def test_acceptance_by_hand() -> None:
    """Ten rounds of k = 2 that accept 8 and 6 at positions 1 and 2; ten plain rounds."""
    a = stats(10, 14, {0: 10, 1: 10}, {0: 8, 1: 6})
    b = stats(10, 0, {}, {})
    out = m.acceptance([a, b], tokens=34)
    assert out.tau_request_mean == pytest.approx((2.4 + 1.0) / 2)
    assert out.tau_pooled == pytest.approx(34 / 20)
    assert out.conditional == pytest.approx((0.8, 0.75))
    assert out.joint == pytest.approx((0.8, 0.6))
    assert out.drafted_per_token == pytest.approx(20 / 34)
    assert out.target_calls_per_token == pytest.approx(22 / 34)


def test_request_mean_and_pooled_differ_where_requests_do() -> None:
    long = stats(30, 0, {}, {})
    short = stats(1, 3, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1})
    out = m.acceptance([long, short], tokens=34)
    assert out.tau_request_mean == pytest.approx(2.5)
    assert out.tau_pooled == pytest.approx(34 / 31)


def test_nothing_drafted_divides_by_nothing() -> None:
    out = m.acceptance([], tokens=0)
    assert out.tau_pooled is None
    assert out.conditional == out.joint == ()


def test_rounds_of_different_depth_are_weighed() -> None:
    """Ten rounds propose one token, ten propose three; position 2 was tried by those alone."""
    proposed = Counter({0: 20, 1: 10, 2: 10})
    accepted = Counter({0: 16, 1: 6, 2: 3})
    assert m.conditional(proposed, accepted) == pytest.approx((0.8, 6 / 8, 0.5))
    assert m.joint(proposed, accepted) == pytest.approx((0.8, 0.6, 0.3))
