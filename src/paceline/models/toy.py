"""A model whose laws are known: a table from recent tokens to logits.

It keeps tokens in a paged store and reads every context back from there, so that a wrong
slot, a wrong mask or a surviving entry of a rejected token changes its laws. Tests and
proofs run the engine on it. Legend: V vocabulary, R wanted rows, S cache slots.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.base import (
    Batch,
    Int32,
    KVStore,
    LayerMask,
    ModelInfo,
    Numerics,
    TargetOutput,
)

Logits = npt.NDArray[np.float32]


class TokenStore:
    """Cache of the tabular model: the token and the position written to each slot."""

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        self.tokens_S = np.full(n_blocks * block_size, -1, np.int32)
        self.positions_S = np.full(n_blocks * block_size, -1, np.int32)

    @property
    def nbytes(self) -> int:
        return self.tokens_S.nbytes + self.positions_S.nbytes

    def move(self, source: Int32, destination: Int32) -> None:
        self.tokens_S[destination] = self.tokens_S[source]
        self.positions_S[destination] = self.positions_S[source]


class TabularModel:
    """Logits are a fixed random function of the last `order` tokens (all, if None).

    scale: standard deviation of the logits. `change(context, logits)` may replace them, for
    drafts that are noisy or always wrong. `skipped`: whose logits a layer mask brings about.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        order: int | None = 2,
        seed: int = 0,
        scale: float = 1.5,
        max_context: int = 4096,
        change: Callable[[tuple[int, ...], Logits], Logits] | None = None,
        skipped: TabularModel | None = None,
    ) -> None:
        self._order = order
        self._seed = seed
        self._scale = scale
        self._change = change
        self.skipped = skipped
        self._known: dict[tuple[int, ...], Logits] = {}
        self.info = ModelInfo(
            name="tabular",
            vocab_size=vocab_size,
            n_layers=1,
            hidden_size=1,
            max_context=max_context,
            kv_slot_bytes=8,
            weight_bytes=0,
            numerics=Numerics.ROW_INVARIANT,
            dtype="float32",
            device="cpu",
        )

    def logits(self, context: tuple[int, ...]) -> Logits:
        """[V] float32 logits of the token after `context`."""
        if self._order is not None:
            context = (
                context[len(context) - self._order :] if len(context) > self._order else context
            )
        known = self._known.get(context)
        if known is None:
            rng = np.random.default_rng([self._seed, len(context), *context])
            known = rng.normal(0.0, self._scale, self.info.vocab_size).astype(np.float32)
            if self._change is not None:
                known = self._change(context, known)
            self._known[context] = known
        return known

    def new_kv(self, n_blocks: int, block_size: int) -> TokenStore:
        return TokenStore(n_blocks, block_size)

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        assert isinstance(kv, TokenStore)
        kv.tokens_S[batch.slots_N] = batch.tokens_N
        kv.positions_S[batch.slots_N] = batch.positions_N
        table = self if layer_mask is None or self.skipped is None else self.skipped
        rows = [table._row(batch, kv, int(r)) for r in batch.wanted_R]
        logits_RV = np.stack(rows) if rows else np.zeros((0, self.info.vocab_size), np.float32)
        hidden = torch.from_numpy(batch.tokens_N.astype(np.float32)).unsqueeze(1)
        return TargetOutput(
            logits_RV=torch.from_numpy(logits_RV),
            taps=dict.fromkeys(taps, hidden),
            starts_B1=batch.starts_B1,
        )

    def _row(self, batch: Batch, kv: TokenStore, row: int) -> Logits:
        b = int(np.searchsorted(batch.starts_B1, row, side="right")) - 1
        start, context = int(batch.starts_B1[b]), int(batch.context_B[b])
        path = []
        at = row
        while at >= start:
            path.append(int(batch.slots_N[at]))
            at = start + int(batch.parents_N[at]) if batch.parents_N[at] >= 0 else -1
        where = np.arange(context)
        table = batch.tables_B[b]
        prefix = table[where // batch.block_size] * batch.block_size + where % batch.block_size
        slots = np.concatenate([prefix, np.array(path[::-1], np.int32)]).astype(np.int64)
        seen = kv.positions_S[slots]
        assert (seen == np.arange(len(slots))).all(), "a cache entry is at the wrong position"
        return self.logits(tuple(kv.tokens_S[slots].tolist()))
