"""Speed-up before it is measured: acceptance from a trace, costs from a profile.

**Rounds.** Along a text that the target wrote, let r_t = q(y_t) / p(y_t) be the draft's over the
target's probability of the token that came. Given the text, a round that begins at t commits more
than i tokens with probability

    token rejection      R_i = prod_{j <= i} min(1, r_j)
    block verification   R_i = min(1, min_{j <= i} prod_{l <= j} r_l)
    greedy, walk         both of them, with r = 1 where the proposal came and 0 elsewhere

Token rejection: a token y comes with probability p(y), by acceptance with min(p(y), q(y)), and what
is rejected ends the round. Block verification: prefix i is drafted and accepted with probability
Q_i P_i (Q_i = prod q, P_i as in Sun et al. 2024, algorithm 2), where P_i = min(1, P_{i-1} p / q);
over the text's own probability that is the minimum above. Rounds keep no memory, so a forward
recursion over the positions gives the expected number of rounds of every length, for any k, from
one text, with the correlations along it and the cut at its end.

**Seconds.** Each round costs what `core.latency` says for its rows, context and batch; first
proposals also pay for reading the prompt.

**Interval.** Requests are the independent units: the jackknife over them gives the error of the
ratio of sums. The profile's own spread and what the model itself gets wrong (`MODEL_ERROR`) are
added in squares, and the whole is a t interval for the logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student

from paceline.bench.trace import Guesses, Setting, Traced
from paceline.core.latency import (
    DraftCost,
    Profile,
    break_even,
    mode_of,
    plain_seconds,
    round_seconds,
)

#: Standard deviation of log(measured / predicted) that neither prompts nor the profile's spread
#: explain. `benchmarks/advisor_accuracy.py` measures it as `model_error`: 0.015 and 0 over two
#: matrices; the rest leaves room for machines and models that were not measured.
MODEL_ERROR = 0.04

Floats = npt.NDArray[np.float64]


def survival(ratios: Seq[float], rule: str = "block") -> list[float]:
    """R_0 = 1, R_1, ...: probability that a round accepts so many tokens, given the text."""
    found, product = [1.0], 1.0
    for r in ratios:
        product *= min(1.0, r) if rule == "token" else r
        found.append(min(found[-1], product))
    return found


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Expected rounds of one request behind its first token, by budget b (asked of the drafter)
    and nodes n (proposed): weight[b, n] rounds, entries[b, n] cache entries before them,
    summed over the rounds."""

    weight: dict[tuple[int, int], float]
    entries: dict[tuple[int, int], float]
    accepted: tuple[float, ...]
    offered: tuple[float, ...]

    @property
    def rounds(self) -> float:
        return sum(self.weight.values())


def tally(request: Traced, guesses: Guesses, k: int, rule: str = "block") -> Tally:
    """The rounds of a request with k draft tokens; 0 is plain decoding.

    accepted[i], offered[i] of the result: expected rounds that accepted position i + 1, and
    that proposed it having accepted all before.
    """
    size = request.output
    start = [0.0] * (size + 1)
    if size > 1:
        start[1] = 1.0
    weight: dict[tuple[int, int], float] = {}
    entries: dict[tuple[int, int], float] = {}
    accepted, offered = [0.0] * k, [0.0] * k
    for done in range(1, size):  # output tokens so far
        mass = start[done]
        if mass < 1e-12:
            continue
        left = size - done
        budget = min(k, left - 1) if request.cut else k
        reach, nodes = _reach(guesses, done - 1, budget, rule)
        key = (budget, nodes)
        weight[key] = weight.get(key, 0.0) + mass
        entries[key] = entries.get(key, 0.0) + mass * (request.prompt + done - 1)
        reach = reach[:left]
        for i, (here, further) in enumerate(pairwise([*reach, 0.0])):
            start[min(done + i + 1, size)] += mass * (here - further)
        for i in range(min(nodes, k)):
            offered[i] += mass * (reach[i] if i < len(reach) else 0.0)
            accepted[i] += mass * (reach[i + 1] if i + 1 < len(reach) else 0.0)
    return Tally(weight=weight, entries=entries, accepted=tuple(accepted), offered=tuple(offered))


