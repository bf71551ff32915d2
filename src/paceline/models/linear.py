"""y = x W^T + b, with the weight in the layout that the device multiplies fastest.

Legend: N rows, I input width, O output width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """weight_OI [O, I], bias_O [O] or None; `__call__` maps [N, I] to [N, O].

    On CPUs whose oneDNN supports the type, the weight is repacked once (and only the
    packed copy is kept). Repacked products give every row the same bits from two rows up,
    so a lone row is computed as two: a verified row then equals the plain one.
    `keep_plain` leaves the weight as it is, for one that is also read as an embedding.
    """

    def __init__(
        self,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
        *,
        keep_plain: bool = False,
    ) -> None:
        self.bias_O = bias_O
        self.nbytes = weight_OI.nbytes + (bias_O.nbytes if bias_O is not None else 0)
        self.packed = not keep_plain and _can_pack(weight_OI)
        if self.packed:
            weight_OI = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous(), 8)
        self.weight = weight_OI

    def plain(self) -> torch.Tensor:
        """The weight [O, I] in plain layout (a copy where it is packed)."""
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return F.linear(x_NI, self.weight, self.bias_O)
        lone = x_NI.shape[0] == 1
        if lone:
            x_NI = x_NI.expand(2, -1).contiguous()
        y_NO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x_NI, self.weight, self.bias_O, "none", [], ""
        )
        return y_NO[:1] if lone else y_NO


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
