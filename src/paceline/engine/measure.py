"""Measures what target, drafters and host cost on this machine (`core.latency.Profile`).

Three sources. Passes of the target alone, in shuffled order, give T_p by rows and context as
ratios to one row's pass next to them. Steps of a real `Engine` with random drafts say what such
passes cost between an engine's other work, which is more: caches are colder and threads sleep.
Steps with the drafters give drafting. Random tokens are fine for costs and say nothing about
acceptance.

Shared machines are noisy and change their speed by a third for seconds at a time, passes of many
rows by more than those of one: everything is repeated in shuffled order, over some seconds however
fast the model is, warmed up, kept clear of garbage collections, compared with plain passes next to
it, and condensed by medians.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import numpy as np
from scipy.optimize import isotonic_regression

from paceline.core.latency import MODES, Curve, Profile, TargetCost
from paceline.draft.base import Drafter
from paceline.engine.engine import EngineConfig
from paceline.engine.fitting import (
    Run,
    Session,
    at_one_speed,
    draft_spread,
    fit_draft,
    fit_host,
    fit_target,
    settled,
)
from paceline.engine.sessions import Clock, RandomDrafter, chosen, new_engine, run_session, warm_up
from paceline.models.base import KVStore, RowGroup, TargetModel, pack

#: Changes when what is measured does, so that older cached profiles are not taken.
METHOD = 5

#: So many times more often than a depth says is anything repeated at most.
MOST = 5

#: Seconds after which a machine runs at the speed that steps of one kind have in the long run:
#: plain ones of a small model are a twentieth faster then, and verifying ones slower.
SETTLE = 0.05

#: Called with a share of the work done, 0 to 1, and what is being measured.
Progress = Callable[[float, str], None]

default_clock = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How much to measure. rows: of a pass, all of whose logits are wanted; chunks: of a
    prompt's pass, without; sweeps: repetitions; context: long one for the cost of reading a
    cache, at `reading` rows. random: engine steps with random drafts, `cycles` times; far: the
    same once, with long prompts. sessions: engine steps with each drafter. Single and batched
    ones of both modes among `random` tell a step's host cost from a sequence's. seconds: over
    which cycles and the drafters' sessions are spread by more of them, up to MOST times as
    many."""

    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    sweeps: int
    context: int
    reading: tuple[int, ...]
    random: tuple[Session, ...]
    cycles: int
    far: tuple[Session, ...]
    sessions: tuple[Session, ...]
    seconds: float

    def repeat(self, times: int, clock: Clock, share: float = 1.0) -> Iterator[int]:
        """As often as wanted, and more often where that took less than the share of `seconds`."""
        start = clock()
        for i in range(MOST * times):
            if i >= times and clock() - start >= share * self.seconds:
                return
            yield i


