"""Configs from config.json and GGUF, and rotary frequencies against transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, from_gguf, from_hf, rope_inv_freq, tensor_shapes

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CLASSES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def small(**changes: Any) -> dict[str, Any]:
    return SMALL | {"model_type": "llama"} | changes


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_saved_configs_of_every_architecture(name: str, tmp_path: Path) -> None:
    CLASSES[name](**SMALL, rope_theta=5000.0, tie_word_embeddings=True).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    config = from_hf(tmp_path)
    assert config.architecture == name
    assert config.rope_theta == 5000.0
    assert config.tied
    assert config.qkv_bias is (name == "qwen2")
    assert config.qk_norm is (name == "qwen3")
    assert config.head_dim == (128 if name == "qwen3" else 16)
    assert {7, 9} <= set(config.eos_ids)
    assert config.rope_scaling.kind == "none"


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rope_equals_transformers(scaling: dict[str, Any], spelling: str, head_dim: int) -> None:
    theta = 10000.0
    reference = LlamaConfig(
        **SMALL, head_dim=head_dim, rope_parameters={**scaling, "rope_theta": theta}
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](reference, torch.device("cpu"))
    if spelling == "rope_scaling":
        mine = from_hf(small(head_dim=head_dim, rope_theta=theta, rope_scaling=scaling))
    else:
        table = scaling | {"rope_theta": theta}
        mine = from_hf(small(head_dim=head_dim, rope_parameters=table))
    got, got_factor = rope_inv_freq(mine)
    assert got.dtype == torch.float32
    assert torch.equal(got, wanted)
    assert got_factor == factor


def test_plain_rope_equals_transformers() -> None:
    reference = LlamaRotaryEmbedding(LlamaConfig(**SMALL))
    assert torch.equal(rope_inv_freq(from_hf(small()))[0], reference.inv_freq)


def test_yarn_extends_the_context_and_sliding_windows_cap_it() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert from_hf(small(model_type="qwen2", rope_scaling=scaling)).max_context == 2048
    capped = from_hf(small(model_type="mistral", sliding_window=100))
    assert (capped.max_context, capped.sliding_window) == (100, 100)
    assert "sliding window of 100" in capped.notes[0]
    wide = from_hf(small(model_type="mistral", sliding_window=4096))
    assert (wide.max_context, wide.notes) == (512, ())
    unused = from_hf(small(model_type="qwen2", sliding_window=100, use_sliding_window=False))
    assert unused.max_context == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported: llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised checkpoints \(awq\)"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'.*supported: default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "one table for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"supported: \*ForCausalLM"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' is '64'; it must be an integer"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"num_hidden_layers": 0}, "n_layers is 0"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ],
)
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_hf(small(**changes))
    assert "\n" not in str(caught.value)


def test_unreadable_config_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        from_hf(tmp_path)
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"not valid JSON|one JSON object"):
            from_hf(tmp_path)


def test_tensor_shapes_equal_transformers_models(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for name, config_class in CLASSES.items():
        reference = config_class(**SMALL, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(reference)
        wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
        assert tensor_shapes(from_hf(json.loads(reference.to_json_string()))) == wanted, name


def test_gguf_config_with_and_without_a_vocabulary_size(make_gguf) -> None:
    for i, keys in enumerate(({}, {"qwen2.vocab_size": 999})):
        config = from_gguf(make_gguf(architecture="qwen2", keys=keys, name=f"{i}.gguf").path)
        assert config.vocab_size == 256 + 7 + 5 + 3
        assert (config.n_heads, config.n_kv_heads, config.head_dim) == (4, 2, 16)
        assert config.qkv_bias
        assert len(config.eos_ids) == 2


def test_gguf_rope_factors_divide_the_frequencies(make_gguf) -> None:
    factors = np.linspace(1, 8, 8).astype(np.float32)
    config = from_gguf(make_gguf(factors=factors).path)
    plain = from_hf(small())
    got, scale = rope_inv_freq(config)
    assert scale == 1.0
    assert torch.equal(got, rope_inv_freq(plain)[0] / torch.from_numpy(factors))


def test_gguf_yarn_equals_the_same_model_as_config_json(make_gguf) -> None:
    keys = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 128,
    }
    mine = from_gguf(make_gguf(architecture="qwen2", keys=keys).path)
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    wanted, factor = rope_inv_freq(from_hf(small(model_type="qwen2", rope_scaling=scaling)))
    got, got_factor = rope_inv_freq(mine)
    assert torch.equal(got, wanted)
    assert got_factor == factor


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count other than"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.attention.head_count": None}, "attention.head_count is missing"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv has the wrong type"),
        ({"llama.block_count": 10**6}, "at most 4096"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "end token 1000000 is outside"),
    ],
)
def test_unsupported_gguf_is_refused_by_name(make_gguf, keys, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_gguf(make_gguf(keys=keys).path)


def test_other_gguf_architectures_are_refused(make_gguf) -> None:
    with pytest.raises(UserError, match="architecture 'gemma' is not supported; supported: llama"):
        from_gguf(make_gguf(architecture="gemma").path)


def test_config_is_frozen() -> None:
    config = from_hf(small())
    assert isinstance(config, DecoderConfig)
    with pytest.raises(AttributeError):
        config.n_layers = 3  # type: ignore[misc]
