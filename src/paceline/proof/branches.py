"""Every branch of a rule with its exact probability: a `Draws` that can be played again.

A rule asks for choices, not for numbers. `branches` runs it once per sequence of answers:
each run repeats the answers so far and takes the first open alternative after that
(depth-first replay). Nothing is sampled and the rule itself is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from paceline.core.law import Law

T = TypeVar("T")
Span = tuple[float, float]


class Branching:
    """Answers along one branch; `probability` is that of all answers so far.

    The uniform behind each flip is known to lie in a span that answers narrow, so a rule
    that asks two questions of one uniform (same index), or of one that the draft used
    already (`spans`), gets the dependent answers that production would give it.
    """

    def __init__(self, trail: list[list[tuple[float, int]]], spans: Mapping[int, Span]) -> None:
        self.probability = 1.0
        self._trail = trail
        self._depth = 0
        self._spans = dict(spans)
        self._drawn: set[tuple[str, int]] = set()

    def flip(self, probability: float, index: int) -> bool:
        assert 0.0 <= probability <= 1.0, f"not a probability: {probability}"
        low, high = self._spans.get(index, (0.0, 1.0))
        cut = min(max(probability, low), high)
        width = high - low
        yes = self._choose([((cut - low) / width, 1), ((high - cut) / width, 0)])
        self._spans[index] = (low, cut) if yes else (cut, high)
        return bool(yes)

    def residual(self, law: Law, index: int = 0) -> int:
        return self._draw("residual", index, law)

    def target(self, law: Law, depth: int) -> int:
        return self._draw("target", depth, law)

    def _draw(self, purpose: str, index: int, law: Law) -> int:
        assert (purpose, index) not in self._drawn, f"{purpose} uniform {index} used twice"
        self._drawn.add((purpose, index))
        return self._choose([(law.probability(x), x) for x in range(law.size)])

    def _choose(self, options: list[tuple[float, int]]) -> int:
        options = [option for option in options if option[0] > 0.0]
        if self._depth == len(self._trail):
            self._trail.append(options[::-1])
        chance, answer = self._trail[self._depth][-1]
        self._depth += 1
        self.probability *= chance
        return answer


def branches(
    play: Callable[[Branching], T], spans: Mapping[int, Span] | None = None
) -> Iterator[tuple[float, T]]:
    """(probability, result) of every way in which `play` can go; probabilities sum to 1.

    spans: what is known beforehand about the uniform of a flip, by index.
    """
    trail: list[list[tuple[float, int]]] = []
    while True:
        draws = Branching(trail, spans or {})
        result = play(draws)
        yield draws.probability, result
        while trail and len(trail[-1]) == 1:
            trail.pop()
        if not trail:
            return
        trail[-1].pop()
