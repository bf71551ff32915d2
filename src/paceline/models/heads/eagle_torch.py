"""EAGLE heads on torch: what `eagle_native` computes in one call, step by step.

Legend: N rows, D hidden, H heads, K key/value heads, E head size, U draft vocabulary, P
positions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F

from paceline.models.base import TargetTables
from paceline.models.heads.config import EagleConfig
from paceline.models.heads.eagle import EagleHead, Norm
from paceline.models.heads.passes import Ask, Grown, Part

#: Rows by which a cache grows.
_GROWTH = 256


class TorchRows:
    """See `passes.Rows`: keys and values [K, rows, E]."""

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

    def copy(self, rows: int) -> TorchRows:
        other = copy.copy(self)
        other.rows, other.k, other.v = rows, self.k[:, :rows].clone(), self.v[:, :rows].clone()
        return other

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def _grown(self, old: torch.Tensor, size: int) -> torch.Tensor:
        new = old.new_empty((old.shape[0], size, old.shape[2]))
        new[:, : old.shape[1]] = old
        return new


class TorchEagle:
    """See `passes.EagleRunner`: fused maps, cached rotations. Made from the head, which it does
    not change."""

    def __init__(
        self,
        head: EagleHead,
        tables: TargetTables,
        embedding_VD: torch.Tensor | None = None,
    ) -> None:
        """embedding_VD: the head's own embeddings, None for the target's. It runs on the
        device of these."""
        device = tables.embedding_rows([0]).device
        c = self.config = head.config
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp

        def weight(*parts: torch.Tensor) -> torch.Tensor:
            return torch.cat([p.detach().to(device) for p in parts])

        def gain(norm: Norm) -> Callable[[torch.Tensor], torch.Tensor]:
            gain_D = norm.weight.detach().to(device).float()
            return lambda x: F.rms_norm(x, gain_D.shape, gain_D, norm.eps)

        self._fc = weight(head.fc.weight)
        self._fc_bias = None if head.fc.bias is None else weight(head.fc.bias)
        self._qkv = weight(
            attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
        )
        self._out = weight(attention.o_proj.weight)
        self._gate_up = weight(mlp.gate_proj.weight, mlp.up_proj.weight)
        self._down = weight(mlp.down_proj.weight)
        self._head = weight(head.lm_head.weight)
        self._mlp_norm = gain(layer.post_attention_layernorm)
        if c.kind == "eagle3":
            self._input_norm = gain(layer.input_layernorm)
            self._hidden_norm = gain(layer.hidden_norm)
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

    def new_cache(self) -> TorchRows:
        return TorchRows(self.config, self._cos)

    def feed(
        self, parts: Seq[Part], tokens: Seq[int], taps_NT: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        g_ND = taps_NT.float()
        if self.config.kind == "eagle3":
            if self._fused_norm is not None:
                g_ND = self._fused_norm(g_ND)
            g_ND = F.linear(g_ND, self._fc, self._fc_bias)
        return self.run(parts, tokens, g_ND, positions)

    def run(
        self, parts: Seq[Part], tokens: Seq[int], g_ND: torch.Tensor, positions: Seq[int]
    ) -> torch.Tensor:
        c = self.config
        embedding_ND = self._embed(tokens)
        if c.kind == "eagle1":
            residual_ND = F.linear(torch.cat([embedding_ND, g_ND], -1), self._fc, self._fc_bias)
            x = residual_ND
        else:
            normed_ND = self._hidden_norm(g_ND)
            residual_ND = normed_ND if c.norm_before_residual else g_ND
            x = torch.cat([self._input_norm(embedding_ND), normed_ND], -1)
        heads = c.n_heads + c.n_kv_heads
        qkv = F.linear(x, self._qkv).view(len(tokens), heads + c.n_kv_heads, c.head_size)
        qk = self._rotate(qkv[:, :heads], positions)
        attended, residual, start = [], [], 0
        for p in parts:
            end = start + p.count
            assert isinstance(p.cache, TorchRows), "a cache of another runner"
            p.cache.write(p.at, qk[start:end, c.n_heads :], qkv[start:end, heads:])
            attended.append(self._attend(qk[end - p.wanted : end, : c.n_heads], p, p.cache))
            residual.append(residual_ND[end - p.wanted : end])
            start = end
        h_ND = torch.cat(residual) + F.linear(torch.cat(attended), self._out)
        gate, up = F.linear(self._mlp_norm(h_ND), self._gate_up).chunk(2, -1)
        return h_ND + F.linear(F.silu(gate) * up, self._down)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        if self.config.kind == "eagle3":
            hidden_ND = self._final_norm(hidden_ND)
        return F.linear(hidden_ND, self._head)

    def grow(self, asks: Seq[Ask], width: int) -> list[Grown] | None:
        return None

    def _attend(self, q_NHE: torch.Tensor, p: Part, cache: TorchRows) -> torch.Tensor:
        """[wanted, H * E]."""
        c, n, end = self.config, p.wanted, p.at + p.count
        k, v = cache.k[:, :end], cache.v[:, :end]
        shared = c.n_heads // c.n_kv_heads
        q = q_NHE.reshape(n, c.n_kv_heads, shared, c.head_size).permute(1, 0, 2, 3)
        q = q.reshape(c.n_kv_heads, n * shared, c.head_size)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(c.head_size**-0.5)
        if p.above is not None or n > 1:
            mask = self._sees(p, scores.device).repeat_interleave(shared, 0)
            scores.masked_fill_(~mask, -torch.inf)
        out = torch.bmm(scores.softmax(-1), v).view(c.n_kv_heads, n, shared, c.head_size)
        return out.permute(1, 0, 2, 3).reshape(n, c.n_heads * c.head_size)

    def _sees(self, p: Part, device: torch.device) -> torch.Tensor:
        """[wanted, at + count]: True where a wanted row sees a key."""
        end = p.at + p.count
        if p.above is None:
            return torch.ones(p.wanted, end, dtype=torch.bool, device=device).tril(end - p.wanted)
        mask = torch.zeros(p.wanted, end, dtype=torch.bool)
        mask[:, : p.cache.rows] = True
        for i, above in enumerate(p.above):
            mask[i, [*above, end - p.wanted + i]] = True
        return mask.to(device)

    def _rotate(self, x_NHE: torch.Tensor, positions: Seq[int]) -> torch.Tensor:
        last = max(positions)
        if last >= self._cos.shape[0]:
            self._cos, self._sin = self._rotations(2 * last)
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