QUICK = Depth(
    rows=(1, 2, 4, 9, 16),
    chunks=(),
    sweeps=1,
    context=1024,
    reading=(1, 8),
    random=(
        Session(budgets=(0, 1, 4, 8), rounds=1, prompt=8, streak=2),
        Session(sampled=True, budgets=(0, 4), rounds=1, prompt=8, streak=2),
        Session(batch=4, budgets=(0,), rounds=1, prompt=4),
        Session(batch=4, sampled=True, budgets=(0,), rounds=1, prompt=4),
    ),
    cycles=1,
    far=(),
    sessions=(
        Session(budgets=(0, 1, 4), rounds=2, prompt=32, streak=2),
        Session(sampled=True, budgets=(0, 4), rounds=1, prompt=16, streak=2),
        Session(batch=4, budgets=(0, 4), rounds=1, prompt=8),
    ),
    seconds=0.0,
)
FULL = Depth(
    rows=(1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 48, 64),
    chunks=(128, 512),
    sweeps=3,
    context=4096,
    reading=(1, 3, 5, 9, 17),
    random=(
        Session(budgets=(0, 1, 2, 3, 4, 6, 8, 12), rounds=1, prompt=16, streak=3, settle=SETTLE),
        Session(sampled=True, budgets=(0, 2, 4, 8), rounds=1, prompt=16, streak=3, settle=SETTLE),
        Session(batch=4, budgets=(0, 4), rounds=1, prompt=16, streak=3, settle=SETTLE),
        Session(
            batch=4, sampled=True, budgets=(0, 4), rounds=1, prompt=16, streak=3, settle=SETTLE
        ),
    ),
    cycles=3,
    far=(
        Session(budgets=(0,), rounds=1, prompt=16, streak=6, settle=SETTLE),
        Session(budgets=(0, 4, 8), rounds=2, prompt=1024, streak=3, settle=SETTLE),
    ),
    sessions=(
        Session(budgets=(0, 1, 2, 4, 8), rounds=3, prompt=64, streak=3, settle=SETTLE),
        Session(sampled=True, budgets=(0, 1, 4, 8), rounds=2, prompt=192, streak=3, settle=SETTLE),
        Session(batch=4, budgets=(0, 1, 4), rounds=2, prompt=32, streak=3, settle=SETTLE),
        Session(
            batch=4, sampled=True, budgets=(0, 4), rounds=1, prompt=32, streak=4, settle=SETTLE
        ),
        Session(budgets=(0, 4), rounds=3, prompt=1024, streak=3, settle=SETTLE),
    ),
    seconds=8.0,
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

    The drafters must be idle, with pools of at least `config`'s size. About 5 s at depth
    QUICK and 60 s at FULL for a model whose pass takes 50 ms, with a drafter of a quarter of
    that a token.
    """
    rng = np.random.default_rng(seed)
    start = clock()
    tick = progress or (lambda done, what: None)
    vocab = vocab_size or model.info.vocab_size
    with _undisturbed():
        tick(0.0, "target passes")
        swept = _measure_target(model, config, depth, vocab, rng, clock)
        tick(0.3, "steps with random drafts")
        cycles = _random_steps(model, config, depth, vocab, rng, clock)
        runs: dict[str, list[Run]] = {}
        sessions = chosen(depth.sessions, config, model)
        for done, (label, drafter) in enumerate(drafters.items()):
            engine = new_engine(model, drafter, config, sessions, vocab, clock)
            runs[label] = []
            warm_up(engine, vocab, rng)
            for turn in depth.repeat(1, clock, 1 / len(drafters)):
                for i, session in enumerate(sessions):
                    share = (done + (turn + i / len(sessions)) / (turn + 1)) / len(drafters)
                    tick(0.5 + 0.5 * share, f"steps with {label}")
                    runs[label].append(run_session(engine, session, vocab, rng))
        tick(1.0, "done")
    random = at_one_speed(cycles)
    target, spread_target = fit_target(swept, random)
    host = {mode: fit_host(random, target, mode) for mode in MODES}
    runs = {label: [settled(run, target, host) for run in many] for label, many in runs.items()}
    drafts = {label: fit_draft(many, target, host, spread_target) for label, many in runs.items()}
    return Profile(
        target=target,
        drafts=drafts,
        host=host,
        spread={
            "target": spread_target,
            "draft": max(map(draft_spread, runs.values()), default=0.0),
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
) -> TargetCost:
    """T_p by rows and by context, of passes that follow each other."""
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
        # The faster of two: so long a pass is often disturbed, which only ever adds.
        ratios[n].append(min(seconds(n, short, 0) / seconds(1, short, 1) for _ in range(2)))
    xs = sorted(ratios)
    ys = isotonic_regression([median(ratios[n]) for n in xs]).x * median(ones)
    per_entry = _reading(seconds, [n for n in depth.reading if n <= most], short, long, depth)
    base = [max(y - per_entry(n) * short, 1e-9) for n, y in zip(xs, ys.tolist(), strict=True)]
    return TargetCost(rows=Curve(xs=tuple(map(float, xs)), ys=tuple(base)), per_entry=per_entry)


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


def _random_steps(
    model: TargetModel,
    config: EngineConfig,
    depth: Depth,
    vocab: int,
    rng: np.random.Generator,
    clock: Clock,
) -> list[list[Run]]:
    """Cycles of sessions with random drafts; each cycle begins with plain greedy steps."""
    near = chosen(depth.random, config, model)
    far = chosen(depth.far, config, model) if depth.far else []
    engine = new_engine(model, RandomDrafter(vocab, rng), config, [*near, *far], vocab, clock)
    cycles = [
        [run_session(engine, s, vocab, rng) for s in near]
        for _ in depth.repeat(depth.cycles, clock)
    ]
    if len(far) > 1:
        cycles.append([run_session(engine, s, vocab, rng) for s in far])
    return cycles
