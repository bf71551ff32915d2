"""Weights of a GGUF file: block formats to dense tensors, under the standard names.

A block format stores groups of weights as small integers with shared scales. Each decoder
below takes raw bytes [n, bytes per block] and fills float32 [n, weights per block] with the
very operations, in the very order, of the format's reference, so results agree to the last
bit. Legend: n blocks, sub-blocks and weights as named in each function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, from_gguf, tensor_shapes
from paceline.models.gguf_file import GGUFFile, TensorInfo, open_gguf

#: Weights that one operation sees: scratch stays in the cache, calls cost little.
_SLICE: Final = 1 << 19
#: Bytes that are read from the file at once, and shared out among the workers.
_READ: Final = 1 << 23


def _half(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 2 m] of little-endian float16 to float32 [n, m]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [..., b] to [..., 2 b]: all low halves, then all high halves."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _fifth_bits(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] to [n, 32]: bit i of the little-endian word, as 0 or 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((raw.unsqueeze(-1) >> shifts) & 1) << 4).flatten(1)


def _q4_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = d (q - 8); 2 bytes d, 16 bytes of nibbles; 32 weights."""
    out.copy_(_nibbles(raw[:, 2:]))
    out.sub_(8.0).mul_(_half(raw[:, :2]))


def _q4_1(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = d q + m."""
    out.copy_(_nibbles(raw[:, 4:]))
    d_and_m = _half(raw[:, :4])
    out.mul_(d_and_m[:, :1]).add_(d_and_m[:, 1:])


def _q5_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = d (q - 16); d, 4 bytes of fifth bits, 16 bytes of nibbles."""
    out.copy_(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]))
    out.sub_(16.0).mul_(_half(raw[:, :2]))


