"""From a workload to requests: conversations replayed, output lengths fixed, seeds dealt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from paceline.bench.load import closed_loop
from paceline.bench.results import CellConfig, Protocol
from paceline.bench.workloads import Item, Workload
from paceline.draft.auto import AutoDrafter
from paceline.draft.base import Drafter
from paceline.draft.none import NoDrafter
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import Engine
from paceline.engine.policy import BudgetPolicy, FixedBudget
from paceline.errors import UserError
from paceline.types import Request, SamplingParams

Message = dict[str, str]
#: A conversation's tokens, ready for the answer.
Render = Callable[[list[Message]], tuple[int, ...]]


@dataclass
class Subject:
    """One engine that decodes plainly or speculates, as told. `drafter` is the speculating
    one; `adaptive` the policy that the engine was made with, where it is adaptive."""

    engine: Engine
    drafter: Drafter
    render: Render
    adaptive: AdaptivePolicy | None = None

    def plain(self) -> None:
        """The reference: the same engine, weights and kernels, with a drafter that does
        nothing and a budget of nothing."""
        self.engine.drafter, self.engine.policy = NoDrafter(), FixedBudget(0)

    def use(self, cell: CellConfig) -> None:
        policy: BudgetPolicy = FixedBudget(cell.k)
        route = None
        if cell.policy == "adaptive":
            assert self.adaptive is not None, "this engine was made without an adaptive policy"
            policy, route = self.adaptive, self.adaptive.route
        if isinstance(self.drafter, AutoDrafter):
            self.drafter.route = route
        self.engine.drafter, self.engine.policy = self.drafter, policy

    @property
    def deterministic(self) -> bool:
        """Whether its proposals are chosen, not drawn, at temperature > 0."""
        return self.drafter.example(greedy=False).laws is None


@dataclass(frozen=True)
class Prompt:
    """One turn, ready to send. length: output tokens of every run."""

    item: Item
    turn: int
    tokens: tuple[int, ...]
    length: int

    def request(self, protocol: Protocol, temperature: float, repeat: int, fast: bool) -> Request:
        """Runs end at `length` and nowhere else, so that all are equally long."""
        seed = _seed(protocol, self, repeat) if protocol.seeded and temperature > 0 else None
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=self.length,
            ignore_eos=True,
            rule=protocol.rule if fast else None,
        )
        return Request(prompt=self.tokens, params=params)


@dataclass(frozen=True)
class Prepared:
    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...]


def _seed(protocol: Protocol, prompt: Prompt, repeat: int) -> int:
    """Of its own for each prompt and repeat: texts of one seed would not be independent."""
    return _hash(protocol.seed, prompt.item.id, prompt.turn, repeat)


def _hash(*parts: object) -> int:
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def prepare(
    subject: Subject, workload: Workload, protocol: Protocol, temperature: float, concurrency: int
) -> Prepared:
    """Decode everything plainly once. The answers fix the output lengths and stand between the
    turns of a conversation, so that plain and speculative runs get the same prompts."""
    subject.plain()
    messages: dict[str, list[Message]] = {i.id: [] for i in workload.items}
    prompts: list[Prompt] = []
    dropped: list[str] = []
    for turn in range(max(max(len(i.turns), 1) for i in workload.items)):
        ready = []
        for item in workload.items:
            if turn < max(len(item.turns), 1) and item.id not in dropped:
                tokens = _tokens(subject, item, turn, messages[item.id])
                if len(tokens) + protocol.max_tokens > subject.engine.max_length:
                    dropped.append(item.id)
                else:
                    ready.append((item, tokens))
        texts = _answer(subject, ready, protocol, temperature, turn, concurrency)
        for (item, tokens), (text, length) in zip(ready, texts, strict=True):
            messages[item.id].append({"role": "assistant", "content": text})
            n = length if protocol.lengths == "plain" else protocol.max_tokens
            prompts.append(Prompt(item, turn, tokens, n))
    notes = list(workload.notes)
    if dropped:
        notes.append(
            f"{len(dropped)} of {len(workload.items)} prompts end where the context of "
            f"{subject.engine.max_length} tokens leaves no room for {protocol.max_tokens} more: "
            f"{', '.join(dropped[:5])}{' ...' if len(dropped) > 5 else ''}"
        )
    if not prompts:
        raise UserError(
            f"workload {workload.name!r}: no prompt fits the context of "
            f"{subject.engine.max_length} tokens; raise --kv-tokens or lower --max-tokens"
        )
    order = {item.id: i for i, item in enumerate(workload.items)}
    prompts.sort(key=lambda p: (order[p.item.id], p.turn))
    return Prepared(tuple(prompts), tuple(notes))


def _tokens(subject: Subject, item: Item, turn: int, messages: list[Message]) -> tuple[int, ...]:
    if item.tokens is not None:
        return item.tokens
    messages.append({"role": "user", "content": item.turns[turn]})
    return subject.render(messages)


def _answer(
    subject: Subject,
    ready: Seq[tuple[Item, tuple[int, ...]]],
    protocol: Protocol,
    temperature: float,
    turn: int,
    concurrency: int,
) -> list[tuple[str, int]]:
    """Text and number of tokens of the plain answers, ended as the model ends them."""
    requests = []
    for item, tokens in ready:
        seed = _seed(protocol, Prompt(item, turn, tokens, 1), 0) if temperature > 0 else None
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=protocol.max_tokens)
        requests.append(Request(prompt=tokens, params=params))
    trace = closed_loop(subject.engine, requests, concurrency) if requests else None
    traces = trace.requests if trace else ()
    return [(t.output.text, len(t.output.tokens)) for t in traces]
