"""Keys and values in the layout that the native core reads.

Legend: L layers, K key/value heads, E head size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from paceline.models.base import Int32
from paceline.models.native_config import NativeConfig
from paceline.models.native_weights import anonymous_memory


class NativeKV:
    """fp16 keys and values; see `KVStore`.

    keys: [L, K, slots / 16, E, 16], so that a vector of the core holds one component of
    sixteen keys. values: [L, K, slots, E]. Slots are rounded up to a multiple of 16.
    """

    LANES = 16

    def __init__(self, config: NativeConfig, n_blocks: int, block_size: int) -> None:
        if n_blocks < 1 or block_size < 1:
            raise ValueError(f"a cache needs blocks: {n_blocks} of {block_size} slots")
        self.n_blocks, self.block_size = n_blocks, block_size
        runs = -(-n_blocks * block_size // self.LANES)
        n_layers, n_heads, size = config.n_layers, config.n_kv_heads, config.head_size
        shape = (n_layers, 2, n_heads, runs * self.LANES, size)
        self._memory = anonymous_memory(2 * math.prod(shape))  # not touched yet
        self.flat = np.frombuffer(self._memory, np.uint16)
        both = self.flat.reshape(shape)
        self.keys = both[:, 0].reshape(n_layers, n_heads, runs, size, self.LANES)
        self.values = both[:, 1]

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def move(self, source: Int32, destination: Int32) -> None:
        """Copies slots in every layer; all are read before any is written."""
        if len(source):
            run, lane = np.divmod(source, self.LANES)
            to_run, to_lane = np.divmod(destination, self.LANES)
            self.keys[:, :, to_run, :, to_lane] = self.keys[:, :, run, :, lane]
            self.values[:, :, destination] = self.values[:, :, source]

    def read(self, slots: Int32) -> npt.NDArray[np.float16]:
        """Copies of the entries in n slots: [L, 2, K, n, E]."""
        run, lane = np.divmod(slots, self.LANES)
        keys = np.moveaxis(self.keys[:, :, run, :, lane], 0, 2)  # indices go to the front
        return np.stack([keys, self.values[:, :, slots]], axis=1).view(np.float16)
