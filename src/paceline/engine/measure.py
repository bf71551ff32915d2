"""Measures what target, drafters and host cost on this machine (`core.latency.Profile`).

Two sources. Passes of the target alone, in shuffled order, give T_p by rows and context as
ratios to one row's pass next to them. Steps of a real `Engine` on random prompts then give
drafting and host cost, and what a pass costs between other work. Random tokens are fine for
costs and say nothing about acceptance.

Shared machines are noisy: everything is repeated in shuffled order, warmed up, kept clear of
garbage collections, and condensed by medians.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression

from paceline.core.latency import Curve, Profile, TargetCost
from paceline.draft.base import Drafter, SelfDrafter
from paceline.draft.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.fitting import (
    LONG,
    Run,
    Session,
    Step,
    draft_spread,
    fit_draft,
    fit_host,
    in_situ,
    relative_error,
)
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.base import KVStore, RowGroup, TargetModel, pack
from paceline.types import Request, SamplingParams

#: Changes when what is measured does, so that older cached profiles are not taken.
METHOD = 1

Clock = Callable[[], float]
#: Called with a share of the work done, 0 to 1, and what is being measured.
Progress = Callable[[float, str], None]

default_clock = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How much to measure. rows: of a pass, all of whose logits are wanted; chunks: of a
    prompt's pass, without; sweeps: repetitions; context: long one for the cost of reading a
    cache, at `reading` rows."""

    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    sweeps: int
    context: int
    reading: tuple[int, ...]
    sessions: tuple[Session, ...]


QUICK = Depth(
    rows=(1, 2, 3, 4, 5, 6, 9, 12, 16),
    chunks=(),
    sweeps=2,
    context=1024,
    reading=(1, 8),
    sessions=(
        Session(budgets=(0, 1, 4), rounds=3, prompt=32),
        Session(sampled=True, budgets=(0, 4), rounds=2, prompt=16),
        Session(batch=4, budgets=(0, 4), rounds=1, prompt=8),
    ),
)
FULL = Depth(
    rows=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64),
    chunks=(128, 512),
    sweeps=7,
    context=4096,
    reading=(1, 3, 5, 9, 17),
    sessions=(
        Session(budgets=(0, 1, 2, 4, 8), rounds=7, prompt=64),
        Session(sampled=True, budgets=(0, 1, 4, 8), rounds=5, prompt=64),
        Session(batch=4, budgets=(0, 1, 4, 8), rounds=3, prompt=64),
        Session(batch=4, sampled=True, budgets=(0, 4), rounds=3, prompt=64),
        Session(budgets=(0, 4), rounds=4, prompt=1024),
    ),
)
DEPTHS = {"quick": QUICK, "full": FULL}


