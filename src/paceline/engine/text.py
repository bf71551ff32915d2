"""Output text as tokens arrive: whole characters only, and stop strings.

Pure: each function returns a new `TextState`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.types import TextState

Decode = Callable[[Seq[int]], str]

#: What decoders put where bytes do not make a character (yet).
INCOMPLETE = "\ufffd"


def advance(state: TextState, output: Seq[int], decode: Decode, *, last: bool = False) -> TextState:
    """Decode `output` (all output tokens) further; with `last`, whatever is there.

    A window of earlier tokens is decoded along, since a token's text can depend on the one
    before it (leading spaces). Text that ends inside a character waits.
    """
    known = decode(output[state.start : state.read])
    both = decode(output[state.start :])
    if len(both) <= len(known) or (both.endswith(INCOMPLETE) and not last):
        return state
    return replace(state, text=state.text + both[len(known) :], start=state.read, read=len(output))


def find_stop(text: str, searched: int, stops: Seq[str]) -> int | None:
    """Where the earliest stop string of `text` begins; the first `searched` characters are
    known to end no stop string."""
    hits = []
    for stop in stops:
        at = text.find(stop, max(0, searched - len(stop) + 1))
        if at >= 0:
            hits.append(at)
    return min(hits, default=None)


def held_back(text: str, stops: Seq[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
