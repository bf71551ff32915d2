"""Closed and open loops on simulated time."""

from __future__ import annotations

import bench_devices as b
import pytest

from paceline.bench.load import RunTrace, changing_loop, closed_loop, open_loop, poisson_arrivals
from paceline.errors import UserError
from paceline.types import Request, SamplingParams


def requests(n: int, tokens: int = 8) -> list[Request]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [Request(prompt=(1 + i % 11, 2, 3), params=params) for i in range(n)]


def in_flight(trace: RunTrace) -> int:
    """The most requests that overlap in time."""
    edges = [(t.arrival, 1) for t in trace.requests] + [(t.times[-1], -1) for t in trace.requests]
    most = now = 0
    for _, change in sorted(edges, key=lambda e: (e[0], e[1])):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_a_closed_loop_keeps_its_number_in_flight(concurrency: int) -> None:
    clock = b.FakeClock()
    s = b.subject("none", clock)
    trace = closed_loop(s.engine, requests(9), concurrency, clock=clock)
    assert in_flight(trace) == concurrency
    assert len(trace.requests) == 9
    assert all(len(t.output.tokens) == sum(t.counts) == 8 for t in trace.requests)
    # Eight passes of 10 ms a request, `concurrency` requests side by side.
    waves = -(-9 // concurrency)
    assert trace.elapsed == pytest.approx(waves * 8 * 0.010)


def test_a_loop_changes_its_size_under_way() -> None:
    """1, 4 and 1 in flight; each phase begins in the middle of a request of 8 tokens."""
    clock = b.FakeClock()
    s = b.subject("none", clock)
    first, middle, last = changing_loop(
        s.engine, requests(3), [(1, 12), (4, 40), (1, 6)], clock=clock
    )
    assert [counts for _, counts in (first, middle, last)] == [
        list(range(13)), list(range(0, 41, 4)), list(range(7))
    ]  # fmt: skip
    for times, counts in (first, middle, last):
        assert times == pytest.approx([0.010 * i for i in range(len(counts))])
    assert s.engine.idle
    assert s.engine.scheduler.allocator.n_used == 0


def test_when_load_falls_the_oldest_request_goes_on() -> None:
    """It alone is not read anew: a prompt of 12 tokens costs a pass of 12 rows."""
    clock = b.FakeClock()
    s = b.subject("none", clock, cost=lambda rows: 0.001 * rows)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    many = [Request(prompt=(1 + i,) * 12, params=params) for i in range(3)]
    _, (times, counts) = changing_loop(s.engine, many, [(3, 9), (1, 6)], clock=clock)
    # Five tokens more of the oldest one, a token a row; then the next request is read.
    assert counts == list(range(7))
    assert times == pytest.approx([0.0, 0.001, 0.002, 0.003, 0.004, 0.005, 0.017])


def test_results_stand_in_the_order_of_the_requests() -> None:
    clock = b.FakeClock()
    s = b.subject("none", clock)
    many = [
        Request(prompt=(1, 2), params=SamplingParams(max_tokens=n, ignore_eos=True))
        for n in (9, 2, 5)
    ]
    trace = closed_loop(s.engine, many, 3, clock=clock)
    assert [len(t.output.tokens) for t in trace.requests] == [9, 2, 5]


def test_cache_use_is_counted_and_ends_at_nothing() -> None:
    clock = b.FakeClock()
    s = b.subject("self", clock)
    s.use(b.cell(k=3))
    trace = closed_loop(s.engine, requests(2), 1, clock=clock)
    assert trace.kv.peak >= 3 + 8 - 1
    assert trace.kv.scratch_peak == 3
    assert trace.kv.draft_peak > 0
    assert s.engine.scheduler.allocator.n_used == 0
    # Peaks are those of one run.
    s.plain()
    assert closed_loop(s.engine, requests(1), 1, clock=clock).kv.scratch_peak == 0


def test_an_open_loop_sends_at_the_arrivals_and_queues() -> None:
    """Each request takes 80 ms alone; the second and third come while the first runs."""
    clock = b.FakeClock()
    s = b.subject("none", clock)
    trace = open_loop(
        s.engine, requests(4), [0.0, 0.02, 0.03, 5.0], 1, clock=clock, sleep=clock.sleep
    )
    start = trace.requests[0].arrival
    waits = [t.times[-1] - t.arrival for t in trace.requests]
    assert [t.arrival - start for t in trace.requests] == pytest.approx([0.0, 0.02, 0.03, 5.0])
    assert waits == pytest.approx([0.08, 0.14, 0.21, 0.08])  # the queue counts
    assert trace.elapsed == pytest.approx(5.08)
    assert in_flight(trace) == 3
    wide = open_loop(
        s.engine, requests(4), [0.0, 0.02, 0.03, 5.0], 8, clock=clock, sleep=clock.sleep
    )
    assert max(t.times[-1] - t.arrival for t in wide.requests) < 0.1


def test_poisson_arrivals_have_their_rate() -> None:
    """Mean gap of 20000 exponential ones: within 5 standard errors (odds 6e-7, fixed seed)."""
    times = poisson_arrivals(20001, 4.0, seed=3)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] / 20000 == pytest.approx(0.25, abs=5 * 0.25 / 20000**0.5)
    assert times == poisson_arrivals(20001, 4.0, seed=3)
    assert times != poisson_arrivals(20001, 4.0, seed=4)


def test_an_interrupted_run_leaves_the_engine_idle() -> None:
    clock = b.FakeClock()
    calls = 0

    def stop(rows: int) -> float:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return 0.01

    s = b.subject("none", clock, cost=stop)
    with pytest.raises(KeyboardInterrupt):
        closed_loop(s.engine, requests(5), 2, clock=clock)
    assert s.engine.idle
    assert len(closed_loop(s.engine, requests(2), 2, clock=clock).requests) == 2


def test_a_failed_request_ends_the_run_by_name() -> None:
    clock = b.FakeClock()
    s = b.subject("none", clock)
    s.engine.model._change = lambda context, logits: logits * float("nan")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="NaN"):
        closed_loop(s.engine, requests(1), 1, clock=clock)
