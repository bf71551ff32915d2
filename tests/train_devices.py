"""A tiny target on disk with a tokenizer, and captures of it."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from paceline.api import LLM
from paceline.engine.engine import EngineConfig
from paceline.models.config import from_hf, tensor_shapes
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.train.capture import CapturePlan, capture, default_taps
from paceline.train.data import CaptureInfo, ShardWriter
from paceline.train.seeds import Seed, invented
from paceline.train.target import target_sha256

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 258,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
ENGINE = EngineConfig(kv_tokens=4096, max_batch=4, prefix_cache=False, prefill_chunk=32)


def write_target(folder: Path, seed: int = 0, **changes: object) -> Path:
    """A random llama in float32 with a byte-level tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(from_hf(config)).items():
        scale = 0.1 if len(shape) == 1 else 1.4 * shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=g) * scale + (len(shape) == 1)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 3  # sharp laws
    save_file(tensors, folder / "model.safetensors")
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )


def info_of(target: Checkpoint, taps: tuple[int, ...], **changes: object) -> CaptureInfo:
    fields: dict[str, object] = {
        "model": target.source.name,
        "target_sha256": target_sha256(target),
        "hidden_size": target.config.hidden_size,
        "n_layers": target.config.n_layers,
        "vocab_size": target.config.vocab_size,
        "taps": taps,
        "temperatures": (0.0,),
        "max_tokens": 24,
        "seeds": "tests",
    }
    return CaptureInfo(**{**fields, **changes})  # type: ignore[arg-type]


def write_capture(
    folder: Path, target: Path, tokens: int, max_tokens: int = 24, unlike: str = ""
) -> Path:
    """Greedy answers of the tiny target to invented prompts. unlike: how they begin."""
    checkpoint = open_checkpoint(str(target), dtype="float32")
    taps = default_taps(checkpoint.config.n_layers)
    writer = ShardWriter(folder, info_of(checkpoint, taps), shard_tokens=1000)
    llm = LLM(str(target), dtype="float32", engine=ENGINE)
    plan = CapturePlan(tokens=tokens, temperatures=(0.0,), max_tokens=max_tokens, max_prompt=100)
    capture(llm, short(invented(0), unlike), writer, plan, taps)
    return folder


def short(seeds, unlike: str = ""):
    """The first words of each prompt: byte tokens are many."""
    for seed in seeds:
        yield Seed(turns=tuple(unlike + t[:12] for t in seed.turns))
