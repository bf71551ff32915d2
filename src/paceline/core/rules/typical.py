"""Typical acceptance: the approximate rule of the Medusa paper."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from paceline.core.draws import Draws
from paceline.core.law import Law
from paceline.core.rules.base import Guarantee, Verdict, origin_at
from paceline.core.tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class Typical:
    """Take x where p(x) > min(epsilon, delta * exp(-H(p))), H the target's entropy in nats.

    NOT exact: the output does not follow the target's law. The deepest path of taken
    nodes counts (the most probable one under the target among equally deep ones, the
    earliest where these tie), and the target adds a sample of its law there.
    Medusa (Cai et al. 2024, section 2.3.1).
    """

    name: ClassVar[str] = "typical"
    guarantee: ClassVar[Guarantee] = Guarantee.APPROXIMATE

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0.0 < self.epsilon <= 1.0:
            raise ValueError(f"typical acceptance needs 0 < epsilon <= 1, got {self.epsilon}")
        if not 0.0 < self.delta < math.inf:
            raise ValueError(f"typical acceptance needs a positive delta, got {self.delta}")

    def check(self, tree: TokenTree, greedy: bool) -> None:
        return None

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        log_p: dict[int, float] = {0: 0.0}  # nodes whose whole path is taken
        for node in range(len(tree)):
            if node not in log_p or not tree.children[node]:
                continue
            law = laws[node]
            bar = min(self.epsilon, self.delta * math.exp(-law.entropy()))
            for child in tree.children[node]:
                p_x = law.probability(tree.tokens[child])
                if p_x > bar:
                    log_p[child] = log_p[node] + math.log(p_x)
        best = max(log_p, key=lambda u: (tree.depths[u], log_p[u], -u))
        path = tree.path(best)
        return Verdict(path, draws.target(laws[best], len(path)), origin_at(tree, best))
