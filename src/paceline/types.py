"""What the user asks (`Request`, `SamplingParams`), the one mutable record of a generation
(`Sequence`), and what comes back (`TokenOut`, `RequestOutput`)."""

from __future__ import annotations

import enum
import math
from collections import Counter
from dataclasses import dataclass, field

from paceline.core.rules import Guarantee, Origin
from paceline.errors import UserError


def _check(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise UserError(f"{name} = {value!r} is out of range: use {want}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    temperature: 0 is greedy (the argmax; the lowest id wins ties).
    top_k: keep the k most probable tokens (0: all). top_p: then the smallest set of most
        probable tokens with at least this mass. min_p: then those with at least this share
        of the largest probability. Applied in this order, after the temperature.
    seed: equal seeds give equal draws, whatever else is in the batch; None takes one at
        random. n: independent samples of the prompt, each with its own derived seed.
    max_tokens: at least 1. stop: text that ends the output (it is not part of it).
    stop_token_ids: tokens that end the output, like end-of-sequence ones (they are part of
        the ids, not of the text). ignore_eos: go on past the model's end-of-sequence.
    logprobs: report log-probabilities of the emitted token and of this many most probable
        ones (0: of the emitted token alone; None: none), from the model's untransformed
        logits.
    k: tokens to draft a round at most (None: the engine's setting; 0: never speculate).
    rule: acceptance rule by name (None: the best exact one for the proposal).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    k: int | None = None
    rule: str | None = None

    def __post_init__(self) -> None:
        t = self.temperature
        _check(_is_number(t) and 0.0 <= t <= 100.0, "temperature", t, "a number from 0 to 100")
        _check(_is_count(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        p = self.top_p
        _check(_is_number(p) and 0.0 < p <= 1.0, "top_p", p, "a number above 0, at most 1 (off)")
        m = self.min_p
        _check(_is_number(m) and 0.0 <= m <= 1.0, "min_p", m, "a number from 0 (off) to 1")
        seed_ok = self.seed is None or (_is_count(self.seed) and 0 <= self.seed < 2**64)
        _check(seed_ok, "seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        _check(_is_count(self.n) and 1 <= self.n <= 1024, "n", self.n, "1 to 1024")
        n = self.max_tokens
        _check(_is_count(n) and n >= 1, "max_tokens", n, "1 or more")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for s in self.stop:
            _check(isinstance(s, str) and s != "", "stop", s, "non-empty strings")
        for i in self.stop_token_ids:
            _check(_is_count(i) and i >= 0, "stop_token_ids", i, "token ids, 0 or more")
        lp = self.logprobs
        lp_ok = lp is None or (_is_count(lp) and 0 <= lp <= 100)
        _check(lp_ok, "logprobs", lp, "0 to 100, or None")
        k_ok = self.k is None or (_is_count(self.k) and 0 <= self.k <= 64)
        _check(k_ok, "k", self.k, "0 (no speculation) to 64, or None for the engine's setting")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, already in tokens, and how to continue it."""

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()


class FinishReason(enum.StrEnum):
    EOS = "eos"  # an end-of-sequence token
    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens
    CONTEXT = "context"  # the model's or the cache's context is full
    ABORTED = "aborted"
    ERROR = "error"  # this request failed; `RequestOutput.error` says why


@dataclass(frozen=True, kw_only=True)
class TokenOut:
    """One emitted token. logprob and top_logprobs (pairs of id and log-probability, most
    probable first) come from the model's untransformed logits, where they were asked for."""

    id: int
    origin: Origin
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


@dataclass
class RequestStats:
    """Counts of one request. drafted >= verified >= accepted; a drafted token is verified
    when the target judged it before the round's end. Times are seconds.

    proposed_at[i], accepted_at[i]: rounds that proposed at least i + 1 tokens deep, and
    that accepted so many. tau_histogram[t]: rounds that committed t tokens.
    """

    rounds: int = 0
    target_calls: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    discarded: int = 0
    preemptions: int = 0
    tau_histogram: Counter[int] = field(default_factory=Counter)
    proposed_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    submitted: float = 0.0
    first_token: float | None = None
    finished: float | None = None

    @property
    def tau(self) -> float:
        """Tokens per round, before a stop discarded any; 0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def as_dict(self) -> dict[str, object]:
        per_token = max(self.emitted, 1)
        depth = max(self.proposed_at, default=-1) + 1
        return {
            "rounds": self.rounds,
            "target_calls": self.target_calls,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "discarded": self.discarded,
            "preemptions": self.preemptions,
            "tau": round(self.tau, 4),
            "tau_histogram": {str(t): n for t, n in sorted(self.tau_histogram.items())},
            "acceptance_by_position": [
                round(self.accepted_at[i] / self.proposed_at[i], 4) for i in range(depth)
            ],
            "target_calls_per_token": round(self.target_calls / per_token, 4),
            "drafted_per_token": round(self.drafted / per_token, 4),
        }


@dataclass(frozen=True)
class TextState:
    """How far a sequence's text is decoded.

    text: output so far, complete characters only. start, read: output tokens [start, read)
    are the window whose text is already in `text`; tokens from `read` on still wait for the
    rest of a character. sent: characters already handed to the user (the rest may be the
    beginning of a stop string).
    """

    text: str = ""
    start: int = 0
    read: int = 0
    sent: int = 0


class Status(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """The only mutable record of a generation; written by the scheduler alone.

    tokens: prompt and output. computed: committed entries in the target's cache, always
    below len(tokens). table: cache blocks, covering at least `computed` entries.
    """

    id: int
    request: Request
    seed: int
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    table: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    text: TextState = TextState()
    out: list[TokenOut] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)
    finish_reason: FinishReason | None = None
    error: str | None = None
    guarantee: Guarantee | None = None
    new_text: str = ""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Committed tokens whose keys and values are not in the target's cache yet."""
        return len(self.tokens) - self.computed

    @property
    def done(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What one step added to one request; `text` never ends inside a character."""

    request_id: int
    index: int
    tokens: tuple[TokenOut, ...]
    text: str
    finish_reason: FinishReason | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A finished generation."""

    request_id: int
    index: int
    prompt_tokens: tuple[int, ...]
    tokens: tuple[TokenOut, ...]
    text: str
    finish_reason: FinishReason
    guarantee: Guarantee
    stats: RequestStats
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(t.id for t in self.tokens)
