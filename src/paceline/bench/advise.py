"""The advisor: which drafter, how many tokens a round, and what to expect; or why not.

A trace of the user's prompts (`bench.trace`) and the machine's costs (`engine.profile`), both
made here, give a prediction for every drafter and k (`bench.predict`), and these one verdict
for each way to sample (`bench.verdict`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from paceline.bench.trace import DraftInfo, Setting, Trace, Traced, trace_requests
from paceline.bench.verdict import BUDGETS
from paceline.bench.workloads import Fit, Workload, load_workload
from paceline.core.latency import Profile
from paceline.draft.base import Drafter
from paceline.engine.engine import EngineConfig
from paceline.engine.profile import file_identity, obtain_profile
from paceline.errors import UserError
from paceline.models.base import TargetModel
from paceline.models.catalog import CATALOG, cached
from paceline.models.heads.shipped import KINDS
from paceline.models.loading import Checkpoint, OnPack, open_checkpoint
from paceline.models.memory import available_bytes, check_memory
from paceline.models.native import NativeModel
from paceline.models.tokenizer import first_mismatch
from paceline.registry import DraftPlan, DraftSpec, plan_drafter

#: Prompts from which predictions are attempted at all.
FEWEST = 4
#: Called with a share of the work done, 0 to 1, and what is being done.
Progress = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the user asks. drafts: see `spec_of`; empty: all that are at hand. workload: see
    `bench.workloads`. chat: put prompts into the model's chat template, where it has one.
    depth: of the profile, if it is to be measured."""

    model: str
    drafts: tuple[str, ...] = ()
    workload: str = "suite"
    prompts: int = 20
    max_tokens: int = 128
    budgets: tuple[int, ...] = BUDGETS
    settings: tuple[Setting, ...] = (Setting(),)
    chat: bool = True
    seed: int = 0
    ignore_eos: bool = False
    depth: str = "full"

    def __post_init__(self) -> None:
        if self.prompts < FEWEST:
            raise UserError(
                f"prompts = {self.prompts} is too few to judge by: use {FEWEST} or more"
            )
        if self.max_tokens < 8:
            raise UserError(f"max tokens = {self.max_tokens} is too few to judge by: use 8 or more")
        if not self.budgets or not all(1 <= k <= 64 for k in self.budgets):
            raise UserError(f"k = {self.budgets} is out of range: use numbers from 1 to 64")
        if not self.settings:
            raise UserError("no temperature was given: give at least one")
        combined = next((d for d in self.drafts if "+" in d), None)
        if combined is not None:
            raise UserError(
                f"draft {combined!r} combines several: name them one by one, the advice is for each"
            )


@dataclass(frozen=True)
class Bench:
    """A loaded target with its drafters, idle. infos: what each drafter takes."""

    target: Checkpoint
    model: TargetModel
    drafters: dict[str, Drafter]
    infos: dict[str, DraftInfo]
    config: EngineConfig
    eos_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        return self.target.config.vocab_size


def available_drafts(target: Checkpoint, config: EngineConfig) -> tuple[str, ...]:
    """n-gram; trained heads and a layer mask where there are such for the target; and the
    downloaded catalog models that share its vocabulary and are smaller."""
    found = ["ngram"]
    for name in (*KINDS, "layerskip"):
        try:
            plan_drafter(DraftSpec(name=name), target, config)
        except UserError:
            continue  # none for this target
        found.append(name)
    for name in CATALOG:
        if name == target.source.name or cached(name) is None:
            continue
        draft = open_checkpoint(name, device=str(target.device))
        smaller = draft.weight_bytes < target.weight_bytes
        if smaller and first_mismatch(target.tokenizer, draft.tokenizer) is None:
            found.append(name)
    return tuple(found)


def open_bench(
    question: Question,
    *,
    dtype: str = "auto",
    device: str = "auto",
    config: EngineConfig | None = None,
    memory_limit: int | None = None,
    on_pack: OnPack | None = None,
) -> Bench:
    """Load the target and all drafters. UserError where one does not fit, before any weights
    are read. on_pack: as of `LLM`."""
    config = config or EngineConfig()
    target = open_checkpoint(question.model, dtype=dtype, device=device, on_pack=on_pack)
    names = question.drafts or available_drafts(target, config)
    plans = {n: plan_drafter(spec_of(n), target, config) for n in dict.fromkeys(names)}
    limit = available_bytes(target.device) if memory_limit is None else memory_limit
    needs = {
        f"weights ({target.source.name})": target.weight_bytes,
        # One for the trace and one for measuring, at worst.
        "caches": 2 * target.kv_slot_bytes * config.n_blocks * config.block_size,
    }
    for name, plan in plans.items():
        needs.update({f"{what} [{name}]": size for what, size in plan.memory.items()})
    check_memory(needs, limit)
    model = target.load()
    if isinstance(model, NativeModel):
        torch.set_num_threads(1)  # as `LLM` does: both pools would spin on the same cores
    drafters = {name: plan.build() for name, plan in plans.items()}
    most = max(question.budgets)
    infos = {n: _info(n, plans[n], d, most) for n, d in drafters.items()}
    eos_ids = frozenset(target.config.eos_ids) | frozenset(target.tokenizer.eos_ids)
    return Bench(target, model, drafters, infos, config, eos_ids)


