"""Measure a group of cells: plain and speculative runs, interleaved, of the same requests.

Order: with one request in flight, every prompt is decoded in all ways in turn before the next
prompt comes; with several, the whole workload is. The order of the ways is reversed from
repeat to repeat (A B B A for plain and one speculative way), so that a drift of the machine's
speed hits all alike.

Legend: P prompts (items, all turns of one together), R repeats.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from paceline.bench import metrics
from paceline.bench.load import (
    Clock,
    RequestTrace,
    RunTrace,
    closed_loop,
    open_loop,
    poisson_arrivals,
)
from paceline.bench.lossless import Conditions, Pair, judge
from paceline.bench.machine import Meter, machine_use
from paceline.bench.prepare import Prepared, Prompt, Subject
from paceline.bench.results import (
    CellConfig,
    CellResult,
    Estimate,
    ModelRecord,
    Protocol,
    Sample,
    Side,
    Slice,
    WorkloadRecord,
)
from paceline.bench.stats import paired_speedup, spread
from paceline.bench.workloads import LENGTHS, UNSAID, Workload

#: Called with the number of requests that were just decoded.
Advance = Callable[[int], None]
_WARM_UP_TOKENS = 24
#: Prompts from which on the interval holds what it says (`paired_speedup`).
FEW = 5


@dataclass
class Way:
    """One way to decode, and all its runs. cell: None is plain decoding."""

    cell: CellConfig | None
    meter: Meter
    runs: list[RunTrace] = field(default_factory=list)
    traces: dict[tuple[int, int], RequestTrace] = field(default_factory=dict)  # prompt, repeat


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the cells of a group share. run: number of the provenance."""

    protocol: Protocol
    workload: Workload
    models: tuple[ModelRecord, ...]
    run: int
    bandwidth: float | None
    clock: Clock = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


def measure(
    subject: Subject,
    cells: Seq[tuple[str, CellConfig]],
    prepared: Prepared,
    context: Context,
    advance: Advance,
) -> list[CellResult]:
    """Cells (with their keys) that differ in policy and k alone."""
    begin = context.clock()
    device = subject.engine.model.info.device
    ways = [Way(None, Meter(device)), *(Way(cell, Meter(device)) for _, cell in cells)]
    first = cells[0][1]
    warm_up(subject, ways, prepared.prompts[0], context, first)
    firsts = {}
    for repeat in range(context.protocol.repeats):
        for number, chunk in enumerate(_chunks(prepared.prompts, first)):
            forward = (repeat + number) % 2 == 0
            for index, _ in chunk:
                firsts[index, repeat] = forward
            for way in ways if forward else reversed(ways):
                _run(subject, way, chunk, repeat, context, first)
                advance(len(chunk))
    seconds = (context.clock() - begin) / len(cells)
    return [
        _result(subject, key, ways[0], way, firsts, prepared, context, seconds)
        for (key, _), way in zip(cells, ways[1:], strict=True)
    ]


def _chunks(prompts: Seq[Prompt], cell: CellConfig) -> list[list[tuple[int, Prompt]]]:
    """What is decoded in one run, with the prompts' numbers."""
    numbered = list(enumerate(prompts))
    return [numbered] if _batched(cell) else [[pair] for pair in numbered]


def _batched(cell: CellConfig) -> bool:
    """Whether all prompts of a repeat are one run."""
    return cell.concurrency > 1 or cell.rate is not None


def _choose(subject: Subject, way: Way) -> None:
    if way.cell is None:
        subject.plain()
    else:
        subject.use(way.cell)


def warm_up(
    subject: Subject, ways: Seq[Way], prompt: Prompt, context: Context, cell: CellConfig
) -> None:
    """A short, untimed request of every way."""
    short = Prompt(prompt.item, prompt.turn, prompt.tokens, min(prompt.length, _WARM_UP_TOKENS))
    for way in ways:
        _choose(subject, way)
        fast = way.cell is not None
        request = short.request(context.protocol, cell.temperature, 0, fast)
        closed_loop(subject.engine, [request], 1, clock=context.clock)


