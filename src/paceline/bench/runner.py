"""Run a matrix: load what a drafter needs once, measure its cells, keep each as it ends."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from paceline.api import LLM
from paceline.bench.folder import ResultFolder
from paceline.bench.forecast import Forecast
from paceline.bench.machine import read_bandwidth
from paceline.bench.matrix import Axes, Group, expand
from paceline.bench.measure import Context, measure
from paceline.bench.prepare import Message, Prepared, Subject, prepare
from paceline.bench.provenance import model_record, provenance, weights_sha256
from paceline.bench.results import CellConfig, CellResult, ModelRecord, Protocol, cell_key
from paceline.bench.workloads import Fit, Workload, load_workload
from paceline.core.rules import AcceptanceRule, rule_named
from paceline.engine.adaptive import AdaptivePolicy
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.catalog import CATALOG, cached
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.models.native import NativeModel
from paceline.registry import DraftSpec, plan_drafter
from paceline.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run. The axes are combined; everything else is the same for all cells.
    memory_limit: as of `LLM`. advice: what `paceline advise` said beforehand, for the cells that
    it speaks of."""

    model: str
    axes: Axes
    dtype: str = "auto"
    device: str = "auto"
    repeats: int = 5
    max_tokens: int = 128
    lengths: str = "plain"
    prompts: int | None = None
    seeded: bool = True
    seed: int = 0
    rule: str | None = None
    chat: bool = True
    kv_tokens: int = 16384
    memory_limit: int | None = None
    advice: Forecast | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"repeats = {self.repeats} is out of range: use 1 or more (5)")
        if self.lengths not in ("plain", "fixed"):
            raise UserError(f"unknown lengths {self.lengths!r}: use plain or fixed")
        if self.rule is not None:
            _rule(self.rule)
        for temperature in self.axes.temperatures:
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, rule=self.rule)

    def protocol(self, sha256: str | None) -> Protocol:
        return Protocol.model_validate(
            {
                "model": self.model,
                "model_sha256": sha256,
                "dtype": self.dtype,
                "device": self.device,
                "repeats": self.repeats,
                "max_tokens": self.max_tokens,
                "lengths": self.lengths,
                "prompts": self.prompts,
                "seeded": self.seeded,
                "seed": self.seed,
                "rule": self.rule,
                "chat": self.chat,
                "kv_tokens": self.kv_tokens,
                "max_batch": max(self.axes.concurrencies),
            }
        )

    @property
    def engine(self) -> EngineConfig:
        """Without prefix cache: a repeat would find its prompt read already, and every request
        shall pay for its own."""
        return EngineConfig(
            kv_tokens=self.kv_tokens,
            max_batch=max(self.axes.concurrencies),
            prefix_cache=False,
        )


class Watcher:
    """What a run tells while it goes; the base class listens to nothing."""

    def plan(self, requests: int, finished: int) -> None:
        """requests: to be decoded in all; finished: cells that are there already."""

    def doing(self, what: str) -> None: ...

    def packing(self, name: str, share: float) -> None:
        """Of a model's weights, at its first start: `on_pack` of `LLM`."""

    def advance(self, requests: int) -> None: ...

    def note(self, text: str) -> None: ...

    def cell(self, result: CellResult) -> None: ...


@dataclass(frozen=True)
class _Job:
    """Cells of a group that are still to be measured, with their keys."""

    group: Group
    cells: tuple[tuple[str, CellConfig], ...]
    workload: Workload


