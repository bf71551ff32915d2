"""Peers and our engine on the same prompts, interleaved in one run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.bench.peers.base import Peer, PeerError, PeerPrompt, PeerRun, Speculation
from paceline.bench.peers.records import Arm, Shot
from paceline.bench.results import Estimate
from paceline.bench.stats import RESAMPLES, spread, tail_share

Floats = npt.NDArray[np.float64]
#: (prompt, repeat) of a run, and what came of it.
Runs = dict[tuple[int, int], PeerRun]
Progress = Callable[[int, int, str], None]

#: An idle engine's threads may spin for a while: let them go to sleep before another starts.
PAUSE_S = 0.02


@dataclass(frozen=True)
class Way:
    """One arm of the comparison before it is measured."""

    peer: Peer
    mode: str


def ways(peers: Seq[Peer]) -> list[Way]:
    return [Way(peer, mode) for peer in peers for mode in peer.info.modes]


def order(n: int, prompt: int, repeat: int) -> list[int]:
    """Arms of one prompt and repeat: forwards, then backwards (A B B A), so that drift of the
    machine's speed meets all alike."""
    arms = list(range(n))
    return arms if (prompt + repeat) % 2 == 0 else arms[::-1]


def compare(
    peers: Seq[Peer],
    prompts: Seq[PeerPrompt],
    *,
    max_tokens: int,
    repeats: int,
    seed: int = 0,
    progress: Progress = lambda done, total, what: None,
    pause: Callable[[float], None] = time.sleep,
) -> tuple[Arm, ...]:
    """Measure every mode of every peer. peers: ours first; its `plain` is the reference. An
    arm that fails is left out from then on and says why; the reference's failure is raised."""
    arms = ways(peers)
    runs: list[Runs] = [{} for _ in arms]
    errors: dict[int, str] = {}
    total, done = len(arms) * (1 + repeats * len(prompts)), 0

    def run(i: int, prompt: PeerPrompt, n: int) -> PeerRun | None:
        nonlocal done
        way = arms[i]
        progress(done, total, f"{way.peer.info.name}, {way.mode}")
        done += 1
        if i in errors:
            return None
        pause(PAUSE_S)
        try:
            return way.peer.generate(way.mode, prompt, n)
        except PeerError as e:
            if i == 0:
                raise
            errors[i] = str(e)
            return None

    for i in range(len(arms)):  # warm-up
        run(i, prompts[0], min(max_tokens, 8))
    for repeat in range(repeats):
        for p, prompt in enumerate(prompts):
            for i in order(len(arms), p, repeat):
                result = run(i, prompt, max_tokens)
                if result is not None:
                    runs[i][p, repeat] = result
    progress(total, total, "")
    rng = np.random.default_rng(seed)
    return tuple(
        _arm(way, runs[i], runs[_plain_of(arms, i)], runs[0], prompts, max_tokens, rng)
        if i not in errors
        else _failed(way, errors[i])
        for i, way in enumerate(arms)
    )


def _plain_of(arms: Seq[Way], i: int) -> int:
    """The arm of the same peer that does not speculate: its first."""
    return next(j for j, way in enumerate(arms) if way.peer is arms[i].peer)


def _failed(way: Way, error: str) -> Arm:
    return _describe(way, error=error)


def _describe(way: Way, **figures: object) -> Arm:
    info = way.peer.info
    return Arm.model_validate(
        {
            "system": info.name,
            "mode": way.mode,
            "ours": info.name == "paceline",
            "version": info.version,
            "model": info.model,
            "precision": info.precision,
            "options": info.options,
            "notes": info.notes,
            **figures,
        }
    )


def _arm(
    way: Way,
    runs: Runs,
    plain: Runs,
    reference: Runs,
    prompts: Seq[PeerPrompt],
    max_tokens: int,
    rng: np.random.Generator,
) -> Arm:
    all_runs = list(runs.values())
    shots = tuple(
        Shot(
            prompt=prompts[p].id,
            repeat=repeat,
            tokens=run.n_tokens,
            rest=rest(run),
            seconds=run.seconds,
            first_s=run.first,
            agreed=agreement(run, reference[p, repeat]),
        )
        for (p, repeat), run in sorted(runs.items())
    )
    gaps = [g for run in all_runs for g in token_gaps(run)]
    told = [s.agreed for s in shots if s.agreed is not None]
    lengths = {
        (r.prompt_tokens, len(prompts[p].tokens))
        for (p, _), r in runs.items()
        if r.prompt_tokens not in (None, len(prompts[p].tokens))
    }
    notes = [f"a prompt of {ours} tokens had {n} there" for n, ours in sorted(lengths)[:1]]
    tau, rate, source = _speculation([r.speculation for r in all_runs if r.speculation])
    return _describe(
        way,
        notes=(*way.peer.info.notes, *notes),
        counted=max((r.counted for r in all_runs), key=_CERTAINTY.index),
        requests=len(all_runs),
        tokens=sum(r.n_tokens for r in all_runs),
        equal_lengths=all(r.n_tokens == max_tokens for r in all_runs),
        tok_s=rate_of(runs, rng, whole=True),
        decode_tok_s=rate_of(runs, rng),
        speedup=None if runs is plain else ratio_of(runs, plain, rng),
        versus_ours=None if runs is reference else ratio_of(runs, reference, rng),
        ttft_s=spread([r.first for r in all_runs]),
        itl_token_s=spread(gaps) if gaps else None,
        itl_chunk_s=spread([g for r in all_runs for g in np.diff(sorted(set(r.arrivals)))]),
        tau=tau,
        acceptance_rate=rate,
        speculation_source=source,
        same_text=sum(s.agreed == max(s.tokens, max_tokens) for s in shots) if told else None,
        compared=len(told) if told else None,
        agreed=sum(told) / (len(told) * max_tokens) if told else None,
        shots=shots,
    )