def _run(
    subject: Subject,
    way: Way,
    chunk: Seq[tuple[int, Prompt]],
    repeat: int,
    context: Context,
    cell: CellConfig,
) -> None:
    _choose(subject, way)
    fast = way.cell is not None
    requests = [p.request(context.protocol, cell.temperature, repeat, fast) for _, p in chunk]
    way.meter.start()
    if cell.rate is None:
        trace = closed_loop(subject.engine, requests, cell.concurrency, clock=context.clock)
    else:
        arrivals = poisson_arrivals(len(requests), cell.rate, context.protocol.seed + repeat)
        trace = open_loop(
            subject.engine,
            requests,
            arrivals,
            cell.concurrency,
            clock=context.clock,
            sleep=context.sleep,
        )
    way.meter.stop()
    way.runs.append(trace)
    for (index, _), one in zip(chunk, trace.requests, strict=True):
        way.traces[index, repeat] = one


# --- from runs to a result -----------------------------------------------------------------


def _result(
    subject: Subject,
    key: str,
    plain: Way,
    fast: Way,
    firsts: dict[tuple[int, int], bool],
    prepared: Prepared,
    context: Context,
    seconds: float,
) -> CellResult:
    assert fast.cell is not None
    cell, prompts = fast.cell, prepared.prompts
    samples = tuple(
        _sample(prompts[index], repeat, plain.traces[index, repeat], trace, firsts[index, repeat])
        for (index, repeat), trace in sorted(fast.traces.items())
    )
    pairs = [
        Pair(prompts[i].tokens, plain.traces[i, r].output.token_ids, trace.output.token_ids)
        for (i, r), trace in sorted(fast.traces.items())
    ]
    comparable = context.protocol.seeded and subject.deterministic
    conditions = Conditions(
        temperature=cell.temperature, comparable=comparable, seed=context.protocol.seed
    )
    sides = {way: _side(subject, w, context) for way, w in (("plain", plain), ("fast", fast))}
    tau = sides["fast"].acceptance.tau_pooled
    assert tau is not None
    plain_rate = sides["plain"].throughput.server_tok_s
    return CellResult(
        key=key,
        run=context.run,
        config=cell,
        workload=workload_record(context.workload, prompts),
        models=context.models,
        speedup=speedup(samples, context.protocol.seed, shared=_batched(cell)),
        decode_speedup=_decode_speedup(plain, fast, prompts, context.protocol.seed),
        server_speedup=sides["fast"].throughput.server_tok_s / plain_rate,
        tau=tau,
        lossless=judge(pairs, subject.engine.model, conditions),
        plain=sides["plain"],
        speculative=sides["fast"],
        slices=slices(samples, context.protocol.seed, shared=_batched(cell)),
        samples=samples,
        seconds=seconds,
        notes=(*prepared.notes, *_few(prompts)),
    )


def _few(prompts: Seq[Prompt]) -> tuple[str, ...]:
    items = len({p.item.id for p in prompts})
    if items >= FEW:
        return ()
    return (f"{items} prompts are too few for an interval about others like them",)


def _side(subject: Subject, way: Way, context: Context) -> Side:
    engine = subject.engine
    _choose(subject, way)  # whose cache it is
    size = engine.config.block_size
    capacity = metrics.Capacity(
        target=engine.config.n_blocks * size, draft=engine.drafter.usage().blocks_total * size
    )
    split = metrics.times(way.runs)
    machine = machine_use(
        way.meter.total,
        tokens=sum(len(t.output.tokens) for t in way.traces.values()),
        model=engine.model,
        passes=split.steps,
        T_p_s=split.T_p_s,
        bandwidth=context.bandwidth,
    )
    return metrics.side(way.runs, capacity, machine)


