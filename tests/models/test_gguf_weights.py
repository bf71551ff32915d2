"""GGUF files: the header, every block format, names, and damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import UserError
from paceline.models import catalog
from paceline.models.config import from_gguf, rope_inv_freq
from paceline.models.gguf_file import open_gguf
from paceline.models.gguf_weights import FORMATS, dequantize, iter_tensors
from paceline.models.tokenizer import Tokenizer

#: Where each block format keeps float16 numbers, which random bytes could make infinite.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def random_blocks(kind: str, n: int) -> np.ndarray:
    """[n, bytes per block] of random bytes whose scales are finite."""
    quant = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[quant][1]), dtype=np.uint8)
    for at in HALVES.get(kind, ()):
        scale = rng.standard_normal((n, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    return raw


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_every_block_format_equals_the_reference_bit_for_bit(kind: str) -> None:
    raw = random_blocks(kind, 123)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    out = torch.empty(wanted.size)
    dequantize(torch.from_numpy(raw), kind, out)
    assert np.array_equal(out.numpy(), wanted.reshape(-1))
    low = torch.empty(wanted.size, dtype=torch.bfloat16)
    dequantize(torch.from_numpy(raw), kind, low)
    assert torch.equal(low, out.bfloat16())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_formats_equal_the_reference(kind: str) -> None:
    values = np.random.default_rng(2).standard_normal((4, 32)).astype(np.float32)
    quant = gguf.GGMLQuantizationType[kind]
    raw = np.ascontiguousarray(gguf.quants.quantize(values, quant)).view(np.uint8)
    wanted = gguf.quants.dequantize(gguf.quants.quantize(values, quant), quant)
    out = torch.empty(values.size)
    dequantize(torch.from_numpy(raw.reshape(-1)), kind, out)
    assert np.array_equal(out.numpy(), wanted.reshape(-1))


def test_an_unsupported_format_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"Q2_K is not supported; supported: F32.*Q6_K"):
        dequantize(torch.zeros(84, dtype=torch.uint8), "Q2_K", torch.empty(256))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_row_order(make_gguf, architecture: str, tied: bool) -> None:
    tiny = make_gguf(architecture=architecture, tied=tied)
    config = from_gguf(tiny.path)
    got = dict(iter_tensors(tiny.path, config, torch.float32))
    assert config.tied is tied
    assert set(got) == set(tiny.weights)
    for name, weight in tiny.weights.items():
        assert np.array_equal(got[name].numpy(), weight), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_files_load_as_the_reference_reads_them(make_gguf, kind: str) -> None:
    tiny = make_gguf(architecture="qwen2", kind=kind)
    got = dict(iter_tensors(tiny.path, None, torch.float32))
    quant = gguf.GGMLQuantizationType[kind]
    for name, weight in tiny.weights.items():
        if weight.ndim == 2:
            weight = gguf.quants.dequantize(gguf.quants.quantize(weight, quant), quant)
        assert np.array_equal(got[name].numpy(), weight), name


def test_missing_extra_and_unsupported_tensors_are_named(make_gguf) -> None:
    lacking = make_gguf(drop=("blk.1.ffn_up.weight",), name="a.gguf")
    with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        iter_tensors(lacking.path, None, torch.float32)
    extra = make_gguf(extra={"blk.0.attn_output.bias": np.zeros(64, np.float32)}, name="b.gguf")
    with pytest.raises(UserError, match=r"blk\.0\.attn_output\.bias is not part of a llama"):
        iter_tensors(extra.path, None, torch.float32)
    other = make_gguf(kind="MXFP4", name="c.gguf")
    with pytest.raises(UserError, match=r"block format MXFP4 .* is not supported; supported: F32"):
        iter_tensors(other.path, None, torch.float32)
    misshapen = make_gguf(keys={"llama.feed_forward_length": 95}, name="d.gguf")
    with pytest.raises(UserError, match="the header asks for"):
        iter_tensors(misshapen.path, None, torch.float32)


def test_header_equals_the_gguf_packages_reader(make_gguf) -> None:
    path = make_gguf(architecture="qwen2").path
    mine, theirs = open_gguf(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert mine.metadata[key] == field.contents(), key
    assert len(mine.tensors) == len(theirs.tensors)
    for tensor in theirs.tensors:
        info = mine.tensors[tensor.name]
        assert info.offset == tensor.data_offset
        assert info.nbytes == tensor.n_bytes
        assert info.kind == tensor.tensor_type.name
        assert list(info.shape) == list(reversed(tensor.shape.tolist()))


def test_missing_folder_and_foreign_files_give_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(UserError, match="is a folder"):
        open_gguf(tmp_path)
    for data in (b"", b"GGUF", b"PK\x03\x04" * 100, b"GGUF" + b"\xff" * 100):
        (tmp_path / "x.gguf").write_bytes(data)
        with pytest.raises(UserError, match=r"not a usable GGUF file") as caught:
            open_gguf(tmp_path / "x.gguf")
        assert "\n" not in str(caught.value)


def _load_all(path: Path) -> None:
    file = open_gguf(path)
    config = from_gguf(file)
    rope_inv_freq(config)
    for _ in iter_tensors(file, config, torch.bfloat16):
        pass
    Tokenizer.from_gguf(file).encode("hello world 12\n<|im_end|>")


def test_damaged_files_only_ever_give_one_line_errors(make_gguf, tmp_path: Path) -> None:
    """400 truncations and 800 changed header bytes: success or `UserError`, never else."""
    good = make_gguf(architecture="llama").path
    data = good.read_bytes()
    header = min(t.offset for t in open_gguf(good).tensors.values())
    rng = np.random.default_rng(3)
    path = tmp_path / "bad.gguf"
    refused: list[str] = []
    for i in range(1200):
        if i < 400:
            bad = data[: int(rng.integers(0, len(data) if i % 2 else header))]
        else:
            copy = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(0, header))
                copy[at] = copy[at] ^ (1 << int(rng.integers(8))) if i % 2 else 0xFF
            bad = bytes(copy)
        path.write_bytes(bad)
        try:
            _load_all(path)
        except UserError as e:
            refused.append(str(e))
    assert len(refused) >= 600
    assert not any("\n" in message for message in refused)


def test_a_file_that_shrinks_after_opening_is_reported(make_gguf) -> None:
    path = make_gguf().path
    file = open_gguf(path)
    tensors = iter_tensors(file, None, torch.float32)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(UserError, match="is truncated inside"):
        list(tensors)


def test_smollm2_loads_with_the_facts_of_its_file() -> None:
    path = catalog.pull("smollm2-135m", progress=False)
    file = open_gguf(path)
    config = from_gguf(file)
    assert (config.n_layers, config.hidden_size, config.n_heads, config.n_kv_heads) == (
        30,
        576,
        9,
        3,
    )
    assert config.tied
    assert config.eos_ids == (0, 2)
    info = file.tensors["blk.3.attn_v.weight"]
    raw = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
    wanted = gguf.quants.dequantize(
        raw.reshape(info.shape[0], -1), gguf.GGMLQuantizationType[info.kind]
    )
    total = 0
    for name, tensor in iter_tensors(file, config, torch.float32):
        total += tensor.numel()
        if name == "model.layers.3.self_attn.v_proj.weight":
            assert np.array_equal(tensor.numpy(), wanted)
    assert total == 134_515_008


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"])
def test_qwen_files_decode_as_the_reference(name: str) -> None:
    path = catalog.pull(name)
    file = open_gguf(path)
    seen = set()
    for (_, tensor), info in zip(
        iter_tensors(file, None, torch.float32), file.tensors.values(), strict=True
    ):
        if info.kind in seen or info.kind == "F32" or info.shape[0] > 10_000:
            continue
        seen.add(info.kind)
        raw = np.fromfile(path, np.uint8, info.nbytes, offset=info.offset)
        quant = gguf.GGMLQuantizationType[info.kind]
        wanted = gguf.quants.dequantize(raw.reshape(info.shape[0], -1), quant)
        assert np.array_equal(tensor.numpy(), wanted), info
    assert seen <= set(FORMATS)
    assert "Q6_K" in seen
