"""The target answers seed prompts through the engine, and what it computed is kept.

`Watcher` is a drafter that proposes nothing and copies the states and laws of every pass, so
that capturing costs one forward pass a token, and training sees exactly what the engine
computes. `capture` keeps the batch full, writes shards as sequences end, and goes on behind
the last whole shard when it is started again.

Legend: N packed rows, T rows of a sequence, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from paceline.api import LLM
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree
from paceline.draft.none import NoDrafter
from paceline.errors import UserError
from paceline.models.base import FINAL, TargetOutput
from paceline.models.heads.config import eagle3_taps
from paceline.train.data import Record, ShardWriter, tap_name
from paceline.train.seeds import Seed
from paceline.types import FinishReason, Request, SamplingParams, Sequence


@dataclass
class _Held:
    """What was computed for one running sequence so far; entry t belongs to token t."""

    rows: int = 0
    states: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    laws: dict[int, tuple[int, float]] = field(default_factory=dict)


class Watcher(NoDrafter):
    """Copies `taps` of every committed row and, where the target chose a token, the most
    probable one and the log-partition of its logits. A finished sequence goes to `finished`;
    take it with `take`."""

    name = "capture"

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._held: dict[int, _Held] = {}
        self._finished: dict[int, Record] = {}

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        top_R, logz_R = _laws(output.logits_RV)
        row = law = 0
        for seq, verdict in zip(seqs, verdicts, strict=True):
            held = self._held.setdefault(seq.id, _Held())
            # A failed sequence wanted its logits too; it is dropped below.
            n = seq.computed - held.rows
            for tap in self.taps:
                states = output.taps[tap][row : row + n].to(torch.bfloat16)
                held.states.setdefault(tap, []).append(states)
            row += n
            held.rows += n
            if verdict is not None or seq.finish_reason is FinishReason.ERROR:
                held.laws[held.rows - 1] = (top_R[law], logz_R[law])
                law += 1
            if seq.done:
                self._finish(seq, held)

    def forget(self, seq_id: int) -> None:
        """Ended or preempted: the rows are computed again. The laws are kept, since a
        recomputed row wants no logits."""
        held = self._held.pop(seq_id, None)
        if held is not None and held.laws:
            self._held[seq_id] = _Held(laws=held.laws)

    def take(self, seq_id: int, key: str) -> Record | None:
        """The record of a finished sequence; None where it failed."""
        self._held.pop(seq_id, None)
        record = self._finished.pop(seq_id, None)
        return None if record is None else _with_key(record, key)

    def _finish(self, seq: Sequence, held: _Held) -> None:
        if seq.finish_reason is FinishReason.ERROR or held.rows < 2:
            return
        n = held.rows
        tokens = torch.tensor(seq.tokens[: n + 1])
        law = torch.zeros(n, dtype=torch.bool)
        top = torch.zeros(n, dtype=torch.int64)
        logz = torch.zeros(n)
        for t, (best, partition) in held.laws.items():
            law[t], top[t], logz[t] = True, best, partition
        self._finished[seq.id] = Record(
            key="",
            tokens_T=tokens[:-1],
            next_T=tokens[1:],
            law_T=law,
            top_T=top,
            logz_T=logz,
            taps={tap_name(i): torch.cat(held.states[i]).cpu() for i in self.taps},
        )


def _laws(logits_RV: torch.Tensor) -> tuple[list[int], list[float]]:
    """The most probable token and the log-partition of each row."""
    if logits_RV.device.type == "cpu":  # numpy's argmax is several times faster than torch's
        top = logits_RV.numpy().argmax(-1).tolist()
    else:
        top = logits_RV.argmax(-1).tolist()
    return top, logits_RV.logsumexp(-1).tolist()


def _with_key(record: Record, key: str) -> Record:
    fields = {name: getattr(record, name) for name in record.__dataclass_fields__}
    return Record(**{**fields, "key": key})


def default_taps(n_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 reads, and the final feature, which every objective needs."""
    return (*eagle3_taps(n_layers), FINAL)


def check_taps(taps: Seq[int], n_layers: int) -> tuple[int, ...]:
    """The taps in the layers' order, with the final feature; UserError where one is no layer."""
    for tap in taps:
        if tap != FINAL and not 0 <= tap <= n_layers:
            raise UserError(
                f"tap {tap} is no layer of this target: use 0 to {n_layers}, or -1 for the final "
                "feature"
            )
    return (*sorted(set(taps) - {FINAL}), FINAL)


