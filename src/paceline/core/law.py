"""Next-token laws: a point mass, or weights over the vocabulary.

Legend: V vocabulary, N rows, G blocks of the vocabulary.

A law keeps *unnormalised* weights on their device and their sums by blocks of the
vocabulary on the host, so that a draw touches one block and never sorts or scans all of V
(inverse-transform sampling in two levels). Sums and everything divided are float64.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

#: Vocabulary entries per block: a draw scans V / BLOCK block sums, then BLOCK weights.
BLOCK = 512

Float64 = npt.NDArray[np.float64]


class Excess(NamedTuple):
    """What `max(scale * p - q, 0)` leaves: its mass, and it normalised (None where empty)."""

    mass: float
    law: Law | None


class Law(Protocol):
    """A normalised next-token distribution over `size` tokens; immutable."""

    @property
    def size(self) -> int: ...

    def probability(self, token: int) -> float:
        """Probability of `token`; 0 outside the support or the vocabulary."""
        ...

    def sample(self, u: float) -> int:
        """The token at quantile `u` in [0, 1); never one of probability zero."""
        ...

    def mode(self) -> int:
        """The most probable token; the lowest id wins ties."""
        ...

    def entropy(self) -> float:
        """Shannon entropy in nats."""
        ...

    def dense(self) -> torch.Tensor:
        """[V] float32 (or wider) probabilities that sum to one."""
        ...

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        """Mass of max(scale * self - q, 0) and the law proportional to it.

        `q` may be over another vocabulary size: it is zero on what it lacks, and what lies
        outside this law's vocabulary is ignored (the target can't emit it).
        """
        ...

    def without(self, token: int) -> Law | None:
        """This law given that the token is another one; None where nothing is left."""
        ...

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        """[V'] -> new [V']: `weights_V - mass * self` over V' tokens, not clamped."""
        ...


@dataclass(frozen=True, slots=True)
class PointLaw:
    """All mass on one token: greedy decoding, deterministic drafts, forced grammar states."""

    token: int
    size: int

    def probability(self, token: int) -> float:
        return 1.0 if token == self.token else 0.0

    def sample(self, u: float) -> int:
        return self.token

    def mode(self) -> int:
        return self.token

    def entropy(self) -> float:
        return 0.0

    def dense(self) -> torch.Tensor:
        probs_V = torch.zeros(self.size)
        probs_V[self.token] = 1.0
        return probs_V

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        mass = max(scale - q.probability(self.token), 0.0)
        return Excess(mass, self if mass > 0.0 else None)

    def without(self, token: int) -> Law | None:
        return None if token == self.token else self

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        left_V = weights_V.clone()
        if self.token < left_V.shape[0]:
            left_V[self.token] -= mass
        return left_V


class WeightLaw:
    """Weights over the vocabulary, zero outside the support.

    weights_V: [V] non-negative, finite, float32 or float64, with a positive sum. Kept, not
        copied: nobody may write to it afterwards.
    sums_G: [G] float64 sums over blocks of BLOCK entries (computed where not given; for
        many rows `weight_laws` fetches all sums from the device at once).
    """

    __slots__ = ("_running_G", "_sums_G", "_total", "_weights_V")

    def __init__(
        self, weights_V: torch.Tensor, sums_G: torch.Tensor | Float64 | None = None
    ) -> None:
        sums = block_sums(weights_V) if sums_G is None else sums_G
        host_G: Float64 = sums.cpu().numpy() if isinstance(sums, torch.Tensor) else sums
        self._weights_V = weights_V
        self._sums_G = host_G
        self._running_G: Float64 = host_G.cumsum(dtype=np.float64)
        self._total = float(self._running_G[-1])
        if not 0.0 < self._total < float("inf"):
            raise ValueError(f"a law needs a finite positive total weight, got {self._total}")

    @property
    def size(self) -> int:
        return self._weights_V.shape[-1]

    @property
    def total(self) -> float:
        """Sum of the weights (float64)."""
        return self._total

    @property
    def weights_V(self) -> torch.Tensor:
        return self._weights_V

    def probability(self, token: int) -> float:
        if not 0 <= token < self.size:
            return 0.0
        return self._weights_V[token].item() / self._total

    def sample(self, u: float) -> int:
        if not 0.0 <= u < 1.0:
            raise ValueError(f"a uniform must lie in [0, 1), got {u}")
        goal = u * self._total
        block = _first_above(self._running_G, goal)
        before = float(self._running_G[block - 1]) if block else 0.0
        low = block * BLOCK
        inside = self._weights_V[low : low + BLOCK].cpu().numpy()
        return low + _first_above(inside.cumsum(dtype=np.float64), goal - before)

    def mode(self) -> int:
        if self._weights_V.is_cuda:
            return int(self._weights_V.argmax())
        return int(self._weights_V.numpy().argmax())  # vectorised, as torch's is not

    def entropy(self) -> float:
        # H = log T - sum(w log w) / T with T the total.
        entr = float(torch.special.entr(self._weights_V).sum(dtype=torch.float64))
        return float(np.log(self._total)) + entr / self._total

    def dense(self) -> torch.Tensor:
        return self._weights_V / self._total

    def excess(self, q: Law, scale: float = 1.0) -> Excess:
        if scale <= 0.0:
            return Excess(0.0, None)
        # In units of this law's weights, so that no normalised copy of either is made. A tiny
        # scale is multiplied out, where it can only underflow to the right answer, zero.
        small = scale < 1e-6
        unit = self._total if small else self._total / scale
        scaled_V = self._weights_V * scale if small else self._weights_V
        left_V = q.taken_from(scaled_V, unit).clamp_(min=0.0)
        sums_G: Float64 = block_sums(left_V).cpu().numpy()
        mass = float(sums_G.sum()) / unit
        return Excess(mass, WeightLaw(left_V, sums_G) if mass > 0.0 else None)

    def without(self, token: int) -> Law | None:
        if self.probability(token) == 0.0:
            return self
        left_V = self._weights_V.clone()
        left_V[token] = 0.0
        # One block is summed afresh: a subtraction would cancel where `token` dominates.
        block = token // BLOCK
        sums_G = self._sums_G.copy()
        sums_G[block] = left_V[block * BLOCK : (block + 1) * BLOCK].sum().item()
        return WeightLaw(left_V, sums_G) if float(sums_G.sum()) > 0.0 else None

    def taken_from(self, weights_V: torch.Tensor, mass: float) -> torch.Tensor:
        mine_V, factor = self._weights_V.to(weights_V.device), mass / self._total
        size = weights_V.shape[0]
        if self.size >= size:
            return torch.sub(weights_V, mine_V[:size].to(weights_V.dtype), alpha=factor)
        left_V = weights_V.clone()
        left_V[: self.size].sub_(mine_V.to(weights_V.dtype), alpha=factor)
        return left_V


