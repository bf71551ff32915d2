"""Where a trained head's matrix products run.

Legend: N rows, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.models.base import TargetModel
from paceline.models.native import NativeLinear, NativeModel
from paceline.models.native_weights import Quantize

Map = Callable[[torch.Tensor], torch.Tensor]

#: A product of so few rows with so few weights is done before a second thread has woken up.
_FEW_ROWS, _SHARED = 16, 1 << 19


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """threads: on the native core so many, None for torch. body, head: bits of the layer's
    weights and of the output projection there (None: bfloat16)."""

    threads: int | None = None
    body: Quantize | None = "q8"
    head: Quantize | None = "q4"

    @staticmethod
    def of(target: TargetModel, *, stored: bool = False) -> Kernels:
        """Those of the target. stored: keep the precision of the head's file (bfloat16 on the
        native core), do not quantise."""
        if not isinstance(target, NativeModel):
            return Kernels()
        if stored:
            return Kernels(threads=target.threads, body=None, head=None)
        return Kernels(threads=target.threads)

    def linear(
        self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, bits: Quantize | None
    ) -> Map:
        if self.threads is None:
            return lambda x: F.linear(x, weight_OI, bias_O)
        weight_OI = weight_OI.detach()
        if bits is None:
            weight_OI = weight_OI.bfloat16()
        packed = NativeLinear.from_float(weight_OI, quantize=bits, threads=self.threads)
        small = weight_OI.numel() < _SHARED
        bias = None if bias_O is None else bias_O.detach().float()

        def apply(x_NI: torch.Tensor) -> torch.Tensor:
            alone = small and x_NI.shape[0] < _FEW_ROWS
            y_NO = packed(x_NI, threads=1 if alone else None)
            return y_NO if bias is None else y_NO + bias

        return apply
