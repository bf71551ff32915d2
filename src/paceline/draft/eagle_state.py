"""What an EAGLE head knows of sequences: of those that run, and of the last that ended.

The target's prefix cache keeps the keys and values of ended sequences: the next turn of a
conversation, or the same prompt again, is not computed anew, and nobody hands a head the
states of that beginning. So what it knew of it is remembered, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from paceline.draft.waiting import Waiting
from paceline.models.heads.passes import Rows
from paceline.types import Sequence

#: Features wait for the next proposal, so that rounds without one cost nothing; so many at
#: most. A head that is asked behind a longer text begins with these, as if the text did.
WINDOW = 256
#: Ended sequences that are remembered, the last ones, and their bytes, at most.
ENDED, ENDED_BYTES = 64, 128 << 20


def _waiting() -> Waiting:
    return Waiting(WINDOW)


@dataclass
class State:
    """cache: rows of the committed tokens whose features were fed; waiting: features of those
    that follow; last_D: the layer's output of the last fed row. start: tokens before the first
    of them, whose features nobody has: a prompt's cached beginning, or what waited too long.
    Positions count from there: an attention with rotary embeddings sees distances alone.
    tokens: the sequence's, which go on growing."""

    tokens: list[int]
    cache: Rows
    start: int
    waiting: Waiting = field(default_factory=_waiting)
    last_D: torch.Tensor | None = None

    @property
    def known(self) -> int:
        """Features [start, known) are fed or wait."""
        return self.start + self.cache.rows + self.waiting.rows

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + sum(self.waiting.storages().values())

    def add(self, taps_TND: torch.Tensor, rows: range | list[int]) -> None:
        """Features of the tokens that follow, in these rows of a pass."""
        dropped = self.waiting.add(taps_TND, rows)
        if dropped:  # what was fed does not touch what waits any more
            self.start += self.cache.rows + dropped
            self.cache.rows, self.last_D = 0, None

    def waiting_tokens(self) -> list[int]:
        """The tokens whose embeddings go with the features that wait."""
        at = self.start + self.cache.rows + 1
        return self.tokens[at : at + self.waiting.rows]

    def fed(self, last_D: torch.Tensor) -> None:
        """Nothing waits any more; the layer's output of the last row."""
        self.waiting.clear()
        self.last_D = last_D

    def begins(self, tokens: list[int], n: int) -> bool:
        """Whether something is known of the first n of these tokens, up to the last. A feature
        goes with the token behind it, so the next one counts, too."""
        return self.start < n <= self.known and self.tokens[: n + 1] == tokens[: n + 1]

    def first(self, n: int, tokens: list[int]) -> State:
        """What is known of the first n tokens, for a sequence of these."""
        fed = min(n - self.start, self.cache.rows)
        waiting = self.waiting.first(n - self.start - fed)
        return State(tokens, self.cache.copy(fed), self.start, waiting)


class Ended:
    """Mutable: the states of the last sequences that ended, none of which is but the beginning of
    another."""

    def __init__(self) -> None:
        self._states: list[tuple[State, int]] = []  # with their bytes, the latest last

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self._states)

    def add(self, state: State) -> None:
        """It belongs to this object now."""
        state.waiting.own()
        others = [(s, n) for s, n in self._states if not _contains(state, s)]
        self._states = [*others, (state, state.nbytes)][-ENDED:]
        while self.nbytes > ENDED_BYTES:
            del self._states[0]

    def begin(self, seq: Sequence, n: int) -> State | None:
        """What was known of the first n tokens of a sequence, from the latest that began so."""
        found = next((s for s, _ in reversed(self._states) if s.begins(seq.tokens, n)), None)
        return None if found is None else found.first(n, seq.tokens)

    def __iter__(self) -> Iterator[State]:
        return (s for s, _ in self._states)


def _contains(long: State, short: State) -> bool:
    """Whether all that one state knows the other one does."""
    n = short.known
    return long.start <= short.start and n <= long.known and long.tokens[:n] == short.tokens[:n]
