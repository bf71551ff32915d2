"""Readable float64 references of every acceptance rule, as close to the papers as possible.

Dense numpy arrays, no cleverness: what the fast rules are tested against. Laws are [V]
arrays that sum to one; `p[u]` is the target's after node u's path and `q[u]` what node u's
children were drawn from. Every function returns (accepted nodes, the token added).

Uniforms come as functions, with the keys that production uses: `eta(i)` decides about
node i + 1, `residual()` picks a replacement, `target(d)` the token d below the root.
Chains are trees in which node i is the i-th drafted token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Outcome = tuple[tuple[int, ...], int]


@dataclass
class Uniforms:
    """Uniforms by key; `margin` is how close any decision came to going the other way."""

    eta_of: Callable[[int], float]
    residual_u: float
    target_of: Callable[[int], float]
    margin: float = field(default=1.0)

    def below(self, probability: float, i: int) -> bool:
        u = self.eta_of(i)
        self.margin = min(self.margin, abs(u - probability))
        return u < probability

    def pick(self, law: Array, u: float) -> int:
        edges = np.cumsum(law) / np.sum(law)
        self.margin = min(self.margin, float(np.abs(edges[:-1] - u).min(initial=1.0)))
        return int(np.searchsorted(edges, u, side="right"))

    def residual(self, law: Array) -> int:
        return self.pick(law, self.residual_u)

    def target(self, law: Array, depth: int) -> int:
        return self.pick(law, self.target_of(depth))


@dataclass
class Draft:
    """A tree of tokens with children in drawing order; `q` is None for chosen tokens."""

    tokens: Sequence[int]
    parents: Sequence[int]
    p: Sequence[Array]
    q: Sequence[Array | None] | None
    replacement: bool = False

    def children(self, u: int) -> list[int]:
        return [c for c in range(1, len(self.tokens)) if self.parents[c] == u]

    def path(self, u: int) -> tuple[int, ...]:
        return () if u == 0 else (*self.path(self.parents[u]), u)

    def first_q(self, u: int) -> Array:
        """The law that the first child of u was drawn from."""
        q = self.q[u] if self.q is not None else None
        return onehot(self.tokens[self.children(u)[0]], len(self.p[u])) if q is None else q

    def next_q(self, q: Array, refused: int, child: int) -> Array:
        """The law of `child`'s draw once its elder sibling came out as `refused`."""
        if self.q is None:
            return onehot(self.tokens[child], len(q))
        if self.replacement:
            return q
        left = q.copy()
        left[self.tokens[refused]] = 0.0
        rest: Array = left / left.sum()
        return rest


def onehot(token: int, size: int) -> Array:
    law = np.zeros(size)
    law[token] = 1.0
    return law


def norm_or(law: Array, otherwise: Array) -> Array:
    return law / law.sum() if law.sum() > 0.0 else otherwise


def greedy(d: Draft) -> Outcome:
    """Follow the argmax."""
    u = 0
    while True:
        y = int(np.argmax(d.p[u]))
        match = [c for c in d.children(u) if d.tokens[c] == y]
        if not match:
            return d.path(u), y
        u = match[0]


def walk(d: Draft, r: Uniforms) -> Outcome:
    """Sample the target, follow the sample while it is a child."""
    u = 0
    while True:
        y = r.target(d.p[u], len(d.path(u)))
        match = [c for c in d.children(u) if d.tokens[c] == y]
        if not match:
            return d.path(u), y
        u = match[0]


def token(d: Draft, r: Uniforms) -> Outcome:
    """Leviathan et al. 2022, algorithm 1."""
    k = len(d.tokens) - 1
    for i in range(k):
        p, q, x = d.p[i], d.first_q(i), d.tokens[i + 1]
        if not r.below(min(1.0, p[x] / q[x]), i):
            return d.path(i), r.residual(norm_or(np.maximum(p - q, 0.0), p))
    return d.path(k), r.target(d.p[k], k)


def block(d: Draft, r: Uniforms) -> Outcome:
    """Sun et al. 2024, algorithm 2: every prefix gets its own eta, the longest yes counts."""
    k = len(d.tokens) - 1
    tau, big_p, tau_p = 0, 1.0, 1.0
    for i in range(1, k + 1):
        x = d.tokens[i]
        big_p = min(1.0, big_p * d.p[i - 1][x] / d.first_q(i - 1)[x])
        h = big_p
        if i < k:
            s = np.maximum(big_p * d.p[i] - d.first_q(i), 0.0).sum()
            h = s / (s + 1.0 - big_p) if big_p < 1.0 else 1.0
        if r.below(h, i - 1):
            tau, tau_p = i, big_p
    if tau == k:
        return d.path(k), r.target(d.p[k], k)
    return d.path(tau), r.residual(
        norm_or(np.maximum(tau_p * d.p[tau] - d.first_q(tau), 0.0), d.p[tau])
    )


def recursive(d: Draft, r: Uniforms) -> Outcome:
    """SpecInfer's multi-step speculative sampling; q without the refused tokens (Sequoia)."""
    u = 0
    while d.children(u):
        p, q = d.p[u], d.first_q(u)
        taken, before = None, None
        for c in d.children(u):
            q = q if before is None else d.next_q(q, before, c)
            x, before = d.tokens[c], c
            if r.below(min(1.0, p[x] / q[x]), c - 1):
                taken = c
                break
            p = norm_or(np.maximum(p - q, 0.0), p)
        if taken is None:
            return d.path(u), r.residual(p)
        u = taken
    return d.path(u), r.target(d.p[u], len(d.path(u)))


def traversal(d: Draft, r: Uniforms) -> Outcome:
    """Weng et al. 2025: all weights afresh after every cut, leaves in depth-first order."""
    n = len(d.tokens)
    left = {u: d.children(u) for u in range(n)}
    p = {u: d.p[u] for u in range(n)}
    q = {u: d.first_q(u) for u in range(n) if left[u]}
    own = {0: 1.0}  # a(u) of nodes that were cut below; others follow from their parent
    while True:
        a = dict(own)
        leaf = 0
        while left[leaf]:
            c = left[leaf][0]
            x = d.tokens[c]
            a.setdefault(c, min(1.0, a[leaf] * p[leaf][x] / q[leaf][x]))
            leaf = c
        untouched = not d.children(leaf)
        if leaf == 0 or r.below(a[leaf], leaf - 1):
            y = r.target(p[leaf], len(d.path(leaf))) if untouched else r.residual(p[leaf])
            return d.path(leaf), y
        u = d.parents[leaf]
        rest = np.maximum(a[u] * p[u] - q[u], 0.0)
        s = rest.sum()
        own[u] = s / (s + 1.0 - a[u]) if a[u] < 1.0 else 1.0
        p[u] = norm_or(rest, p[u])
        left[u] = left[u][1:]
        if left[u]:
            q[u] = d.next_q(q[u], leaf, left[u][0])


def typical(d: Draft, r: Uniforms, epsilon: float = 0.09, delta: float = 0.3) -> Outcome:
    """Cai et al. 2024, section 2.3.1 (approximate)."""
    taken, score = [0], {0: 1.0}
    for c in range(1, len(d.tokens)):
        if d.parents[c] in taken:
            p, x = d.p[d.parents[c]], d.tokens[c]
            entropy = -float(sum(v * np.log(v) for v in p if v > 0.0))
            if p[x] > min(epsilon, delta * np.exp(-entropy)):
                taken.append(c)
                score[c] = score[d.parents[c]] * p[x]
    best = max(taken, key=lambda u: (len(d.path(u)), score[u], -u))
    return d.path(best), r.target(d.p[best], len(d.path(best)))