def spec_of(text: str) -> DraftSpec:
    """A drafter as the advisor is asked for it: NAME, or NAME@stored for a draft model whose
    weights are taken as they are in the file."""
    name, _, weights = text.rpartition("@")
    return DraftSpec(name=name, weights=weights) if name else DraftSpec(name=text)


def _flags(spec: DraftSpec) -> str:
    weights = "" if spec.weights == "fast" else f" --draft-weights {spec.weights}"
    return f"--draft {spec.name}{weights}"


def _info(name: str, plan: DraftPlan, drafter: Drafter, most: int) -> DraftInfo:
    tree = not drafter.example(True).is_chain
    return DraftInfo(
        most=plan.tree.nodes if plan.tree is not None else most,
        flags=_flags(spec_of(name)),
        tree=tree,
        memory=dict(plan.memory),
        notes=plan.notes,
    )


def load_prompts(question: Question, bench: Bench) -> tuple[Workload, list[tuple[int, ...]]]:
    """The workload, and the first turn of each of its prompts in tokens."""
    tokenizer = bench.target.tokenizer
    room = min(bench.model.info.max_context, bench.config.n_blocks * bench.config.block_size)
    limit = room - question.max_tokens
    fit = Fit(
        encode=lambda text: tokenizer.encode(text, add_special=False),
        limit=limit,
        vocab_size=min(tokenizer.vocab_size, bench.vocab_size),
        special_ids=frozenset(tokenizer.special_ids),
    )
    workload = load_workload(question.workload, prompts=question.prompts, fit=fit)
    chat = question.chat and tokenizer.chat_template is not None
    prompts = []
    for item in workload.items:
        if item.tokens is not None:
            ids = tuple(item.tokens)
        elif chat:
            ids = tuple(tokenizer.chat([{"role": "user", "content": item.turns[0]}]))
        else:
            ids = tuple(tokenizer.encode(item.turns[0]))
        if len(ids) <= limit:
            prompts.append(ids)
    if len(prompts) < FEWEST:
        raise UserError(
            f"workload {question.workload!r} has {len(prompts)} prompts of at most {limit} tokens, "
            f"too few to judge by: give {FEWEST} or more, or raise --kv-tokens"
        )
    return workload, prompts


def collect(question: Question, bench: Bench, progress: Progress | None = None) -> Trace:
    """Trace the prompts under every setting."""
    workload, prompts = load_prompts(question, bench)
    start = time.perf_counter()
    total = len(prompts) * len(question.settings)
    done = 0
    requests: dict[Setting, tuple[Traced, ...]] = {}
    for setting in question.settings:

        def one_more(label: str = setting.label) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done / total, f"tracing, {label}")

        requests[setting] = trace_requests(
            bench.model,
            bench.drafters,
            {n: i.most for n, i in bench.infos.items()},
            prompts,
            setting,
            bench.config,
            max_tokens=question.max_tokens,
            eos_ids=bench.eos_ids,
            vocab_size=bench.vocab_size,
            seed=question.seed,
            ignore_eos=question.ignore_eos,
            on_done=one_more,
        )
    return Trace(
        model=question.model,
        workload=workload.name,
        synthetic=any(i.synthetic for i in workload.items),
        drafts=bench.infos,
        requests=requests,
        seconds=time.perf_counter() - start,
    )


def profile_of(
    bench: Bench, depth: str = "full", *, fresh: bool = False, progress: Progress | None = None
) -> Profile:
    """The cached or measured costs of a loaded target and its drafters."""
    # Kept by the labels of specs, under which engines look for them, too.
    labels = {name: spec_of(name).label for name in bench.drafters}
    profile = obtain_profile(
        bench.model,
        {labels[name]: drafter for name, drafter in bench.drafters.items()},
        bench.config,
        weights=file_identity(bench.target.source.path),
        depth=depth,
        vocab_size=bench.vocab_size,
        fresh=fresh,
        progress=progress,
    )
    return replace(profile, drafts={name: profile.drafts[labels[name]] for name in labels})
