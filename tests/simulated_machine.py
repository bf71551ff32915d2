"""Machines whose costs are known: models that move a clock by what their passes cost."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.core.latency import Curve, TargetCost
from paceline.draft.cache import DraftCache
from paceline.draft.model import ModelDrafter
from paceline.draft.vocabulary import SameVocabulary
from paceline.engine.engine import EngineConfig
from paceline.models.base import (
    Batch,
    Int32,
    KVStore,
    LayerMask,
    ModelInfo,
    Numerics,
    TargetModel,
    TargetOutput,
)

VOCAB = 50

#: Seconds of a pass, from the rows and the contexts of its sequences.
Cost = Callable[[Seq[int], Seq[int]], float]


class SimulatedClock:
    """Time passes when somebody works, and a little whenever it is looked at. noise: each
    piece of work takes up to so much longer, and the share `interrupted` ten times as long."""

    def __init__(self, noise: float = 0.0, interrupted: float = 0.02) -> None:
        self.now, self.noise, self.interrupted = 0.0, noise, interrupted
        self.rng = np.random.default_rng(3)

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def work(self, seconds: float) -> None:
        factor = 1.0 + self.noise * self.rng.random()
        if self.noise and self.rng.random() < self.interrupted:
            factor *= 10
        self.now += seconds * factor


class Store:
    """A cache without contents."""

    nbytes = 0

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size

    def move(self, source: Int32, destination: Int32) -> None:
        assert len(source) == len(destination)
        assert destination.max(initial=0) < self.n_blocks * self.block_size


class Machine:
    """A model that is nothing but its costs. It always says token + 1, so that a draft of
    the same kind is always right."""

    def __init__(
        self, clock: SimulatedClock, cost: Cost, name: str = "machine", max_context: int = 8192
    ) -> None:
        self.clock, self.cost = clock, cost
        self.info = ModelInfo(
            name=name, vocab_size=VOCAB, n_layers=1, hidden_size=1, max_context=max_context,
            kv_slot_bytes=1, weight_bytes=1, numerics=Numerics.ROW_INVARIANT, dtype="float32",
            device="cpu",
        )  # fmt: skip

    def new_kv(self, n_blocks: int, block_size: int) -> Store:
        return Store(n_blocks, block_size)

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        assert (batch.slots_N < kv.n_blocks * kv.block_size).all()
        charge(self.clock, self.cost, batch)
        logits = np.zeros((len(batch.wanted_R), VOCAB), np.float32)
        for i, row in enumerate(batch.wanted_R):
            logits[i, (batch.tokens_N[row] + 1) % VOCAB] = 10.0
        return TargetOutput(logits_RV=torch.from_numpy(logits))


class Timed:
    """A model that also moves a clock."""

    def __init__(self, model: TargetModel, clock: SimulatedClock, cost: Cost) -> None:
        self.model, self.clock, self.cost = model, clock, cost
        self.info, self.new_kv = model.info, model.new_kv

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        charge(self.clock, self.cost, batch)
        return self.model.forward(batch, kv, taps=taps, layer_mask=layer_mask)


def charge(clock: SimulatedClock, cost: Cost, batch: Batch) -> None:
    clock.work(cost(np.diff(batch.starts_B1).tolist(), batch.context_B.tolist()))


CONFIG = EngineConfig(kv_tokens=16384, block_size=32, max_batch=8, prefill_chunk=512)
#: Costs of a machine: a target, a small one, a draft.
TARGET = TargetCost(
    rows=Curve(xs=(1.0, 4.0, 64.0), ys=(50e-3, 56e-3, 236e-3)),
    per_entry=Curve(xs=(1.0, 17.0), ys=(2e-6, 4e-6)),
)
SMALL = TargetCost(
    rows=Curve(xs=(1.0, 4.0, 64.0), ys=(5e-3, 5.6e-3, 23.6e-3)), per_entry=Curve.level(0.0)
)
DRAFT = TargetCost(
    rows=Curve(xs=(1.0, 64.0), ys=(8e-3, 8e-3 + 63 * 0.1e-3)), per_entry=Curve.level(0.5e-6)
)


def machines(clock):
    target, draft = Machine(clock, TARGET), Machine(clock, DRAFT, "draft")
    cache = DraftCache(draft, n_blocks=CONFIG.n_blocks, block_size=32, max_batch=8)
    return target, ModelDrafter(cache, SameVocabulary(VOCAB))
