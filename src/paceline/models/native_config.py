"""The shape of a decoder that the native core runs, read from GGUF metadata or a HF config.

Shapes: llama, qwen2 and qwen3 (RMS norm, rotary half-split, grouped-query attention, gated
SiLU MLP). Anything else is refused by name with a ValueError, so that the caller can fall back
to the torch path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """Sizes and constants of a decoder. `inverse_frequencies` has head_size / 2 entries."""

    name: str
    architecture: str
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

    def __post_init__(self) -> None:
        sizes = (
            self.vocab_size, self.hidden_size, self.intermediate_size, self.n_layers,
            self.n_heads, self.n_kv_heads, self.head_size, self.max_context,
        )  # fmt: skip
        if min(sizes) <= 0 or max(sizes) >= 1 << 28:
            raise ValueError(f"{self.name}: a size in the model's metadata is out of range")
        for what, size in (
            ("hidden size", self.hidden_size),
            ("MLP width", self.intermediate_size),
            ("head size", self.head_size),
        ):
            if size % 16:
                raise ValueError(f"the native core needs a {what} divisible by 16, not {size}")
        if self.n_heads % self.n_kv_heads or self.n_heads // self.n_kv_heads > 64:
            raise ValueError(
                f"the native core cannot share {self.n_kv_heads} key/value heads "
                f"among {self.n_heads} query heads"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> NativeConfig:
        frequencies = tuple(data["inverse_frequencies"])
        return NativeConfig(**{**data, "inverse_frequencies": frequencies})


def rotary_frequencies(head_size: int, base: float) -> list[float]:
    """base ** (-2 i / head_size) for i < head_size / 2 (Su et al. 2021, section 3.2.2)."""
    if not base > 0:
        raise ValueError(f"rope base must be positive, not {base}")
    return [base ** (-2.0 * i / head_size) for i in range(head_size // 2)]


def scale_llama3(frequencies: list[float], scaling: Mapping[str, Any]) -> list[float]:
    """Llama 3.1's rescaling: long wavelengths are divided by `factor`, with a smooth edge."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(scaling["original_max_position_embeddings"])
    out = []
    for f in frequencies:
        wavelengths = trained * f / (2 * math.pi)
        smooth = min(1.0, max(0.0, (wavelengths - low) / (high - low)))
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


def config_from_hf(config: Any, name: str = "") -> NativeConfig:
    """From a transformers config (object or dict). Raises ValueError for what cannot run."""
    data: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    arch = str(data.get("model_type", "llama"))
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"the native core does not run '{arch}' models ({', '.join(ARCHITECTURES)})"
        )
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"the native core has no '{data['hidden_act']}' MLP")
    if data.get("use_sliding_window"):
        raise ValueError("the native core has no sliding-window attention")
    heads = int(data["num_attention_heads"])
    head_size = int(data.get("head_dim") or data["hidden_size"] // heads)
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    base = float(rope.get("rope_theta") or data.get("rope_theta") or 10000.0)
    frequencies = rotary_frequencies(head_size, base)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "linear":
        frequencies = [f / float(rope["factor"]) for f in frequencies]
    elif kind == "llama3":
        frequencies = scale_llama3(frequencies, rope)
    elif kind != "default":
        raise ValueError(f"the native core has no '{kind}' rope scaling")
    return NativeConfig(
        name=name or str(data.get("_name_or_path") or arch),
        architecture=arch,
        vocab_size=int(data["vocab_size"]),
        hidden_size=int(data["hidden_size"]),
        intermediate_size=int(data["intermediate_size"]),
        n_layers=int(data["num_hidden_layers"]),
        n_heads=heads,
        n_kv_heads=int(data.get("num_key_value_heads") or heads),
        head_size=head_size,
        max_context=int(data["max_position_embeddings"]),
        norm_eps=float(data["rms_norm_eps"]),
        inverse_frequencies=tuple(frequencies),
    )


def config_from_gguf(
    meta: Mapping[str, Any], vocab_size: int, rope_factors: list[float] | None
) -> NativeConfig:
    """From GGUF metadata. `rope_factors`: `rope_freqs.weight`, which divides the frequencies."""
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"the native core does not run '{arch}' models ({', '.join(ARCHITECTURES)})"
        )

    def need(key: str) -> Any:
        value = meta.get(f"{arch}.{key}")
        if not isinstance(value, int | float):
            raise ValueError(f"GGUF metadata lacks {arch}.{key}")
        return value

    def get(key: str, default: Any) -> Any:
        return meta.get(f"{arch}.{key}", default)

    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ValueError(f"the native core has no '{scaling}' rope scaling")
    if get("expert_count", 0):
        raise ValueError("the native core has no mixture of experts")
    heads = int(need("attention.head_count"))
    hidden = int(need("embedding_length"))
    if heads <= 0:
        raise ValueError("GGUF metadata: attention.head_count must be positive")
    head_size = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head_size)) != head_size:
        raise ValueError("the native core needs keys and values of one size")
    if int(get("rope.dimension_count", head_size)) != head_size:
        raise ValueError("the native core needs rotary embeddings over the whole head")
    frequencies = rotary_frequencies(head_size, float(get("rope.freq_base", 10000.0)))
    if scaling == "linear":
        frequencies = [f / float(get("rope.scaling.factor", 1.0)) for f in frequencies]
    if rope_factors is not None:
        if len(rope_factors) != len(frequencies) or not all(f > 0 for f in rope_factors):
            raise ValueError("rope_freqs.weight does not fit the head size")
        frequencies = [f / x for f, x in zip(frequencies, rope_factors, strict=True)]
    return NativeConfig(
        name=str(meta.get("general.name", arch)),
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=int(need("feed_forward_length")),
        n_layers=int(need("block_count")),
        n_heads=heads,
        n_kv_heads=int(get("attention.head_count_kv", heads)),
        head_size=head_size,
        max_context=int(need("context_length")),
        norm_eps=float(need("attention.layer_norm_rms_epsilon")),
        inverse_frequencies=tuple(frequencies),
    )
