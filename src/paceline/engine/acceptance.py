"""How many tokens a proposal will probably bring, from how earlier ones fared.

Chains: the acceptance of each position, given that those before it were accepted. Trees:
accepted nodes by size. Every estimate is shrunk towards a more general one (Beta prior with
its mean): a request's towards all requests' with the same drafter and bucket, that one
towards what the next smaller bucket promises or the drafter's, and a position's towards the
position before it. Counts decay, so that estimates follow a drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from paceline.draft.base import Arm

#: Acceptance before anything was seen, and how many trials that opinion weighs.
PRIOR, PRIOR_WEIGHT = 0.6, 4.0
#: Trials that the more general estimate weighs against a request's own, and against a
#: bucket's.
OWN_WEIGHT = 6.0
#: Refusals in a bucket, before anything is known of it, for each in the next smaller one: of
#: n-grams whose match is twice as long half are refused or fewer (docs/measurements.md).
SAFER = 0.5
#: What a round keeps of older counts: of one request, and of all.
OWN_KEEP, POOL_KEEP = 0.96, 0.995
#: Positions told apart; deeper ones count as the last.
DEPTH = 16


class Estimate(Protocol):
    def gains(self, most: int) -> list[float]:
        """Expected accepted tokens that each further node brings; never rising."""
        ...

    def update(self, drafted: int, accepted: int) -> None: ...

    def summary(self) -> list[float]: ...


class ChainEstimate:
    """Conditional acceptance by position. parent: the more general estimate."""

    def __init__(self, parent: ChainEstimate | None, keep: float, weight: float) -> None:
        self._parent, self._keep, self._weight = parent, keep, weight
        self._hits = [0.0] * DEPTH
        self._tries = [0.0] * DEPTH

    def update(self, drafted: int, accepted: int) -> None:
        """One round: `accepted` of `drafted` nodes in a row, the next one refused."""
        for i in range(min(drafted, accepted + 1, DEPTH)):
            self._hits[i] = self._keep * self._hits[i] + (i < accepted)
            self._tries[i] = self._keep * self._tries[i] + 1.0

    def alphas(self, most: int) -> list[float]:
        """Acceptance of the first `most` positions, each given the ones before it."""
        general = self._general(most)
        found: list[float] = []
        for i in range(most):
            at = min(i, DEPTH - 1)
            if general is None:
                prior = found[-1] if found else PRIOR
            else:
                # What sets this one apart at one position does so at the next.
                shift = found[-1] - general[i - 1] if found else 0.0
                prior = min(max(general[i] + shift, 0.0), 1.0)
            tries = self._tries[at] + self._weight
            found.append((self._hits[at] + self._weight * prior) / tries)
        return found

    def _general(self, most: int) -> list[float] | None:
        """What the more general estimate says of the same positions."""
        return self._parent.alphas(most) if self._parent else None

    def gains(self, most: int) -> list[float]:
        reach, found = 1.0, []
        for alpha in self.alphas(most):
            reach *= alpha
            found.append(reach)
        return found

    def summary(self) -> list[float]:
        return self.alphas(8)


class BucketEstimate(ChainEstimate):
    """Of all requests, in one bucket. pools: the drafter's other buckets."""

    def __init__(self, bucket: int, pools: Mapping[int, Estimate], drafter: ChainEstimate) -> None:
        super().__init__(drafter, POOL_KEEP, OWN_WEIGHT)
        self._bucket, self._pools = bucket, pools

    def _general(self, most: int) -> list[float] | None:
        """The next smaller bucket's acceptance, raised; the drafter's in the smallest one."""
        smaller = max((b for b in self._pools if b < self._bucket), default=None)
        if smaller is None:
            return super()._general(most)
        below = self._pools[smaller]
        assert isinstance(below, ChainEstimate)
        left = SAFER ** (self._bucket - smaller)
        return [1.0 - left * (1.0 - a) for a in below.alphas(most)]


