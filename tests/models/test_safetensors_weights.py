"""Safetensors folders: one file, shards, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from paceline.errors import UserError
from paceline.models.config import from_hf
from paceline.models.safetensors_weights import INDEX, iter_tensors, shards

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL, tie_word_embeddings=False))
    size = "100KB" if request.param == "shards" else "1GB"
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).is_file() is (request.param == "shards")
    return tmp_path


def test_every_tensor_comes_once_and_equal(folder: Path) -> None:
    wanted: dict[str, torch.Tensor] = {}
    for file in shards(folder):
        wanted |= load_file(file)
    pairs = list(iter_tensors(folder, from_hf(folder), torch.float32))
    assert len(pairs) == len(wanted) == len(dict(pairs))
    for name, tensor in pairs:
        assert torch.equal(tensor, wanted[name]), name
    low = dict(iter_tensors(folder, from_hf(folder), torch.bfloat16))
    assert all(torch.equal(low[n], w.bfloat16()) for n, w in wanted.items())


def one_file(tmp_path: Path, **changes: torch.Tensor | None) -> Path:
    config = LlamaConfig(**SMALL, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file)
    return tmp_path


def test_a_tied_head_and_stored_frequencies_are_left_out(tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": torch.zeros(300, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    folder = one_file(tmp_path, **extra)
    names = {name for name, _ in iter_tensors(folder, from_hf(folder), torch.float32)}
    assert not names & set(extra)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"lacks model\.norm\.weight$"),
        ({"model.layers.0.mlp.extra": torch.zeros(1)}, r"model\.layers\.0\.mlp\.extra is not part"),
        ({"model.norm.weight": torch.zeros(63)}, r"model\.norm\.weight has shape \[63\]"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, "stored as I8"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = one_file(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as caught:
        iter_tensors(folder, from_hf(folder), torch.float32)
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = one_file(tmp_path)
    config = from_hf(folder)
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for bad in (b"", data[:7], data[:100], data[:-1], b"\xff" * 64):
        file.write_bytes(bad)
        with pytest.raises(UserError, match="not a usable safetensors file"):
            iter_tensors(folder, config, torch.float32)
    file.unlink()
    with pytest.raises(UserError, match=r"has no \*\.safetensors file"):
        iter_tensors(folder, config, torch.float32)


def test_an_index_may_not_name_files_that_are_missing_or_elsewhere(tmp_path: Path) -> None:
    for name, message in (("a.safetensors", "is missing"), ("../a.safetensors", "not a file name")):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
        with pytest.raises(UserError, match=message):
            shards(tmp_path)