@dataclass(frozen=True, kw_only=True)
class CapturePlan:
    """tokens: stop when the shards hold so many. temperatures: conversations take one each,
    in turn. max_tokens: of one answer. max_prompt: longer prompts are passed over."""

    tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7)
    max_tokens: int = 256
    max_prompt: int = 768

    def __post_init__(self) -> None:
        for name in ("tokens", "max_tokens", "max_prompt"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)} is out of range: use 1 or more")
        if not self.temperatures:
            raise UserError("no temperature was given: use 0 for greedy answers")
        for t in self.temperatures:
            SamplingParams(temperature=t)  # the same bounds, the same message


@dataclass
class Progress:
    """Counts for whoever draws them. answers: stored sequences; too_long: prompts passed
    over; tokens: rows in shards or waiting to be written."""

    tokens: int = 0
    answers: int = 0
    too_long: int = 0
    failed: int = 0


@dataclass
class _Conversation:
    seed: Seed
    temperature: float
    number: int
    turn: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.seed.key}-{self.turn}"


def capture(
    llm: LLM,
    seeds: Iterator[Seed],
    writer: ShardWriter,
    plan: CapturePlan,
    taps: tuple[int, ...],
    report: Callable[[Progress], None] = lambda _: None,
) -> Progress:
    """Answer seeds until the folder holds `plan.tokens`, or they end. The engine must have
    been made without a prefix cache (every position has to be computed).

    Whoever interrupts this keeps the shards that were written; `writer.close()` adds what
    had finished. Seeds whose sequence is in the folder are passed over.
    """
    engine = llm.engine
    if engine.config.prefix_cache:
        raise ValueError("capturing needs EngineConfig(prefix_cache=False)")
    watcher = Watcher(taps)
    engine.drafter = watcher
    progress = Progress(tokens=writer.tokens)
    running: dict[int, _Conversation] = {}
    queue: list[_Conversation] = []
    numbers = iter(range(1 << 62))
    ended = False
    while writer.tokens < plan.tokens:
        while len(running) < engine.config.max_batch and not (ended and not queue):
            talk = queue.pop() if queue else _next(seeds, plan, next(numbers))
            if talk is None:
                ended = True
            elif not _in_folder(talk, writer):
                prompt = _prompt(llm, talk)
                if len(prompt) > plan.max_prompt:
                    progress.too_long += 1
                    continue
                running[_submit(llm, prompt, talk, plan)] = talk
        if not running:
            break
        for output in engine.step():
            if output.finish_reason is None:
                continue
            talk = running.pop(output.request_id)
            result = engine.result(output.request_id)
            record = watcher.take(output.request_id, talk.key)
            if record is None:
                progress.failed += 1
                continue
            writer.add(record)
            progress.answers += 1
            if talk.turn + 1 < len(talk.seed.turns):
                talk.messages.append({"role": "assistant", "content": result.text})
                talk.turn += 1
                queue.append(talk)
        progress.tokens = writer.tokens
        report(progress)
    for request in running:
        engine.forget(request)
    writer.flush()
    return progress


def _next(seeds: Iterator[Seed], plan: CapturePlan, number: int) -> _Conversation | None:
    seed = next(seeds, None)
    if seed is None:
        return None
    temperature = plan.temperatures[number % len(plan.temperatures)]
    return _Conversation(seed, temperature, number)


def _in_folder(talk: _Conversation, writer: ShardWriter) -> bool:
    """Whether nothing of it is left to do. A later turn needs the earlier answers, so a
    conversation of which something is missing is held again from its first turn."""
    return all(f"{talk.seed.key}-{i}" in writer.keys for i in range(len(talk.seed.turns)))


def _prompt(llm: LLM, talk: _Conversation) -> tuple[int, ...]:
    text = talk.seed.turns[talk.turn]
    if talk.seed.raw:
        return llm.tokens(text)
    talk.messages.append({"role": "user", "content": text})
    return llm.chat_tokens(talk.messages)


def _submit(llm: LLM, prompt: tuple[int, ...], talk: _Conversation, plan: CapturePlan) -> int:
    params = SamplingParams(
        temperature=talk.temperature, max_tokens=plan.max_tokens, seed=talk.number
    )
    (request,) = llm.engine.submit(Request(prompt=prompt, params=params))
    return request