def _sample(
    prompt: Prompt, repeat: int, plain: RequestTrace, fast: RequestTrace, plain_first: bool
) -> Sample:
    stats = fast.output.stats
    return Sample(
        item=prompt.item.id,
        turn=prompt.turn,
        domain=prompt.item.domain,
        tier=prompt.item.tier,
        synthetic=prompt.item.synthetic,
        repeat=repeat,
        plain_first=plain_first,
        input_tokens=len(prompt.tokens),
        plain_tokens=metrics.n_tokens(plain),
        speculative_tokens=metrics.n_tokens(fast),
        plain_s=metrics.seconds(plain),
        speculative_s=metrics.seconds(fast),
        plain_ttft_s=metrics.ttft(plain),
        speculative_ttft_s=metrics.ttft(fast),
        tau=stats.tau if stats.rounds else None,
        identical=plain.output.token_ids == fast.output.token_ids,
    )


def speedup(samples: Seq[Sample], seed: int, *, shared: bool) -> Estimate:
    """Of whole requests; a text that is longer than its partner (a failure) counts by token."""
    times = [
        (s.item, s.repeat, s.plain_s, s.speculative_s * s.plain_tokens / s.speculative_tokens)
        for s in samples
    ]
    return _paired(times, seed, shared)


def _paired(times: Seq[tuple[str, int, float, float]], seed: int, shared: bool) -> Estimate:
    """Items' turns are summed, since they are one conversation and not independent."""
    items = {item: i for i, item in enumerate(dict.fromkeys(t[0] for t in times))}
    repeats = {r: i for i, r in enumerate(dict.fromkeys(t[1] for t in times))}
    plain_PR = np.zeros((len(items), len(repeats)))
    fast_PR = np.zeros_like(plain_PR)
    for item, repeat, plain, fast in times:
        plain_PR[items[item], repeats[repeat]] += plain
        fast_PR[items[item], repeats[repeat]] += fast
    return paired_speedup(plain_PR, fast_PR, seed=seed, shared=shared)


def _decode_speedup(plain: Way, fast: Way, prompts: Seq[Prompt], seed: int) -> Estimate | None:
    times = []
    for (index, repeat), trace in sorted(fast.traces.items()):
        a, b = metrics.decode_rate(plain.traces[index, repeat]), metrics.decode_rate(trace)
        if a is not None and b is not None:
            n = prompts[index].length
            times.append((prompts[index].item.id, repeat, n / a, n / b))
    assert fast.cell is not None
    return _paired(times, seed, _batched(fast.cell)) if times else None


def slices(samples: Seq[Sample], seed: int, *, shared: bool) -> tuple[Slice, ...]:
    """By domain, by tier where there are any, by length of the input."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for s in samples:
        groups.setdefault(("domain", s.domain), []).append(s)
        if s.tier != UNSAID:
            groups.setdefault(("tier", s.tier), []).append(s)
        groups.setdefault(("input", _length_class(s.input_tokens)), []).append(s)
    order = {"domain": 0, "tier": 1, "input": 2}
    out = []
    for (by, name), group in sorted(groups.items(), key=lambda g: order[g[0][0]]):
        taus = [s.tau for s in group if s.tau is not None]
        out.append(
            Slice.model_validate(
                {
                    "by": by,
                    "name": name,
                    "synthetic": any(s.synthetic for s in group),
                    "requests": len({(s.item, s.turn) for s in group}),
                    "speedup": speedup(group, seed, shared=shared),
                    "tau": sum(taus) / len(taus) if taus else None,
                }
            )
        )
    return tuple(out)


def _length_class(tokens: int) -> str:
    top = next((n for n in LENGTHS if tokens <= n), None)
    return f"more than {LENGTHS[-1]}" if top is None else f"up to {top}"


def workload_record(workload: Workload, prompts: Seq[Prompt]) -> WorkloadRecord:
    """Of the prompts that were really decoded."""
    items = {p.item.id: p.item for p in prompts}
    domains: dict[str, int] = {}
    for item in items.values():
        domains[item.domain] = domains.get(item.domain, 0) + 1
    return WorkloadRecord(
        name=workload.name,
        source=workload.source,
        sha256=workload.sha256,
        items=len(items),
        requests=len(prompts),
        synthetic_items=sum(i.synthetic for i in items.values()),
        domains=domains,
        input_tokens=spread([len(p.tokens) for p in prompts]),
        output_tokens=spread([p.length for p in prompts]),
    )
