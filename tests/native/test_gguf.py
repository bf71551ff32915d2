"""Loading GGUF files: what the file says is what runs, damage is a ValueError, the cache works."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from native_devices import Runner, same_bits, tiny_config, tiny_tensors

from paceline.models import native_weights
from paceline.models.native import NativeModel

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def write_gguf(
    path: Path,
    config: dict,
    tensors: dict[str, torch.Tensor],
    kind: str = "F32",
    extra: dict[str, object] | None = None,
) -> dict[str, torch.Tensor]:
    """Writes a tiny model; returns the tensors as the file holds them (after quantisation)."""
    arch = config["model_type"]
    w = gguf.GGUFWriter(path, arch)
    w.add_block_count(config["num_hidden_layers"])
    w.add_context_length(config["max_position_embeddings"])
    w.add_embedding_length(config["hidden_size"])
    w.add_feed_forward_length(config["intermediate_size"])
    w.add_head_count(config["num_attention_heads"])
    w.add_head_count_kv(config["num_key_value_heads"])
    w.add_key_length(config["head_dim"])
    w.add_value_length(config["head_dim"])
    w.add_layer_norm_rms_eps(config["rms_norm_eps"])
    w.add_rope_freq_base(config["rope_theta"])
    for key, value in (extra or {}).items():
        w.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    held = {}
    qtype = gguf.GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        data = tensor.numpy()
        if name.startswith("model.layers."):
            _, _, i, rest = name.split(".", 3)
            module, suffix = rest.rsplit(".", 1)
            gname = f"blk.{i}.{NAMES[module]}.{suffix}"
        else:
            gname = {
                "model.embed_tokens.weight": "token_embd.weight",
                "model.norm.weight": "output_norm.weight",
                "lm_head.weight": "output.weight",
            }[name]
        if data.ndim == 2 and kind != "F32":
            raw = gguf.quants.quantize(data, qtype)
            data = gguf.quants.dequantize(raw, qtype)
            held[name] = torch.from_numpy(data.copy())
            w.add_tensor(gname, permute(raw, config, name), raw_dtype=qtype)
        else:
            held[name] = tensor
            w.add_tensor(gname, permute(data, config, name))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return held


def permute(rows: np.ndarray, config: dict, name: str) -> np.ndarray:
    """The interleaved rotary row order of the llama architecture."""
    if config["model_type"] != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return rows
    half = config["head_dim"] // 2
    shape = rows.shape
    return np.ascontiguousarray(rows.reshape(-1, 2, half, *shape[1:]).swapaxes(1, 2).reshape(shape))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_file_and_state_are_one_model(tmp_path: Path, arch: str, kind: str) -> None:
    """A file runs like the float tensors it stands for; exactly so where they are floats."""
    config = tiny_config(arch, tie_word_embeddings=arch == "llama")
    held = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config), kind)
    file = NativeModel.from_gguf(tmp_path / "m.gguf")
    state = NativeModel.from_state(config, held)
    assert file.info.vocab_size == 150
    tokens = np.random.default_rng(0).integers(0, 150, 30)
    a, b = Runner(file).prefill(0, tokens), Runner(state).prefill(0, tokens)
    if kind == "F32":
        assert same_bits(a, b)
    else:
        assert (a - b).norm() / b.norm() < 0.03


def test_rope_factors_and_linear_scaling(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = tiny_tensors(config)
    write_gguf(
        tmp_path / "m.gguf",
        config,
        tensors,
        extra={"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0},
    )
    linear = NativeModel.from_gguf(tmp_path / "m.gguf")
    plain = NativeModel.from_state(config, tensors)
    assert linear.config.inverse_frequencies == pytest.approx(
        [f / 2 for f in plain.config.inverse_frequencies]
    )
    write_gguf(tmp_path / "y.gguf", config, tensors, extra={"qwen2.rope.scaling.type": "yarn"})
    with pytest.raises(ValueError, match="yarn"):
        NativeModel.from_gguf(tmp_path / "y.gguf")


def test_cache_is_used_checked_and_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("qwen3")
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tiny_tensors(config), "Q8_0")
    tokens = np.arange(20)
    first = Runner(NativeModel.from_gguf(path)).prefill(0, tokens)
    (pack,) = native_weights.cache_directory().glob("*.pack")
    calls: list[int] = []
    original = native_weights.write_packed
    monkeypatch.setattr(
        native_weights, "write_packed", lambda *a: (calls.append(1), original(*a))[1]
    )
    assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)
    assert not calls
    pack.write_bytes(pack.read_bytes()[:-5000])  # damaged: made again
    assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)
    assert len(calls) == 1
    os.utime(path, ns=(time.time_ns(), time.time_ns()))  # another file as far as we know
    NativeModel.from_gguf(path)
    assert len(calls) == 2
    assert same_bits(Runner(NativeModel.from_gguf(path, use_cache=False)).prefill(0, tokens), first)
    monkeypatch.setenv("PACELINE_CACHE", "/proc/nowhere")  # not writable: runs from memory
    assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)


def test_requantised_draft(tmp_path: Path) -> None:
    config = tiny_config("qwen2", hidden_size=128, head_dim=32)
    path = tmp_path / "m.gguf"
    held = write_gguf(path, config, tiny_tensors(config), "Q8_0")
    tokens = np.random.default_rng(0).integers(0, 150, 30)
    whole = Runner(NativeModel.from_state(config, held)).prefill(0, tokens)
    small = NativeModel.from_gguf(path, quantize="q4", head_ids=range(100), compact_logits=True)
    out = Runner(small).prefill(0, tokens)
    assert out.shape == (30, 100)
    assert (out - whole[:, :100]).norm() / whole[:, :100].norm() < 0.5
    assert small.info.dtype == "q4"
    with pytest.raises(ValueError, match="outside the vocabulary"):
        NativeModel.from_gguf(path, head_ids=[150])
    with pytest.raises(ValueError, match="quantize"):
        NativeModel.from_gguf(path, quantize="q3")  # type: ignore[arg-type]


def test_unusable_files_are_value_errors(tmp_path: Path) -> None:
    config = tiny_config("qwen2")
    tensors = tiny_tensors(config)
    path = tmp_path / "m.gguf"
    with pytest.raises(ValueError, match="no such file"):
        NativeModel.from_gguf(path)
    path.write_bytes(b"hello")
    with pytest.raises(ValueError, match="not a GGUF file"):
        NativeModel.from_gguf(path)
    write_gguf(path, {**config, "model_type": "gpt2"}, tensors)
    with pytest.raises(ValueError, match="gpt2"):
        NativeModel.from_gguf(path)
    missing = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    write_gguf(path, config, missing)
    with pytest.raises(ValueError, match=r"blk\.1\.ffn_up\.weight is missing"):
        NativeModel.from_gguf(path)
    write_gguf(path, {**config, "num_hidden_layers": 2}, tensors)
    with pytest.raises(ValueError, match=r"does not know tensor blk\.2"):
        NativeModel.from_gguf(path)
    write_gguf(path, {**config, "intermediate_size": 176}, tensors)
    with pytest.raises(ValueError, match="ffn_gate"):
        NativeModel.from_gguf(path)


def test_damaged_files_never_crash(tmp_path: Path) -> None:
    """Truncations and random bytes in the header end in a ValueError, or in a model that runs."""
    config = tiny_config("llama", num_hidden_layers=1, vocab_size=32, hidden_size=32)
    config.update(intermediate_size=32, num_attention_heads=1, num_key_value_heads=1)
    path = tmp_path / "good.gguf"
    write_gguf(path, config, tiny_tensors(config), "Q8_0")
    good = path.read_bytes()
    header = good.find(b"output_norm.weight") + 200
    rng = np.random.default_rng(0)
    bad = tmp_path / "bad.gguf"
    outcomes, messages = {"error": 0, "runs": 0}, []
    for trial in range(400):
        data = bytearray(good)
        if trial % 4 == 0:
            data = data[: rng.integers(0, len(good))]
        else:
            for at in rng.integers(4, header, rng.integers(1, 4)):
                data[at] = (
                    rng.integers(0, 256) if trial % 4 == 1 else data[at] ^ (1 << rng.integers(0, 8))
                )
        bad.write_bytes(data)
        try:
            model = NativeModel.from_gguf(bad, use_cache=False, threads=1)
            Runner(model, n_blocks=4).prefill(0, np.arange(5))
            outcomes["runs"] += 1
        except ValueError as error:
            outcomes["error"] += 1
            messages.append(str(error))
    assert min(outcomes.values()) > 0, outcomes
    assert not any("\n" in message for message in messages)
