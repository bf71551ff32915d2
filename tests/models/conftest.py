"""Tiny checkpoints that the model tests write themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.float32]

D, H, K, E, F, L = 64, 4, 2, 16, 96, 2
MERGES = ["h e", "l l", "he ll", "hell o", "\u0120 w", "\u0120w o", "1 2"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, in byte order (written anew for the tests)."""
    out, extra = [], 0
    for b in range(256):
        if chr(b).isprintable() and b not in (0x20, 0xA0, 0xAD):
            out.append(chr(b))
        else:
            out.append(chr(256 + extra))
            extra += 1
    return out


def byte_level_tokens(padding: int = 3) -> tuple[list[str], list[int]]:
    """Tokens and types: bytes, merges, three control tokens, one user token, padding."""
    tokens = byte_alphabet() + [m.replace(" ", "") for m in MERGES]
    types = [1] * len(tokens)
    tokens += ["<s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool>"]
    types += [3, 3, 3, 3, 4]
    tokens += [f"[PAD{i}]" for i in range(padding)]
    return tokens, types + [5] * padding


@dataclass(frozen=True)
class TinyGGUF:
    """A written file and the float32 weights (standard names) that it was made from."""

    path: Path
    weights: dict[str, Array]


GGUFMaker = Callable[..., TinyGGUF]


@pytest.fixture
def make_gguf(tmp_path: Path) -> GGUFMaker:
    """A function that writes a tiny random decoder as GGUF; see its arguments."""

    def make(
        *,
        architecture: str = "llama",
        tied: bool = True,
        kind: str = "F32",
        keys: Mapping[str, Any] | None = None,
        factors: Array | None = None,
        drop: tuple[str, ...] = (),
        extra: Mapping[str, Array] | None = None,
        pre: str | None = "gpt-2",
        padding: int = 3,
        name: str = "tiny.gguf",
    ) -> TinyGGUF:
        rng = np.random.default_rng(0)
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        tokens, types = byte_level_tokens(padding)
        a = architecture
        table: dict[str, Any] = {
            f"{a}.block_count": L,
            f"{a}.context_length": 128,
            f"{a}.embedding_length": D,
            f"{a}.feed_forward_length": F,
            f"{a}.attention.head_count": H,
            f"{a}.attention.head_count_kv": K,
            f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{a}.rope.freq_base": 10000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
            "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": TEMPLATE,
        }
        if pre is not None:
            table["tokenizer.ggml.pre"] = pre
        for key, value in (table | dict(keys or {})).items():
            if value is not None:
                _add_key(writer, key, value)
        weights = _weights(rng, architecture, tied, len(tokens))
        for hf_name, weight in weights.items():
            gg_name = _gguf_name(hf_name)
            if gg_name in drop:
                continue
            stored = weight
            if architecture == "llama" and ("attn_q." in gg_name or "attn_k." in gg_name):
                heads = H if "attn_q." in gg_name else K
                stored = weight.reshape(heads, 2, E // 2, -1).swapaxes(1, 2).reshape(weight.shape)
            if kind == "F32" or weight.ndim == 1:
                writer.add_tensor(gg_name, np.ascontiguousarray(stored))
            else:
                quant = gguf.GGMLQuantizationType[kind]
                raw = gguf.quants.quantize(np.ascontiguousarray(stored), quant)
                writer.add_tensor(gg_name, raw, raw_dtype=quant)
        if factors is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        for gg_name, weight in (extra or {}).items():
            writer.add_tensor(gg_name, weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return TinyGGUF(path, weights)

    return make


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _weights(
    rng: np.random.Generator, architecture: str, tied: bool, vocabulary: int
) -> dict[str, Array]:
    def random(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    w = {"model.embed_tokens.weight": random(vocabulary, D)}
    for i in range(L):
        at = f"model.layers.{i}."
        w[at + "input_layernorm.weight"] = random(D)
        for p, rows in (("q", H * E), ("k", K * E), ("v", K * E)):
            w[f"{at}self_attn.{p}_proj.weight"] = random(rows, D)
            if architecture == "qwen2":
                w[f"{at}self_attn.{p}_proj.bias"] = random(rows)
        if architecture == "qwen3":
            w[at + "self_attn.q_norm.weight"] = random(E)
            w[at + "self_attn.k_norm.weight"] = random(E)
        w[at + "self_attn.o_proj.weight"] = random(D, H * E)
        w[at + "post_attention_layernorm.weight"] = random(D)
        w[at + "mlp.gate_proj.weight"] = random(F, D)
        w[at + "mlp.up_proj.weight"] = random(F, D)
        w[at + "mlp.down_proj.weight"] = random(D, F)
    w["model.norm.weight"] = random(D)
    if not tied:
        w["lm_head.weight"] = random(vocabulary, D)
    return w


def _gguf_name(name: str) -> str:
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("post_attention_layernorm", "ffn_norm"),
        ("input_layernorm", "attn_norm"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(old, new)
    return name
