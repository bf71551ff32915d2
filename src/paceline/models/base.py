"""What the engine needs from a target model: one forward pass over packed rows.

Shape legend: B sequences, N packed rows, R rows whose logits are wanted, V vocabulary,
D hidden width, L layers, K key/value heads, E head size, S cache slots.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]

#: Tap index of the hidden state after the final norm (what the head reads).
FINAL = -1


class Numerics(enum.StrEnum):
    """Whether a row's logits depend on what else shares the pass."""

    ROW_INVARIANT = "row_invariant"  # bit-identical whatever else is in the batch
    TOLERANT = "tolerant"  # near-ties may flip


@dataclass(frozen=True, kw_only=True)
class LayerMask:
    """Which sub-layers run; a skipped one leaves the residual stream as it is.

    `attention_L[i]` and `mlp_L[i]` are True where layer i's sub-layer runs
    (Draft & Verify, Zhang et al. 2023, section 3.2).
    """

    attention_L: tuple[bool, ...]
    mlp_L: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """The rows that one sequence contributes to a pass.

    context: committed key/value entries that every row sees, in [0, context).
    tokens, parents: row j's token, and the row (of this group) that it follows; -1 where
        it follows the committed prefix. Parents come before their children.
    table: cache block ids that cover [0, context + len(tokens)).
    wanted: rows (of this group) whose logits are returned, ascending.
    """

    tokens: Int32
    parents: Int32
    context: int
    table: Int32
    wanted: Int32


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of B sequences, back to back; made by `pack`.

    Row j of sequence b is packed row `starts_B1[b] + j`. It writes its key and value to
    `slots_N`, sits at `positions_N` (context + depth), and attends to the first
    `context_B[b]` positions of its sequence, to its ancestors among the rows of the same
    sequence (`parents_N`, relative to the sequence's first row, -1 for none) and to itself.
    """

    tokens_N: Int32
    positions_N: Int32
    parents_N: Int32
    slots_N: Int32
    starts_B1: Int32
    context_B: Int32
    tables_B: tuple[Int32, ...]
    block_size: int
    wanted_R: Int32

    @property
    def n_rows(self) -> int:
        return len(self.tokens_N)

    @property
    def n_seqs(self) -> int:
        return len(self.context_B)


def pack(groups: Seq[RowGroup], block_size: int) -> Batch:
    """Lay the rows of several sequences back to back (pure; nothing is allocated)."""
    starts = np.zeros(len(groups) + 1, np.int32)
    np.cumsum([len(g.tokens) for g in groups], out=starts[1:])
    positions, slots = [], []
    for g in groups:
        n = len(g.tokens)
        parents = g.parents
        if n == 1 or bool((parents == np.arange(-1, n - 1, dtype=np.int32)).all()):
            depth = np.arange(n, dtype=np.int32)  # a chain
        else:
            depth = np.zeros(n, np.int32)
            for j in range(n):
                if parents[j] >= 0:
                    depth[j] = depth[parents[j]] + 1
        positions.append(g.context + depth)
        at = np.arange(g.context, g.context + n, dtype=np.int32)
        slots.append(g.table[at // block_size] * block_size + at % block_size)
    return Batch(
        tokens_N=np.concatenate([g.tokens for g in groups]).astype(np.int32, copy=False),
        positions_N=np.concatenate(positions).astype(np.int32, copy=False),
        parents_N=np.concatenate([g.parents for g in groups]).astype(np.int32, copy=False),
        slots_N=np.concatenate(slots).astype(np.int32, copy=False),
        starts_B1=starts,
        context_B=np.array([g.context for g in groups], np.int32),
        tables_B=tuple(g.table for g in groups),
        block_size=block_size,
        wanted_R=np.concatenate(
            [s + g.wanted for s, g in zip(starts, groups, strict=False)]
        ).astype(np.int32, copy=False),
    )


class Stacked(Mapping[int, torch.Tensor]):
    """Taps that lie in one tensor, states_TND, in the order of `ids`."""

    __slots__ = ("ids", "states_TND")

    def __init__(self, ids: tuple[int, ...], states_TND: torch.Tensor) -> None:
        self.ids, self.states_TND = ids, states_TND

    def __getitem__(self, tap: int) -> torch.Tensor:
        if tap not in self.ids:
            raise KeyError(tap)
        return self.states_TND[self.ids.index(tap)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


def stack(taps: Mapping[int, torch.Tensor], ids: tuple[int, ...]) -> torch.Tensor:
    """[T, N, D]: these taps; no copy where they lie like that."""
    if isinstance(taps, Stacked) and taps.ids == ids:
        return taps.states_TND
    return torch.stack([taps[i] for i in ids])


@dataclass(frozen=True, kw_only=True)
class TargetOutput:
    """logits_RV: float32, one row per `Batch.wanted_R`; taps[i]: [N, D] hidden states that
    enter layer i (i = L: that leave the last layer; FINAL: after the final norm), of the
    rows of all sequences: those of sequence b are [starts_B1[b], starts_B1[b + 1])."""

    logits_RV: torch.Tensor
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    starts_B1: Int32 = field(default_factory=lambda: np.zeros(1, np.int32))


class KVStore(Protocol):
    """Key/value tensors of one model, addressed by slot = block * block_size + offset."""

    @property
    def n_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def move(self, source: Int32, destination: Int32) -> None:
        """Copy slots `source` to `destination` in every layer (all read before any write)."""
        ...


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the engine must know about a model. `kv_slot_bytes`: cache bytes per token."""

    name: str
    vocab_size: int
    n_layers: int
    hidden_size: int
    max_context: int
    kv_slot_bytes: int
    weight_bytes: int
    numerics: Numerics
    dtype: str
    device: str


class TargetModel(Protocol):
    """A causal language model. `forward` writes the rows' keys and values to the store and
    mutates nothing else."""

    @property
    def info(self) -> ModelInfo: ...

    def new_kv(self, n_blocks: int, block_size: int) -> KVStore: ...

    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput: ...


@runtime_checkable
class TargetTables(Protocol):
    """A target's embeddings and output projection, row by row, for heads that borrow them.
    float32 on the target's device, dequantised where they are stored in fewer bits."""

    def embedding_rows(self, tokens: Seq[int]) -> torch.Tensor:
        """[n, D]: the embeddings of `tokens`."""
        ...

    def head_rows(self, tokens: Seq[int]) -> torch.Tensor:
        """[n, D]: the rows of the output projection for `tokens`."""
        ...
