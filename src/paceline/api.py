"""`LLM`: a model, a drafter and an engine behind three calls."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import AsyncIterator, Generator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.latency import Profile
from paceline.core.shapes import TreeShape, best_shape
from paceline.draft.auto import AutoDrafter
from paceline.draft.base import Drafter
from paceline.draft.tree import TreeDrafter
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.costs import guess
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import BudgetPolicy, FixedBudget
from paceline.engine.profile import file_identity, obtain_profile, read_profile
from paceline.engine.purse import AdaptiveConfig
from paceline.errors import UserError
from paceline.models.base import TargetModel
from paceline.models.loading import Checkpoint, OnPack, open_checkpoint
from paceline.models.memory import available_bytes, check_memory
from paceline.models.native import NativeModel
from paceline.registry import DraftSpec, drafters_of, plan_drafter
from paceline.sampling.grammar import Grammars, Vocabulary
from paceline.types import Request, RequestOutput, RequestStats, SamplingParams, StepOutput

POLICIES = ("adaptive", "fixed")
#: Cache slots below which costs can't be measured.
_ROOM_TO_MEASURE = 1024

#: A prompt: text, or its tokens.
Prompt = str | Seq[int]


class LLM:
    """A language model that drafts for itself what it can.

    model: catalog name, path of a .gguf file or safetensors folder, or Hub id.
    draft: `none`, `ngram`, `layerskip`, a smaller model, a trained head (`eagle3`, `medusa` or
        its folder), or `ngram+DRAFT` for both.
    policy: `adaptive` measures what drafting costs and brings, and drafts as much as pays,
        nothing where it does not; `fixed` always drafts k tokens.
    k: tokens to draft a round at most (default: 8, or 4 where fixed; all nodes of a tree).
    profile: costs of this machine, or the file of them, for the adaptive policy (default:
        measured once, in a few seconds, and kept in the cache folder).
    tree: trees from a draft model: `3x2x1`, `top:3x2x1`, `paths:12` or `sequoia:12` (which
        starts as 4x2x1 until `fit_tree`); see docs/drafters.md.
    draft_vocab: `same`; or `intersect`, `slem` for a draft with another tokenizer.
    draft_weights: on the native core, `fast` (4 bits, frequent tokens) or `stored`.
    dtype: auto (on a CPU the native core for quantised weights), bfloat16 or float32; q4 or
        q8: on the native core, weights stored in more bits quantised to 4 or 8.
    device: auto, cpu or cuda.
    memory_limit: bytes that weights and caches may take (default: what is free).
    on_pack: called with a model's name and the share done while the native core packs its
        weights, once: they are kept in the cache folder.

    Thread-safe; requests of all threads share one batch. Raises UserError for anything
    that the caller can mend.
    """

    def __init__(
        self,
        model: str,
        *,
        draft: str = "none",
        policy: str = "adaptive",
        k: int | None = None,
        profile: Profile | str | Path | None = None,
        tree: str | None = None,
        draft_vocab: str = "same",
        draft_weights: str = "fast",
        dtype: str = "auto",
        device: str = "auto",
        engine: EngineConfig | None = None,
        memory_limit: int | None = None,
        on_pack: OnPack | None = None,
    ) -> None:
        spec = DraftSpec(name=draft, tree=tree, vocabulary=draft_vocab, weights=draft_weights)
        SamplingParams(k=k)  # the same bounds, the same message
        if policy not in POLICIES:
            raise UserError(f"unknown policy {policy!r}: use {' or '.join(POLICIES)}")
        if profile is not None and policy != "adaptive":
            raise UserError("a profile is of use to policy 'adaptive' only: drop one of the two")
        if isinstance(profile, str | Path):
            profile = read_profile(profile)
        config = engine or EngineConfig()
        target = open_checkpoint(model, dtype=dtype, device=device, on_pack=on_pack)
        plan = plan_drafter(spec, target, config)
        adaptive = policy == "adaptive" and draft != "none"
        if k is None:
            k = (8 if adaptive else 4) if plan.tree is None else plan.tree.nodes
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
        self.tokenizer = tokenizer = target.tokenizer
        eos_ids = frozenset(target.config.eos_ids) | frozenset(tokenizer.eos_ids)
        vocabulary = Vocabulary(
            token_bytes=lambda: [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)],
            special_ids=tokenizer.special_ids,
            eos_ids=frozenset(i for i in eos_ids if i < tokenizer.vocab_size),
            encode=lambda text: tokenizer.encode(text, add_special=False),
        )
        loaded = target.load()
        if isinstance(loaded, NativeModel):
            # Torch builds the laws between passes. Its threads wait by spinning, and so do the
            # core's: on the same cores each would halve the other's speed.
            torch.set_num_threads(1)
        drafter = plan.build()
        notes: list[str] = []
        budgets: BudgetPolicy = FixedBudget(k)
        if adaptive:
            costs = _profile(profile, target, loaded, spec, drafter, config, notes)
            budgets = AdaptivePolicy(costs, drafter, AdaptiveConfig(most=k))
            if isinstance(drafter, AutoDrafter):
                drafter.route = budgets.route
        self.engine = Engine(
            loaded,
            drafter,
            budgets,
            config,
            eos_ids=eos_ids,
            decode=self.tokenizer.decode,
            encode=vocabulary.encode,
            grammars=Grammars(vocabulary),
            vocab_size=target.config.vocab_size,
        )
        self.notes = (*target.config.notes, *plan.notes, *notes)
        self._tree = plan.tree
        self.k = k
        # Vocabularies are hundreds of thousands of objects that never die: without this, the
        # garbage collector scans them now and then, for a tenth of a second.
        gc.collect()
        gc.freeze()
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

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StepOutput, None, None]:
        """What each round adds. A request that can't be served is refused at once; the work
        begins with the first step, and closing the iterator ends it."""
        tokens, chosen = self.tokens(prompt), params or SamplingParams()
        with self._lock:
            self.engine.check(Request(prompt=tokens, params=chosen))
        return self._stream(tokens, chosen)

    def _stream(
        self, tokens: tuple[int, ...], params: SamplingParams
    ) -> Generator[StepOutput, None, None]:
        ids = self._submit_all([tokens], params)
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

    @property
    def wants_fit(self) -> bool:
        """Whether a Sequoia tree was asked for and not fitted yet."""
        return self._tree is not None and self._tree.fit is not None

    def fit_tree(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | None = None
    ) -> TreeShape:
        """Measure how often each rank of child is accepted on these prompts, and take the
        best static shape for it from now on (Sequoia, Chen et al. 2024, section 3.1)."""
        drafter = self.engine.drafter
        if isinstance(drafter, AutoDrafter):
            drafter = next(reversed(drafter.drafters.values()))
        if self._tree is None or self._tree.fit is None or not isinstance(drafter, TreeDrafter):
            raise UserError("there is no Sequoia tree to fit: give tree='sequoia:12'")
        params = replace(params or SamplingParams(max_tokens=64), k=self.k)
        outputs = self.generate(prompts, params)
        total = RequestStats()
        for output in outputs:
            total.offered_rank.update(output.stats.offered_rank)
            total.accepted_rank.update(output.stats.accepted_rank)
        rates = total.acceptance_by_rank()
        if not rates:
            raise UserError("nothing was drafted on these prompts: give longer ones")
        drafter.shape = best_shape(rates, self._tree.fit)
        self.k = drafter.shape.nodes
        if isinstance(self.engine.policy, AdaptivePolicy):
            self.engine.policy.limit(self.k)
        else:
            self.engine.policy = FixedBudget(self.k)
        self._tree = replace(self._tree, shape=drafter.shape, fit=None)
        return drafter.shape

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


def _profile(
    given: Profile | None,
    target: Checkpoint,
    model: TargetModel,
    spec: DraftSpec,
    drafter: Drafter,
    config: EngineConfig,
    notes: list[str],
) -> Profile:
    """Costs by the names under which drafters propose: given, known from an earlier run,
    measured now, or guessed where the cache is too small to measure in."""
    parts = drafters_of(spec, drafter)
    if given is None and config.kv_tokens < _ROOM_TO_MEASURE:
        notes.append(
            f"kv_tokens = {config.kv_tokens} is too small to measure costs in: the adaptive "
            "policy learns them while it runs"
        )
        return guess()
    profile = given or obtain_profile(
        model,
        dict(parts.values()),
        config,
        weights=file_identity(target.source.path),
        vocab_size=target.config.vocab_size,
        on_measure=lambda: notes.append("costs of this machine were measured for the policy"),
    )
    drafts = {
        name: profile.drafts[label] for name, (label, _) in parts.items() if label in profile.drafts
    }
    missing = [label for label, _ in parts.values() if label not in profile.drafts]
    if missing:
        notes.append(
            f"the profile has no costs of draft {missing[0]!r}: they are learned while it runs"
        )
    return replace(profile, drafts=drafts)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) == 0:
        raise UserError("no prompt was given: give at least one")
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