class TreeEstimate:
    """Accepted nodes as `rate * log2(1 + nodes)`, corrected by size: an m-node tree of good
    shape reaches about as deep as the logarithm of m."""

    def __init__(self, parent: TreeEstimate | None, keep: float, weight: float) -> None:
        self._parent, self._keep, self._weight = parent, keep, weight
        self._got: dict[int, float] = {}
        self._due: dict[int, float] = {}

    def update(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        size = drafted.bit_length()
        self._got[size] = self._keep * self._got.get(size, 0.0) + accepted
        self._due[size] = self._keep * self._due.get(size, 0.0) + math.log2(1 + drafted)

    def rate(self, size: int | None = None) -> float:
        """Accepted nodes per doubling; of trees of 2**(size - 1) nodes and more, or of all."""
        general = self._parent.rate(size) if self._parent else PRIOR
        got, due = sum(self._got.values()), sum(self._due.values())
        overall = (got + self._weight * general) / (due + self._weight)
        if size is None or size not in self._due:
            return overall
        return (self._got[size] + self._weight * overall) / (self._due[size] + self._weight)

    def gains(self, most: int) -> list[float]:
        found: list[float] = []
        rates = {s: self.rate(s) for s in range(1, most.bit_length() + 1)}
        before = 0.0
        for n in range(1, most + 1):
            total = max(before, rates[n.bit_length()] * math.log2(1 + n))
            gain = total - before
            found.append(min(gain, found[-1]) if found else gain)
            before += found[-1]
        return found

    def summary(self) -> list[float]:
        return [self.rate()]


def _new(tree: bool, parent: Estimate | None, keep: float, weight: float) -> Estimate:
    if tree:
        assert parent is None or isinstance(parent, TreeEstimate)
        return TreeEstimate(parent, keep, weight)
    assert parent is None or isinstance(parent, ChainEstimate)
    return ChainEstimate(parent, keep, weight)


class Acceptance:
    """Mutable. Estimates of all requests of an engine, by drafter and bucket."""

    def __init__(self) -> None:
        self._drafters: dict[str, Estimate] = {}
        self._pools: dict[str, dict[int, Estimate]] = {}
        self._own: dict[int, dict[tuple[str, int], Estimate]] = {}

    def of(self, seq_id: int, arm: Arm) -> Estimate:
        key = (arm.drafter, arm.bucket)
        own = self._own.setdefault(seq_id, {})
        if key not in own:
            if arm.drafter not in self._drafters:
                self._drafters[arm.drafter] = _new(arm.tree, None, POOL_KEEP, PRIOR_WEIGHT)
            own[key] = _new(arm.tree, self._pool(arm), OWN_KEEP, OWN_WEIGHT)
        return own[key]

    def _pool(self, arm: Arm) -> Estimate:
        """All requests' rounds in the arm's bucket."""
        general = self._drafters[arm.drafter]
        if arm.bucket == 0:  # nothing sets it apart from the drafter's other rounds
            return general
        pools = self._pools.setdefault(arm.drafter, {})
        if arm.bucket not in pools:
            pools[arm.bucket] = (
                BucketEstimate(arm.bucket, pools, general)
                if isinstance(general, ChainEstimate)
                else _new(True, general, POOL_KEEP, OWN_WEIGHT)
            )
        return pools[arm.bucket]

    def update(self, seq_id: int, arm: Arm, drafted: int, accepted: int) -> None:
        self.of(seq_id, arm).update(drafted, accepted)
        if arm.bucket:
            self._pools[arm.drafter][arm.bucket].update(drafted, accepted)
        self._drafters[arm.drafter].update(drafted, accepted)

    def forget(self, seq_id: int) -> None:
        self._own.pop(seq_id, None)

    def summary(self) -> dict[str, list[float]]:
        """By drafter, over all requests: acceptance of the first positions, each given the
        ones before it (of a tree: accepted nodes per doubling of its size)."""
        return {name: [round(x, 4) for x in e.summary()] for name, e in self._drafters.items()}