def measure(
    model: TargetModel,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    *,
    depth: Depth = FULL,
    vocab_size: int | None = None,
    clock: Clock = default_clock,
    progress: Progress | None = None,
    seed: int = 0,
) -> Profile:
    """Costs of a target and its drafters (by label; without any, of the target alone).

    The drafters must be idle, with pools of at least `config`'s size. Under 3 s at depth
    QUICK and 60 s at FULL for a model whose pass takes 50 ms, with a drafter of a quarter of
    that a token.
    """
    rng = np.random.default_rng(seed)
    start = clock()
    tick = progress or (lambda done, what: None)
    vocab = vocab_size or model.info.vocab_size
    with _undisturbed():
        tick(0.0, "target passes")
        target, spread_target = _measure_target(model, config, depth, vocab, rng, clock)
        runs: dict[str, list[Run]] = {}
        named = dict(drafters) or {"": NoDrafter()}
        sessions = _chosen(depth.sessions, config, model)
        for done, (label, drafter) in enumerate(named.items()):
            engine = _engine(model, drafter, config, sessions, vocab, clock)
            runs[label] = []
            for i, session in enumerate(sessions):
                share = (done + i / len(sessions)) / len(named)
                tick(0.4 + 0.6 * share, f"steps with {label or 'no draft'}")
                runs[label].append(_run_session(engine, session, vocab, rng))
        tick(1.0, "done")
    steps = [s for many in runs.values() for run in many for s in run.steps]
    target = in_situ(target, steps)
    host = {m: fit_host([s for s in steps if s.session.sampled == (m == "sampled")])
            for m in ("greedy", "sampled")}  # fmt: skip
    drafts = {
        label: fit_draft(many, target, host) for label, many in runs.items() if label in drafters
    }
    return Profile(
        target=target,
        drafts=drafts,
        host=host,
        spread={
            "target": spread_target,
            "draft": max((draft_spread(runs[label]) for label in drafts), default=0.0),
        },
        meta={
            "model": model.info.name,
            "dtype": model.info.dtype,
            "device": model.info.device,
            "weight_bytes": model.info.weight_bytes,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(clock() - start, 3),
        },
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# Passes of the target alone.


def _measure_target(
    model: TargetModel,
    config: EngineConfig,
    depth: Depth,
    vocab: int,
    rng: np.random.Generator,
    clock: Clock,
) -> tuple[TargetCost, float]:
    """T_p by rows and by context, and the relative standard error of its ratios."""
    short = 32
    most = max(depth.rows)
    chunks = [n for n in depth.chunks if n <= config.prefill_chunk]
    limit = model.info.max_context
    rows = [n for n in depth.rows if short + n <= limit] or [1]
    chunks = [n for n in chunks if short + n <= limit]
    long = max(min(depth.context, limit - most), short)
    size = config.block_size
    n_blocks = -(-(max(long + most, short + max(chunks, default=0))) // size)
    kv = model.new_kv(n_blocks, size)

    def seconds(n: int, context: int, wanted: int) -> float:
        group = RowGroup(
            tokens=rng.integers(0, vocab, n).astype(np.int32),
            parents=np.arange(-1, n - 1, dtype=np.int32),
            context=context,
            table=np.arange(n_blocks, dtype=np.int32),
            wanted=np.arange(n - wanted, n, dtype=np.int32),
        )
        batch = pack([group], size)
        before = clock()
        model.forward(batch, kv)
        return clock() - before

    seconds(short, 0, 0)
    if long > short:
        _fill(kv, short, long + most)
    for n in (1, rows[-1], 1):  # first calls pack weights and start threads
        seconds(n, short, n)
    ones: list[float] = []
    ratios: dict[int, list[float]] = {n: [] for n in (*rows, *chunks)}
    for _ in range(depth.sweeps):
        times = [(n, seconds(n, short, n)) for n in rng.permutation([*rows, 1, 1]).tolist()]
        unit = median(t for n, t in times if n == 1)
        ones.append(unit)
        for n, t in times:
            ratios[n].append(t / unit)
    for n in chunks:
        for _ in range(2):
            ratios[n].append(seconds(n, short, 0) / seconds(1, short, 1))
    xs = sorted(ratios)
    ys = isotonic_regression([median(ratios[n]) for n in xs]).x * median(ones)
    per_entry = _reading(seconds, [n for n in depth.reading if n <= most], short, long, depth)
    base = [max(y - per_entry(n) * short, 1e-9) for n, y in zip(xs, ys.tolist(), strict=True)]
    spread = [relative_error(ratios[n]) for n in rows if n > 1]
    return (
        TargetCost(rows=Curve(xs=tuple(map(float, xs)), ys=tuple(base)), per_entry=per_entry),
        float(np.mean(spread)) if spread else 0.0,
    )


def _fill(kv: KVStore, known: int, wanted: int) -> None:
    """Copy the first `known` entries over the next ones, up to `wanted`: memory that was
    never written is read faster than real entries."""
    while known < wanted:
        n = min(known, wanted - known)
        kv.move(np.arange(n, dtype=np.int32), np.arange(known, known + n, dtype=np.int32))
        known += n


def _reading(
    seconds: Callable[[int, int, int], float], rows: Seq[int], short: int, long: int, depth: Depth
) -> Curve:
    """Seconds for each entry that a sequence of so many rows reads."""
    if long < 2 * short:
        return Curve.level(0.0)
    ys = []
    for n in rows:
        pairs = [
            (seconds(n, long, n), seconds(n, short, n)) for _ in range(max(2, depth.sweeps // 2))
        ]
        slope = median((a - b) / (long - short) for a, b in pairs)
        ys.append(max(slope, 0.0))
    # More rows never read less.
    return Curve(xs=tuple(map(float, rows)), ys=tuple(np.maximum.accumulate(ys).tolist()))


# Steps of a real engine.


def _engine(
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


def _run_session(engine: Engine, session: Session, vocab: int, rng: np.random.Generator) -> Run:
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
        first = _step(engine, session, max(session.budgets))
        read = engine.stats.time_draft - before
        _step(engine, session, 0)
        steps = [_step(engine, session, k) for k in order]
    finally:
        for i in ids:
            engine.forget(i)
    same = [s.t_q for s in steps if s.k == first.k]
    return Run(session, tuple(steps), max(read - median(same), 0.0))


def _chosen(sessions: Seq[Session], config: EngineConfig, model: TargetModel) -> list[Session]:
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
    if session.batch == 1 and session.prompt < LONG:
        yield replace(session, rounds=1, prompt=min(session.prompt, 8))
        yield replace(session, rounds=1, prompt=4, budgets=(0, 1))


def _longest(session: Session) -> int:
    """Tokens of a sequence at the end: two warm-up steps, all others, and room for one more,
    so that none ends before."""
    most = max(session.budgets)
    steps = session.rounds * sum(k + 1 for k in session.budgets)
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
