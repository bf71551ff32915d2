"""Medusa-2: heads and target trained together, the target through low-rank adapters
(Cai et al. 2024, section 2.2.2; adapters: Hu et al. 2021).

The target may move, so its law is held to the one it had: the captured states are the
teacher (self-distillation, section 2.3.2), and nothing is run twice. What is written at the
end is a *new* target with the adapters merged in, and heads for it: its answers are not the
old target's to the token, which no acceptance rule can change.

Legend: N packed rows, D hidden, H heads, K key/value heads, E head size, R rank.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, rope_inv_freq
from paceline.models.heads import MedusaHeads
from paceline.models.loading import Checkpoint
from paceline.train.attention import attend
from paceline.train.data import FINAL_NAME, Pack, Record, pack_records
from paceline.train.losses import HeadLosses, head_loss
from paceline.train.objectives import (
    Depth,
    Judge,
    LossConfig,
    Moment,
    Outcome,
    depths_of,
    judged_rows,
)
from paceline.train.target import Tables

#: Linear maps that get an adapter.
ADAPTED = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class Adapter(nn.Module):
    """y + scale * B A x; B starts at zero, so that training starts at the target."""

    def __init__(self, weight_OI: torch.Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        n_out, n_in = weight_OI.shape
        self.a_RI = nn.Parameter(torch.randn(rank, n_in) * n_in**-0.5)
        self.b_OR = nn.Parameter(torch.zeros(n_out, rank))
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * F.linear(F.linear(x, self.a_RI), self.b_OR)

    @torch.no_grad()
    def delta(self) -> torch.Tensor:
        """What it adds to the weight: [O, I]."""
        return self.scale * self.b_OR @ self.a_RI


class AdaptedDecoder(nn.Module):
    """The torch decoder once more, differentiable, over packed whole sequences. The frozen
    tensors are no parameters, so a checkpoint holds the adapters alone."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        rank: int = 8,
        alpha: float = 16.0,
    ) -> None:
        super().__init__()
        if rank < 1:
            raise UserError(f"rank = {rank} is out of range: use 1 or more")
        self.config = config
        self._frozen = dict(tensors)
        self._inverse_E2, self._rope_scale = rope_inv_freq(config)
        self.adapters = nn.ModuleDict(
            {
                _key(i, name): Adapter(self._frozen[_weight(i, name)], rank, alpha)
                for i in range(config.n_layers)
                for name in ADAPTED
            }
        )

    def forward(self, pack: Pack) -> torch.Tensor:
        """Final features [N, D] of the pack's tokens, behind the final norm."""
        c, frozen = self.config, self._frozen
        h_ND = frozen["model.embed_tokens.weight"][pack.tokens_N]
        angle = _positions(pack).unsqueeze(-1) * self._inverse_E2.to(h_ND.device)
        angle_N1E = torch.cat([angle, angle], -1).unsqueeze(1)
        cos, sin = angle_N1E.cos() * self._rope_scale, angle_N1E.sin() * self._rope_scale
        for i in range(c.n_layers):
            at = f"model.layers.{i}."
            x_ND = _norm(h_ND, frozen[at + "input_layernorm.weight"], c.rms_eps)
            q, k, v = (
                self._linear(i, f"self_attn.{n}_proj", x_ND).view(len(x_ND), -1, c.head_dim)
                for n in "qkv"
            )
            if c.qk_norm:
                q = _norm(q, frozen[at + "self_attn.q_norm.weight"], c.rms_eps)
                k = _norm(k, frozen[at + "self_attn.k_norm.weight"], c.rms_eps)
            mixed = attend(_rotate(q, cos, sin), (_rotate(k, cos, sin), v), (), pack.starts_B1)
            h_ND = h_ND + self._linear(i, "self_attn.o_proj", mixed)
            x_ND = _norm(h_ND, frozen[at + "post_attention_layernorm.weight"], c.rms_eps)
            gate, up = (self._linear(i, f"mlp.{n}_proj", x_ND) for n in ("gate", "up"))
            h_ND = h_ND + self._linear(i, "mlp.down_proj", F.silu(gate) * up)
        return _norm(h_ND, frozen["model.norm.weight"], c.rms_eps)

    def _linear(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._frozen.get(_weight(layer, name).replace(".weight", ".bias"))
        adapted: torch.Tensor = self.adapters[_key(layer, name)](x)
        return F.linear(x, self._frozen[_weight(layer, name)], bias) + adapted

    def merged(self) -> dict[str, torch.Tensor]:
        """The target's tensors with the adapters added in, in their old types."""
        out = {name: t.detach().cpu() for name, t in self._frozen.items()}
        for i in range(self.config.n_layers):
            for name in ADAPTED:
                adapter = self.adapters[_key(i, name)]
                assert isinstance(adapter, Adapter)
                old = out[_weight(i, name)]
                out[_weight(i, name)] = (old.float() + adapter.delta().cpu()).to(old.dtype)
        return out


class _Pair(nn.Module):
    def __init__(self, decoder: AdaptedDecoder, heads: MedusaHeads) -> None:
        super().__init__()
        self.decoder, self.heads = decoder, heads


class Medusa2:
    """heads_weight times the heads' losses (each decay ** i), and the cross-entropy of the
    decoder's law with the captured one (`lm`). Both are soft: the teacher's laws. The heads
    run alone for `heads_first` updates, so that their first gradients do not spoil the
    target (the paper's two stages)."""

    def __init__(
        self,
        decoder: AdaptedDecoder,
        heads: MedusaHeads,
        tables: Tables,
        loss: LossConfig,
        *,
        heads_weight: float = 0.2,
        heads_first: int = 50,
    ) -> None:
        self.module = _Pair(decoder, heads)
        self.config = loss
        self.taps = (FINAL_NAME,)
        self._heads_weight, self._heads_first = heads_weight, heads_first
        self._judge = Judge(tables, heads.target_ids, loss)
        every = torch.arange(len(tables.head_VD))
        self._lm_judge = Judge(tables, every, loss)

    def __call__(self, pack: Pack, now: Moment, steps: int | None = None) -> Outcome:
        joint = now.step >= self._heads_first
        pack = self._judge.lesson(pack, training=steps is None)
        with torch.set_grad_enabled(joint and torch.is_grad_enabled()):
            final_ND = self.module.decoder(pack)
        lm = self._against_old(pack, final_ND)
        losses = [lm.loss / max(len(lm.agreed_N), 1)]
        depths: list[Depth] = []
        laws, law_row_N = self._judge.laws(pack)
        heads = self.module.heads
        for i in range(heads.config.num_heads):
            rows, law_rows = judged_rows(pack, law_row_N, 1 + i)
            projection = heads.lm_heads[0 if heads.config.shared_head else i]
            assert isinstance(projection, nn.Linear)
            z = heads.features(final_ND[rows].to(projection.weight.dtype), i)
            kind = self.config.at(now.step)
            one = head_loss(z, projection.weight, laws, law_rows, kind, dtype=self.config.dtype)
            depths.extend(depths_of(one, [len(rows)]))
            weight = self._heads_weight * self.config.decay**i
            losses.append(weight * one.loss / max(len(rows), 1))
        return Outcome(loss=torch.stack(losses).sum(), depths=tuple(depths))

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """The adapters learn at a quarter of the heads' rate (the paper's ratio)."""
        heads = [p for p in self.module.heads.parameters() if p.requires_grad]
        return [(heads, 1.0), (list(self.module.decoder.parameters()), 0.25)]

    @torch.no_grad()
    def features(self, record: Record) -> torch.Tensor:
        """float32 [T, D]: the adapted target's final features of one sequence."""
        out: torch.Tensor = self.module.decoder(pack_records([record]))
        return out.float()

    @torch.no_grad()
    def own(self, pack: Pack) -> Depth:
        """The adapted target's law against the old one's: how far it has moved."""
        found = self._against_old(pack, self.module.decoder(pack))
        return depths_of(found, [len(found.agreed_N)])[0]

    def _against_old(self, pack: Pack, final_ND: torch.Tensor) -> HeadLosses:
        laws, law_row_N = self._lm_judge.laws(pack)
        rows, law_rows = judged_rows(pack, law_row_N, 0)
        head_VD = self._lm_judge.head_UD
        return head_loss(final_ND[rows], head_VD, laws, law_rows, "ce", dtype=self.config.dtype)


def write_target(decoder: AdaptedDecoder, source: Checkpoint, folder: Path) -> None:
    """The merged target as a safetensors folder, with its config and tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(decoder.merged(), folder / "model.safetensors")
    for file in sorted(Path(source.source.path).iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copyfile(file, folder / file.name)


def _weight(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}.weight"


def _key(layer: int, name: str) -> str:
    return f"{layer}_{name.split('.')[1]}"


def _positions(pack: Pack) -> torch.Tensor:
    lengths = torch.tensor(pack.starts_B1).diff()
    first_N = torch.tensor(pack.starts_B1[:-1]).repeat_interleave(lengths)
    return (torch.arange(pack.n_rows) - first_N).float().to(pack.tokens_N.device)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)
