"""The torch decoder: llama, mistral, qwen2 and qwen3, on CPU and CUDA by the same code.

Legend: N packed rows, R wanted rows, D hidden, F MLP width, H heads, K key/value heads,
E head size, V vocabulary, L layers, P positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.errors import UserError
from paceline.models.attention import attend, plan_groups
from paceline.models.base import (
    FINAL,
    Batch,
    KVStore,
    LayerMask,
    ModelInfo,
    Numerics,
    TargetOutput,
)
from paceline.models.config import DecoderConfig, rope_inv_freq
from paceline.models.kv import TorchKV
from paceline.models.linear import Linear


@dataclass
class Layer:
    """One block. Norm weights are [D] (q/k norms [E]), None where the family has none."""

    input_norm_D: torch.Tensor
    qkv: Linear
    q_norm_E: torch.Tensor | None
    k_norm_E: torch.Tensor | None
    out: Linear
    mlp_norm_D: torch.Tensor
    gate_up: Linear
    down: Linear


class TorchDecoder:
    """A `TargetModel` over torch tensors; made by `build_decoder`."""

    def __init__(
        self,
        *,
        config: DecoderConfig,
        name: str,
        embedding_VD: torch.Tensor,
        layers: list[Layer],
        final_norm_D: torch.Tensor,
        head: Linear,
        weight_bytes: int,
    ) -> None:
        self.config = config
        self.embedding_VD = embedding_VD
        self.layers = layers
        self.final_norm_D = final_norm_D
        self.head = head
        self.dtype = embedding_VD.dtype
        self.device = embedding_VD.device
        inv_freq, self._rope_scale = rope_inv_freq(config)
        self._inv_freq = inv_freq.to(self.device)
        self._cos_PE, self._sin_PE = self._rope_tables(256)
        slot = 2 * config.n_layers * config.n_kv_heads * config.head_dim
        self.info = ModelInfo(
            name=name,
            vocab_size=embedding_VD.shape[0],
            n_layers=config.n_layers,
            hidden_size=config.hidden_size,
            max_context=config.max_context,
            kv_slot_bytes=slot * embedding_VD.element_size(),
            weight_bytes=weight_bytes,
            # Rows agree bit for bit on the CPUs that we tried, but nothing promises it.
            numerics=Numerics.TOLERANT,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
        )

    def new_kv(self, n_blocks: int, block_size: int) -> TorchKV:
        c = self.config
        return TorchKV(
            n_layers=c.n_layers,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            n_blocks=n_blocks,
            block_size=block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def embedding_rows(self, tokens: Seq[int]) -> torch.Tensor:
        return self.embedding_VD[torch.tensor(tokens, device=self.device)].float()

    def head_rows(self, tokens: Seq[int]) -> torch.Tensor:
        weight_VD = self.head.plain()
        return weight_VD[torch.tensor(tokens, device=self.device)].float()

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        kv: KVStore,
        *,
        taps: tuple[int, ...] = (),
        layer_mask: LayerMask | None = None,
    ) -> TargetOutput:
        """One pass over packed rows; writes their keys and values to `kv` alone.

        Sub-layers that `layer_mask` skips write nothing.
        """
        assert isinstance(kv, TorchKV)
        c, device = self.config, self.device
        tokens_N = torch.from_numpy(batch.tokens_N).to(device)
        slots_N = torch.from_numpy(batch.slots_N.astype("int64")).to(device)
        cos_NE, sin_NE = self._rope(batch)
        n_slots = kv.n_blocks * kv.block_size
        groups = plan_groups(batch, n_slots, c.n_heads // c.n_kv_heads, device)
        kept: dict[int, torch.Tensor] = {}
        h_ND = self.embedding_VD[tokens_N]
        for i, layer in enumerate(self.layers):
            if i in taps:
                kept[i] = h_ND
            if layer_mask is None or layer_mask.attention_L[i]:
                x_ND = _norm(h_ND, layer.input_norm_D, c.rms_eps)
                q_NHE, k_NKE, v_NKE = self._qkv(layer, x_ND, cos_NE, sin_NE)
                keys_SKE, values_SKE = kv.keys_L[i], kv.values_L[i]
                keys_SKE.index_copy_(0, slots_N, k_NKE)
                values_SKE.index_copy_(0, slots_N, v_NKE)
                h_ND = h_ND + layer.out(attend(q_NHE, keys_SKE, values_SKE, groups))
            if layer_mask is None or layer_mask.mlp_L[i]:
                x_ND = _norm(h_ND, layer.mlp_norm_D, c.rms_eps)
                gate_NF, up_NF = layer.gate_up(x_ND).chunk(2, dim=-1)
                h_ND = h_ND + layer.down(F.silu(gate_NF) * up_NF)
        if c.n_layers in taps:
            kept[c.n_layers] = h_ND
        if FINAL in taps:
            kept[FINAL] = _norm(h_ND, self.final_norm_D, c.rms_eps)
        if len(batch.wanted_R) < batch.n_rows:
            h_ND = h_ND[torch.from_numpy(batch.wanted_R).to(device)]
        logits_RV = self.head(_norm(h_ND, self.final_norm_D, c.rms_eps)).float()
        return TargetOutput(logits_RV=logits_RV, taps=kept, starts_B1=batch.starts_B1)

    def _qkv(
        self, layer: Layer, x_ND: torch.Tensor, cos_NE: torch.Tensor, sin_NE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        heads = c.n_heads + c.n_kv_heads
        qkv = layer.qkv(x_ND).view(x_ND.shape[0], heads + c.n_kv_heads, c.head_dim)
        qk, v_NKE = qkv[:, :heads], qkv[:, heads:]
        if layer.q_norm_E is not None and layer.k_norm_E is not None:
            q = _norm(qk[:, : c.n_heads], layer.q_norm_E, c.rms_eps)
            k = _norm(qk[:, c.n_heads :], layer.k_norm_E, c.rms_eps)
            qk = torch.cat([q, k], dim=1)
        # Rotary embedding of queries and keys together, in float32 (Su et al. 2021).
        half = c.head_dim // 2
        wide = qk.float()
        turned = torch.cat([-wide[..., half:], wide[..., :half]], dim=-1)
        qk = torch.addcmul(wide * cos_NE, turned, sin_NE).to(self.dtype)
        return qk[:, : c.n_heads], qk[:, c.n_heads :], v_NKE

    def _rope(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin for each row: [N, 1, E]."""
        last = int(batch.positions_N.max())
        if last >= self._cos_PE.shape[0]:
            size = max(last + 1, 2 * self._cos_PE.shape[0])
            self._cos_PE, self._sin_PE = self._rope_tables(size)
        at = torch.from_numpy(batch.positions_N).to(self.device)
        return self._cos_PE[at].unsqueeze(1), self._sin_PE[at].unsqueeze(1)

    def _rope_tables(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.arange(size, device=self.device, dtype=torch.float32)
        angle = torch.outer(at, self._inv_freq)
        angle = torch.cat([angle, angle], dim=-1)
        return angle.cos() * self._rope_scale, angle.sin() * self._rope_scale


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


#: Tensors of one layer by their standard names, in the groups that are multiplied at once.
_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_NORMS = {
    "input_norm_D": "input_layernorm.weight",
    "mlp_norm_D": "post_attention_layernorm.weight",
    "q_norm_E": "self_attn.q_norm.weight",
    "k_norm_E": "self_attn.k_norm.weight",
}


def build_decoder(
    config: DecoderConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> TorchDecoder:
    """Take named tensors one at a time (standard `model.layers.0...` names), cast, fuse and
    pack them; at no time are two copies of more than one fused group held.

    Raises UserError for a missing, unknown or misshaped tensor, by name.
    """
    parts: dict[str, torch.Tensor] = {}
    linears: dict[str, Linear] = {}
    plan = _fusion_plan(config)
    owner = {key: target for target, members in plan.items() for key in members}
    total = 0
    for key, tensor in tensors:
        if key == "lm_head.weight" and config.tied:
            continue
        parts[key] = tensor.to(device=device, dtype=dtype)
        total += parts[key].nbytes
        del tensor
        target = owner.get(key)
        if target is not None and all(m in parts for m in plan[target]):
            linears[target] = _fuse([parts.pop(m) for m in plan[target]])

    def take(key: str) -> torch.Tensor:
        if key not in parts:
            raise UserError(f"model '{name}' lacks the tensor '{key}'; the file is incomplete")
        return parts.pop(key)

    def linear(key: str) -> Linear:
        if key not in linears:
            missing = [m for m in plan[key] if m not in parts]
            raise UserError(f"model '{name}' lacks the tensors {missing}; the file is incomplete")
        return linears.pop(key)

    embedding_VD = take("model.embed_tokens.weight")
    layers = []
    for i in range(config.n_layers):
        at = f"model.layers.{i}."
        layers.append(
            Layer(
                input_norm_D=take(at + _NORMS["input_norm_D"]),
                qkv=linear(at + "qkv"),
                q_norm_E=take(at + _NORMS["q_norm_E"]) if config.qk_norm else None,
                k_norm_E=take(at + _NORMS["k_norm_E"]) if config.qk_norm else None,
                out=linear(at + "out"),
                mlp_norm_D=take(at + _NORMS["mlp_norm_D"]),
                gate_up=linear(at + "gate_up"),
                down=linear(at + "down"),
            )
        )
    final_norm_D = take("model.norm.weight")
    head = Linear(embedding_VD, keep_plain=True) if config.tied else linear("lm_head")
    if parts:
        raise UserError(
            f"model '{name}' has tensors that this decoder does not use: {sorted(parts)}"
        )
    return TorchDecoder(
        config=config,
        name=name,
        embedding_VD=embedding_VD,
        layers=layers,
        final_norm_D=final_norm_D,
        head=head,
        weight_bytes=total,
    )


def _fusion_plan(config: DecoderConfig) -> dict[str, list[str]]:
    """Names of the tensors behind each linear map: its weights, then its biases."""
    plan = {}
    for i in range(config.n_layers):
        at = f"model.layers.{i}."
        for target, sources in _FUSED.items():
            plan[at + target] = [f"{at}{s}.weight" for s in sources]
            if target == "qkv" and config.qkv_bias:
                plan[at + target] += [f"{at}{s}.bias" for s in sources]
    if not config.tied:
        plan["lm_head"] = ["lm_head.weight"]
    return plan


def _fuse(tensors: list[torch.Tensor]) -> Linear:
    """One map from stacked weights [O_i, I] and, where there are any, biases [O_i]."""
    weights = [t for t in tensors if t.ndim == 2]
    biases = [t for t in tensors if t.ndim == 1]
    tensors.clear()
    weight = torch.cat(weights) if len(weights) > 1 else weights.pop()
    weights.clear()
    return Linear(weight, torch.cat(biases) if biases else None)
