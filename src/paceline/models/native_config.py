"""What the native core needs to know of a decoder, and what it can't run."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, rope_inv_freq

#: Query heads that share a key/value head, at most (MAX_GROUP of native/types.h).
_MAX_GROUP = 64
#: The largest size (native/module.cpp), and that of a head (MAX_HEAD_SIZE of native/types.h).
_MAX_SIZE, _MAX_HEAD = (1 << 28) - 1, 512
#: Widths are read in vectors of so many.
_LANES = 16


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """Sizes and constants of a decoder. `inverse_frequencies` has head_size / 2 entries;
    `rope_scale` is YaRN's factor on cos and sin (1 elsewhere)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    max_context: int
    norm_eps: float
    inverse_frequencies: tuple[float, ...]
    rope_scale: float

    @staticmethod
    def from_decoder(config: DecoderConfig) -> NativeConfig:
        """UserError, naming what and why, for a decoder that the core can't run."""
        _check(config)
        frequencies, scale = rope_inv_freq(config)
        return NativeConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            n_layers=config.n_layers,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_size=config.head_dim,
            max_context=config.max_context,
            norm_eps=config.rms_eps,
            inverse_frequencies=tuple(frequencies.tolist()),
            rope_scale=scale,
        )


def _check(c: DecoderConfig) -> None:
    for what, size, most in (
        ("vocabulary", c.vocab_size, _MAX_SIZE),
        ("hidden size", c.hidden_size, _MAX_SIZE),
        ("MLP width", c.intermediate_size, _MAX_SIZE),
        ("head size", c.head_dim, _MAX_HEAD),
        ("width of all heads", c.n_heads * c.head_dim, _MAX_SIZE),
    ):
        if size > most:
            raise UserError(f"the native core needs a {what} of at most {most}, not {size}")
        if what != "vocabulary" and size % _LANES:
            raise UserError(f"the native core needs a {what} divisible by {_LANES}, not {size}")
    if c.n_heads // c.n_kv_heads > _MAX_GROUP:
        raise UserError(
            f"the native core can't share {c.n_kv_heads} key/value heads among {c.n_heads} "
            f"query heads: at most {_MAX_GROUP} share one"
        )
