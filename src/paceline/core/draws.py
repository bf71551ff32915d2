"""Randomness as an argument.

A uniform is a function of (seed, position, purpose, index), so no draw depends on what
else is in the batch, on preemption, or on tokens that were proposed and thrown away.

`position` is the sequence position of the token that the round decides first (the root's
successor) for everything that belongs to one round: DRAFT by the drafted token's number,
ACCEPT by the judged node's, RESIDUAL once. Every round commits a token, so the next one has
another position and no key comes up twice. That matters: block and traversal verification
reject a long prefix before they accept a short one, so what a round commits depends on
uniforms of nodes below it, and a next round that saw those again (keyed by the drafted
token's own position, say) would draw from a conditioned uniform. tests/core/test_draws.py
shows that bias.
`TARGET` draws are keyed by the emitted token's own position instead. Each position is
emitted once, by one TARGET draw or none, and nothing else reads that key: a rule asks for it
only where the token it gives ends the round, or, in the walk, where it is emitted at once.
Under `walk` the token at a position is thus the one that plain decoding draws there.

A round that is computed and dropped before anything of it was committed (preemption) may be
drawn again with the same keys, whatever is proposed then. A generation that goes on after a
stop discarded tokens may too: what was committed did not depend on the discarded end's
TARGET draws, and the other keys have another position.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from paceline.core.law import Law

_MASK = (1 << 64) - 1


class Purpose(enum.IntEnum):
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014): 64 bits to 64 bits."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, purpose: Purpose, index: int = 0) -> float:
    """A uniform in [0, 1) with 53 random bits; equal arguments give equal values."""
    h = _mix((seed + 0x9E3779B97F4A7C15) & _MASK)
    h = _mix((h ^ (position * 0xD1B54A32D192ED03)) & _MASK)
    h = _mix((h ^ (int(purpose) * 0x8CB92BA72F3D8DD7 + index * 0xABC98388FB8FAC03)) & _MASK)
    return (_mix((h + 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of the index-th of several samples of one request (index 0: `seed`)."""
    return seed if index == 0 else _mix((seed ^ _mix(index)) & _MASK)


class Draws(Protocol):
    """The random choices of one round. Rules ask for choices, not for numbers, so that a
    proof can follow every branch of the very code that runs in production."""

    def flip(self, probability: float, index: int) -> bool:
        """True with `probability`; never at 0, always at 1. One index per question: the
        judged node's number less one."""
        ...

    def residual(self, law: Law, index: int = 0) -> int:
        """A replacement token from a residual law; once per round and index."""
        ...

    def target(self, law: Law, depth: int) -> int:
        """A token from the target's own law, `depth` tokens below the root (0: the root's
        successor); once per round and depth."""
        ...


@dataclass(frozen=True)
class KeyedDraws:
    """Draws for the round whose first undecided token has sequence position `position`."""

    seed: int
    position: int

    def flip(self, probability: float, index: int) -> bool:
        return uniform(self.seed, self.position, Purpose.ACCEPT, index) < probability

    def residual(self, law: Law, index: int = 0) -> int:
        return law.sample(uniform(self.seed, self.position, Purpose.RESIDUAL, index))

    def target(self, law: Law, depth: int) -> int:
        return law.sample(uniform(self.seed, self.position + depth, Purpose.TARGET))

    def draft(self, index: int) -> float:
        """The uniform for the index-th drafted token (for drafters)."""
        return uniform(self.seed, self.position, Purpose.DRAFT, index)
