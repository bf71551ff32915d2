"""Rounds that could be: who drafts how much for which sequence, and what that is worth.

A round is worth E[tokens] - lambda E[seconds] (`engine.adaptive`); lambda is called its price.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.draft.base import Arm
from paceline.engine.acceptance import Acceptance
from paceline.engine.costs import Costs, Work
from paceline.engine.explore import Lengths
from paceline.engine.weigh import best_length, caps, spread
from paceline.types import Sequence


@dataclass(frozen=True)
class Choice:
    """For one sequence: who may propose and how much. free: whether this policy decided.
    mode: of its costs."""

    arm: Arm | None
    budget: int
    free: bool
    mode: str


@dataclass(frozen=True)
class Plan:
    """A round that could be. value: E[tokens] - lambda E[seconds], its seconds and those of
    catching up among them."""

    choices: dict[int, Choice]
    work: Work
    value: float
    seconds: float
    catching_up: float = 0.0


def work_of(choices: Seq[Choice], budgets: Seq[int], contexts: Seq[int]) -> Work:
    """What a round does in which so many nodes are proposed for each sequence."""
    return Work(
        budgets=tuple(budgets),
        drafters=tuple(c.arm.drafter if c.arm else None for c in choices),
        lags=tuple(c.arm.lag if c.arm else 0 for c in choices),
        contexts=tuple(contexts),
        modes=tuple(c.mode for c in choices),
    )


@dataclass(frozen=True)
class Choices:
    """Prices rounds by what is known of costs, acceptance and lengths, all of which others
    keep up to date."""

    costs: Costs
    acceptance: Acceptance
    lengths: Lengths

    def unpriced(self, seqs: Seq[Sequence], choices: dict[int, Choice]) -> Plan:
        """A round whose seconds nobody has asked for."""
        chosen = [choices[s.id] for s in seqs]
        budgets = [c.budget if c.arm else 0 for c in chosen]
        return Plan(choices, work_of(chosen, budgets, [s.computed for s in seqs]), 0.0, 0.0)

    def plan(self, seqs: Seq[Sequence], choices: dict[int, Choice]) -> Plan:
        """A round and its seconds, not valued."""
        plan = self.unpriced(seqs, choices)
        return replace(plan, seconds=self.costs.of(plan.work))

    def better(
        self,
        seqs: Seq[Sequence],
        free: Seq[Sequence],
        arms: dict[int, list[Arm]],
        base: Plan,
        price: float,
    ) -> Iterator[Plan]:
        """Rounds in which some of `free` are drafted for and that beat `base`, a plain one, the
        most valuable first; for one sequence cheaper ones behind it, should it cost too much."""
        work = base.work
        most = sum(max((a.most for a in arms[s.id]), default=0) for s in free)
        by_rows = self.costs.per_row(len(seqs), work.contexts, most, work.mode)
        picked, gains = self._pick(free, arms, by_rows, price, base)
        floor = -price * base.seconds
        if len(picked) == 1:
            ((i, arm),) = picked.items()
            drafting = self._drafting(arm, len(gains[i]), work, base.choices[i].mode)
            k, _ = best_length(gains[i], drafting, by_rows, price)
            while k > 0:
                plan = self._price(seqs, picked, {i: k}, gains, base, price)
                if plan.value > floor:
                    yield plan
                k //= 2
        elif picked:
            plans = []
            for cap in caps(max(len(g) for g in gains.values())):
                budgets = spread({i: g[:cap] for i, g in gains.items()}, by_rows, price)
                plans.append(self._price(seqs, picked, budgets, gains, base, price))
            yield from sorted((p for p in plans if p.value > floor), key=lambda p: -p.value)

    def _pick(
        self,
        free: Seq[Sequence],
        arms: dict[int, list[Arm]],
        by_rows: list[float],
        price: float,
        base: Plan,
    ) -> tuple[dict[int, Arm], dict[int, list[float]]]:
        """For each sequence the arm that promises most, were it alone in drafting, and what
        its nodes are expected to bring."""
        deepest = max((a.most for many in arms.values() for a in many), default=0)
        alone: dict[tuple[str, str], list[float]] = {}
        picked, gains = {}, {}
        for s in free:
            best, mode = -float("inf"), base.choices[s.id].mode
            for arm in arms[s.id]:
                found = self.acceptance.of(s.id, arm).gains(arm.most)
                promise = 0.0
                if len(arms[s.id]) > 1:
                    kind = (arm.drafter, mode)
                    if kind not in alone:
                        alone[kind] = self._drafting(arm, deepest, base.work, mode)
                    _, promise = best_length(found, alone[kind], by_rows, price)
                    promise -= price * self._investment(s, arm)
                if promise > best:
                    best, picked[s.id], gains[s.id] = promise, arm, found
        return picked, gains

    def _drafting(self, arm: Arm, most: int, work: Work, mode: str) -> list[float]:
        """Seconds of drafting 1, 2, ... `most` nodes for one sequence alone."""
        context = sum(work.contexts) // len(work.contexts)
        return [self.costs.alone(arm.drafter, k, context, mode) for k in range(1, most + 1)]

    def _investment(self, seq: Sequence, arm: Arm) -> float:
        """Seconds a round of what catching up takes, over the rounds that it will serve."""
        if arm.lag <= 2:
            return 0.0
        left = self.lengths.remaining(seq.n_output, seq.params.max_tokens)
        tau = 1.0 + sum(self.acceptance.of(seq.id, arm).gains(arm.most))
        return self.costs.catching_up(arm.drafter, arm.lag) / max(1.0, left / tau)

    def _price(
        self,
        seqs: Seq[Sequence],
        picked: dict[int, Arm],
        budgets: dict[int, int],
        gains: dict[int, list[float]],
        base: Plan,
        price: float,
    ) -> Plan:
        choices = dict(base.choices)
        for i, k in budgets.items():
            choices[i] = Choice(picked[i], k, True, base.choices[i].mode)
        plan = self.plan(seqs, choices)
        late = {s: picked[s.id] for s in seqs if s.id in budgets and picked[s.id].lag > 2}
        catching_up = sum(self.costs.catching_up(a.drafter, a.lag) for a in late.values())
        invested = sum(self._investment(s, a) for s, a in late.items())
        tokens = sum(sum(gains[i][:k]) for i, k in budgets.items())
        lasting = plan.seconds - catching_up + invested
        return replace(plan, value=tokens - price * lasting, catching_up=catching_up)
