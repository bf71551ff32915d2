"""Shapes and constants of a decoder, read from a `config.json` or a GGUF header.

Everything that the decoder cannot do exactly is refused here, by name, before any weight is
read. Legend: D hidden, H heads, K key/value heads, E head size, F MLP width, V vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from paceline.errors import UserError
from paceline.models.gguf_file import GGUFFile, open_gguf
from paceline.models.rope import UNSCALED, RopeScaling, inverse_frequencies

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: Final = ("llama", "mistral", "qwen2", "qwen3")
_GGUF_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
_MAX_LAYERS: Final = 4096  # a bound for damaged files: tensor names are made for every layer


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """One decoder. Projections have no biases except q, k and v where `qkv_bias`.

    max_context: tokens that a sequence may hold. Where a checkpoint declares a sliding
        window W that is shorter, this is W: within the first W tokens a sliding window and
        full attention see the same keys, so capping the context keeps every result exact.
    eos_ids: tokens that end generation, ascending; empty where the checkpoint names none.
    notes: what a user should know about how the checkpoint was read, a sentence each.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling = UNSCALED
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_context: int
    sliding_window: int | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "max_context",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UserError(f"the model's {name} is {value!r}; it must be a positive integer")
        if self.n_layers > _MAX_LAYERS:
            raise UserError(f"the model's n_layers is {self.n_layers}; at most {_MAX_LAYERS} fit")
        if self.n_heads % self.n_kv_heads:
            raise UserError(
                f"the model has {self.n_heads} heads and {self.n_kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise UserError(f"the model's head size {self.head_dim} is odd; rotary needs it even")
        for name, least in (("rms_eps", 0.0), ("rope_theta", 1.0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > least):
                raise UserError(f"the model's {name} is {value!r}; it must be above {least}")


def rope_inv_freq(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Rotary inverse frequencies, float32 [E / 2], and the factor on cos and sin.

    See `paceline.models.rope` for the formulas and their sources.
    """
    return inverse_frequencies(config.rope_scaling, config.head_dim, config.rope_theta)


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config must hold: standard name to shape.

    `lm_head.weight` is listed for separate heads only.
    """
    d, e, f = config.hidden_size, config.head_dim, config.intermediate_size
    q, kv = config.n_heads * e, config.n_kv_heads * e
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, q),
        "post_attention_layernorm.weight": (d,),
        "mlp.gate_proj.weight": (f, d),
        "mlp.up_proj.weight": (f, d),
        "mlp.down_proj.weight": (d, f),
    }
    if config.qkv_bias:
        layer |= {f"self_attn.{n}_proj.bias": (w,) for n, w in (("q", q), ("k", kv), ("v", kv))}
    if config.qk_norm:
        layer |= {"self_attn.q_norm.weight": (e,), "self_attn.k_norm.weight": (e,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.n_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def from_hf(source: Mapping[str, Any] | str | Path) -> DecoderConfig:
    """Read a Hugging Face config: a mapping, a `config.json`, or the folder that holds one.

    With a folder, end tokens of `generation_config.json` count too.

    Raises:
        UserError: unreadable, incomplete, or asks for something that is not supported.
    """
    if isinstance(source, Mapping):
        return _HFReader(source, "config").read(())
    path = Path(source)
    folder = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    extra: tuple[int, ...] = ()
    if (folder / "generation_config.json").is_file():
        generation = load_json(folder / "generation_config.json")
        extra = _ids(generation.get("eos_token_id"), f"{folder}: eos_token_id")
    return _HFReader(load_json(file), str(file)).read(extra)


def rope_from_hf(
    config: Mapping[str, Any], where: str = "config"
) -> tuple[float, RopeScaling, int]:
    """Rotary base, scaling and context length of a Hugging Face config, by the old keys or by
    `rope_parameters`. UserError for what is not supported."""
    return _HFReader(config, where)._rope()


def load_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; anything else is a one-line `UserError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except OSError as e:
        raise UserError(f"{path}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is not valid JSON; fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object")
    return value


def _ids(value: Any, what: str) -> tuple[int, ...]:
    """Token ids given as nothing, one number or a list."""
    items = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in items):
        raise UserError(f"{what} is {value!r}; it must be a token id or a list of ids")
    return tuple(items)


def _window_cap(max_context: int, window: int | None) -> tuple[int, tuple[str, ...]]:
    if window is None or window >= max_context:
        return max_context, ()
    note = f"context capped at the sliding window of {window} tokens (declared: {max_context})"
    return window, (note,)


class _HFReader:
    """Reads one `config.json` mapping; `where` starts every message."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config = config
        self._where = where

    def _fail(self, message: str) -> UserError:
        return UserError(f"{self._where}: {message}")

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        value = default if value is None else value
        if value is None:
            raise self._fail(f"'{key}' is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fail(f"'{key}' is {value!r}; it must be an integer")
        return value

    def _number(self, table: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = table.get(key)
        value = default if value is None else value
        if value is None:
            raise self._fail(f"'{key}' is missing")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._fail(f"'{key}' is {value!r}; it must be a number")
        return float(value)

    def read(self, extra_eos: tuple[int, ...]) -> DecoderConfig:
        c = self._config
        self._refuse_unsupported()
        architecture: Architecture = c["model_type"]
        hidden, heads = self._int("hidden_size"), self._int("num_attention_heads")
        # Qwen3 fixes the head size at 128 where its config is silent.
        default_head = 128 if architecture == "qwen3" else hidden // max(heads, 1)
        # A null or missing key means full multi-head attention in llama only.
        kv_default = heads if architecture == "llama" else None
        theta, scaling, max_context = self._rope()
        window = self._int("sliding_window", 0) or None
        if architecture.startswith("qwen") and not c.get("use_sliding_window"):
            window = None
        max_context, notes = _window_cap(max_context, window)
        vocab = self._int("vocab_size")
        eos = set(_ids(c.get("eos_token_id"), f"{self._where}: eos_token_id")) | set(extra_eos)
        return DecoderConfig(
            architecture=architecture,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            n_layers=self._int("num_hidden_layers"),
            n_heads=heads,
            n_kv_heads=self._int("num_key_value_heads", kv_default),
            head_dim=self._int("head_dim", default_head),
            rms_eps=self._number(c, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            tied=bool(c.get("tie_word_embeddings", False)),
            max_context=max_context,
            sliding_window=window,
            eos_ids=tuple(sorted(i for i in eos if i < vocab)),
            bos_id=next(iter(_ids(c.get("bos_token_id"), "bos_token_id")), None),
            pad_id=next(iter(_ids(c.get("pad_token_id"), "pad_token_id")), None),
            notes=notes,
        )

    def _refuse_unsupported(self) -> None:
        c = self._config
        architecture = c.get("model_type")
        if architecture not in ARCHITECTURES:
            raise self._fail(
                f"model_type {architecture!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        names = c.get("architectures") or []
        if not isinstance(names, list) or any(not str(n).endswith("ForCausalLM") for n in names):
            raise self._fail(f"architectures {names!r} is not supported; supported: *ForCausalLM")
        if c.get("hidden_act", "silu") != "silu":
            raise self._fail(f"hidden_act {c['hidden_act']!r} is not supported; supported: silu")
        quantised = c.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise self._fail(
                f"quantised checkpoints ({method}) are not supported; "
                "supported: float32, float16 and bfloat16 safetensors, or a .gguf file"
            )
        if c.get("attention_bias") and architecture != "qwen2":
            raise self._fail("attention_bias=true (a bias on o_proj) is not supported; use false")
        if c.get("mlp_bias"):
            raise self._fail("mlp_bias=true is not supported; supported: false")

    def _rope(self) -> tuple[float, RopeScaling, int]:
        """Base, scaling and context length, from the old keys or the new `rope_parameters`."""
        c = self._config
        table: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            part = c.get(key) or {}
            if not isinstance(part, dict) or any(isinstance(v, dict) for v in part.values()):
                raise self._fail(f"'{key}' is {part!r}; one table for all layers is supported")
            table |= part
        theta = self._number(table, "rope_theta", self._number(c, "rope_theta", 10000.0))
        for place in (c, table):
            if self._number(place, "partial_rotary_factor", 1.0) != 1.0:
                raise self._fail("partial_rotary_factor other than 1 is not supported")
        kind = table.get("rope_type", table.get("type")) or "default"
        if kind not in _ROPE_TYPES:
            raise self._fail(
                f"rope type {kind!r} is not supported; supported: {', '.join(_ROPE_TYPES)}"
            )
        limit = self._int("max_position_embeddings")
        if kind == "default":
            return theta, UNSCALED, limit
        # A top-level value wins over the table's, as in the reference implementation.
        original = int(
            self._number(
                c,
                "original_max_position_embeddings",
                self._number(table, "original_max_position_embeddings", float(limit)),
            )
        )
        if kind == "linear":
            return theta, RopeScaling(kind="linear", factor=self._number(table, "factor")), limit
        if kind == "llama3":
            scaling = RopeScaling(
                kind="llama3",
                factor=self._number(table, "factor"),
                original_max_position=original,
                low_freq_factor=self._number(table, "low_freq_factor"),
                high_freq_factor=self._number(table, "high_freq_factor"),
            )
            return theta, scaling, limit
        scaling = self._yarn(table, original, limit)
        # Qwen writes the unextended length here and turns YaRN on beside it.
        return theta, scaling, max(limit, int(original * scaling.factor))

    def _yarn(self, table: Mapping[str, Any], original: int, limit: int) -> RopeScaling:
        def optional(key: str) -> float | None:
            return None if table.get(key) is None else self._number(table, key)

        return RopeScaling(
            kind="yarn",
            factor=self._number(table, "factor", limit / max(original, 1)),
            original_max_position=original,
            beta_fast=self._number(table, "beta_fast", 32.0) or 32.0,
            beta_slow=self._number(table, "beta_slow", 1.0) or 1.0,
            attention_factor=optional("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=bool(table.get("truncate", True)),
        )


def from_gguf(source: GGUFFile | str | Path) -> DecoderConfig:
    """Read the config of a GGUF file.

    The vocabulary size is the number of embedding rows, so a missing `vocab_size` key does
    no harm. No `output.weight` means tied embeddings.

    Raises:
        UserError: damaged, incomplete, or asks for something that is not supported.
    """
    file = source if isinstance(source, GGUFFile) else open_gguf(source)
    architecture = file.need("general.architecture", str)
    if architecture not in _GGUF_ARCHITECTURES:
        raise UserError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: "
            f"{', '.join(_GGUF_ARCHITECTURES)} (mistral files say llama)"
        )
    a = architecture
    if file.get(f"{a}.expert_count", int, 0):
        raise UserError(f"{file.path}: mixture-of-experts models are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: the tensor token_embd.weight is missing or not a matrix")
    heads = file.need(f"{a}.attention.head_count", int)
    hidden = file.need(f"{a}.embedding_length", int)
    head_dim = file.get(f"{a}.attention.key_length", int, hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.get(f"{a}.{key}", int, head_dim) != head_dim:
            raise UserError(f"{file.path}: {a}.{key} other than the head size is not supported")
    window = file.get(f"{a}.attention.sliding_window", int) or None
    limit = file.need(f"{a}.context_length", int)
    max_context, notes = _window_cap(limit, window)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=file.need(f"{a}.feed_forward_length", int),
        n_layers=file.need(f"{a}.block_count", int),
        n_heads=heads,
        n_kv_heads=file.get(f"{a}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        rms_eps=file.need(f"{a}.attention.layer_norm_rms_epsilon", float),
        rope_theta=file.get(f"{a}.rope.freq_base", float, 10000.0),
        rope_scaling=_gguf_scaling(file, a, limit, head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tied="output.weight" not in file.tensors,
        max_context=max_context,
        sliding_window=window,
        eos_ids=file.eos_ids(),
        bos_id=file.get("tokenizer.ggml.bos_token_id", int),
        pad_id=file.get("tokenizer.ggml.padding_token_id", int),
        notes=notes,
    )


def _gguf_scaling(file: GGUFFile, a: str, limit: int, head_dim: int) -> RopeScaling:
    kind = file.get(f"{a}.rope.scaling.type", str, "none")
    old = file.get(f"{a}.rope.scale_linear", float)
    factor = file.get(f"{a}.rope.scaling.factor", float, 1.0 if old is None else old)
    if old is not None and kind == "none":
        kind = "linear"
    factors = file.tensors.get("rope_freqs.weight")
    if kind == "linear" and factor == 1.0:
        kind = "none"
    if kind not in ("none", "linear", "yarn") or (factors is not None and kind != "none"):
        with_factors = " together with rope_freqs.weight" if factors is not None else ""
        raise UserError(
            f"{file.path}: rope scaling {kind!r}{with_factors} is not supported; "
            "supported: none, linear, yarn, or rope_freqs.weight alone"
        )
    if factors is not None:
        if factors.kind != "F32" or math.prod(factors.shape) != head_dim // 2:
            raise UserError(f"{file.path}: rope_freqs.weight must be {head_dim // 2} F32 numbers")
        with file.open() as f:
            f.seek(factors.offset)
            raw = bytearray(f.read(factors.nbytes))
        if len(raw) != factors.nbytes:
            raise UserError(f"{file.path}: is truncated inside rope_freqs.weight; fetch it again")
        values = torch.frombuffer(raw, dtype=torch.float32)
        return RopeScaling(kind="factors", factors=tuple(values.tolist()))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "none":
        return UNSCALED
    key = f"{a}.rope.scaling"
    # The file stores a multiplier of YaRN's own attention factor, 0.1 ln(factor) + 1.
    attention = file.get(f"{key}.attn_factor", float, 1.0)
    scaling = RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position=file.get(f"{key}.original_context_length", int, limit),
        beta_fast=file.get(f"{key}.yarn_beta_fast", float, 32.0),
        beta_slow=file.get(f"{key}.yarn_beta_slow", float, 1.0),
        attention_factor=attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )
    for name in ("yarn_log_multiplier", "yarn_ext_factor"):
        if file.get(f"{key}.{name}", float) not in (None, 1.0):
            raise UserError(f"{file.path}: {key}.{name} is not supported")
    return scaling