class Runner:
    """Mutable: the loaded model, and plain answers that several groups share."""

    def __init__(self, settings: Settings, folder: ResultFolder, watcher: Watcher) -> None:
        """UserError where anything in the settings is wrong, before any work is done."""
        self.settings, self.folder, self.watcher = settings, folder, watcher
        target = open_checkpoint(settings.model, dtype=settings.dtype, device=settings.device)
        groups = expand(settings.axes)
        self._check_drafts(target, groups)
        self.protocol = settings.protocol(weights_sha256(target.source))
        folder.check(self.protocol)
        workloads = self._workloads(target)
        self._jobs, self._finished = self._sort(groups, workloads)
        self._prepared: dict[tuple[str, float], Prepared] = {}
        self._run: int | None = None
        self._bandwidth: float | None = None

    def _check_drafts(self, target: Checkpoint, groups: list[Group]) -> None:
        """A draft that does not fit is refused now and not after an hour."""
        for spec in dict.fromkeys(g.spec for g in groups):
            plan_drafter(spec, target, self.settings.engine)

    def _workloads(self, target: Checkpoint) -> dict[str, Workload]:
        s = self.settings
        context = min(target.config.max_context, s.kv_tokens)
        fit = Fit(
            encode=lambda text: target.tokenizer.encode(text, add_special=False),
            limit=context - s.max_tokens - _TEMPLATE_ROOM,
            vocab_size=min(target.config.vocab_size, target.tokenizer.vocab_size),
            special_ids=target.tokenizer.special_ids,
        )
        return {
            spec: load_workload(spec, prompts=s.prompts, seed=s.seed, fit=fit)
            for spec in s.axes.workloads
        }

    def _sort(
        self, groups: list[Group], workloads: dict[str, Workload]
    ) -> tuple[list[_Job], list[CellResult]]:
        """What is to do, and what the folder has already."""
        jobs, finished = [], []
        for group in groups:
            todo = []
            for cell in group.cells:
                workload = workloads[cell.workload]
                key = cell_key(self.protocol, cell, workload.sha256)
                known = self.folder.finished(key)
                if known is None:
                    todo.append((key, cell))
                else:
                    finished.append(known)
            if todo:
                jobs.append(_Job(group, tuple(todo), workloads[group.cells[0].workload]))
        return jobs, finished

    def run(self) -> list[CellResult]:
        """All cells of the matrix, those measured earlier included, in the matrix's order."""
        results = list(self._finished)
        self.watcher.plan(sum(map(self._size, self._jobs)), len(results))
        for result in results:
            self.watcher.cell(result)
        for spec, jobs in groupby(self._jobs, key=lambda j: j.group.spec):
            results += self._drafter(spec, list(jobs))
        self.folder.write_parquet()
        return results

    def _size(self, job: _Job) -> int:
        turns = sum(max(len(i.turns), 1) for i in job.workload.items)
        return turns * (1 + len(job.cells)) * self.settings.repeats

    def _drafter(self, spec: DraftSpec, jobs: list[_Job]) -> Iterator[CellResult]:
        """Load one drafter (and the target), measure its cells, let go of both."""
        self.watcher.doing(f"loading {self.settings.model} and {_describe(spec)}")
        llm = self._load(spec, [cell for job in jobs for _, cell in job.cells])
        subject = self._subject(llm, jobs)
        self._check_rule(subject)
        run = self._begin(llm)
        models = self._models(llm, spec)
        for note in llm.notes:
            self.watcher.note(note)
        for job in jobs:
            context = Context(
                protocol=self.protocol,
                workload=job.workload,
                models=models,
                run=run,
                bandwidth=self._bandwidth,
            )
            prepared = self._prepare(subject, job)
            first = job.cells[0][1]
            self.watcher.doing(
                f"{first.workload}, {_describe(spec)}, temperature {first.temperature:g}, "
                f"{_load_text(first)}"
            )
            for measured in measure(subject, job.cells, prepared, context, self.watcher.advance):
                result = self._with_forecast(measured)
                self.folder.add(result)
                self.watcher.cell(result)
                yield result
        del llm, subject
        gc.unfreeze()  # the next model shall not find this one's memory taken
        gc.collect()

    def _with_forecast(self, result: CellResult) -> CellResult:
        advice = self.settings.advice
        found = advice.of(result.config, self.protocol.seeded) if advice else None
        return result if found is None else result.model_copy(update={"predicted": found})

    def _load(self, spec: DraftSpec, cells: list[CellConfig]) -> LLM:
        s = self.settings
        adaptive = any(c.policy == "adaptive" for c in cells)
        return LLM(
            s.model,
            draft=spec.name,
            k=max(c.k for c in cells),
            tree=spec.tree,
            draft_vocab=spec.vocabulary,
            draft_weights=spec.weights,
            dtype=s.dtype,
            device=s.device,
            engine=s.engine,
            memory_limit=s.memory_limit,
            policy="adaptive" if adaptive else "fixed",
            on_pack=self.watcher.packing,
        )

    def _subject(self, llm: LLM, jobs: list[_Job]) -> Subject:
        if llm.wants_fit:  # before any cell, so that all of them have the same tree
            self.watcher.doing("measuring acceptance for the Sequoia tree")
            items = jobs[0].workload.items[:4]
            texts = [i.tokens or self._render(llm, _user(i.turns[0])) for i in items]
            shape = llm.fit_tree(texts, SamplingParams(max_tokens=64))
            self.watcher.note(f"Sequoia tree of {shape.nodes} nodes, {shape.depth} deep")
        policy = llm.engine.policy
        return Subject(
            llm.engine,
            llm.engine.drafter,
            lambda messages: self._render(llm, messages),
            adaptive=policy if isinstance(policy, AdaptivePolicy) else None,
        )

    def _check_rule(self, subject: Subject) -> None:
        """UserError where the rule can't judge what this drafter proposes."""
        if self.settings.rule is None:
            return
        for temperature in self.settings.axes.temperatures:
            greedy = temperature == 0
            try:
                _rule(self.settings.rule).check(subject.drafter.example(greedy), greedy)
            except ValueError as e:
                raise UserError(str(e)) from None

    def _begin(self, llm: LLM) -> int:
        """Note where this run is made, once; its number."""
        if self._run is not None:
            return self._run
        model = llm.engine.model
        self._bandwidth = read_bandwidth(model)
        threads = model.threads if isinstance(model, NativeModel) else torch.get_num_threads()
        self._run = len(self.folder.runs)
        self.folder.begin(
            self.protocol,
            provenance(self._run, threads=threads, bandwidth=self._bandwidth),
        )
        return self._run

    def _render(self, llm: LLM, messages: list[Message]) -> tuple[int, ...]:
        if self.settings.chat and llm.tokenizer.chat_template is not None:
            return llm.chat_tokens(messages)
        return llm.tokens("\n\n".join(m["content"] for m in messages))

    def _models(self, llm: LLM, spec: DraftSpec) -> tuple[ModelRecord, ...]:
        target = model_record("target", self.settings.model, llm.engine.model.info)
        if spec.name in CATALOG or os.path.exists(spec.name):
            return (target, model_record("draft", spec.name))
        return (target,)

    def _prepare(self, subject: Subject, job: _Job) -> Prepared:
        """Plain answers of a workload at a temperature: once, whatever drafts and loads."""
        cell = job.cells[0][1]
        key = (cell.workload, cell.temperature)
        if key not in self._prepared:
            self.watcher.doing(f"{cell.workload}: plain answers, temperature {cell.temperature:g}")
            prepared = prepare(
                subject,
                job.workload,
                self.protocol,
                cell.temperature,
                max(self.settings.axes.concurrencies),
            )
            for note in prepared.notes:
                self.watcher.note(f"{cell.workload}: {note}")
            self._prepared[key] = prepared
        return self._prepared[key]


