"""Paged key/value tensors of the torch decoder.

Legend: L layers, S cache slots, K key/value heads, E head size.
"""

from __future__ import annotations

import torch

from paceline.models.base import Int32


class TorchKV:
    """keys_L[i], values_L[i]: [S, K, E], slot = block * block_size + offset."""

    def __init__(
        self,
        *,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        n_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.n_blocks = n_blocks
        self.block_size = block_size
        shape = (n_layers, n_blocks * block_size, n_kv_heads, head_dim)
        # Uninitialised pages cost nothing until they are written. A slot is always written
        # before it is read, except masked padding, which `read_limit` zeroes.
        self.keys_L = torch.zeros(shape, dtype=dtype, device=device)
        self.values_L = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys_L.nbytes + self.values_L.nbytes

    def move(self, source: Int32, destination: Int32) -> None:
        """Copy slots in every layer; all are read before any is written."""
        device = self.keys_L.device
        src = torch.from_numpy(source.astype("int64")).to(device)
        dst = torch.from_numpy(destination.astype("int64")).to(device)
        self.keys_L[:, dst] = self.keys_L[:, src]
        self.values_L[:, dst] = self.values_L[:, src]
