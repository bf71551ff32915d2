"""Rotary position embedding: inverse frequencies under every supported scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from paceline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a checkpoint stretches rotary positions past the length it was trained on.

    none: plain (Su et al. 2021). linear: every frequency divided by `factor` (position
    interpolation, Chen et al. 2023). llama3: low frequencies divided, high ones kept, a ramp
    between, boundaries in turns per `original_max_position` (Llama 3.1). yarn: a ramp over
    dimensions and a factor on cos and sin (Peng et al. 2023). factors: frequency i divided by
    `factors[i]`, as a GGUF file's `rope_freqs.weight` asks.
    """

    kind: Literal["none", "linear", "llama3", "yarn", "factors"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        divisors = self.factors or (self.factor,)
        if not all(math.isfinite(f) and f > 0 for f in divisors):
            raise UserError(f"rope scaling factors must be positive; got {min(divisors)}")
        if self.kind == "factors" and not self.factors:
            raise UserError("rope scaling by factors needs at least one factor")
        if self.kind in ("llama3", "yarn") and self.original_max_position < 1:
            raise UserError(f"rope scaling {self.kind!r} needs the original context length")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                "rope scaling 'llama3' needs 0 < low_freq_factor < high_freq_factor; got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        betas = (self.beta_fast, self.beta_slow)
        if self.kind == "yarn" and not all(math.isfinite(b) and b > 0 for b in betas):
            raise UserError("rope scaling 'yarn' needs positive beta_fast and beta_slow")


UNSCALED = RopeScaling()


def inverse_frequencies(
    scaling: RopeScaling, head_dim: int, theta: float
) -> tuple[torch.Tensor, float]:
    """float32 [E / 2] inverse frequencies, and the factor on cos and sin.

    Operations and their order are those of the reference implementation, so that angles, and
    with them greedy texts, agree to the last bit.
    """
    if scaling.kind == "yarn":
        return _yarn(scaling, head_dim, theta)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (theta**exponent)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "factors":
        assert scaling.factors is not None
        if len(scaling.factors) != head_dim // 2:
            raise UserError(
                f"rope scaling has {len(scaling.factors)} factors for {head_dim // 2} frequencies"
            )
        return plain / torch.tensor(scaling.factors, dtype=torch.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(scaling, plain), 1.0
    return plain, 1.0


def _llama3(s: RopeScaling, plain: torch.Tensor) -> torch.Tensor:
    """Wavelengths above original / low are stretched, below original / high kept."""
    wavelength = 2 * math.pi / plain
    longest = s.original_max_position / s.low_freq_factor
    shortest = s.original_max_position / s.high_freq_factor
    stretched = torch.where(wavelength > longest, plain / s.factor, plain)
    turns = s.original_max_position / wavelength
    keep = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    between = (1 - keep) * stretched / s.factor + keep * stretched
    return torch.where((wavelength >= shortest) & (wavelength <= longest), between, stretched)


def _yarn(s: RopeScaling, head_dim: int, theta: float) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023, section 3.2 (ramp) and 3.4 (attention factor)."""
    period = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes `turns` turns over the original length."""
        ratio = s.original_max_position / (turns * 2 * math.pi)
        return (head_dim * math.log(ratio)) / (2 * math.log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    stretched = 1.0 / (s.factor * period)
    return stretched * (1 - keep) + (1.0 / period) * keep, _yarn_attention(s)


def _yarn_attention(s: RopeScaling) -> float:
    def scale(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return scale(s.mscale) / scale(s.mscale_all_dim)
    return scale(1.0)