def _q5_1(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = d q + m; d, m, fifth bits, nibbles."""
    out.copy_(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]))
    d_and_m = _half(raw[:, :4])
    out.mul_(d_and_m[:, :1]).add_(d_and_m[:, 1:])


def _q8_0(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = d q; d, 32 signed bytes."""
    out.copy_(raw[:, 2:].view(torch.int8))
    out.mul_(_half(raw[:, :2]))


def _scales_and_minima(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of Q4_K and Q5_K, uint8 [n, 16], to d * sc and dmin * m: [n, 8, 1] each.

    Twelve bytes hold eight six-bit scales and minima: bytes 0-3 and 4-7 the first four of
    each in their low six bits; bytes 8-11 the low nibbles of the last four of both, whose top
    two bits sit in the top bits of bytes 0-7.
    """
    d = _half(raw[:, :4])
    a, b, c = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scale = torch.cat([a & 63, (c & 15) | ((a >> 2) & 48)], dim=1)
    minimum = torch.cat([b & 63, (c >> 4) | ((b >> 2) & 48)], dim=1)
    return (d[:, :1] * scale).unsqueeze(-1), (d[:, 1:] * minimum).unsqueeze(-1)


def _q4_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = (d sc) q - (dmin m); 8 sub-blocks of 32, a low and a high one per 32 bytes."""
    step, floor = _scales_and_minima(raw)
    w = out.view(-1, 8, 32)
    packed = raw[:, 16:].view(-1, 4, 32)
    w[:, 0::2].copy_(packed & 15)
    w[:, 1::2].copy_(packed >> 4)
    w.mul_(step).sub_(floor)


def _q5_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    """As Q4_K with fifth bits: bit j of the 32 bytes belongs to sub-block j."""
    step, floor = _scales_and_minima(raw)
    packed = raw[:, 48:].view(-1, 4, 1, 32)
    low = torch.cat([packed & 15, packed >> 4], dim=2).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).view(8, 1)
    top = ((raw[:, 16:48].unsqueeze(1) >> shifts) & 1) << 4
    w = out.view(-1, 8, 32)
    w.copy_(low | top)
    w.mul_(step).sub_(floor)


def _q6_k(raw: torch.Tensor, out: torch.Tensor) -> None:
    """w = (d sc) (q - 32); 16 sub-blocks of 16 with signed eight-bit scales.

    Each half (128 weights) has 64 bytes of nibbles, low ones first, and 32 bytes of top bit
    pairs, the lowest pair for the first 32 weights.
    """
    low = _nibbles(raw[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)
    top = ((raw[:, 128:192].view(-1, 2, 1, 32) >> shifts) & 3) << 4
    scale = raw[:, 192:208].contiguous().view(torch.int8).float()
    step = (_half(raw[:, 208:210]) * scale).unsqueeze(-1)
    out.view(-1, 2, 4, 32).copy_(low | top)
    out.sub_(32.0).view(-1, 16, 16).mul_(step)


_Decoder = Callable[[torch.Tensor, torch.Tensor], None]
#: Format: weights per block, bytes per block, decoder.
_BLOCKS: Final[dict[str, tuple[int, int, _Decoder]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FORMATS: Final = (*_PLAIN, *_BLOCKS)


def dequantize(raw: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """Decode whole blocks: uint8 bytes of format `kind` into `out`, flat, any float dtype.

    Rounding to `out`'s dtype is to nearest, ties to even. `raw` and `out` are contiguous.

    Raises:
        ValueError: `kind` is not one of `FORMATS`.
    """
    if kind in _PLAIN:
        out.copy_(raw.view(_PLAIN[kind]))
        return
    if kind not in _BLOCKS:
        raise ValueError(f"block format {kind} is not supported; supported: {', '.join(FORMATS)}")
    weights, nbytes, decode = _BLOCKS[kind]
    blocks = raw.view(-1, nbytes)
    if out.dtype == torch.float32:
        decode(blocks, out.view(-1, weights))
        return
    scratch = torch.empty(blocks.shape[0], weights)
    decode(blocks, scratch)
    out.copy_(scratch.view(-1))


class _Reader:
    """Decodes tensors of one file with a few threads, each taking a run of whole blocks.

    Each of these threads runs torch's operations by itself. torch's own way, every operation
    split over all cores with a barrier at its end, is forty times slower as soon as another
    process uses a core.
    """

    def __init__(self, file: GGUFFile, dtype: torch.dtype) -> None:
        self._file = file
        self._dtype = dtype
        self._workers = max(1, torch.get_num_threads())

    def __enter__(self) -> _Reader:
        self._stream = self._file.open()
        everyone = threading.Barrier(self._workers)

        def alone(_: int) -> None:
            torch.set_num_threads(1)  # holds for this thread and those started later
            everyone.wait()  # so that each thread of the pool takes one of these jobs

        self._pool = ThreadPoolExecutor(self._workers)
        try:
            list(self._pool.map(alone, range(self._workers)))
        finally:
            torch.set_num_threads(self._workers)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._stream.close()

    def read(self, info: TensorInfo) -> torch.Tensor:
        """The tensor, dense, [*info.shape]; every slice goes straight into the result."""
        result = torch.empty(info.shape, dtype=self._dtype)
        flat = result.view(-1)
        if info.kind in _BLOCKS:
            weights, nbytes = _BLOCKS[info.kind][:2]
        else:
            weights, nbytes = 1, _PLAIN[info.kind].itemsize
        blocks_at_once = _READ // nbytes
        buffer = bytearray(min(blocks_at_once * nbytes, info.nbytes))
        self._stream.seek(info.offset)
        start = 0
        while start < flat.numel():
            part = flat[start : start + blocks_at_once * weights]
            view = memoryview(buffer)[: part.numel() // weights * nbytes]
            if self._stream.readinto(view) != len(view):
                raise UserError(
                    f"{self._file.path}: is truncated inside {info.name}; fetch it again"
                )
            self._decode(torch.frombuffer(view, dtype=torch.uint8), info.kind, part, weights)
            start += part.numel()
        return result

    def _decode(self, raw: torch.Tensor, kind: str, out: torch.Tensor, weights: int) -> None:
        n = out.numel() // weights
        per_byte = raw.numel() // n
        step = _SLICE // weights

        def work(first: int, last: int) -> None:
            for at in range(first, last, step):
                end = min(at + step, last)
                dequantize(
                    raw[at * per_byte : end * per_byte], kind, out[at * weights : end * weights]
                )

        share = -(-n // self._workers)
        jobs = [self._pool.submit(work, at, min(at + share, n)) for at in range(0, n, share)]
        for job in jobs:
            job.result()


_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: Tensors that the config reader has used, or that only other programs need.
_IGNORED: Final = frozenset({"rope_freqs.weight"})


def standard_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; None if unknown."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"


def check_tensors(file: GGUFFile, config: DecoderConfig) -> dict[str, TensorInfo]:
    """Standard name to place, in file order, for exactly the tensors that `config` needs.

    Raises:
        UserError: a tensor is missing, extra, misshapen or in an unsupported format; named.
    """
    wanted = tensor_shapes(config)
    found: dict[str, TensorInfo] = {}
    for info in file.tensors.values():
        if info.name in _IGNORED:
            continue
        name = standard_name(info.name)
        if name is None or name not in wanted:
            raise UserError(
                f"{file.path}: the tensor {info.name} is not part of a {config.architecture} "
                "decoder that is supported"
            )
        if info.shape != wanted[name]:
            raise UserError(
                f"{file.path}: {info.name} has shape {list(info.shape)}, "
                f"the header asks for {list(wanted[name])}; the file is damaged"
            )
        if info.kind not in FORMATS:
            raise UserError(
                f"{file.path}: block format {info.kind} (tensor {info.name}) is not supported; "
                f"supported: {', '.join(FORMATS)}"
            )
        found[name] = info
    missing = [name for name in wanted if name not in found]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{file.path}: lacks {', '.join(missing[:3])}{more}")
    return found


def iter_tensors(
    source: GGUFFile | str | Path, config: DecoderConfig | None, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight of the file, dense in `dtype`, in file order, under its standard name.

    One tensor is decoded at a time and nothing is kept, so peak memory is what the caller
    keeps plus one tensor. The `llama` architecture stores q and k rows for interleaved
    rotary pairs; they are put back into the half-and-half order that the decoder uses.

    config: as read by `from_gguf`; None reads it.

    Raises:
        UserError: before the first tensor if any is missing, extra, misshapen or in an
        unsupported format; later if the file shrinks meanwhile.
    """
    file = source if isinstance(source, GGUFFile) else open_gguf(source)
    if config is None:
        config = from_gguf(file)
    places = check_tensors(file, config)
    return _decode_all(file, places, config, dtype)


def _decode_all(
    file: GGUFFile, places: dict[str, TensorInfo], config: DecoderConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    with _Reader(file, dtype) as reader:
        for name, info in places.items():
            tensor = reader.read(info)
            heads = interleaved_heads(config, name)
            yield name, tensor if heads is None else half_order(tensor, heads)


def interleaved_heads(config: DecoderConfig, name: str) -> int | None:
    """The heads of a tensor (standard name) whose rows the file holds as rotary pairs, for
    `half_order`; None where it holds them in the decoder's order."""
    if config.architecture == "llama" and ".q_proj." in name:
        return config.n_heads
    if config.architecture == "llama" and ".k_proj." in name:
        return config.n_kv_heads
    return None


def half_order(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Rows (or bias entries) of each head from pairs (0, 0', 1, 1', ...) to halves
    (0, 1, ..., 0', 1', ...): [H E, ...] to the same shape."""
    rest = weight.shape[1:]
    pairs = weight.view(n_heads, -1, 2, *rest)
    return pairs.transpose(1, 2).reshape(weight.shape)
