"""A machine on simulated time: what policies decide, without any model.

Costs come from a profile (the true one, which the policy need not know) times noise;
acceptance from a function of the request, how far it is, and who drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from paceline.core.latency import Curve, DraftCost, HostCost, Profile, TargetCost, mode_of
from paceline.draft.base import Arm
from paceline.draft.none import NoDrafter
from paceline.engine.policy import BudgetPolicy, Part, Round
from paceline.types import Request, SamplingParams, Sequence

#: Probability that the next drafted token is accepted: of (request, output tokens so far,
#: drafter).
Alpha = Callable[[int, int, str], float]

HOST = HostCost(step=2e-4, sequence=5e-5, row=2e-5)
#: Seconds by rows: reading the weights takes 10 ms, each row adds a little, many rows more.
ROWS = Curve(xs=(1, 4, 8, 16, 64, 512), ys=(0.010, 0.0112, 0.0132, 0.019, 0.060, 0.460))
MODEL = DraftCost(
    fixed=1e-4,
    first=Curve(xs=(1, 16), ys=(0.0032, 0.005)),
    step=Curve(xs=(1, 16), ys=(0.003, 0.005)),
    feed=Curve(xs=(1, 64, 512), ys=(0.003, 0.018, 0.14)),
)
NGRAM = DraftCost(fixed=2e-5)


def profile(**drafts: DraftCost) -> Profile:
    target = TargetCost(rows=ROWS, per_entry=Curve.level(2e-7))
    host = {"greedy": HOST, "sampled": HOST}
    return Profile(target=target, drafts=drafts or {"model": MODEL, "ngram": NGRAM}, host=host)


def scaled(p: Profile, *, rows: float = 1.0, draft: float = 1.0) -> Profile:
    """A profile that is wrong: passes of several rows and drafting cost so many times more."""
    first, *rest = p.target.rows.ys
    ys = (first, *(first + (y - first) * rows for y in rest))
    drafts = {
        name: DraftCost(
            fixed=c.fixed * draft,
            first=Curve(xs=c.first.xs, ys=tuple(y * draft for y in c.first.ys)),
            step=Curve(xs=c.step.xs, ys=tuple(y * draft for y in c.step.ys)),
            feed=Curve(xs=c.feed.xs, ys=tuple(y * draft for y in c.feed.ys)),
        )
        for name, c in p.drafts.items()
    }
    target = replace(p.target, rows=Curve(xs=p.target.rows.xs, ys=ys))
    return replace(p, target=target, drafts=drafts)


class SimDrafter(NoDrafter):
    """names: drafters. matches(request, output tokens): whether n-grams match there."""

    name = "simulated"

    def __init__(
        self, names: Iterable[str], matches: Callable[[int, int], bool] = lambda i, n: True
    ) -> None:
        self.names = list(names)
        self.drafters = dict.fromkeys(self.names)  # as a combination has them
        self.matches = matches
        self.fed: dict[int, int] = {}
        #: Length of the match, by output tokens.
        self.bucket: Callable[[int], int] = lambda n: 2

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        found = []
        for name in self.names:
            if name == "ngram":
                if self.matches(seq.id, seq.n_output):
                    found.append(Arm(drafter=name, bucket=self.bucket(seq.n_output)))
            else:
                lag = len(seq.tokens) - self.fed.get(seq.id, 0)
                found.append(Arm(drafter=name, lag=max(1, lag)))
        return tuple(found)


@dataclass
class Simulation:
    """speed(t): a factor on all costs at simulated time t. noise: on each round's. temperature:
    of all requests. upkeep: seconds of drafting in every round, for what a drafter keeps.
    work: seconds without these factors, by which runs can be compared."""

    true: Profile
    drafter: SimDrafter
    alpha: Alpha
    policy: BudgetPolicy
    rng: np.random.Generator
    noise: tuple[float, float] = (1.0, 1.0)
    speed: Callable[[float], float] = lambda t: 1.0
    upkeep: float = 0.0
    temperature: float = 0.0
    now: float = 0.0
    work: float = 0.0
    tokens: int = 0
    finished: dict[int, float] = field(default_factory=dict)

    def run(self, requests: Iterable[tuple[float, int, int]], max_batch: int = 16) -> float:
        """(arrival, prompt length, output length) of requests; seconds until all ended."""
        waiting = []
        for i, (at, n, m) in enumerate(requests):
            params = SamplingParams(max_tokens=m, temperature=self.temperature)
            waiting.append((at, Sequence(i, Request(prompt=(1,) * n, params=params), i)))
        running: list[Sequence] = []
        begin = self.now
        while waiting or running:
            while waiting and len(running) < max_batch and waiting[0][0] <= self.now:
                running.append(waiting.pop(0)[1])
            if not running:
                self.now = waiting[0][0]
                continue
            self.step(running)
            for seq in [s for s in running if s.n_output >= s.params.max_tokens]:
                running.remove(seq)
                self.policy.forget(seq.id)
                self.finished[seq.id] = self.now
        return self.now - begin

    def step(self, running: list[Sequence]) -> None:
        budgets = self.policy.budgets(running)
        parts, drafted = [], []
        by_drafter: dict[str, list[tuple[int, int, int]]] = {}
        for seq, budget in zip(running, budgets, strict=True):
            left = seq.params.max_tokens - seq.n_output - 1
            k = 0 if seq.n_output == 0 else min(budget, left)
            name = self._who(seq) if k > 0 else None
            drafted.append((k if name else 0, name))
            if name:
                fed = self.drafter.fed.get(seq.id, 0) if name != "ngram" else len(seq.tokens)
                lag = len(seq.tokens) - fed
                by_drafter.setdefault(name, []).append((k, seq.computed, lag))
                if name != "ngram":
                    self.drafter.fed[seq.id] = len(seq.tokens)
        t_draft = self.upkeep
        for name, asked in by_drafter.items():
            cost = self.true.drafts[name]
            mode = mode_of(self.temperature)
            t_draft += cost([k for k, _, _ in asked], [c for _, c, _ in asked], mode)
            t_draft += cost.catch_up(sum(lag for _, _, lag in asked if lag > 2))
        rows = [s.pending + k for s, (k, _) in zip(running, drafted, strict=True)]
        t_pass = self.true.target(rows, [s.computed for s in running])
        t_host = HOST(len(running), sum(k + 1 for k, _ in drafted))
        factor = self.speed(self.now) * self.rng.uniform(*self.noise)
        for seq, (k, name), budget in zip(running, drafted, budgets, strict=True):
            accepted = 0
            while accepted < k and self.rng.random() < self.alpha(
                seq.id, seq.n_output + accepted, name or ""
            ):
                accepted += 1
            parts.append(
                Part(
                    seq_id=seq.id,
                    rows=seq.pending,
                    context=seq.computed,
                    budget=min(budget, k),
                    drafted=k,
                    accepted=accepted,
                    emitted=accepted + 1,
                )
            )
        for seq, part in zip(running, parts, strict=True):
            seq.computed = len(seq.tokens) + part.accepted
            seq.tokens.extend([1] * part.emitted)
            self.tokens += part.emitted
        done = Round(
            parts=tuple(parts),
            t_draft=factor * t_draft,
            t_target=factor * t_pass,
            t_other=factor * t_host,
        )
        self.now += done.seconds
        self.work += t_draft + t_pass + t_host
        self.policy.observe(done)

    def _who(self, seq: Sequence) -> str | None:
        route = getattr(self.policy, "route", None)
        wanted = route(seq) if route else None
        if wanted is not None:
            return wanted
        arms = self.drafter.arms(seq)
        return arms[0].drafter if arms else None
