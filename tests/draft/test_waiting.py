"""Target states that wait: the right rows, and no more memory than is owed."""

from __future__ import annotations

import pytest
import torch

from paceline.draft import waiting as module
from paceline.draft.waiting import Waiting

T, D = 3, 8


def states(n: int, seed: int) -> torch.Tensor:
    return torch.randn(T, n, D, generator=torch.Generator().manual_seed(seed))


def side_by_side(taps_TND: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return torch.cat(list(taps_TND[:, rows]), -1)


@pytest.mark.parametrize("most", [0, 1000, 1 << 20])
def test_rows_come_back_in_order_however_often_they_were_copied(monkeypatch, most: int) -> None:
    monkeypatch.setattr(module, "FOREIGN_BYTES", most)
    waiting, expected = Waiting(1000), []
    for i, rows in enumerate([range(4), range(2, 3), [0, 3, 5], range(6), range(1)] * 3):
        taps = states(6, i)
        waiting.add(taps, rows)
        expected.append(side_by_side(taps, list(rows)))
    assert waiting.rows == 3 * 15
    assert torch.equal(waiting.joined(), torch.cat(expected))
    waiting.clear()
    assert waiting.rows == 0
    waiting.add(taps, range(2, 4))
    assert torch.equal(waiting.joined(), side_by_side(taps, [2, 3]))


@pytest.mark.parametrize("foreign", [0, 1000, 1 << 20])
@pytest.mark.parametrize("most", [1, 5, 6])
def test_the_last_rows_stay(monkeypatch, most: int, foreign: int) -> None:
    monkeypatch.setattr(module, "FOREIGN_BYTES", foreign)
    waiting, expected, dropped = Waiting(most), torch.empty(0, T * D), 0
    for i, rows in enumerate([range(1), range(6), [0, 3, 5], range(2, 3), [1], range(1, 4)] * 3):
        taps = states(6, i)
        dropped += waiting.add(taps, rows)
        expected = torch.cat([expected, side_by_side(taps, list(rows))])
        assert (waiting.rows, dropped) == (min(most, len(expected)), max(0, len(expected) - most))
        assert torch.equal(waiting.joined(), expected[-most:])
        beside = sum(waiting.storages().values()) - waiting.rows * T * D * 4
        assert beside <= foreign + 4 * T * D * 6


@pytest.mark.parametrize("n", [0, 1, 7, 8, 11])
def test_the_first_rows_stay(n: int) -> None:
    waiting = Waiting(1000)
    whole = [range(1), range(6), [0, 3, 5], range(2, 3)]
    for i, rows in enumerate(whole):
        waiting.add(states(6, i), rows)
    whole_before = waiting.joined()
    first = waiting.first(n)
    assert first.rows == n
    first.add(states(6, 9), [4, 5])
    more = side_by_side(states(6, 9), [4, 5])
    assert torch.equal(first.joined(), torch.cat([whole_before[:n], more]))
    assert torch.equal(waiting.joined(), whole_before)
    waiting.own()
    assert torch.equal(waiting.joined(), whole_before)
    assert sum(waiting.storages().values()) == whole_before.nbytes


def test_foreign_rows_are_kept_up_to_a_bound(monkeypatch) -> None:
    """One row of sixteen, a hundred times. Without a copy all of the passes stay alive."""
    per_pass = T * 16 * D * 4
    monkeypatch.setattr(module, "FOREIGN_BYTES", 10 * per_pass)
    waiting = Waiting(1000)
    for i in range(100):
        waiting.add(states(16, i), range(5, 6))
        assert sum(waiting.storages().values()) <= 11 * per_pass + per_pass * (i + 1) // 16
    assert waiting.joined().shape == (100, T * D)


def test_sequences_that_wait_together_share_what_they_keep() -> None:
    taps, both = states(4, 0), (Waiting(9), Waiting(9))
    for i, waiting in enumerate(both):
        waiting.add(taps, range(2 * i, 2 * i + 2))
    kept = both[0].storages() | both[1].storages()
    assert sum(kept.values()) == T * 4 * D * 4