#: From certain to a guess; an arm is as certain as its worst run.
_CERTAINTY = ("ids", "stream-usage", "logprobs", "usage", "chunks")


def rest(run: PeerRun) -> int:
    """Tokens behind the first arrival (which may have brought several)."""
    at_first = sum(t == run.first for t in run.arrivals) if run.arrivals else 1
    return run.n_tokens - at_first


def token_gaps(run: PeerRun) -> list[float]:
    """Inter-token times: the tokens of a burst share the time since the burst before."""
    if run.counted in ("usage", "chunks"):
        return []
    gaps: list[float] = []
    times, counts = np.unique(np.asarray(run.arrivals), return_counts=True)
    for before, at, count in zip(times[:-1], times[1:], counts[1:], strict=True):
        gaps += [float(at - before) / int(count)] * int(count)
    return gaps


def agreement(run: PeerRun, reference: PeerRun) -> int | None:
    """Leading tokens that equal the reference's; None where ids are not told."""
    if run.tokens is None or reference.tokens is None:
        return None
    pairs = zip(run.tokens, reference.tokens, strict=False)
    n = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return min(len(run.tokens), len(reference.tokens)) if n is None else n


def _speculation(told: list[Speculation]) -> tuple[float | None, float | None, str | None]:
    """(tau, acceptance rate, source) of all runs: pooled counts where there are counts, else
    the mean of what the peer reports."""
    if not told:
        return None, None, None
    rounds = [t.rounds for t in told if t.rounds is not None]
    drafted = [t.drafted for t in told if t.drafted is not None]
    accepted = [t.accepted for t in told if t.accepted is not None]
    tau = 1 + sum(accepted) / sum(rounds) if sum(rounds) else _mean([t.tau for t in told])
    rate = sum(accepted) / sum(drafted) if sum(drafted) else None
    if rate is None:
        rate = _mean([t.acceptance_rate for t in told])
    return tau, rate, told[0].source


def _mean(values: Seq[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def _by_prompt(runs: Runs, whole: bool) -> dict[int, list[tuple[float, float]]]:
    """Per prompt, (tokens, seconds) of each repeat."""
    out: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (p, _), run in sorted(runs.items()):
        tokens = run.n_tokens if whole else rest(run)
        out[p].append((tokens, run.seconds if whole else run.seconds - run.first))
    return out


def _rates(
    tables: Seq[dict[int, list[tuple[float, float]]]], rng: np.random.Generator
) -> Floats | None:
    """Tokens per second of each table: first as measured, then resampled: prompts with
    replacement, and repeats of each prompt. Shape (1 + resamples, tables)."""
    a_TPR2 = np.array([[t[p] for p in sorted(t)] for t in tables], np.float64)
    n_prompts, n_repeats = a_TPR2.shape[1:3]
    p_SP = rng.integers(n_prompts, size=(RESAMPLES, n_prompts, 1))
    r_SPR = rng.integers(n_repeats, size=(RESAMPLES, n_prompts, n_repeats))
    sums = np.concatenate([a_TPR2.sum((1, 2))[:, None], a_TPR2[:, p_SP, r_SPR].sum((2, 3))], axis=1)
    if not (sums[..., 1] > 0).all():
        return None
    rates: Floats = (sums[..., 0] / sums[..., 1]).T
    return rates


def rate_of(runs: Runs, rng: np.random.Generator, whole: bool = False) -> Estimate | None:
    """Tokens per second, with a 95 % bootstrap interval over prompts and repeats; None where
    there was no time to measure (outputs of one token)."""
    rates = _rates([_by_prompt(runs, whole)], rng)
    return None if rates is None else _estimate(rates[:, 0], runs)


def ratio_of(runs: Runs, base: Runs, rng: np.random.Generator) -> Estimate | None:
    """Decoding rate over that of `base`, paired by prompt and repeat; None where `base` was
    not measured."""
    if runs.keys() != base.keys():
        return None
    rates = _rates([_by_prompt(runs, False), _by_prompt(base, False)], rng)
    if rates is None or not (rates > 0).all():
        return None
    return _estimate(rates[:, 0] / rates[:, 1], runs)


def _estimate(values: Floats, runs: Runs) -> Estimate:
    """values: as measured, then the resamples."""
    value, prompts = float(values[0]), len({p for p, _ in runs})
    units = prompts if prompts > 1 else len(runs)
    if units == 1:
        return Estimate(value=value, low=value, high=value)
    cut = tail_share(units, 0.95)
    low, high = np.quantile(values[1:], (cut, 1 - cut))
    return Estimate(value=value, low=min(float(low), value), high=max(float(high), value))
