"""Requests in time: what is sent when, and when each token came.

Closed loop: `concurrency` requests are always in flight; when one ends the next is sent.
Their number may change under way.
Open loop: requests arrive at random times whether or not earlier ones are done (Poisson), so
that queueing shows. Both step the engine in this thread, so a trace holds no other waiting
than the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.engine import Engine, EngineStats
from paceline.errors import UserError
from paceline.types import FinishReason, Request, RequestOutput

Clock = Callable[[], float]
Sleep = Callable[[float], None]


@dataclass(frozen=True)
class RequestTrace:
    """One request: when it arrived, and when which number of tokens came (one entry a round
    that gave any). Seconds of the run's clock."""

    arrival: float
    times: tuple[float, ...]
    counts: tuple[int, ...]
    output: RequestOutput


@dataclass
class KvSamples:
    """Slots in use after every step, summed for the mean, and the peaks."""

    steps: int = 0
    used: int = 0
    peak: int = 0
    scratch_peak: int = 0
    draft_used: int = 0
    draft_peak: int = 0


@dataclass(frozen=True)
class RunTrace:
    """One run of the engine over a list of requests, in their order."""

    requests: tuple[RequestTrace, ...]
    elapsed: float
    stats: EngineStats
    kv: KvSamples


@dataclass
class _Live:
    index: int
    arrival: float
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


class _Run:
    """Mutable: the requests in flight of one run."""

    def __init__(self, engine: Engine, requests: Seq[Request], clock: Clock) -> None:
        assert engine.idle, "another run is under way"
        self.engine, self.requests, self.clock = engine, requests, clock
        self.live: dict[int, _Live] = {}
        self.done: dict[int, RequestTrace] = {}
        self.tokens = 0
        self.kv = KvSamples()
        engine.stats = EngineStats()  # peaks and times of this run alone

    def send(self, index: int, arrival: float) -> None:
        (request_id,) = self.engine.submit(self.requests[index])
        self.live[request_id] = _Live(index, arrival)

    def step(self) -> None:
        outputs = self.engine.step()
        now = self.clock()
        self._sample()
        for output in outputs:
            live = self.live[output.request_id]
            self.tokens += len(output.tokens)
            if output.tokens:
                live.times.append(now)
                live.counts.append(len(output.tokens))
            if output.finish_reason is FinishReason.ERROR:
                raise UserError(f"a request failed during the benchmark: {output.error}")
            if output.finish_reason is not None:
                del self.live[output.request_id]
                self.done[live.index] = RequestTrace(
                    live.arrival,
                    tuple(live.times),
                    tuple(live.counts),
                    self.engine.result(output.request_id),
                )

    def _sample(self) -> None:
        size = self.engine.config.block_size
        used = self.engine.scheduler.allocator.n_used * size
        draft = self.engine.drafter.usage().blocks_used * size
        self.kv.steps += 1
        self.kv.used += used
        self.kv.draft_used += draft
        self.kv.draft_peak = max(self.kv.draft_peak, draft)

    def abandon(self, kept: int = 0) -> None:
        """End what is in flight but the oldest `kept`; all of it, so that the engine can go on
        after an interruption."""
        for request_id in list(self.live)[kept:]:
            self.engine.forget(request_id)
            del self.live[request_id]

    def trace(self, elapsed: float) -> RunTrace:
        stats = self.engine.stats
        self.kv.peak = stats.kv_peak_blocks * self.engine.config.block_size
        self.kv.scratch_peak = stats.kv_peak_scratch_slots
        requests = tuple(self.done[i] for i in range(len(self.requests)))
        return RunTrace(requests, elapsed, stats, self.kv)


def closed_loop(
    engine: Engine,
    requests: Seq[Request],
    concurrency: int,
    *,
    clock: Clock = time.perf_counter,
) -> RunTrace:
    """Send `concurrency` requests at once, then one as soon as one has ended. Each request
    is a single sample (n = 1). UserError where one fails."""
    run = _Run(engine, requests, clock)
    start = clock()
    sent = 0
    try:
        while len(run.done) < len(requests):
            while sent < len(requests) and len(run.live) < concurrency:
                run.send(sent, clock())
                sent += 1
            run.step()
    finally:
        run.abandon()
    return run.trace(clock() - start)


def changing_loop(
    engine: Engine,
    requests: Seq[Request],
    phases: Seq[tuple[int, int]],
    *,
    clock: Clock = time.perf_counter,
) -> list[tuple[list[float], list[int]]]:
    """A closed loop whose size changes under way. For each phase, the seconds and the tokens of
    all requests since it began: 0 at first, then after each step.

    phases: requests in flight, and the tokens with which that ends (a step may bring more). Then
    load rises at once, or falls at once: the oldest requests go on, the others are dropped.
    Requests are sent in turn, over and over. UserError where one fails.
    """
    run, sent, found = _Run(engine, requests, clock), 0, []
    try:
        for in_flight, tokens in phases:
            run.abandon(in_flight)
            start, before = clock(), run.tokens
            times, counts = [0.0], [0]
            while counts[-1] < tokens:
                while len(run.live) < in_flight:
                    run.send(sent % len(requests), clock())
                    sent += 1
                run.step()
                times.append(clock() - start)
                counts.append(run.tokens - before)
            found.append((times, counts))
    finally:
        run.abandon()
    return found


def poisson_arrivals(n: int, rate: float, seed: int) -> list[float]:
    """n arrival times, seconds from the start, `rate` a second on average; the first at 0."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, n)
    gaps[0] = 0.0
    return [float(t) for t in np.cumsum(gaps)]


def open_loop(
    engine: Engine,
    requests: Seq[Request],
    arrivals: Seq[float],
    concurrency: int,
    *,
    clock: Clock = time.perf_counter,
    sleep: Sleep = time.sleep,
) -> RunTrace:
    """Send each request at its arrival (seconds from the start, ascending), or as soon after
    as fewer than `concurrency` are in flight; its time counts from the arrival."""
    run = _Run(engine, requests, clock)
    start = clock()
    sent = 0
    try:
        while len(run.done) < len(requests):
            while (
                sent < len(requests)
                and len(run.live) < concurrency
                and start + arrivals[sent] <= clock()
            ):
                run.send(sent, start + arrivals[sent])
                sent += 1
            if run.live:
                run.step()
            else:
                sleep(max(0.0, start + arrivals[sent] - clock()))
    finally:
        run.abandon()
    return run.trace(clock() - start)
