"""Trained heads ready to draft: weights packed for their device, and their row caches.

Legend: N rows, D hidden, H heads, K key/value heads, Q = H / K, E head size, U draft
vocabulary, T keys, M Medusa heads.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from paceline.models.base import TargetModel, TargetTables
from paceline.models.heads.config import EagleConfig
from paceline.models.heads.eagle import EagleHead, Norm
from paceline.models.heads.medusa import MedusaHeads
from paceline.models.native import NativeLinear, NativeModel
from paceline.models.native_weights import Quantize

Map = Callable[[torch.Tensor], torch.Tensor]

#: Rows by which a cache grows.
_GROWTH = 256
#: A product of so few rows with so few weights is done before a second thread has woken up.
_FEW_ROWS, _SHARED = 16, 1 << 19


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Where a head's matrix products run. threads: on the native core so many, None for
    torch. body, head: bits of the layer's weights and of the output projection there (None:
    bfloat16)."""

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


class Gain:
    """RMS norm with a gain; on the CPU by numpy, which takes half as long for a few rows."""

    def __init__(self, weight_D: torch.Tensor, eps: float) -> None:
        self._weight_D, self._eps = weight_D.float(), eps
        self._host_D = self._weight_D.numpy() if weight_D.device.type == "cpu" else None

    def __call__(self, x_ND: torch.Tensor) -> torch.Tensor:
        if self._host_D is None:
            return F.rms_norm(x_ND, self._weight_D.shape, self._weight_D, self._eps)
        x = x_ND.numpy()
        scale_N = 1.0 / np.sqrt(np.einsum("nd,nd->n", x, x) / x.shape[-1] + self._eps)
        return torch.from_numpy(x * scale_N[:, None] * self._host_D)


