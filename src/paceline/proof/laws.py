"""Laws small enough to enumerate, in plain Python floats (float64)."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch

from paceline.core.law import Excess, Law


class ExactLaw:
    """Probabilities of a handful of tokens; the `Law` that the enumeration runs on."""

    __slots__ = ("probs", "size")

    def __init__(self, weights: Seq[float]) -> None:
        total = math.fsum(weights)
        if not 0.0 < total < math.inf:
            raise ValueError(f"a law needs a finite positive total weight, got {total}")
        self.probs = tuple([w / total for w in weights])
        self.size = len(self.probs)

    def __repr__(self) -> str:
        return f"ExactLaw({', '.join(f'{v:.6g}' for v in self.probs)})"

    def probability(self, token: int) -> float:
        return self.probs[token] if 0 <= token < self.size else 0.0

    def sample(self, u: float) -> int:
        running, last = 0.0, 0
        for token, v in enumerate(self.probs):
            running += v
            if v > 0.0:
                last = token
                if u < running:
                    break
        return last

    def mode(self) -> int:
        return self.probs.index(max(self.probs))

    def entropy(self) -> float:
        return -math.fsum(v * math.log(v) for v in self.probs if v > 0.0)

    def dense(self) -> torch.Tensor:
        return torch.tensor(self.probs, dtype=torch.float64)

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        left = [max(scale * v - q.probability(x), 0.0) for x, v in enumerate(self.probs)]
        mass = math.fsum(left)
        return Excess(mass, ExactLaw(left) if mass > 0.0 else None)

    def without(self, token: int) -> Law | None:
        left = [0.0 if x == token else v for x, v in enumerate(self.probs)]
        return ExactLaw(left) if any(left) else None

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        left_V = weights_V.clone()
        size = min(self.size, left_V.shape[0])
        left_V[:size] -= mass * self.dense()[:size].to(left_V)
        return left_V
