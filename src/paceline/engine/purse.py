"""What speculation may spend: the ledger, and room that is made for trials."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.engine.ledger import Ledger
from paceline.errors import UserError

#: What a round may take: what it is expected to take beyond a plain step, times this, and a plain
#: step times that.
MARGIN, SLACK = 1.25, 1.1
#: Plain steps without whose time nothing is worth deciding.
LEAST_ROOM = 0.3


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """most: nodes a round and sequence at most. eps: tolerated loss, as a share of plain
    decoding. In plain steps: start (s0), trial (what each drafter's first rounds, with the
    reading of a prompt, may cost on top of s0, once), credit (gains kept to pay for later
    losses)."""

    most: int = 8
    eps: float = 0.015
    start: float = 2.0
    trial: float = 24.0
    credit: float = 256.0

    def __post_init__(self) -> None:
        if not 0 <= self.most <= 64:
            raise UserError(f"k = {self.most} is out of range: use 0 to 64")
        if not 0.0 < self.eps <= 1.0:
            raise UserError(f"eps = {self.eps} is out of range: use a share above 0, like 0.015")
        for name in ("start", "trial", "credit"):
            if getattr(self, name) < 0.0:
                raise UserError(f"{name} = {getattr(self, name)} is out of range: use 0 or more")


class Purse:
    """Mutable."""

    def __init__(self, config: AdaptiveConfig) -> None:
        self.ledger = Ledger(config.eps)
        self._config = config
        self._granted: dict[str, float] = {}
        self._saving = 0.0  # room that the cheapest round wants which would pay and was refused

    def scale(self, plain: float) -> None:
        """What is given in plain steps, in seconds; never lowered."""
        self.ledger.start = max(self.ledger.start, self._config.start * plain)
        self.ledger.credit = max(self.ledger.credit, self._config.credit * plain)

    def solvent(self, plain: float) -> bool:
        """Whether there may be room for anything. Where there is none, deciding would only cost
        what could become room."""
        return self.ledger.room() >= self._least(plain)

    def rounds_until_solvent(self, plain: float) -> int:
        """Plain steps until it is."""
        missing = self._least(plain) - self.ledger.room()
        return math.floor(missing / (self._config.eps * plain)) if plain > 0.0 else 0

    def _least(self, plain: float) -> float:
        return max(LEAST_ROOM * plain, self._saving)

    @property
    def saved(self) -> bool:
        """Whether there is room now for what was refused."""
        return 0.0 < self._saving <= self.ledger.room()

    def spend(self) -> None:
        """A decision begins, or is made for others: what rounds it refuses is not known yet."""
        self._saving = 0.0

    def save_for(self, seconds: float, plain: float) -> None:
        """A round of so many seconds would pay and was refused: nothing is worth deciding before
        there is room for it, or for a cheaper one of which the same was said."""
        wanted = self._wanted(seconds, plain)
        self._saving = min(self._saving, wanted) if self._saving else wanted

    def rounds_until(self, seconds: float, plain: float) -> int:
        """Plain steps after which there will be room for a round that is refused now."""
        missing = self._wanted(seconds, plain) - self.ledger.room()
        return math.ceil(max(missing, 0.0) / (self._config.eps * plain))

    def _wanted(self, seconds: float, plain: float) -> float:
        """Room that a round wants (`Ledger.permits`)."""
        return _most(seconds, plain) - (1.0 + self._config.eps) * plain

    def permits(self, seconds: float, plain: float) -> bool:
        """Whether there is room for a round of so many seconds, where a plain step takes
        `plain`."""
        return self.ledger.permits(_most(seconds, plain), plain)

    def admits(self, drafter: str, seconds: float, plain: float) -> bool:
        """The same for a round of a drafter on trial: room is made for it, once."""
        missing = _most(seconds, plain) - plain - self.ledger.room()
        granted = self._granted.get(drafter, 0.0)
        if granted + missing > self._config.trial * plain:
            return False
        self._granted[drafter] = granted + missing
        self.ledger.grant(missing)
        return True


def _most(seconds: float, plain: float) -> float:
    """What a round may take of which so much is expected, where a plain step takes `plain`."""
    return SLACK * plain + MARGIN * (seconds - plain)
