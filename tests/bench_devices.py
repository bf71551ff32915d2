"""A benchmark subject on simulated time: a tabular model whose passes take as long as told."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

import devices as d

from paceline.bench.measure import Context
from paceline.bench.prepare import Message, Subject
from paceline.bench.results import CellConfig, Protocol
from paceline.bench.workloads import Item, Workload
from paceline.core.draws import Draws
from paceline.core.law import Law
from paceline.core.rules import AcceptanceRule, Origin, Verdict
from paceline.core.rules.chains import TokenRejection
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.models.base import Batch, KVStore, LayerMask, Numerics, TargetOutput
from paceline.models.toy import TabularModel
from paceline.types import Sequence

CONFIG = EngineConfig(
    kv_tokens=2048, block_size=4, prefill_chunk=128, max_batch=8, prefix_cache=False
)


class FakeClock:
    """Seconds that pass only where somebody spends them."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class TimedModel(TabularModel):
    """`cost(rows)` seconds a pass. numerics: what it claims to be."""

    def __init__(
        self,
        clock: FakeClock,
        cost: Callable[[int], float],
        numerics: Numerics = Numerics.ROW_INVARIANT,
    ) -> None:
        super().__init__(d.VOCAB, order=None)
        self.clock, self.cost = clock, cost
        self.info = replace(self.info, numerics=numerics)

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        self.clock.now += self.cost(batch.n_rows)
        return super().forward(batch, kv, taps=taps, layer_mask=layer_mask)


class TakesAll(TokenRejection):
    """A lossy rule: whatever was drafted is accepted."""

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        last = len(tree) - 1
        return Verdict(tree.path(last), draws.target(laws[last], last), Origin.BONUS)


class LossyEngine(Engine):
    def rule_for(self, seq: Sequence, tree: TokenTree) -> AcceptanceRule:
        return TakesAll()


def flat(rows: int) -> float:
    """A pass takes ten milliseconds however many rows: drafting is free."""
    return 0.010


def render(messages: list[Message]) -> tuple[int, ...]:
    """Each letter is a token."""
    text = "".join(m["content"] for m in messages)
    return tuple(1 + ord(ch) % (d.VOCAB - 1) for ch in text)


def subject(
    drafter: Drafter | str,
    clock: FakeClock,
    *,
    cost: Callable[[int], float] = flat,
    numerics: Numerics = Numerics.ROW_INVARIANT,
    engine: type[Engine] = Engine,
) -> Subject:
    built = d.DRAFTERS[drafter](CONFIG) if isinstance(drafter, str) else drafter
    made = engine(
        TimedModel(clock, cost, numerics),
        built,
        FixedBudget(4),
        CONFIG,
        decode=lambda ids: "".join(chr(97 + i) for i in ids),
        audit=True,
        clock=clock,
    )
    return Subject(made, built, render)


def workload(n: int = 3, turns: int = 1) -> Workload:
    items = tuple(
        Item(
            id=f"item-{i}",
            domain=("one", "two")[i % 2],
            tier="mid",
            turns=tuple(f"prompt number {i} turn {t}" for t in range(turns)),
        )
        for i in range(n)
    )
    return Workload(name="toy", source="toy", items=items)


def protocol(**changes: object) -> Protocol:
    values: dict[str, object] = {
        "model": "tabular",
        "model_sha256": None,
        "dtype": "auto",
        "device": "auto",
        "repeats": 4,
        "max_tokens": 12,
        "lengths": "plain",
        "prompts": None,
        "seeded": True,
        "seed": 0,
        "rule": None,
        "chat": True,
        "kv_tokens": 2048,
        "max_batch": 8,
    }
    return Protocol.model_validate(values | changes)


def cell(**changes: object) -> CellConfig:
    values: dict[str, object] = {
        "workload": "toy",
        "drafter": "self",
        "k": 3,
        "temperature": 0.0,
        "concurrency": 1,
    }
    return CellConfig.model_validate(values | changes)


def context(clock: FakeClock, work: Workload, rules: Protocol) -> Context:
    return Context(
        protocol=rules,
        workload=work,
        models=(),
        run=0,
        bandwidth=None,
        clock=clock,
        sleep=clock.sleep,
    )