class RowCache:
    """Keys and values of one sequence, [K, rows, E] each. Rows [0, rows) are committed; what
    a proposal appends behind them is scratch and written over."""

    def __init__(self, config: EagleConfig, like: torch.Tensor) -> None:
        self.rows = 0
        shape = (config.n_kv_heads, 0, config.head_size)
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)

    def write(self, at: int, k_NKE: torch.Tensor, v_NKE: torch.Tensor) -> None:
        end = at + k_NKE.shape[0]
        if end > self.k.shape[1]:
            size = max(end + _GROWTH, self.k.shape[1] * 5 // 4)
            self.k, self.v = self._grown(self.k, size), self._grown(self.v, size)
        self.k[:, at:end] = k_NKE.transpose(0, 1)
        self.v[:, at:end] = v_NKE.transpose(0, 1)

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _grown(self, old: torch.Tensor, size: int) -> torch.Tensor:
        new = old.new_empty((old.shape[0], size, old.shape[2]))
        new[:, : old.shape[1]] = old
        return new


@dataclass(frozen=True)
class Part:
    """One sequence's rows of a pass, written to its cache from `at` on.

    wanted: the last rows whose outputs are returned. mask: True where a wanted row sees a key
    ([wanted, at + count]); None: the last row alone is wanted and sees all.
    """

    cache: RowCache
    at: int
    count: int
    wanted: int = 1
    mask: torch.Tensor | None = None


class EagleRunner:
    """`EagleHead` for drafting: the same numbers up to the weights' precision (fused maps,
    cached rotations). Made from the head, which it does not change."""

    def __init__(
        self,
        head: EagleHead,
        tables: TargetTables,
        kernels: Kernels,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        """embedding_VD: the head's own embeddings, None for the target's. It runs on the
        device of these."""
        device = tables.embedding_rows([0]).device
        c = self.config = head.config
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp

        def linear(*parts: torch.Tensor, bias: torch.Tensor | None = None) -> Map:
            weight_OI = torch.cat([p.detach().to(device) for p in parts])
            own = None if bias is None else bias.detach().to(device)
            return kernels.linear(weight_OI, own, kernels.body)

        def gain(norm: Norm) -> Gain:
            return Gain(norm.weight.detach().to(device), norm.eps)

        self._fc = linear(head.fc.weight, bias=head.fc.bias)
        self._qkv = linear(
            attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
        )
        self._out = linear(attention.o_proj.weight)
        self._gate_up = linear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = linear(mlp.down_proj.weight)
        rows_UD = head.lm_head.weight.detach().to(device)
        self._head = kernels.linear(rows_UD, None, kernels.head)
        self._mlp_norm = gain(layer.post_attention_layernorm)
        self._final_norm: Gain | None = None
        if c.kind == "eagle3":
            self._input_norm, self._hidden_norm = (
                gain(layer.input_layernorm),
                gain(layer.hidden_norm),
            )
            self._final_norm = gain(head.norm)
        self._fused_norm = gain(head.input_norm) if c.norm_before_fc else None
        if embedding_VD is None:
            self._embed: Callable[[Seq[int]], torch.Tensor] = tables.embedding_rows
        else:
            own = embedding_VD.to(device).float()
            self._embed = lambda tokens: own[torch.tensor(tokens, device=own.device)]
        self.target_ids = head.target_ids.to(device)
        frequencies, self._scale = c.inverse_frequencies()
        self._frequencies = frequencies.to(device)
        self._cos, self._sin = self._rotations(1024)

    def new_cache(self) -> RowCache:
        return RowCache(self.config, self._cos)

    def fuse(self, taps_ND: torch.Tensor) -> torch.Tensor:
        """See `EagleHead.fuse`."""
        taps_ND = taps_ND.float()
        if self.config.kind == "eagle1":
            return taps_ND
        if self._fused_norm is not None:
            taps_ND = self._fused_norm(taps_ND)
        return self._fc(taps_ND)

    def run(
        self, parts: Seq[Part], tokens: Seq[int], g_ND: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        """One pass over the rows of all parts, back to back. tokens, g_ND, positions: of each
        row, its embedding's token, its feature, its place. Returns the layer's outputs of the
        wanted rows, [W, D]; keys and values of all rows go to the caches."""
        c = self.config
        embedding_ND = self._embed(tokens)
        if c.kind == "eagle1":
            x = residual_ND = self._fc(torch.cat([embedding_ND, g_ND], -1))
        else:
            normed_ND = self._hidden_norm(g_ND)
            residual_ND = normed_ND if c.norm_before_residual else g_ND
            x = torch.cat([self._input_norm(embedding_ND), normed_ND], -1)
        heads = c.n_heads + c.n_kv_heads
        qkv = self._qkv(x).view(len(tokens), heads + c.n_kv_heads, c.head_size)
        qk = self._rotate(qkv[:, :heads], positions)
        attended, wanted, start = [], [], 0
        for p in parts:
            end = start + p.count
            p.cache.write(p.at, qk[start:end, c.n_heads :], qkv[start:end, heads:])
            attended.append(self._attend(qk[end - p.wanted : end, : c.n_heads], p))
            wanted.append((end - p.wanted, end))
            start = end
        if len(parts) == 1:
            (low, high), attended_ND = wanted[0], attended[0]
            residual_ND = residual_ND[low:high]
        else:
            attended_ND = torch.cat(attended)
            residual_ND = torch.cat([residual_ND[low:high] for low, high in wanted])
        h_ND = residual_ND + self._out(attended_ND)
        gate, up = self._gate_up(self._mlp_norm(h_ND)).chunk(2, -1)
        return h_ND + self._down(F.silu(gate) * up)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, U] float32 logits over the draft vocabulary."""
        if self._final_norm is not None:
            hidden_ND = self._final_norm(hidden_ND)
        return self._head(hidden_ND)

    def _attend(self, q_NHE: torch.Tensor, p: Part) -> torch.Tensor:
        """[wanted, H * E]."""
        c, n, end = self.config, p.wanted, p.at + p.count
        k, v = p.cache.k[:, :end], p.cache.v[:, :end]
        shared = c.n_heads // c.n_kv_heads
        q = q_NHE.reshape(n, c.n_kv_heads, shared, c.head_size).permute(1, 0, 2, 3)
        q = q.reshape(c.n_kv_heads, n * shared, c.head_size)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(c.head_size**-0.5)
        if p.mask is not None:
            mask = p.mask.repeat_interleave(shared, 0)
            scores.masked_fill_(~mask, -torch.inf)
        out = torch.bmm(scores.softmax(-1), v).view(c.n_kv_heads, n, shared, c.head_size)
        return out.permute(1, 0, 2, 3).reshape(n, c.n_heads * c.head_size)

    def _rotate(self, x_NHE: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        last = max(positions)
        if last >= self._cos.shape[0]:
            self._cos, self._sin = self._rotations(2 * last)
        if len(positions) == 1:
            cos, sin = self._cos[last : last + 1], self._sin[last : last + 1]
        else:
            at = torch.tensor(positions, device=self._cos.device)
            cos, sin = self._cos[at], self._sin[at]
        half = x_NHE.shape[-1] // 2
        turned = torch.cat([-x_NHE[..., half:], x_NHE[..., :half]], -1)
        return torch.addcmul(x_NHE * cos, turned, sin)

    def _rotations(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [P, 1, E]."""
        at = torch.arange(size, device=self._frequencies.device, dtype=torch.float32)
        angle = torch.outer(at, self._frequencies)
        angle = torch.cat([angle, angle], -1).unsqueeze(1)
        return angle.cos() * self._scale, angle.sin() * self._scale


class MedusaRunner:
    """`MedusaHeads` for drafting. Made from the heads, which it does not change."""

    def __init__(
        self, heads: MedusaHeads, kernels: Kernels, device: torch.device | str = "cpu"
    ) -> None:
        """device: the target's."""
        c = self.config = heads.config
        self.target_ids = heads.target_ids.to(device)

        def linear(
            weights: Seq[torch.Tensor], biases: Seq[torch.Tensor], bits: Quantize | None
        ) -> Map:
            bias = torch.cat([b.detach().to(device) for b in biases]) if biases else None
            return kernels.linear(torch.cat([w.detach().to(device) for w in weights]), bias, bits)

        blocks = [[block.linear for block in head] for head in heads.residual_blocks()]
        first = [head[0] for head in blocks]
        self._first = linear([m.weight for m in first], [m.bias for m in first], kernels.body)
        self._rest = [
            [linear([m.weight], [m.bias], kernels.body) for m in head[1:]] for head in blocks
        ]
        self._heads = [linear([p], [], kernels.head) for p in heads.lm_heads.parameters()]
        self._hidden = c.hidden

    def logits(self, h_ND: torch.Tensor, depth: int) -> torch.Tensor:
        """[N, depth, U] float32 logits of the first `depth` heads."""
        n = h_ND.shape[0]
        h_ND = h_ND.float()
        z = h_ND.unsqueeze(1) + F.silu(self._first(h_ND).view(n, -1, self._hidden))
        parts = []
        for i in range(depth):
            z_ND = z[:, i]
            for block in self._rest[i]:
                z_ND = z_ND + F.silu(block(z_ND))
            parts.append(z_ND)
        if self.config.shared_head:
            stacked = torch.stack(parts, 1).view(n * depth, -1)
            return self._heads[0](stacked).view(n, depth, -1)
        return torch.stack([self._heads[i](z_ND) for i, z_ND in enumerate(parts)], 1)
