"""The ledger's bound, against an adversary who knows the policy and chooses everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.ledger import Ledger
from paceline.engine.purse import AdaptiveConfig
from paceline.errors import UserError

EPS = 0.02
#: (seconds of a plain step, C_max over it, real cost as a share of C_max, tokens).
ROUNDS = st.lists(
    st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 20.0), st.floats(0.0, 1.0), st.integers(1, 9)),
    max_size=120,
)


def play(ledger: Ledger, rounds: list[tuple[float, float, float, int]]) -> list[float]:
    """Speculate whenever it is permitted; how far elapsed time exceeds (1 + eps) plain time
    after each round."""
    over = []
    for plain, extra, share, tokens in rounds:
        worst = plain + extra
        if ledger.permits(worst, plain):
            ledger.record(share * worst, plain * tokens)
        else:
            ledger.record(plain, plain)
        over.append(ledger.elapsed - (1 + EPS) * ledger.plain)
    return over


@given(rounds=ROUNDS, start=st.floats(0.0, 5.0))
def test_the_bound_holds_whatever_is_accepted(rounds, start: float) -> None:
    """elapsed <= (1 + eps) plain + s0 after every round, t_plain changing all the time."""
    ledger = Ledger(EPS, start=start, credit=float("inf"))
    assert all(x <= start + 1e-6 for x in play(ledger, rounds))


@given(rounds=ROUNDS, start=st.floats(0.0, 5.0), credit=st.floats(0.0, 50.0))
def test_the_bound_holds_over_every_stretch(rounds, start: float, credit: float) -> None:
    """Between any two rounds no more than s0 and the kept credit are lost beyond eps."""
    over = [0.0, *play(Ledger(EPS, start=start, credit=credit), rounds)]
    lowest = 0.0
    for x in over:
        assert x - lowest <= start + credit + 1e-6
        lowest = min(lowest, x)


@given(rounds=ROUNDS, grants=st.lists(st.floats(0.0, 3.0), max_size=5))
def test_grants_raise_the_bound_by_what_was_granted(rounds, grants: list[float]) -> None:
    ledger = Ledger(EPS, start=1.0, credit=float("inf"))
    for grant in grants:
        ledger.grant(grant)
    assert all(x <= 1.0 + sum(grants) + 1e-6 for x in play(ledger, rounds))
    assert ledger.debt <= ledger.bound + 1e-6


def test_slack_grows_with_what_plain_decoding_takes() -> None:
    """From nothing, a round that may lose a whole step is permitted after 1 / eps steps."""
    ledger = Ledger(EPS, credit=10.0)
    steps = 0
    while not ledger.permits(2.0, 1.0):
        ledger.record(1.0, 1.0)
        steps += 1
    assert steps == pytest.approx(1 / EPS - 1, abs=1)


def test_gains_are_kept_up_to_the_credit() -> None:
    ledger = Ledger(EPS, credit=3.0)
    ledger.record(1.0, 100.0)
    assert ledger.permits(1.0 + 3.0, 1.0)
    assert not ledger.permits(1.0 + 3.1, 1.0)


@pytest.mark.parametrize(
    ("values", "words"), [({"most": 65}, "k = 65"), ({"eps": 0.0}, "eps"), ({"trial": -1}, "trial")]
)
def test_settings_out_of_range_are_refused(values: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        AdaptiveConfig(**values)
