"""The demo's figures."""

from __future__ import annotations

from types import SimpleNamespace

from paceline.cli.demo import Comparison


def run(seconds: float) -> SimpleNamespace:
    """Eleven tokens, ten of them behind the first."""
    stats = SimpleNamespace(first_token=1.0, finished=1.0 + seconds, tau=2.0)
    return SimpleNamespace(tokens=[None] * 11, token_ids=tuple(range(11)), stats=stats)


def test_a_machine_that_slows_down_does_not_decide():
    """It does so within the second pair: medians of all runs would say 0.33."""
    plain, fast = [run(1.0), run(1.0), run(3.0)], [run(1.0), run(3.0), run(3.0)]
    found = Comparison("x", plain, fast).as_dict()
    assert found["speedup"] == 1.0
    assert found["plain_tok_s"] == 10.0
    assert found["speculative_tok_s"] == 3.33


def test_one_disturbed_run_does_not_decide():
    plain = [run(1.0), run(1.0), run(9.0), run(1.5), run(2.0)]
    fast = [run(1.0), run(1.0), run(1.0), run(1.5), run(2.0)]
    assert Comparison("x", plain, fast).as_dict()["speedup"] == 1.0


def test_other_text_is_said():
    other = run(1.0)
    other.token_ids = (1, 2, 3)
    assert not Comparison("x", [run(1.0)], [other]).identical
    assert Comparison("x", [run(1.0)], [run(2.0)]).identical
