"""From traces to figures. Pure: nothing here looks at a clock or an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.bench.load import RequestTrace, RunTrace
from paceline.bench.results import (
    Acceptance,
    KvUse,
    Latency,
    MachineUse,
    Side,
    Throughput,
    TimeSplit,
)
from paceline.bench.stats import spread
from paceline.types import RequestStats


def ttft(trace: RequestTrace) -> float:
    """Seconds from arrival to the first token."""
    return trace.times[0] - trace.arrival


def seconds(trace: RequestTrace) -> float:
    """Seconds from arrival to the last token."""
    return trace.times[-1] - trace.arrival


def n_tokens(trace: RequestTrace) -> int:
    return sum(trace.counts)


def round_intervals(trace: RequestTrace) -> list[float]:
    """Seconds between bursts."""
    return [b - a for a, b in zip(trace.times, trace.times[1:], strict=False)]


def token_intervals(trace: RequestTrace) -> list[float]:
    """Seconds per token: a burst's tokens share the time of the round that brought them.

    Tokens of one burst come at once. Counting gaps of zero between them, and the round's whole
    time for the first, would make a median of zero out of any acceptance above a half. The
    first burst belongs to the time to first token.
    """
    gaps = zip(round_intervals(trace), trace.counts[1:], strict=True)
    return [gap / count for gap, count in gaps for _ in range(count)]


def decode_seconds(trace: RequestTrace) -> float:
    """Seconds behind the first burst."""
    return trace.times[-1] - trace.times[0]


def decode_rate(trace: RequestTrace) -> float | None:
    """Tokens per second behind the first burst; None where nothing followed it."""
    rest, time = n_tokens(trace) - trace.counts[0], decode_seconds(trace)
    return rest / time if rest and time > 0 else None


def conditional(proposed: Counter[int], accepted: Counter[int]) -> tuple[float | None, ...]:
    """Acceptance of position i given that it was proposed and all before were accepted.

    A position counts as tried where it was proposed and its parent accepted. Rounds propose
    different depths, so of those that accepted i - 1 nodes only a part had a node to accept
    next; where all rounds propose as deep, this is accepted[i] / accepted[i - 1].
    """
    out: list[float | None] = []
    for i in range(max(proposed, default=-1) + 1):
        reached = proposed[0] if i == 0 else accepted[i - 1] * proposed[i] / proposed[i - 1]
        out.append(min(1.0, accepted[i] / reached) if reached else None)
    return tuple(out)


def joint(proposed: Counter[int], accepted: Counter[int]) -> tuple[float | None, ...]:
    """Share of the rounds that proposed position i which accepted it and all before."""
    depth = max(proposed, default=-1) + 1
    return tuple(accepted[i] / proposed[i] if proposed[i] else None for i in range(depth))


def acceptance(stats: Seq[RequestStats], tokens: int) -> Acceptance:
    """tokens: committed ones. tau counts what rounds accepted, before a stop cut any off."""
    histogram: Counter[int] = Counter()
    proposed: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for s in stats:
        histogram.update(s.tau_histogram)
        proposed.update(s.proposed_at)
        accepted.update(s.accepted_at)
    rounds = sum(s.rounds for s in stats)
    taken = sum(s.accepted for s in stats)
    drafted = sum(s.drafted for s in stats)
    taus = [s.tau for s in stats if s.rounds]
    return Acceptance(
        rounds=rounds,
        drafted=drafted,
        accepted=taken,
        tau_request_mean=sum(taus) / len(taus) if taus else None,
        tau_pooled=(taken + rounds) / rounds if rounds else None,
        histogram={str(t): n for t, n in sorted(histogram.items())},
        conditional=conditional(proposed, accepted),
        joint=joint(proposed, accepted),
        drafted_per_token=drafted / max(tokens, 1),
        target_calls_per_token=sum(s.target_calls for s in stats) / max(tokens, 1),
    )


@dataclass(frozen=True)
class Capacity:
    """Slots of the target's and the drafter's caches."""

    target: int
    draft: int


def kv_use(runs: Seq[RunTrace], capacity: Capacity) -> KvUse:
    steps = max(sum(r.kv.steps for r in runs), 1)
    return KvUse(
        capacity_slots=capacity.target,
        mean_slots=sum(r.kv.used for r in runs) / steps,
        peak_slots=max(r.kv.peak for r in runs),
        scratch_peak_slots=max(r.kv.scratch_peak for r in runs),
        draft_capacity_slots=capacity.draft,
        draft_mean_slots=sum(r.kv.draft_used for r in runs) / steps,
        draft_peak_slots=max(r.kv.draft_peak for r in runs),
    )


def times(runs: Seq[RunTrace]) -> TimeSplit:
    return TimeSplit(
        T_p_s=sum(r.stats.time_target for r in runs),
        T_q_s=sum(r.stats.time_draft for r in runs),
        T_o_s=sum(r.stats.time_other for r in runs),
        steps=sum(r.stats.steps for r in runs),
        rows=sum(r.stats.rows for r in runs),
    )


def side(runs: Seq[RunTrace], capacity: Capacity, machine: MachineUse) -> Side:
    """Everything about all runs of one way to decode."""
    traces = [t for r in runs for t in r.requests]
    tokens = sum(map(n_tokens, traces))
    elapsed = sum(r.elapsed for r in runs)
    rates = [rate for t in traces if (rate := decode_rate(t)) is not None]
    return Side(
        requests=len(traces),
        tokens=tokens,
        elapsed_s=elapsed,
        latency=Latency(
            ttft_s=spread([ttft(t) for t in traces]),
            itl_token_s=spread([s for t in traces for s in token_intervals(t)]),
            itl_round_s=spread([s for t in traces for s in round_intervals(t)]),
            request_s=spread([seconds(t) for t in traces]),
        ),
        throughput=Throughput(
            request_tok_s=spread([n_tokens(t) / max(seconds(t), 1e-12) for t in traces]),
            decode_tok_s=spread(rates),
            server_tok_s=tokens / max(elapsed, 1e-12),
        ),
        acceptance=acceptance([t.output.stats for t in traces], tokens),
        kv=kv_use(runs, capacity),
        machine=machine,
        times=times(runs),
        preemptions=sum(t.output.stats.preemptions for t in traces),
    )
