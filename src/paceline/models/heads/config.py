"""Shapes of trained heads, checked when they are made.

Taps count target layers as `TargetModel.forward` does: tap l is the hidden state that
enters layer l, L (the number of layers) what leaves the last one, FINAL what the target's
head reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.errors import UserError
from paceline.models.base import FINAL
from paceline.models.rope import UNSCALED, RopeScaling, inverse_frequencies

EagleKind = Literal["eagle1", "eagle3"]


def eagle3_taps(n_layers: int) -> tuple[int, int, int]:
    """The taps of EAGLE-3 (Li et al. 2025, section 3.1): the states entering layers 2, L // 2
    and L - 3. UserError for a target that is too shallow to have three different ones."""
    taps = (2, n_layers // 2, n_layers - 3)
    if not 0 <= taps[0] < taps[1] < taps[2]:
        raise UserError(
            f"EAGLE-3 reads the states entering layers 2, L // 2 and L - 3, and a target of "
            f"{n_layers} layers has no three different ones: name the taps"
        )
    return taps


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """One decoder layer that drafts.

    hidden: the head's width, which is the target's. vocab_size: the target's.
    draft_vocab_size: tokens that the head can propose. taps: target states that it reads:
    (FINAL,) for eagle1, three layers for eagle3. norm_before_residual: the residual stream
    is the normed feature (official EAGLE-3: False). norm_before_fc: one RMS norm over the
    joined taps before `fc` (official: False). max_context: positions that the head was made
    for.
    """

    kind: EagleKind
    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = UNSCALED
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...] = (FINAL,)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    max_context: int = 1 << 20

    def __post_init__(self) -> None:
        if self.kind not in ("eagle1", "eagle3"):
            raise UserError(f"unknown head kind {self.kind!r}: use eagle1 or eagle3")
        _positive(
            self,
            "hidden",
            "intermediate",
            "n_heads",
            "n_kv_heads",
            "head_size",
            "vocab_size",
            "draft_vocab_size",
            "max_context",
        )
        if self.n_heads % self.n_kv_heads or self.head_size % 2:
            raise UserError(
                f"a head with {self.n_heads} heads, {self.n_kv_heads} key/value heads and head "
                f"size {self.head_size} can't run: heads must be a multiple of key/value heads "
                "and the head size even"
            )
        _check_draft_vocab(self.draft_vocab_size, self.vocab_size)
        if self.kind == "eagle1":
            if self.taps != (FINAL,):
                raise UserError("an EAGLE-1 head reads the target's final feature alone")
            if self.norm_before_fc or self.norm_before_residual:
                raise UserError("norm_before_fc and norm_before_residual belong to EAGLE-3")
        elif not self.taps or list(self.taps) != sorted(set(self.taps)):
            # Other systems join the states in the layers' order, whatever the config says.
            raise UserError(
                f"an EAGLE-3 head needs different taps in ascending order, got {self.taps}"
            )

    @property
    def fused_width(self) -> int:
        """Input width of `fc`: the taps side by side, or embedding and feature."""
        return self.hidden * (2 if self.kind == "eagle1" else len(self.taps))

    @property
    def layer_width(self) -> int:
        """Input width of the query, key and value projections."""
        return self.hidden * (1 if self.kind == "eagle1" else 2)

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """float32 [E / 2] rotary inverse frequencies, and the factor on cos and sin."""
        return inverse_frequencies(self.rope_scaling, self.head_size, self.rope_theta)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """Residual heads on the target's final feature (Cai et al. 2024, section 2.1).

    num_layers: residual blocks of each head. draft_vocab_size: tokens that the heads can
    propose; below vocab_size that is an extension of ours. shared_head: the heads use the
    target's own output projection in place of one each (ours too).
    """

    num_heads: int
    num_layers: int = 1
    hidden: int
    vocab_size: int
    draft_vocab_size: int
    shared_head: bool = False

    def __post_init__(self) -> None:
        names = ("num_heads", "num_layers", "hidden", "vocab_size", "draft_vocab_size")
        _positive(self, *names)
        _check_draft_vocab(self.draft_vocab_size, self.vocab_size)

    @property
    def taps(self) -> tuple[int, ...]:
        return (FINAL,)


def _positive(config: EagleConfig | MedusaConfig, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"the head's {name} is {value!r}; it must be a positive integer")


def _check_draft_vocab(draft: int, target: int) -> None:
    if draft > target:
        raise UserError(
            f"the head's draft vocabulary of {draft} exceeds the target's {target} tokens"
        )
