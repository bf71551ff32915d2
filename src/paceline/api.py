"""`LLM`: a model, a drafter and an engine behind three calls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from collections.abc import Sequence as Seq

from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.loading import open_checkpoint
from paceline.models.memory import available_bytes, check_memory
from paceline.registry import plan_drafter
from paceline.types import Request, RequestOutput, SamplingParams, StepOutput

#: A prompt: text, or its tokens.
Prompt = str | Seq[int]


class LLM:
    """A language model that drafts for itself what it can.

    model: catalog name, path of a .gguf file or safetensors folder, or Hub id.
    draft: `none`, `ngram`, or a smaller model of the same vocabulary.
    k: tokens to draft a round at most.
    dtype: auto, bfloat16 or float32; device: auto, cpu or cuda.
    memory_limit: bytes that weights and caches may take (default: what is free).

    Thread-safe; requests of all threads share one batch. Raises UserError for anything
    that the caller can mend.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str = "none",
        k: int = 4,
        dtype: str = "auto",
        device: str = "auto",
        engine: EngineConfig | None = None,
        memory_limit: int | None = None,
    ) -> None:
        SamplingParams(k=k)  # the same bounds, the same message
        config = engine or EngineConfig()
        target = open_checkpoint(model, dtype=dtype, device=device)
        plan = plan_drafter(draft, target, config)
        limit = available_bytes(target.device) if memory_limit is None else memory_limit
        slots = config.n_blocks * config.block_size
        check_memory(
            {
                f"weights ({target.source.name})": target.weight_bytes,
                "cache": target.kv_slot_bytes * slots,
                **plan.memory,
            },
            limit,
        )
        self.tokenizer = target.tokenizer
        self.engine = Engine(
            target.load(),
            plan.build(),
            FixedBudget(k),
            config,
            eos_ids=frozenset(target.config.eos_ids) | frozenset(target.tokenizer.eos_ids),
            decode=self.tokenizer.decode,
            vocab_size=target.config.vocab_size,
        )
        self._lock = threading.Lock()
        self._inbox: dict[int, deque[StepOutput]] = {}

    def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's tokens; text gets the model's beginning-of-sequence token."""
        if isinstance(prompt, str):
            if not prompt:
                raise UserError("the prompt is empty: give at least one character")
            return tuple(self.tokenizer.encode(prompt))
        return tuple(prompt)

    def chat_tokens(self, messages: Seq[dict[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation (`role`, `content`) under the model's template."""
        return tuple(self.tokenizer.chat(list(messages)))

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """All samples of all prompts, in order, decoded as one batch."""
        many = _as_list(prompts)
        ids = self._submit_all([self.tokens(p) for p in many], params or SamplingParams())
        try:
            for i in ids:
                while self._next(i).finish_reason is None:
                    pass
            return [self.result(i) for i in ids]
        finally:
            self._drop(ids)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """What each round adds. Closing the iterator ends the request."""
        ids = self._submit_all([self.tokens(prompt)], params or SamplingParams())
        return self._stream(ids)

    def _stream(self, ids: list[int]) -> Iterator[StepOutput]:
        live = set(ids)
        try:
            while live:
                for i in list(live):
                    output = self._next(i)
                    if output.finish_reason is not None:
                        live.remove(i)
                    yield output
        finally:
            self._drop(ids)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[StepOutput]:
        """`stream` for asyncio: concurrent requests share a batch; cancelling ends one."""
        tokens = self.tokens(prompt)
        ids = await asyncio.to_thread(self._submit_all, [tokens], params or SamplingParams())
        live = set(ids)
        try:
            while live:
                for i in list(live):
                    output = await asyncio.to_thread(self._next, i)
                    if output.finish_reason is not None:
                        live.remove(i)
                    yield output
        finally:
            await asyncio.shield(asyncio.to_thread(self._drop, ids))

    def result(self, request_id: int) -> RequestOutput:
        """The whole of a finished generation, until its stream is closed."""
        with self._lock:
            return self.engine.peek(request_id)

    def _submit_all(self, prompts: list[tuple[int, ...]], params: SamplingParams) -> list[int]:
        ids: list[int] = []
        with self._lock:
            for prompt in prompts:  # refuse all before any work is done
                self.engine.check(Request(prompt=prompt, params=params))
            for prompt in prompts:
                ids += self.engine.submit(Request(prompt=prompt, params=params))
            for i in ids:
                self._inbox[i] = deque()
        return ids

    def _next(self, request_id: int) -> StepOutput:
        """The next output of a request. Whoever waits steps the engine for all."""
        while True:
            with self._lock:
                inbox = self._inbox[request_id]
                if inbox:
                    return inbox.popleft()
                for output in self.engine.step():
                    if output.request_id in self._inbox:
                        self._inbox[output.request_id].append(output)

    def _drop(self, ids: list[int]) -> None:
        with self._lock:
            for i in ids:
                self._inbox.pop(i, None)
                self.engine.forget(i)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) == 0:
        raise UserError("no prompt was given: give at least one")
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
