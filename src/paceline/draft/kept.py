"""What a head knew of sequences that ended, for those that begin alike.

The target's prefix cache keeps the keys and values of ended sequences: the next turn of a
conversation, or the same prompt again, is not computed anew, and nobody hands a head the
states of that beginning. So what it knew of it is kept, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

#: Ended sequences that are remembered, the last ones.
MOST = 8


class Known(Protocol):
    """start: tokens before the first that is known; known: the tokens [0, known) have been seen."""

    start: int

    @property
    def known(self) -> int: ...

    def cut(self, n: int) -> None:
        """Forget what was seen behind the first n tokens."""
        ...


State = TypeVar("State", bound=Known)


class Kept(Generic[State]):
    """Mutable."""

    def __init__(self) -> None:
        self._ended: list[tuple[list[int], State]] = []

    def add(self, tokens: list[int], state: State) -> None:
        """A sequence ended. Its state belongs to this object now."""
        self._ended.append((tokens, state))
        del self._ended[:-MOST]

    def take(self, tokens: list[int], n: int) -> State | None:
        """What was known of the first n of these tokens, if a sequence began with them and the next
        one; the latest such. It belongs to the caller now."""
        for i in reversed(range(len(self._ended))):
            ended, state = self._ended[i]
            # The last of n rows pairs a state with the token behind it.
            if state.start < n <= state.known and ended[: n + 1] == tokens[: n + 1]:
                del self._ended[i]
                state.cut(n)
                return state
        return None

    def __iter__(self) -> Iterator[State]:
        return (state for _, state in self._ended)
