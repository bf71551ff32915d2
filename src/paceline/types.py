"""What the user asks (`Request`, `SamplingParams`), the one mutable record of a generation
(`Sequence`), and what comes back (`TokenOut`, `RequestOutput`)."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.rules import Guarantee, Origin
from paceline.errors import UserError


def _check(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise UserError(f"{name} = {value!r} is out of range: use {want}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids as a tuple; UserError where they are none."""
    ids = tuple(value) if isinstance(value, Iterable) else (value,)
    for i in ids:
        _check(isinstance(i, int) and _is_count(i) and i >= 0, name, i, "token ids, 0 or more")
    return ids


#: Outputs of one request at most.
MAX_N = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    What changes the law of the next token, in the order of application (transformers' one;
    `docs/guarantees.md`). Each is part of the law of target and draft alike and sees the
    tokens on the judged node's own path:

    logit_bias: id -> added to its logit, -100 to 100 (a mapping; kept as sorted pairs).
    repetition_penalty: logits of tokens of prompt and output are divided by it where
        positive, multiplied where negative (1: off; above 0). frequency_penalty,
        presence_penalty: subtracted from the logits of output tokens, for each occurrence
        and once (-2 to 2; 0: off).
    allowed_tokens: only these ids (None: all). banned_tokens: never these ids.
    banned_words: never these texts, as tokenised with and without a leading space, or
        sequences of ids; one that the prompt begins can't be completed either.
    min_tokens: end-of-sequence and stop tokens are banned until there are so many output
        tokens (a stop string ends the output all the same, and so does a grammar that
        allows nothing else).
    json_schema (a dict or JSON text), regex, grammar (Lark or EBNF/GBNF text): one at most;
        the whole output is a text of that language, and end-of-sequence follows it.
    temperature: 0 is greedy (the argmax of the logits so far; the lowest id wins ties).
    top_k: keep the k most probable tokens (0: all). top_p: then the smallest set of most
        probable tokens with at least this mass (1: off). min_p: then those with at least
        this share of the largest probability (0: off). typical_p: then the smallest set of
        those nearest to the entropy with at least this mass (1: off).

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
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] | None = None
    banned_tokens: tuple[int, ...] = ()
    banned_words: tuple[str | tuple[int, ...], ...] = ()
    min_tokens: int = 0
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
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
        self._check_law()
        self._check_tokens()
        self._check_grammar()
        seed_ok = self.seed is None or (_is_count(self.seed) and 0 <= self.seed < 2**64)
        _check(seed_ok, "seed", self.seed, "an integer from 0 to 2**64 - 1, or None")
        _check(_is_count(self.n) and 1 <= self.n <= MAX_N, "n", self.n, f"1 to {MAX_N}")
        n = self.max_tokens
        _check(_is_count(n) and n >= 1, "max_tokens", n, "1 or more")
        m = self.min_tokens
        _check(_is_count(m) and 0 <= m <= n, "min_tokens", m, f"0 to max_tokens ({n})")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for s in self.stop:
            _check(isinstance(s, str) and s != "", "stop", s, "non-empty strings")
        lp = self.logprobs
        lp_ok = lp is None or (_is_count(lp) and 0 <= lp <= 100)
        _check(lp_ok, "logprobs", lp, "0 to 100, or None")
        k_ok = self.k is None or (_is_count(self.k) and 0 <= self.k <= 64)
        _check(k_ok, "k", self.k, "0 (no speculation) to 64, or None for the engine's setting")

    def _check_law(self) -> None:
        t = self.temperature
        _check(_is_number(t) and 0.0 <= t <= 100.0, "temperature", t, "a number from 0 to 100")
        _check(_is_count(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        for name in ("top_p", "typical_p"):
            p = getattr(self, name)
            _check(_is_number(p) and 0.0 < p <= 1.0, name, p, "a number above 0, at most 1 (off)")
        m = self.min_p
        _check(_is_number(m) and 0.0 <= m <= 1.0, "min_p", m, "a number from 0 (off) to 1")
        r = self.repetition_penalty
        _check(_is_number(r) and r > 0.0, "repetition_penalty", r, "a number above 0 (1: off)")
        for name in ("presence_penalty", "frequency_penalty"):
            f = getattr(self, name)
            _check(_is_number(f) and -2.0 <= f <= 2.0, name, f, "a number from -2 to 2 (0: off)")

    def _check_tokens(self) -> None:
        """Ids and words become tuples, so that parameters stay immutable and hashable."""
        try:
            pairs = sorted(dict(self.logit_bias).items())
        except (TypeError, ValueError):
            raise UserError("logit_bias must map token ids to numbers, like {42: -1.5}") from None
        _ids("logit_bias", [i for i, _ in pairs])
        for _, value in pairs:
            ok = _is_number(value) and -100.0 <= value <= 100.0
            _check(ok, "logit_bias", value, "numbers from -100 to 100")
        object.__setattr__(self, "logit_bias", tuple(pairs))
        for name in ("banned_tokens", "stop_token_ids"):
            object.__setattr__(self, name, _ids(name, getattr(self, name)))
        if self.allowed_tokens is not None:
            allowed = _ids("allowed_tokens", self.allowed_tokens)
            want = "at least one token id, or None for all"
            _check(len(allowed) > 0, "allowed_tokens", allowed, want)
            object.__setattr__(self, "allowed_tokens", allowed)
        many = self.banned_words
        words = (many,) if isinstance(many, str) else tuple(many)
        words = tuple(w if isinstance(w, str) else _ids("banned_words", w) for w in words)
        for word in words:
            ok = word.strip() != "" if isinstance(word, str) else len(word) > 0
            _check(ok, "banned_words", word, "non-empty texts or sequences of token ids")
        object.__setattr__(self, "banned_words", words)

    def _check_grammar(self) -> None:
        schema = self.json_schema
        if schema is not None:
            try:
                value = json.loads(schema) if isinstance(schema, str) else dict(schema)
                text = json.dumps(value)
            except (ValueError, TypeError) as e:
                raise UserError(f"json_schema can't be read as JSON: {e}") from None
            if not isinstance(value, dict):
                raise UserError("json_schema must be a JSON object: give a schema like {'type': …}")
            object.__setattr__(self, "json_schema", text)
        for name in ("regex", "grammar"):
            v = getattr(self, name)
            _check(v is None or (isinstance(v, str) and v != ""), name, v, "non-empty text")
        given = [n for n in ("json_schema", "regex", "grammar") if getattr(self, n) is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} exclude each other: give one of them")
        if given and self.ignore_eos:
            raise UserError(
                f"{given[0]} can't be met with ignore_eos: the end-of-sequence token ends the "
                "language's texts; drop one of them"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def language(self) -> tuple[str, str] | None:
        """The grammar as (parameter, text); None without one."""
        if self.json_schema is not None:
            assert isinstance(self.json_schema, str)
            return "json_schema", self.json_schema
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    @cached_property
    def penalises(self) -> bool:
        """Whether logits depend on which tokens came before."""
        none = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != none

    @cached_property
    def contextual(self) -> bool:
        """Whether the law depends on the tokens so far beyond the model's logits."""
        masks = bool(self.banned_words) or self.min_tokens > 0 or self.language is not None
        return masks or self.penalises

    @cached_property
    def adjusts(self) -> bool:
        """Whether logits change before the temperature."""
        static = bool(self.logit_bias or self.banned_tokens) or self.allowed_tokens is not None
        return static or self.contextual


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, already in tokens, and how to continue it."""

    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()

    @cached_property
    def prompt_ids(self) -> frozenset[int]:
        """The prompt's distinct tokens."""
        return frozenset(self.prompt)


class TokenMask(Protocol):
    """A grammar's state on behalf of one sequence: a pure function of the output tokens."""

    def mask(self, output: Seq[int]) -> npt.NDArray[np.bool_] | None:
        """Which tokens may follow; None where `output` lies outside the language, or in it
        behind its end."""
        ...


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
    """Counts of one request. cached: prompt tokens whose cache entries were there already.
    drafted >= verified >= accepted; a drafted token is verified
    when the target judged it before the round's end. Times are seconds.

    proposed_at[i], accepted_at[i]: rounds that proposed at least i + 1 tokens deep, and
    that accepted so many. offered_rank[r], accepted_rank[r]: visited nodes that had a child
    of rank r, and that were left through it. tau_histogram[t]: rounds that committed t.
    """

    cached: int = 0
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
    offered_rank: Counter[int] = field(default_factory=Counter)
    accepted_rank: Counter[int] = field(default_factory=Counter)
    submitted: float = 0.0
    first_token: float | None = None
    finished: float | None = None

    @property
    def tau(self) -> float:
        """Tokens per round, before a stop discarded any; 0 before the first round."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    def acceptance_by_rank(self) -> list[float]:
        """How often the first, second, ... child of a visited node was accepted."""
        ranks = max(self.offered_rank, default=-1) + 1
        return [self.accepted_rank[r] / self.offered_rank[r] for r in range(ranks)]

    def as_dict(self) -> dict[str, object]:
        per_token = max(self.emitted, 1)
        depth = max(self.proposed_at, default=-1) + 1
        return {
            "cached": self.cached,
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
            "acceptance_by_rank": [round(r, 4) for r in self.acceptance_by_rank()],
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
    below len(tokens). table: cache blocks, covering at least `computed` entries. end_ids:
    tokens that end it (end-of-sequence and stop tokens). grammar: what its language allows.
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
    end_ids: frozenset[int] = frozenset()
    grammar: TokenMask | None = None

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