def weight_laws(weights_NV: torch.Tensor) -> list[WeightLaw]:
    """The laws of N rows of weights, with one transfer from the device for all sums."""
    sums_NG = block_sums(weights_NV).cpu().numpy()
    return [WeightLaw(weights_NV[i], sums_NG[i]) for i in range(weights_NV.shape[0])]


def block_sums(weights_V: torch.Tensor) -> torch.Tensor:
    """[..., V] weights to [..., G] float64 block sums."""
    size = weights_V.shape[-1]
    whole = size // BLOCK * BLOCK
    parts = []
    if whole:
        shape = (*weights_V.shape[:-1], whole // BLOCK, BLOCK)
        parts.append(weights_V[..., :whole].reshape(shape).sum(-1))
    if whole < size:
        parts.append(weights_V[..., whole:].sum(-1, keepdim=True))
    sums: torch.Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return sums.double()


def _first_above(running: Float64, goal: float) -> int:
    """First index whose running sum exceeds `goal` (its weight is then positive).

    Rounding can leave `goal` at or past the last sum: then the last positive weight.
    """
    index = int(running.searchsorted(goal, side="right"))
    if index >= len(running):
        index = int(running.searchsorted(running[-1], side="left"))
    return index


def residual(p: Law, q: Law, scale: float = 1.0) -> Law | None:
    """norm(max(scale * p - q, 0)); None where nothing is left. See `Law.excess`."""
    return p.excess(q, scale).law


def probabilities(laws: Seq[Law], tokens: Seq[int]) -> list[float]:
    """`laws[i].probability(tokens[i])` for all i, with one device synchronisation."""
    if not any(isinstance(law, WeightLaw) and law.weights_V.is_cuda for law in laws):
        return [law.probability(t) for law, t in zip(laws, tokens, strict=True)]
    found = [0.0] * len(laws)
    asked: list[tuple[int, WeightLaw, int]] = []
    for i, (law, token) in enumerate(zip(laws, tokens, strict=True)):
        if isinstance(law, WeightLaw):
            if 0 <= token < law.size:
                asked.append((i, law, token))
        else:
            found[i] = law.probability(token)
    if asked:
        weights = torch.stack([law.weights_V[token].double() for _, law, token in asked]).tolist()
        for (i, law, _), weight in zip(asked, weights, strict=True):
            found[i] = weight / law.total
    return found


def draw_siblings(law: Law, uniforms: Seq[float], replacement: bool = False) -> tuple[int, ...]:
    """Tokens drawn one after the other from `law`, without replacement unless asked.

    Fewer than `len(uniforms)` where the support is exhausted. What stands in a tree under
    `Proposal.SAMPLED` (or `REPLACED`) must come from here or have this very distribution.
    """
    tokens: list[int] = []
    left: Law | None = law
    for u in uniforms:
        if left is None:
            break
        tokens.append(left.sample(u))
        left = left if replacement else left.without(tokens[-1])
    return tuple(tokens)
