"""Published layouts of EAGLE-3, EAGLE-1 and Medusa checkpoints: names and configs.

official: EAGLE-3's own (`midlayer.` tensors), EAGLE-1's (`layers.0.` tensors, `fc` of two
widths), Medusa's (`{head}.{block}.linear`). speculators: EAGLE-3 in a folder that vLLM
loads. Extensions of ours are keys that begin with `paceline_`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import UserError
from paceline.models.base import FINAL
from paceline.models.config import rope_from_hf
from paceline.models.heads.config import EagleConfig, MedusaConfig, eagle3_taps
from paceline.models.rope import RopeScaling

Shapes = Mapping[str, tuple[int, ...]]
AUX: Final = "eagle_aux_hidden_state_layer_ids"
N_AUX: Final = "num_aux_hidden_states"
SPECULATORS_VERSION: Final = "0.3.0"
#: Where each layout keeps the decoder layer.
PREFIX: Final = {"eagle3": "midlayer.", "speculators": "layers.0.", "eagle1": "layers.0."}


def detect(config: Mapping[str, Any], shapes: Shapes, where: str) -> str:
    """eagle3, eagle1, medusa or speculators; UserError for anything else, by name."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise UserError(f"{where}: speculators of type {kind!r} are not read: use eagle3")
        return "speculators"
    if "medusa_num_heads" in config:
        return "medusa"
    if any(n.startswith("midlayer.") for n in shapes):
        return "eagle3"
    if "fc.weight" in shapes and any(n.startswith("layers.0.") for n in shapes):
        return "eagle1"
    raise UserError(
        f"{where}: is no head that is known: EAGLE-3 (midlayer.* tensors), EAGLE-1 (fc.weight and "
        "layers.0.*), Medusa (medusa_num_heads) or a speculators folder"
    )


def read_eagle(
    layout: str, config: Mapping[str, Any], shapes: Shapes, where: str, n_layers: int | None
) -> EagleConfig:
    """n_layers: of the target, for checkpoints that don't say which layers they read."""
    outer = config
    if layout == "speculators":
        inner = config.get("transformer_layer_config")
        if not isinstance(inner, dict):
            raise UserError(f"{where}: 'transformer_layer_config' is missing")
        config = inner
        _refuse(outer, where, "fc_norm", "norm_output")
    _refuse(config, where, "attention_bias", "qkv_bias", "mlp_bias")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not supported: use silu")
    if int(config.get("num_hidden_layers", 1)) != 1:
        raise UserError(f"{where}: heads of one decoder layer are supported")
    hidden, heads = _int(config, "hidden_size", where), _int(config, "num_attention_heads", where)
    wide = outer.get("target_hidden_size") or hidden
    if wide != hidden:
        raise UserError(f"{where}: a head of another width ({hidden}) than its target's ({wide})")
    theta, scaling, max_context = rope_from_hf({"max_position_embeddings": 1 << 20, **config})
    vocab = _int(config, "vocab_size", where)
    fc = shapes.get("fc.weight")
    if fc is None:
        raise UserError(f"{where}: lacks fc.weight")
    kind: Any = "eagle1" if layout == "eagle1" else "eagle3"
    return EagleConfig(
        kind=kind,
        hidden=hidden,
        intermediate=_int(config, "intermediate_size", where),
        n_heads=heads,
        n_kv_heads=_int(config, "num_key_value_heads", where, heads),
        head_size=_int(config, "head_dim", where, hidden // max(heads, 1)),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        vocab_size=vocab,
        draft_vocab_size=_int(outer, "draft_vocab_size", where, vocab),
        taps=(FINAL,) if kind == "eagle1" else _taps(outer, fc, hidden, n_layers, where),
        norm_before_residual=bool(outer.get("norm_before_residual", False)),
        norm_before_fc=bool(outer.get("norm_before_fc", False)),
        max_context=max_context,
    )


def read_medusa(
    config: Mapping[str, Any], shapes: Shapes, where: str, vocab_size: int | None
) -> MedusaConfig:
    """vocab_size: the target's, for heads that don't say it (the official config does not)."""
    layers = _int(config, "medusa_num_layers", where, 1)
    shared = bool(config.get("paceline_shared_head", False))
    first = shapes.get("0.0.linear.weight")
    last = shapes.get(f"0.{layers}.weight")
    if first is None or (last is None and not shared):
        raise UserError(f"{where}: lacks the tensors of its first head (0.0.linear.weight, …)")
    rows = int(last[0]) if last is not None else None
    vocab = config.get("paceline_vocab_size") or vocab_size or rows
    draft = config.get("draft_vocab_size") or rows
    if vocab is None or draft is None:
        raise UserError(f"{where}: does not say its vocabulary's size")
    return MedusaConfig(
        num_heads=_int(config, "medusa_num_heads", where),
        num_layers=layers,
        hidden=int(first[0]),
        vocab_size=int(vocab),
        draft_vocab_size=int(draft),
        shared_head=shared,
    )


def write_eagle(c: EagleConfig) -> dict[str, Any]:
    """config.json of the official layouts."""
    name = "LlamaForCausalLMEagle3" if c.kind == "eagle3" else "EagleLlamaForCausalLM"
    out = {**_layer(c), "architectures": [name], "model_type": "llama"}
    out |= {"draft_vocab_size": c.draft_vocab_size}
    if c.kind == "eagle3":
        out |= {
            AUX: list(c.taps),
            N_AUX: len(c.taps),
            "norm_before_residual": c.norm_before_residual,
            "norm_before_fc": c.norm_before_fc,
        }
    return out


def write_speculators(c: EagleConfig, k: int, target: str, architecture: str) -> dict[str, Any]:
    """config.json of a speculators folder. k: tokens to draft; target: its name or path;
    architecture: its class, like LlamaForCausalLM."""
    if c.kind != "eagle3" or FINAL in c.taps:
        raise UserError("a speculators folder holds an EAGLE-3 head whose taps are layers")
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": k,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
        "algorithm": "eagle3",
        # vLLM takes the number of taps from here, and three where it is not said.
        "transformer_layer_config": {**_layer(c), "model_type": "llama", N_AUX: len(c.taps)},
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": c.hidden,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        AUX: list(c.taps),
    }


