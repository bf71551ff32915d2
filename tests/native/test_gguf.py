"""Loading GGUF files: what the file says is what runs, damage is a UserError, the cache works."""

from __future__ import annotations

import os
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from native_devices import Runner, same_bits, tiny_config, tiny_tensors

from paceline.errors import UserError
from paceline.models import gguf_weights, native_weights
from paceline.models.config import from_gguf
from paceline.models.decoder import build_decoder
from paceline.models.gguf_file import open_gguf
from paceline.models.native import NativeModel
from paceline.models.native_core import native_core
from paceline.models.native_source import GGUFStore, gather, source_of
from paceline.models.native_weights import Quantize

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
    factors: np.ndarray | None = None,
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
    if factors is not None:
        w.add_tensor("rope_freqs.weight", factors)
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


@pytest.mark.parametrize(
    "extra",
    [
        {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        "factors",
    ],
)
def test_scaled_positions_are_those_of_the_file(tmp_path: Path, extra: dict | str) -> None:
    """As the torch decoder of the same file has them."""
    config, path = tiny_config("qwen2"), tmp_path / "m.gguf"
    tensors = tiny_tensors(config)
    keys = {f"qwen2.{k}": v for k, v in extra.items()} if isinstance(extra, dict) else {}
    factors = np.linspace(1, 8, 16).astype(np.float32) if extra == "factors" else None
    write_gguf(path, config, tensors, extra=keys, factors=factors)
    decoder = from_gguf(path)
    assert decoder.rope_scaling.kind == keys.get("qwen2.rope.scaling.type", "factors")
    weights = gguf_weights.iter_tensors(path, decoder, torch.float32)
    expected = build_decoder(decoder, weights, name="tiny", dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 150, 200)
    a, b = (Runner(m).prefill(0, tokens) for m in (NativeModel.from_gguf(path), expected))
    assert (a - b).norm() / b.norm() < 0.005


def test_cache_is_used_checked_and_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config("qwen3")
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tiny_tensors(config), "Q8_0")
    tokens = np.arange(20)
    first = Runner(NativeModel.from_gguf(path)).prefill(0, tokens)
    (pack,) = native_weights.cache_directory().glob("*.pack")
    calls: list[int] = []
    original = native_weights.pack
    monkeypatch.setattr(
        native_weights, "pack", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)
    assert not calls
    good = pack.read_bytes()
    for damaged in (good[:-5000], good[:100], b"", b"?" * len(good)):  # made again
        calls.clear()
        pack.write_bytes(damaged)
        assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)
        assert len(calls) == 1
        assert pack.read_bytes() == good
    os.utime(path, ns=(time.time_ns(), time.time_ns()))  # another file as far as we know
    NativeModel.from_gguf(path)
    assert len(calls) == 2
    assert same_bits(Runner(NativeModel.from_gguf(path, use_cache=False)).prefill(0, tokens), first)
    monkeypatch.setenv("PACELINE_CACHE", "/proc/nowhere")  # not writable: runs from memory
    assert same_bits(Runner(NativeModel.from_gguf(path)).prefill(0, tokens), first)
    assert "can't be kept in /proc/nowhere/native" in caplog.text


@pytest.mark.parametrize("how", [None, "q4"])
def test_pieces_are_packed_like_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Quantize | None
) -> None:
    """One tile at a time in several threads, or a matrix at a time; what is done is said."""
    config, path = tiny_config("llama"), tmp_path / "m.gguf"
    write_gguf(path, config, tiny_tensors(config), "Q8_0")
    file = open_gguf(path)
    decoder = from_gguf(file)
    store, ids = GGUFStore(file, decoder), np.array([*range(40), 90, 149])
    source = source_of(native_core(), decoder, store, quantize=how, head_ids=ids)
    monkeypatch.setenv("PACELINE_THREADS", "1")
    whole = native_weights.pack(native_core(), source)
    monkeypatch.setenv("PACELINE_THREADS", "4")
    monkeypatch.setattr(native_weights, "_JOB", 1)
    said: list[tuple[int, int]] = []
    pieces = native_weights.pack(
        native_core(), source, progress=lambda done, total: said.append((done, total))
    )
    assert bytes(pieces.keep[0]) == bytes(whole.keep[0])
    assert len(said) > 3 * 7 * 2
    assert said == sorted(said)
    assert said[-1][0] == said[-1][1] == sum(m.data.nbytes for m in pieces.matrices.values())


def test_a_file_that_shrinks_while_it_is_packed(tmp_path: Path) -> None:
    config, path = tiny_config("qwen2"), tmp_path / "m.gguf"
    write_gguf(path, config, tiny_tensors(config))
    file = open_gguf(path)
    decoder = from_gguf(file)
    store = GGUFStore(file, decoder)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match="is truncated inside"):
        NativeModel.from_store(decoder, store)
    assert not list(native_weights.cache_directory().glob("*"))


def test_rows_are_gathered_in_few_reads() -> None:
    table = np.arange(5000, dtype=np.uint8).reshape(1000, 5)
    reads: list[int] = []

    def read(first: int, last: int) -> np.ndarray:
        reads.append(last - first)
        return table[first:last]

    rng = np.random.default_rng(0)
    for wanted, n_reads, n_rows in (
        (rng.permutation(np.arange(100, 300)), 1, 200),
        (np.array([999, 0, 2, 5]), 2, 7),
        (np.array([7, 7]), 1, 1),
    ):
        reads.clear()
        assert (gather(wanted, read) == table[wanted]).all()
        assert (len(reads), sum(reads)) == (n_reads, n_rows)


def test_every_format_that_torch_reads_has_a_native_form() -> None:
    for kind in gguf_weights.FORMATS:
        assert native_core().format_of_gguf(int(gguf.GGMLQuantizationType[kind])) >= 0, kind


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
    with pytest.raises(ValueError, match="not a usable GGUF file"):
        NativeModel.from_gguf(path)
    write_gguf(path, {**config, "model_type": "gpt2"}, tensors)
    with pytest.raises(ValueError, match="gpt2"):
        NativeModel.from_gguf(path)
    missing = {k: v for k, v in tensors.items() if "layers.1.mlp.up" not in k}
    write_gguf(path, config, missing)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        NativeModel.from_gguf(path)
    write_gguf(path, {**config, "num_hidden_layers": 2}, tensors)
    with pytest.raises(ValueError, match=r"blk\.2\.\S+ is not part of"):
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
