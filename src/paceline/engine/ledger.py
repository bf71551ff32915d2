"""The bound: what speculation may have cost so far, whatever was accepted.

    debt = elapsed - t_plain * tokens

over the rounds so far, t_plain being the seconds of a plain step. A round that commits one
token for each sequence whatever happens may take C_max seconds where

    debt + C_max - t_plain <= eps * t_plain * (tokens + 1) + s0

and a plain step is taken otherwise, which changes neither side but for the better. If no
round takes longer than its C_max, then after every round, for every sequence of acceptances,

    elapsed <= (1 + eps) * t_plain * tokens + s0.

Here both sides are kept as one number, the balance `debt - eps * t_plain * tokens`, with
t_plain as it was in each round. What speculation gained is kept up to `credit` only, so that
a good hour does not pay for a bad one: the same bound, with `credit` added, then holds over
every stretch of the run and not just from its start.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ledger:
    """Mutable; seconds throughout.

    eps: tolerated loss as a share of plain decoding's time. start: s0, what may be lost
    before anything is known. credit: gains that are kept. Both may be raised (`raise_to`) as
    plain steps turn out to be longer; `granted` is what single trials were allowed beyond.
    """

    eps: float
    start: float = 0.0
    credit: float = 0.0
    balance: float = 0.0
    granted: float = 0.0
    elapsed: float = 0.0
    plain: float = 0.0

    def room(self) -> float:
        """Seconds that may be lost now."""
        return self.start + self.granted - self.balance

    def permits(self, cost: float, plain: float) -> bool:
        """Whether a round of `cost` seconds at most may be taken, where a plain step takes
        `plain`: even if it commits no more than that step would."""
        return self.balance + cost - (1.0 + self.eps) * plain <= self.start + self.granted

    def grant(self, seconds: float) -> None:
        """Raise s0 for good: the bound grows by this."""
        assert seconds >= 0.0
        self.granted += seconds

    def record(self, seconds: float, plain: float) -> None:
        """A round: what it took, and what plain decoding takes for the tokens that it gave."""
        self.elapsed += seconds
        self.plain += plain
        self.balance = max(self.balance + seconds - (1.0 + self.eps) * plain, -self.credit)

    @property
    def debt(self) -> float:
        """Seconds more than plain decoding so far; negative: fewer."""
        return self.elapsed - self.plain

    @property
    def bound(self) -> float:
        """What `debt` can't exceed: eps of plain decoding's time, and s0."""
        return self.eps * self.plain + self.start + self.granted
