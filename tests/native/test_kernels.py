"""The kernels against numpy, and every instruction-set path against the portable one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from native_devices import same_bits

from paceline import _native
from paceline.models.native import NativeLinear, kernel_paths
from paceline.models.native_weights import PackedMatrix

KINDS = ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"]


def random_blocks(
    kind: str, n_out: int, n_in: int, seed: int = 0, codes: int | None = None
) -> np.ndarray:
    """Random code bytes (or all the same) with sane fp16 scales, as raw GGUF rows [n_out, row
    bytes]."""
    rng = np.random.default_rng(seed)
    row = _native.gguf_row_bytes(int(Kind[kind]), n_in)
    raw = rng.integers(0, 256, (n_out, row), dtype=np.uint8)
    if codes is not None:
        raw[:] = codes
    block, places = {
        "Q4_0": (18, [0]), "Q4_1": (20, [0, 2]), "Q5_0": (22, [0]), "Q5_1": (24, [0, 2]),
        "Q8_0": (34, [0]), "Q4_K": (144, [0, 2]), "Q5_K": (176, [0, 2]), "Q6_K": (210, [208]),
    }[kind]  # fmt: skip
    blocks = raw.reshape(n_out, -1, block)
    for at in places:
        scales = rng.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return raw


def pack(kind: str, raw: np.ndarray, n_in: int) -> PackedMatrix:
    number = int(Kind[kind])
    fmt = _native.format_of_gguf(number)
    data = np.empty(_native.packed_bytes(fmt, len(raw), n_in), np.uint8)
    _native.pack_gguf(number, raw.reshape(-1), len(raw), n_in, data)
    return PackedMatrix(format=fmt, n_out=len(raw), n_in=n_in, data=data)


def quantised(x: np.ndarray) -> np.ndarray:
    """What int8 activations in groups of 32 stand for."""
    g = x.reshape(len(x), -1, 32)
    scale = np.abs(g).max(-1, keepdims=True) / 127
    with np.errstate(invalid="ignore", divide="ignore"):
        q = np.where(scale > 0, np.rint(g / scale), 0)
    return (q * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_the_files_weights(kind: str) -> None:
    """Packing loses nothing: rows equal the gguf package's dequantisation to float rounding."""
    n_in = 768 if kind.endswith("_K") else 352
    raw = random_blocks(kind, 37, n_in)
    expected = dequantize(raw, Kind[kind])
    linear = NativeLinear(pack(kind, raw, n_in))
    got = np.stack([linear.row(i).numpy() for i in range(37)])
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-7)
    unpacked = np.empty_like(expected)
    _native.unpack_gguf(int(Kind[kind]), raw.reshape(-1), unpacked)
    np.testing.assert_array_equal(unpacked, got)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", kernel_paths())
def test_product_matches_numpy_and_other_paths(kind: str, path: str) -> None:
    n_in = 768 if kind.endswith("_K") else 352
    raw = random_blocks(kind, 50, n_in, seed=1)
    x = np.random.default_rng(2).normal(0, 1, (33, n_in)).astype(np.float32)
    x[3] = 0  # an empty row
    x[4, :32] = 0  # an empty group
    x[5, 7] = 1e4  # an outlier
    packed = pack(kind, raw, n_in)
    weights = dequantize(raw, Kind[kind]).astype(np.float64)
    expected = quantised(x.astype(np.float64)) @ weights.T
    got = NativeLinear(packed, path=path)(torch.from_numpy(x))
    size = np.abs(quantised(x)) @ np.abs(weights).T
    assert (np.abs(got.numpy() - expected) <= 1e-5 * size + 1e-6).all()
    assert same_bits(got, NativeLinear(packed, path="portable")(torch.from_numpy(x)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", kernel_paths())
def test_sums_of_the_largest_codes_do_not_overflow(kind: str, path: str) -> None:
    """Every weight's code is all ones, every activation's +-127: where 16 bits hold sums of
    products they are as full as they get (15, 63 and 255 times 127)."""
    n_in = 512
    raw = random_blocks(kind, 32, n_in, codes=255)
    x = np.ones((9, n_in), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3, ::4] = x[3, 1::4] = -1
    weights = dequantize(raw, Kind[kind]).astype(np.float64)
    packed = pack(kind, raw, n_in)
    got = NativeLinear(packed, path=path)(torch.from_numpy(x))
    size = np.abs(x) @ np.abs(weights).T
    assert (np.abs(got.numpy() - x @ weights.T) <= 1e-5 * size + 1e-6).all()
    assert same_bits(got, NativeLinear(packed, path="portable")(torch.from_numpy(x)))


@pytest.mark.parametrize("path", kernel_paths())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_product(path: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(41, 70, generator=g).to(dtype)  # any width
    x = torch.randn(21, 70, generator=g)
    got = NativeLinear.from_float(weight, path=path)(x)
    torch.testing.assert_close(got, x @ weight.float().T, rtol=1e-5, atol=1e-5)
    assert same_bits(got, NativeLinear.from_float(weight, path="portable")(x))


@pytest.mark.parametrize("path", kernel_paths())
@pytest.mark.parametrize("kind", [*KINDS, "F32"])
def test_a_row_does_not_depend_on_its_neighbours(path: str, kind: str) -> None:
    """Bit-identical alone and at every place among 1-40 rows, with 1 and 2 threads."""
    n_in = 512
    if kind == "F32":
        weight = torch.randn(48, n_in, generator=torch.Generator().manual_seed(3))
        make = lambda threads: NativeLinear.from_float(weight, path=path, threads=threads)  # noqa: E731
    else:
        packed = pack(kind, random_blocks(kind, 48, n_in), n_in)
        make = lambda threads: NativeLinear(packed, path=path, threads=threads)  # noqa: E731
    one, two = make(1), make(2)
    x = torch.randn(40, n_in, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([one(x[i : i + 1]) for i in range(40)])
    for n in [*range(1, 20), 24, 33, 40]:
        assert same_bits(one(x[:n]), alone[:n]), n
        assert same_bits(two(x[40 - n :]), alone[40 - n :]), n


def test_quantised_floats_are_close() -> None:
    g = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 896, generator=g)
    for how, limit in (("q4", 0.09), ("q8", 0.006)):
        linear = NativeLinear.from_float(weight, quantize=how)  # type: ignore[arg-type]
        rows = torch.stack([linear.row(i) for i in range(64)])
        assert (rows - weight).norm() / weight.norm() < limit
    assert NativeLinear.from_float(weight, quantize="q4").nbytes < 4.7 / 8 * weight.numel()


def test_non_finite_activations_show() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    linear = NativeLinear.from_float(weight, quantize="q8")
    x = torch.ones(3, 64)
    x[1, 5], x[2, 40] = torch.inf, torch.nan
    out = linear(x)
    assert out[0].isfinite().all()
    assert not out[1:].isfinite().any()


def test_wrong_use_is_a_value_error() -> None:
    linear = NativeLinear.from_float(torch.randn(16, 32), quantize="q8")
    with pytest.raises(ValueError, match="activations"):
        linear(torch.ones(1, 31))
    with pytest.raises(ValueError, match="available"):
        NativeLinear.from_float(torch.randn(16, 32), path="mmx")(torch.ones(1, 32))
    with pytest.raises(ValueError, match="wrong size"):
        NativeLinear(PackedMatrix(format=6, n_out=16, n_in=32, data=np.zeros(5, np.uint8)))
    with pytest.raises(ValueError, match="divisible by 32"):
        _native.packed_bytes(1, 16, 40)
