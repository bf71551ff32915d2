"""Attention of packed rows over paged keys and values, with tree masks.

Legend: N packed rows, n rows of each sequence of a group, G sequences in a group, T keys,
H heads, K key/value heads, Q = H / K heads that share a key/value head, E head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models.base import Batch, Int32

#: Keys are read in whole multiples of this, the rest masked: sums then have the same
#: order for a row whether it comes alone or among others.
KEY_STEP = 64


@dataclass(frozen=True)
class Group:
    """Sequences with the same number of rows, attended together.

    rows_Gn: packed rows; slots_GT: cache slots of the keys, or None where they are the run
    [start, start + n_keys) of one sequence; mask_GnT: True where a row sees a key.
    """

    rows_Gn: torch.Tensor
    slots_GT: torch.Tensor | None
    start: int
    n_keys: int
    mask: torch.Tensor
    whole: bool


def plan_groups(batch: Batch, n_slots: int, q_per_kv: int, device: torch.device) -> list[Group]:
    """Attention groups of a pass, made once and used by every layer.

    Masks have shape [G, 1, Q * n, T], rows in the order (query head of the key head, row).
    """
    counts = np.diff(batch.starts_B1)
    groups = []
    for n in sorted({int(c) for c in counts}):
        members = np.flatnonzero(counts == n)
        rows = batch.starts_B1[members][:, None] + np.arange(n, dtype=np.int32)[None, :]
        n_keys = int(batch.context_B[members].max()) + n
        padded = -(-n_keys // KEY_STEP) * KEY_STEP
        mask = np.zeros((len(members), n, padded), bool)
        for g, b in enumerate(members):
            _fill_mask(mask[g], batch, int(b), n)
        start, slots = -1, None
        if len(members) == 1:
            start = _run_start(batch.tables_B[members[0]], n_keys, batch.block_size)
            if start + padded > n_slots:
                start = -1
        if start < 0:
            slots = np.zeros((len(members), padded), np.int64)
            at = np.arange(n_keys)
            for g, b in enumerate(members):
                table = batch.tables_B[b]
                block = np.minimum(at // batch.block_size, len(table) - 1)
                slots[g, :n_keys] = table[block] * batch.block_size + at % batch.block_size
        groups.append(
            Group(
                rows_Gn=torch.from_numpy(rows.astype(np.int64)).to(device),
                slots_GT=None if slots is None else torch.from_numpy(slots).to(device),
                start=start,
                n_keys=padded,
                mask=torch.from_numpy(mask).to(device).repeat(1, q_per_kv, 1).unsqueeze(1),
                whole=len(members) == batch.n_seqs,
            )
        )
    return groups


def _fill_mask(mask_nT: np.ndarray, batch: Batch, b: int, n: int) -> None:
    context = int(batch.context_B[b])
    first = int(batch.starts_B1[b])
    parents = batch.parents_N[first : first + n]
    mask_nT[:, :context] = True
    if bool((parents == np.arange(-1, n - 1)).all()):
        mask_nT[:, context : context + n] = np.tri(n, dtype=bool)
        return
    for j in range(n):
        if parents[j] >= 0:
            mask_nT[j, context : context + n] = mask_nT[parents[j], context : context + n]
        mask_nT[j, context + j] = True


def _run_start(table: Int32, n_keys: int, block_size: int) -> int:
    """First slot where a sequence's blocks are consecutive, else -1."""
    used = table[: -(-n_keys // block_size)]
    if len(used) > 1 and bool((np.diff(used) != 1).any()):
        return -1
    return int(used[0]) * block_size


def attend(
    q_NHE: torch.Tensor, keys_SKE: torch.Tensor, values_SKE: torch.Tensor, groups: list[Group]
) -> torch.Tensor:
    """softmax(q k^T / sqrt(E)) v for every packed row: [N, H * E]."""
    n_rows, n_heads, size = q_NHE.shape
    n_kv = keys_SKE.shape[1]
    shared = n_heads // n_kv
    out = None if len(groups) == 1 and groups[0].whole else torch.empty_like(q_NHE)
    for group in groups:
        n_seqs, n = group.rows_Gn.shape
        q = q_NHE if out is None else q_NHE[group.rows_Gn]
        q = q.view(n_seqs, n, n_kv, shared, size).permute(0, 2, 3, 1, 4)
        q = q.reshape(n_seqs, n_kv, shared * n, size)
        if group.slots_GT is None:
            span = slice(group.start, group.start + group.n_keys)
            k, v = keys_SKE[span].unsqueeze(0), values_SKE[span].unsqueeze(0)
        else:
            k, v = keys_SKE[group.slots_GT], values_SKE[group.slots_GT]
        o = F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=group.mask
        )
        o = o.view(n_seqs, n_kv, shared, n, size).permute(0, 3, 1, 2, 4)
        o = o.reshape(n_seqs, n, n_heads, size)
        if out is None:
            return o.reshape(n_rows, n_heads * size)
        out[group.rows_Gn] = o
    assert out is not None
    return out.view(n_rows, n_heads * size)