def write_medusa(c: MedusaConfig, target: str) -> dict[str, Any]:
    out: dict[str, Any] = {
        "medusa_num_heads": c.num_heads,
        "medusa_num_layers": c.num_layers,
        "base_model_name_or_path": target,
    }
    if c.draft_vocab_size != c.vocab_size or c.shared_head:
        out |= {"draft_vocab_size": c.draft_vocab_size, "paceline_vocab_size": c.vocab_size}
        out |= {"paceline_shared_head": c.shared_head}
    return out


def eagle_names(config: EagleConfig, layout: str) -> dict[str, str]:
    """Names of an `EagleHead`'s tensors -> names in the layout."""
    c = config
    layer = [f"self_attn.{n}_proj.weight" for n in "qkvo"]
    layer += [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    layer += ["post_attention_layernorm.weight"]
    names = ["fc.weight", "lm_head.weight", "d2t", "t2d"]
    if c.kind == "eagle3":
        layer += ["input_layernorm.weight", "hidden_norm.weight"]
        names += ["norm.weight"]
    else:
        names += ["fc.bias"]
    if c.norm_before_fc:
        names += ["input_norm.weight"]
    return {n: n for n in names} | {f"midlayer.{n}": PREFIX[layout] + n for n in layer}


def medusa_names(c: MedusaConfig) -> dict[str, str]:
    """Names of `MedusaHeads`' tensors -> names in the layout."""
    names = {"d2t": "d2t", "t2d": "t2d"}
    for i in range(c.num_heads):
        for block in range(c.num_layers):
            for part in ("weight", "bias"):
                names[f"blocks.{i}.{block}.linear.{part}"] = f"{i}.{block}.linear.{part}"
        if not c.shared_head:
            names[f"lm_heads.{i}.weight"] = f"{i}.{c.num_layers}.weight"
    if c.shared_head:
        names["lm_heads.0.weight"] = "lm_head.weight"
    return names


def _layer(c: EagleConfig) -> dict[str, Any]:
    """The decoder layer's part of a config."""
    return {
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_size,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": _scaling(c.rope_scaling),
        "max_position_embeddings": c.max_context,
        "vocab_size": c.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _scaling(s: RopeScaling) -> dict[str, Any] | None:
    if s.kind == "none":
        return None
    if s.kind == "linear":
        return {"rope_type": "linear", "factor": s.factor}
    if s.kind == "llama3":
        return {
            "rope_type": "llama3",
            "factor": s.factor,
            "low_freq_factor": s.low_freq_factor,
            "high_freq_factor": s.high_freq_factor,
            "original_max_position_embeddings": s.original_max_position,
        }
    raise UserError(
        f"rope scaling {s.kind!r} of a head can't be written: use none, linear or llama3"
    )


def _taps(
    config: Mapping[str, Any], fc: tuple[int, ...], hidden: int, n_layers: int | None, where: str
) -> tuple[int, ...]:
    nested = config.get("eagle_config")
    ids = config.get(AUX) or (nested.get(AUX) if isinstance(nested, dict) else None)
    if ids is None:
        if n_layers is None:
            raise UserError(f"{where}: does not say which target layers it reads ({AUX})")
        ids = eagle3_taps(n_layers)
    ok = isinstance(ids, list | tuple) and all(isinstance(i, int) and i >= 0 for i in ids)
    if not ok or len(fc) != 2 or fc[1] != len(ids) * hidden:
        raise UserError(
            f"{where}: fc.weight {list(fc)} does not read {ids!r} target layers of width {hidden}"
        )
    return tuple(ids)


def _refuse(config: Mapping[str, Any], where: str, *keys: str) -> None:
    for key in keys:
        if config.get(key):
            raise UserError(f"{where}: {key}={config[key]!r} is not supported; supported: false")


def _int(config: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{where}: '{key}' is {value!r}; it must be an integer")
    return value