#: Tokens that a chat template may put around a prompt.
_TEMPLATE_ROOM = 64


def _rule(name: str) -> AcceptanceRule:
    try:
        return rule_named(name)
    except ValueError as e:
        raise UserError(str(e)) from None


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _describe(spec: DraftSpec) -> str:
    return spec.name if spec.tree is None else f"{spec.name} {spec.tree}"


def _load_text(cell: CellConfig) -> str:
    if cell.rate is not None:
        return f"{cell.rate:g} arrivals a second"
    return f"{cell.concurrency} in flight"


def available_drafts(model: str, *, dtype: str = "auto", device: str = "auto") -> tuple[str, ...]:
    """`ngram`, and the models of the catalog that are on this disk, smaller than the target and
    of its vocabulary: what a comparison of drafts takes by itself."""
    target = open_checkpoint(model, dtype=dtype, device=device)
    names = ["ngram"]
    for name in CATALOG:
        path = cached(name)
        if path is None or os.path.getsize(path) >= _bytes(target):
            continue
        try:
            plan_drafter(DraftSpec(name=name), target, EngineConfig())
        except UserError:
            continue  # another vocabulary
        names.append(name)
    return tuple(names)


def _bytes(target: Checkpoint) -> int:
    path = target.source.path
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(os.path.getsize(p) for p in files)
