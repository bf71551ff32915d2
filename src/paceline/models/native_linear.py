"""One weight matrix on the native kernels, for the heads that drafters train.

Legend: N rows, K input width, V output width.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.models.native_core import default_threads, native_core
from paceline.models.native_weights import (
    DENSE_BF16,
    DENSE_F16,
    DENSE_F32,
    GROUP,
    QUANTISED,
    PackedMatrix,
    Quantize,
    anonymous_memory,
)

#: Matrices that share memory begin at multiples of this.
_ALIGN = 4096


class NativeLinear:
    """A weight matrix on the native kernels: out_NV = x_NK @ weight_VK.T, row-invariant."""

    def __init__(self, packed: PackedMatrix, *, threads: int | None = None, path: str = "") -> None:
        self._linear = native_core().Linear(packed.format, packed.n_out, packed.n_in, packed.data)
        self._threads = default_threads() if threads is None else threads
        self._path = path
        self.n_out, self.n_in, self.format = packed.n_out, packed.n_in, packed.format
        self.nbytes = packed.data.nbytes

    @staticmethod
    def from_float(
        weight_VK: torch.Tensor,
        *,
        quantize: Quantize | None = None,
        threads: int | None = None,
        path: str = "",
    ) -> NativeLinear:
        """Packs float weights [V, K]: 4-bit, 8-bit, or as they are (float32, bf16, fp16)."""
        (packed,) = pack_floats([(weight_VK, quantize)])
        return NativeLinear(packed, threads=threads, path=path)

    def __call__(self, x_NK: torch.Tensor, *, threads: int | None = None) -> torch.Tensor:
        """x_NK: float32 [N, K]. Returns float32 [N, V]. threads: for this call alone."""
        x = np.ascontiguousarray(x_NK.detach().float().numpy())
        if x.ndim != 2 or x.shape[1] != self.n_in:
            raise ValueError(f"expected activations [N, {self.n_in}], got {list(x_NK.shape)}")
        out = np.empty((len(x), self.n_out), np.float32)
        self._linear.run(x, out, threads or self._threads, self._path)
        return torch.from_numpy(out)

    def row(self, index: int) -> torch.Tensor:
        """Row `index` of the weights, dequantised: float32 [K]."""
        out = np.empty(self.n_in, np.float32)
        self._linear.row(index, out)
        return torch.from_numpy(out)


def pack_floats(weights: Seq[tuple[torch.Tensor, Quantize | None]]) -> list[PackedMatrix]:
    """Packs float matrices [V, K] into one stretch of memory, so that it has huge pages: each to
    4 or 8 bits, or (None) as it is (float32, bf16, fp16)."""
    core = native_core()
    kinds = [_float_format(weight, bits) for weight, bits in weights]
    sizes = [core.packed_bytes(k, *w.shape) for k, (w, _) in zip(kinds, weights, strict=True)]
    ends = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes])
    memory = np.frombuffer(anonymous_memory(int(ends[-1])), np.uint8)
    packed = []
    for kind, (weight, _), size, end in zip(kinds, weights, sizes, ends, strict=True):
        at = int(end) - -(-size // _ALIGN) * _ALIGN
        data = memory[at : at + size]
        core.pack_float(np.ascontiguousarray(weight.detach().float().numpy()), kind, data)
        n_out, n_in = weight.shape
        packed.append(PackedMatrix(format=kind, n_out=n_out, n_in=n_in, data=data))
    return packed


def _float_format(weight: torch.Tensor, quantize: Quantize | None) -> int:
    if quantize is not None and weight.shape[1] % GROUP == 0:
        return QUANTISED[quantize]
    return {torch.bfloat16: DENSE_BF16, torch.float16: DENSE_F16}.get(weight.dtype, DENSE_F32)
