"""Steps of a real engine, taken to see what they cost (`engine.measure`).

Random prompts, every number of draft tokens in shuffled order. Random tokens are fine for costs
and say nothing about acceptance.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median

import numpy as np

from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, Drafter, SelfDrafter, arms_of
from paceline.draft.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.fitting import LONG, Run, Session, Step
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.base import TargetModel
from paceline.types import Request, SamplingParams, Sequence

Clock = Callable[[], float]


class RandomDrafter(NoDrafter):
    """Proposes as many tokens as it is asked for, drawn evenly: it costs nothing and is hardly
    ever right, so that what a round takes more than a plain one is verification."""

    name = "random"

    def __init__(self, vocab: int, rng: np.random.Generator) -> None:
        self._vocab, self._rng = vocab, rng

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0])

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return (Arm(drafter=self.name),)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        return [
            chain(seq.tokens[-1], self._rng.integers(0, self._vocab, k).tolist())
            for seq, k in zip(seqs, budgets, strict=True)
        ]


def new_engine(
    model: TargetModel,
    drafter: Drafter,
    config: EngineConfig,
    sessions: Seq[Session],
    vocab: int,
    clock: Clock,
) -> Engine:
    """An engine for all sessions, its cache no larger than they need."""
    needs = [s.batch * (_longest(s) + config.block_size) for s in sessions]
    own = replace(config, kv_tokens=max([config.block_size, *needs]), prefix_cache=False)
    if isinstance(drafter, SelfDrafter):  # the original stays bound to its own engine's cache
        drafter = copy.copy(drafter)
    return Engine(model, drafter, FixedBudget(0), own, vocab_size=vocab, clock=clock)


def warm_up(engine: Engine, vocab: int, rng: np.random.Generator) -> None:
    """One round and what led to it: a draft's first passes pack weights and touch memory for
    the first time."""
    engine.policy = FixedBudget(1)
    prompt = tuple(rng.integers(0, vocab, 4).tolist())
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    ids = engine.submit(Request(prompt=prompt, params=params))
    while not engine.idle:
        engine.step()
    for i in ids:
        engine.forget(i)


def run_session(engine: Engine, session: Session, vocab: int, rng: np.random.Generator) -> Run:
    order = [k for _ in range(session.rounds) for k in rng.permutation(session.budgets).tolist()]
    params = SamplingParams(
        temperature=1.0 if session.sampled else 0.0,
        max_tokens=_longest(session) - session.prompt,
        ignore_eos=True,
    )
    half = rng.integers(0, vocab, (session.batch, -(-session.prompt // 2)))
    prompts = np.concatenate([half, half], axis=1)[:, : session.prompt]
    engine.policy = FixedBudget(0)
    before = engine.stats.time_draft
    ids = [
        i for p in prompts.tolist() for i in engine.submit(Request(prompt=tuple(p), params=params))
    ]
    try:
        while engine.scheduler.waiting or any(s.n_output == 0 for s in engine.scheduler.running):
            engine.step()
        fed = _fed(engine, session)
        first = _step(engine, session, max(session.budgets))
        read = engine.stats.time_draft - before
        _step(engine, session, 0)
        steps = []
        for k in order:
            steps += _streak(engine, session, k)
    finally:
        for i in ids:
            engine.forget(i)
    same = [s.t_q for s in steps if s.k == first.k]
    return Run(session, tuple(steps), max(read - median(same), 0.0), fed)


def _fed(engine: Engine, session: Session) -> int:
    """Rows of each prompt that the drafter will read: not all, where it says so."""
    lags = [a.lag for s in engine.scheduler.running for a in arms_of(engine.drafter, s)]
    lag = max(lags, default=0)
    return min(lag, session.prompt) if lag > 1 else session.prompt


def _streak(engine: Engine, session: Session, k: int) -> list[Step]:
    """The steps that count: half as long as the machine took to settle, and no fewer than asked
    for."""
    first: list[Step] = []
    passed = 0.0
    while not first or (passed < session.settle and len(first) < session.longest_streak // 2):
        first.append(_step(engine, session, k))
        passed += first[-1].seconds
    counted: list[Step] = []
    passed = 0.0
    while len(first) + len(counted) < session.longest_streak and (
        len(counted) < session.streak - 1 or passed < session.settle / 2
    ):
        counted.append(_step(engine, session, k))
        passed += counted[-1].seconds
    return counted or first


def chosen(sessions: Seq[Session], config: EngineConfig, model: TargetModel) -> list[Session]:
    """Those that fit, basic ones made smaller where they don't. UserError where the pool is
    too small for any."""
    found = [
        next((size for size in _sizes(session) if _fits(size, config, model)), None)
        for session in sessions
    ]
    chosen = [s for s in found if s is not None]
    if not any(s.prompt < LONG and not s.sampled for s in chosen):
        raise UserError(
            f"kv_tokens = {config.kv_tokens} is too small to measure costs in: raise it"
        )
    return chosen


def _sizes(session: Session) -> Iterator[Session]:
    """A session, and where it is a basic one, what will do in a small pool or context."""
    yield session
    if session.settle:
        session = replace(session, settle=0.0)
        yield session
    if session.batch == 1 and session.prompt < LONG:
        yield replace(session, rounds=1, prompt=min(session.prompt, 8))
        yield replace(session, rounds=1, prompt=4, budgets=(0, 1))


def _longest(session: Session) -> int:
    """Tokens of a sequence at the end: two warm-up steps, all others, and room for one more,
    so that none ends before."""
    most = max(session.budgets)
    steps = session.rounds * session.longest_streak * sum(k + 1 for k in session.budgets)
    return session.prompt + (most + 1) + 1 + steps + most + 2


def _fits(session: Session, config: EngineConfig, model: TargetModel) -> bool:
    longest = _longest(session)
    return (
        session.batch <= config.max_batch
        and longest <= model.info.max_context
        and session.batch * (longest + config.block_size) <= config.kv_tokens
    )


def _step(engine: Engine, session: Session, k: int) -> Step:
    engine.policy = FixedBudget(k)
    running = list(engine.scheduler.running)
    contexts = tuple(s.computed for s in running)
    s = engine.stats
    before = (s.time_target, s.time_draft, s.time_other, s.rows)
    engine.step()
    return Step(
        session=session,
        k=k,
        drafted=s.rows - before[3] - len(running),
        contexts=contexts,
        t_p=s.time_target - before[0],
        t_q=s.time_draft - before[1],
        t_o=s.time_other - before[2],
    )
