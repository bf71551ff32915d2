"""The engine: continuous batching of plain and speculating requests over one model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.cache.allocator import BlockAllocator
from paceline.core.draws import derive_seed
from paceline.core.rules import AcceptanceRule, Guarantee, Verdict, default_rule, rule_named
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Drafter, SelfDrafter
from paceline.engine.admission import Admission, Encode
from paceline.engine.policy import BudgetPolicy, Part, Round
from paceline.engine.scheduler import Commit, Item, Scheduler
from paceline.engine.step import Ends, judge, kv_moves, row_groups, truncate
from paceline.engine.text import Decode
from paceline.errors import UserError
from paceline.models.base import KVStore, TargetModel, pack
from paceline.sampling.grammar import Grammars
from paceline.types import Request, RequestOutput, RequestStats, Sequence, StepOutput


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """kv_tokens: cache slots for committed and proposed tokens of all running sequences.
    block_size: slots per block. max_batch: sequences that run at once. prefill_chunk:
    prompt tokens that one step reads at most. prefix_cache: keep the cache blocks of
    finished requests for prompts that begin alike, as long as nobody needs the room."""

    kv_tokens: int = 16384
    block_size: int = 32
    max_batch: int = 16
    prefill_chunk: int = 512
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size", "max_batch", "prefill_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} = {value!r} is out of range: use an integer of 1 or more")
        if self.kv_tokens < self.block_size:
            raise UserError(
                f"kv_tokens = {self.kv_tokens} does not fill one block of {self.block_size}; "
                "raise kv_tokens"
            )

    @property
    def n_blocks(self) -> int:
        return self.kv_tokens // self.block_size


@dataclass
class EngineStats:
    """Totals since the start. T_p: target passes, T_q: drafting (propose and observe), T_o:
    everything else in a step; seconds."""

    steps: int = 0
    rows: int = 0
    time_target: float = 0.0
    time_draft: float = 0.0
    time_other: float = 0.0
    kv_peak_blocks: int = 0
    kv_peak_scratch_slots: int = 0
    totals: RequestStats = field(default_factory=RequestStats)

    def add(self, stats: RequestStats) -> None:
        t = self.totals
        for name in (
            "cached",
            "rounds",
            "target_calls",
            "drafted",
            "verified",
            "accepted",
            "emitted",
            "discarded",
            "preemptions",
        ):
            setattr(t, name, getattr(t, name) + getattr(stats, name))
        t.tau_histogram.update(stats.tau_histogram)
        t.proposed_at.update(stats.proposed_at)
        t.accepted_at.update(stats.accepted_at)
        t.offered_rank.update(stats.offered_rank)
        t.accepted_rank.update(stats.accepted_rank)

    def as_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "rows": self.rows,
            "T_p_s": round(self.time_target, 6),
            "T_q_s": round(self.time_draft, 6),
            "T_o_s": round(self.time_other, 6),
            "kv_peak_blocks": self.kv_peak_blocks,
            "kv_peak_scratch_slots": self.kv_peak_scratch_slots,
            **self.totals.as_dict(),
        }


class Engine:
    """Mutable; one thread at a time. `step` is the whole loop."""

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter,
        policy: BudgetPolicy,
        config: EngineConfig,
        *,
        eos_ids: frozenset[int] = frozenset(),
        decode: Decode | None = None,
        encode: Encode | None = None,
        grammars: Grammars | None = None,
        vocab_size: int | None = None,
        audit: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """eos_ids: tokens that end a generation. decode: output ids to text, where there is
        a tokenizer. encode: text to ids without special tokens, for banned words. grammars:
        compiler of grammars. vocab_size: tokens that a prompt may hold (the model's, if not given).
        audit: check all cache invariants after every step (for tests). clock: seconds, by
        which everything is timed that policies and statistics see."""
        self.model = model
        self.drafter = drafter
        self.policy = policy
        self.config = config
        self.stats = EngineStats()
        self._vocab_size = vocab_size or model.info.vocab_size
        self._decode = decode
        self._admission = Admission(self._vocab_size, eos_ids, encode, grammars)
        self._audit = audit
        self._clock = clock
        max_length = min(model.info.max_context, config.n_blocks * config.block_size)
        self._ends = Ends(eos_ids, max_length, decode)
        self._kv: KVStore = model.new_kv(config.n_blocks, config.block_size)
        if isinstance(drafter, SelfDrafter):
            drafter.bind(model, self._kv)
        self.scheduler = Scheduler(
            BlockAllocator(config.n_blocks, config.block_size),
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            max_length=max_length,
            prefix_cache=config.prefix_cache,
            clock=clock,
        )
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle

    @property
    def max_length(self) -> int:
        """Prompt and output tokens that one sequence may have."""
        return self._ends.max_length

    def submit(self, request: Request) -> list[int]:
        """Queue a request; the id of each of its `n` samples. UserError where it can't be
        served as asked."""
        self.check(request)
        request = self._admission.resolve(request)
        seed = request.params.seed
        base = secrets.randbits(64) if seed is None else seed
        ids = []
        for index in range(request.params.n):
            seq = Sequence(self._next_id, request, derive_seed(base, index), index)
            seq.end_ids = self._admission.end_ids(request.params)
            seq.grammar = self._admission.cursor(request.params)
            self._next_id += 1
            self._sequences[seq.id] = seq
            self.scheduler.add(seq)
            ids.append(seq.id)
        return ids

    def check(self, request: Request) -> None:
        """UserError where a request can't be served as asked."""
        prompt, params = request.prompt, request.params
        if not prompt:
            raise UserError("the prompt is empty: give at least one token or character")
        bad = next((t for t in prompt if not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise UserError(
                f"prompt token {bad} is outside the model's vocabulary of {self._vocab_size}"
            )
        if len(prompt) >= self.max_length:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.max_length} "
                "with at least one new token; shorten it or raise --kv-tokens (up to the "
                f"model's {self.model.info.max_context})"
            )
        if params.stop and self._decode is None:
            raise UserError("stop strings need a tokenizer, and this model has none")
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise UserError(f"logprobs = {params.logprobs} exceeds the vocabulary")
        self._admission.check(request)
        if params.rule is not None:
            # Refuse now what the rule could only refuse in the middle of a generation.
            try:
                rule = rule_named(params.rule)
                rule.check(self.drafter.example(params.greedy), params.greedy)
            except ValueError as e:
                raise UserError(str(e)) from None

    def rule_for(self, seq: Sequence, tree: TokenTree) -> AcceptanceRule:
        """The request's rule, else the best exact one (measurements override this)."""
        if seq.params.rule is not None:
            return rule_named(seq.params.rule)
        return default_rule(tree, seq.params.greedy)

    def step(self) -> list[StepOutput]:
        """One round for every running sequence: what it emitted, and who finished."""
        start = self._clock()
        items = self.scheduler.plan(self.policy)
        for seq in self.scheduler.take_preempted():
            self.drafter.forget(seq.id)
        if not items:
            return []

        drafting = self._clock()
        trees = self._propose(items)
        drafted = self._clock()
        batch = pack(row_groups(items, trees), self.config.block_size)
        passing = self._clock()
        output = self.model.forward(batch, self._kv, taps=self.drafter.taps)
        passed = self._clock()
        judged = judge(items, trees, output.logits_RV, self.rule_for)
        commits = truncate(items, trees, judged, output.logits_RV, self._ends)
        moves = kv_moves(items, commits, self.config.block_size)
        if moves is not None:
            self._kv.move(*moves)
        self._note_usage(items, batch.n_rows)
        verdicts = [j.verdict for j in judged]
        outputs = self.scheduler.commit(items, trees, verdicts, commits)

        observing = self._clock()
        known = [t or chain(i.seq.tokens[-1]) for i, t in zip(items, trees, strict=True)]
        self.drafter.observe([i.seq for i in items], known, output, verdicts)
        end = self._clock()
        t_draft = drafted - drafting + end - observing
        t_other = end - start - t_draft - (passed - passing)
        self.stats.time_draft += t_draft
        self.stats.time_target += passed - passing
        self.stats.time_other += t_other
        self.policy.observe(
            Round(
                parts=tuple(_parts(items, trees, commits, verdicts)),
                t_draft=t_draft,
                t_target=passed - passing,
                t_other=t_other,
            )
        )
        for item in items:
            if item.seq.done:
                self._end(item.seq)
        if self._audit:
            self.scheduler.audit()
        return outputs

    def _propose(self, items: list[Item]) -> list[TokenTree | None]:
        """A tree for each sequence that decides; None while its prompt is being read."""
        deciding = [i for i in items if i.decides]
        if not any(i.budget for i in deciding):  # a plain step: nobody is asked
            return [chain(i.seq.tokens[-1]) if i.decides else None for i in items]
        proposed = self.drafter.propose([i.seq for i in deciding], [i.budget for i in deciding])
        for item, tree in zip(deciding, proposed, strict=True):
            assert len(tree) - 1 <= item.budget, "a drafter exceeded its budget"
        trees = iter(proposed)
        return [next(trees) if i.decides else None for i in items]

    def _note_usage(self, items: list[Item], rows: int) -> None:
        s = self.stats
        s.steps += 1
        s.rows += rows
        s.kv_peak_blocks = max(s.kv_peak_blocks, self.scheduler.allocator.n_used)
        scratch = rows - sum(i.rows for i in items)
        s.kv_peak_scratch_slots = max(s.kv_peak_scratch_slots, scratch)

    def _end(self, seq: Sequence) -> None:
        self.drafter.forget(seq.id)
        self.policy.forget(seq.id)
        self.stats.add(seq.stats)

    def abort(self, request_id: int) -> StepOutput | None:
        """End a request now; its blocks are free at once. None where it had ended."""
        seq = self._sequences.get(request_id)
        if seq is None:
            raise UserError(f"no request {request_id} is known")
        output = self.scheduler.abort(seq)
        if output is not None:
            self._end(seq)
        return output

    def stream(self) -> Iterator[StepOutput]:
        """Step until nothing is left to do. Requests may be submitted meanwhile."""
        while not self.idle:
            yield from self.step()

    def peek(self, request_id: int) -> RequestOutput:
        """A finished generation; ValueError while it still runs."""
        seq = self._sequences[request_id]
        if seq.finish_reason is None:
            raise ValueError(f"request {request_id} has not finished")
        guarantee = seq.guarantee
        if guarantee is None:  # it ended before its first token
            greedy = seq.params.greedy
            guarantee = Guarantee.EXACT_GREEDY if greedy else Guarantee.EXACT_SAMPLING
        return RequestOutput(
            request_id=seq.id,
            index=seq.index,
            prompt_tokens=seq.request.prompt,
            tokens=tuple(seq.out),
            text=seq.text.text,
            finish_reason=seq.finish_reason,
            guarantee=guarantee,
            stats=seq.stats,
            error=seq.error,
        )

    def forget(self, request_id: int) -> None:
        """Drop a request's record, ending it first where it still runs."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self.abort(request_id)
            del self._sequences[request_id]

    def result(self, request_id: int) -> RequestOutput:
        """The finished generation, which the engine then forgets."""
        output = self.peek(request_id)
        self.forget(request_id)
        return output

    def usage(self) -> dict[str, object]:
        """Cache blocks and statistics, readable at any time, before any traffic too."""
        draft = self.drafter.usage()
        allocator = self.scheduler.allocator
        cache = self.scheduler.prefix_cache
        committed = sum(allocator.blocks_for(s.computed) for s in self.scheduler.running)
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "kv_blocks": allocator.n_blocks,
            "kv_blocks_used": allocator.n_used,
            "kv_blocks_committed": committed,
            "kv_blocks_cached": len(cache.table) if cache else 0,
            "kv_bytes": self._kv.nbytes,
            "weight_bytes": self.model.info.weight_bytes,
            "draft_kv_blocks": draft.blocks_total,
            "draft_kv_blocks_used": draft.blocks_used,
            "draft_bytes": draft.bytes_total,
            **self.stats.as_dict(),
            "policy": self.policy.usage(),
        }


def _parts(
    items: Seq[Item],
    trees: Seq[TokenTree | None],
    commits: Seq[Commit],
    verdicts: Seq[Verdict | None],
) -> Iterator[Part]:
    for item, tree, commit, verdict in zip(items, trees, commits, verdicts, strict=True):
        yield Part(
            seq_id=item.seq.id,
            rows=item.rows,
            context=item.context,
            budget=item.budget,
            drafted=len(tree) - 1 if tree is not None else 0,
            accepted=len(verdict.path) if verdict is not None else 0,
            emitted=len(commit.tokens),
        )