def _reach(g: Guesses, at: int, budget: int, rule: str) -> tuple[list[float], int]:
    """Survival of a round whose first undecided token is entry `at`, and its proposal's
    nodes."""
    if budget == 0:
        return [1.0], 0
    if g.kind == "match":
        nodes = min(g.nodes[at], budget)
        return [1.0] * (int(min(g.value[at], nodes)) + 1), nodes
    ratios = []
    for r in g.value[at : at + budget]:
        if math.isnan(r):
            break
        ratios.append(r)
    # A draft that has nothing to say proposes nothing; behind a rejection we can't know.
    stops = at + len(ratios) < len(g.value) and len(ratios) < budget
    return survival(ratios, rule), len(ratios) if stops else budget


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A prediction and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}x ({self.low:.2f} to {self.high:.2f})"

    def to_json(self) -> dict[str, float]:
        return {name: round(v, 4) for name, v in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What to expect of a drafter with k tokens a round.

    latency: plain over speculative seconds of whole requests, one at a time (what `paceline
    bench` calls the speed-up). decode: the same behind the first token. throughput: plain over
    speculative seconds with `concurrency` requests in flight. tau: tokens a round, as the
    engine counts. alpha: accepted share of judged proposals. by_position: acceptance of each
    position, given those before. break_even: constant acceptance at which k tokens a round
    just pay; None where not even perfect drafts do. t_plain, t_round, t_draft: mean seconds
    of a plain step, of a full round, and of its drafting. proposing: share of rounds with a
    proposal.
    """

    draft: str
    k: int
    setting: Setting
    concurrency: int
    latency: Interval
    decode: Interval
    throughput: Interval
    tau: float
    alpha: float
    by_position: tuple[float, ...]
    proposing: float
    break_even: float | None
    t_plain: float
    t_round: float
    t_draft: float

    def to_json(self) -> dict[str, object]:
        return {
            "draft": self.draft,
            "k": self.k,
            "temperature": self.setting.temperature,
            "seeded": self.setting.seeded,
            "concurrency": self.concurrency,
            "speedup": self.latency.to_json(),
            "decode_speedup": self.decode.to_json(),
            "throughput_speedup": self.throughput.to_json(),
            "tau": round(self.tau, 4),
            "acceptance": round(self.alpha, 4),
            "acceptance_by_position": [round(a, 4) for a in self.by_position],
            "proposing": round(self.proposing, 4),
            "break_even_acceptance": None if self.break_even is None else round(self.break_even, 4),
            "ms_plain_step": round(1e3 * self.t_plain, 4),
            "ms_round": round(1e3 * self.t_round, 4),
            "ms_draft": round(1e3 * self.t_draft, 4),
        }


@dataclass(frozen=True)
class _Seconds:
    """Seconds of requests, one entry for each: `own`, and rounds shared by a batch, by nodes
    (rows: requests), each round's part of a step depending on what the others propose."""

    own: Floats
    rounds: Floats


class Predictor:
    """Predictions for one setting from its traced requests.

    label: the drafter's in trace and profile. chunk: prompt tokens that a step reads at most.
    requests: how many requests the figure to be predicted averages over (None: all that the
    workload could have).
    """

    def __init__(
        self,
        profile: Profile,
        setting: Setting,
        traced: Seq[Traced],
        *,
        rule: str = "block",
        chunk: int = 512,
        requests: int | None = None,
        model_error: float = MODEL_ERROR,
    ) -> None:
        if len(traced) < 2:
            raise ValueError("a prediction needs two traced requests or more")
        self.profile = profile
        self.setting = setting
        self.traced = tuple(traced)
        self._mode = mode_of(setting.temperature)
        self._rule = rule
        self._chunk = chunk
        self.requests = requests
        self._model_error = model_error

    def predict(self, label: str, k: int, concurrency: int = 1) -> Prediction:
        tallies = [tally(r, r.guesses[label], k, self._rule) for r in self.traced]
        draft = self.profile.drafts[label]
        share = self._draft_share(tallies, draft)

        def interval(batch: int, whole: bool) -> Interval:
            plain = self._plain(batch, whole)
            return self._interval(
                plain, self._speculative(tallies, draft, batch, whole), batch, share
            )

        latency = interval(1, True)
        sizes = np.array([r.output for r in self.traced], np.float64)
        entries = sum(_plain_entries(r) for r in self.traced)
        contexts = [round(entries / max(float((sizes - 1).sum()), 1.0))] * concurrency
        t_plain = plain_seconds(self.profile, contexts, self._mode)
        t_round = round_seconds(self.profile, label, k, contexts, self._mode)
        accepted = np.array([t.accepted for t in tallies]).sum(0)
        offered = np.array([t.offered for t in tallies]).sum(0)
        rounds = sum(t.rounds for t in tallies)
        proposing = sum(w for t in tallies for (_, n), w in t.weight.items() if n > 0)
        return Prediction(
            draft=label,
            k=k,
            setting=self.setting,
            concurrency=concurrency,
            latency=latency,
            decode=interval(1, False),
            throughput=latency if concurrency == 1 else interval(concurrency, True),
            tau=float(sizes.sum() / (rounds + len(self.traced))),
            alpha=float(accepted.sum() / max(offered.sum(), 1e-12)),
            by_position=tuple(
                float(a / o) for a, o in zip(accepted, offered, strict=True) if o > 1e-9
            ),
            proposing=proposing / rounds if rounds else 0.0,
            break_even=break_even(t_plain, t_round, k),
            t_plain=t_plain,
            t_round=t_round,
            t_draft=draft(k, contexts, self._mode),
        )

    # --- seconds of each request ---

    def _plain(self, batch: int, whole: bool) -> _Seconds:
        read = self.profile.target.per_entry(1)
        own = [
            read * _plain_entries(r) + (self._prefill(r.prompt, batch) if whole else 0.0)
            for r in self.traced
        ]
        return _Seconds(np.array(own), np.array([[r.output - 1.0] for r in self.traced]))

    def _speculative(
        self, tallies: Seq[Tally], draft: DraftCost, batch: int, whole: bool
    ) -> _Seconds:
        target = self.profile.target
        own = np.zeros(len(tallies))
        rounds = np.zeros(
            (len(tallies), 1 + max(n for t in tallies for _, n in [*t.weight, (0, 0)]))
        )
        # All of a batch draft together: each pays its part of the pass over all.
        shared: dict[int, float] = {}
        for i, (request, t) in enumerate(zip(self.traced, tallies, strict=True)):
            for (asked, n), w in t.weight.items():
                if asked not in shared:
                    shared[asked] = draft([asked] * batch, [0] * batch, self._mode) / batch
                reading = draft.per_entry * asked + target.per_entry(n + 1)
                own[i] += w * shared[asked] + t.entries[asked, n] * reading
                rounds[i, n] += w
            if any(asked for asked, _ in t.weight):
                own[i] += draft.catch_up(request.prompt)
            if whole:
                own[i] += self._prefill(request.prompt, batch)
        return _Seconds(own, rounds)

    def _prefill(self, prompt: int, batch: int) -> float:
        """Reading a prompt, in passes that also decode for the others of the batch."""
        others = batch - 1
        target, host = self.profile.target, self.profile.host[self._mode]
        alone = target.rows(others) + host(others, others) if others else 0.0
        total = 0.0
        for begin in range(0, prompt, self._chunk):
            n = min(self._chunk, prompt - begin)
            seconds = target.rows(n + others) + target.per_entry(n) * begin
            total += seconds + host(others + 1, others + 1) - alone
        return total

    def _draft_share(self, tallies: Seq[Tally], draft: DraftCost) -> float:
        """Part of the speculative seconds that drafting takes."""
        whole = float(self._each(self._speculative(tallies, draft, 1, True)).sum())
        drafting = sum(
            w * draft(asked, [0], self._mode) for t in tallies for (asked, _), w in t.weight.items()
        )
        return min(drafting / whole, 1.0)

    # --- sums and their errors ---

    def _each(self, s: _Seconds) -> Floats:
        """Seconds of every request alone."""
        step = np.array([self._step_seconds(1, 1 + n) for n in range(s.rounds.shape[1])])
        seconds: Floats = s.own + s.rounds @ step
        return seconds

    def _total(self, s: _Seconds, weights: Floats, batch: int) -> float:
        """Seconds of all, `batch` of them at once; weights: how often each counts. A step's
        rows are the sum of independent draws from all rounds."""
        rounds = weights @ s.rounds
        together, law = np.ones(1), rounds / max(float(rounds.sum()), 1e-300)
        for _ in range(batch):
            together = np.convolve(together, law)
        step = [self._step_seconds(batch, batch + n) for n in range(len(together))]
        shared = float(rounds.sum()) / batch * float(together @ np.array(step))
        return float(weights @ s.own) + shared

    def _step_seconds(self, batch: int, rows: int) -> float:
        return self.profile.target.rows(rows) + self.profile.host[self._mode](batch, rows)

    def _interval(self, plain: _Seconds, fast: _Seconds, batch: int, share: float) -> Interval:
        n = len(self.traced)
        if batch == 1:
            ours, theirs = self._each(fast), self._each(plain)
            middle = math.log(theirs.sum() / ours.sum())
            left_out = np.log((theirs.sum() - theirs) / (ours.sum() - ours))
        else:

            def log_ratio(weights: Floats) -> float:
                return math.log(
                    self._total(plain, weights, batch) / self._total(fast, weights, batch)
                )

            every = np.ones(n)
            middle = log_ratio(every)
            left_out = np.array([log_ratio(every - unit) for unit in np.eye(n)])
        jack = (n - 1) / n * float(((left_out - left_out.mean()) ** 2).sum())
        sampling = jack * (1.0 + (n / self.requests if self.requests else 0.0))
        spread = self.profile.spread
        known = (
            spread.get("target", 0.0) ** 2
            + (share * spread.get("draft", 0.0)) ** 2
            + self._model_error**2
        )
        total = sampling + known
        # Welch and Satterthwaite: only the part from few requests has few degrees of freedom.
        degrees = (n - 1) * (total / sampling) ** 2 if sampling > 0.0 else math.inf
        half = float(student.ppf(0.975, degrees)) * math.sqrt(total)
        return Interval(
            value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half)
        )


def _plain_entries(r: Traced) -> float:
    """Cache entries that plain steps behind the first token read: prompt, prompt + 1, ..."""
    steps = r.output - 1
    return steps * r.prompt + steps * (steps - 1) / 2
