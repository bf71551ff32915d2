"""How far the native core and llama.cpp are from the bf16-dequantised model, on the same text.

    python benchmarks/forward_quality.py FILE.gguf [...] [--text a.py b.py ...]

The reference is the file's weights, dequantised, rounded to bf16 and run in float32 by torch.
For each text the first 512 tokens: mean KL(reference || engine) per token in nats, top-1
agreement, and perplexity. Prediction: both engines quantise activations to int8, the native core
in groups of 32 with float32 scales, so its KL is at most llama.cpp's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from paceline.bench.peers import LlamaCpp, find_llamacpp
from paceline.models.base import RowGroup, pack
from paceline.models.native import NativeModel, default_threads

TEXTS = ("argparse.py", "heapq.py", "textwrap.py", "json/decoder.py")
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def reference(path: Path) -> Any:
    """The dequantised model in torch, weights rounded to bf16, arithmetic in float32."""
    reader = GGUFReader(path)
    meta = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("tokenizer.")}
    arch = meta["general.architecture"]
    heads, kv = (meta[f"{arch}.attention.head_count{s}"] for s in ("", "_kv"))
    base = meta[f"{arch}.rope.freq_base"]
    tensors = {
        t.name: torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), np.float32))
        .bfloat16()
        .float()
        for t in reader.tensors
    }
    make, model = {
        "llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[arch]  # fmt: skip
    config = make(
        vocab_size=len(tensors["token_embd.weight"]),
        hidden_size=meta[f"{arch}.embedding_length"],
        intermediate_size=meta[f"{arch}.feed_forward_length"],
        num_hidden_layers=meta[f"{arch}.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv,
        max_position_embeddings=meta[f"{arch}.context_length"],
        rms_norm_eps=meta[f"{arch}.attention.layer_norm_rms_epsilon"],
        tie_word_embeddings="output.weight" not in tensors,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    state = {
        "model.embed_tokens.weight": tensors["token_embd.weight"],
        "model.norm.weight": tensors["output_norm.weight"],
        "lm_head.weight": tensors.get("output.weight", tensors["token_embd.weight"]),
    }
    for name, value in tensors.items():
        if not name.startswith("blk."):
            continue
        _, layer, module, suffix = name.split(".")
        if arch == "llama" and module in ("attn_q", "attn_k"):
            n = heads if module == "attn_q" else kv
            shape = value.shape
            value = value.reshape(n, shape[0] // n // 2, 2, -1).swapaxes(1, 2).reshape(shape)
        state[f"model.layers.{layer}.{NAMES[module]}.{suffix}"] = value
    with torch.device("meta"):
        out = model(config)
    out = out.to_empty(device="cpu")
    out.load_state_dict(state, assign=True)
    size = config.hidden_size // heads
    frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
    out.model.rotary_emb.inv_freq = out.model.rotary_emb.original_inv_freq = frequencies
    return out.eval()


def ours(model: NativeModel, tokens: list[int]) -> torch.Tensor:
    n = len(tokens)
    kv = model.new_kv(-(-n // 64), 64)
    group = RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, n - 1, dtype=np.int32),
        context=0,
        table=np.arange(kv.n_blocks, dtype=np.int32),
        wanted=np.arange(n, dtype=np.int32),
    )
    return model.forward(pack([group], 64), kv).logits_RV


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path, metavar="FILE.gguf")
    parser.add_argument("--text", nargs="*", type=Path, help="default: four standard-library files")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--peer-python", help="Python of an environment that has llama-cpp-python")
    args = parser.parse_args()
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = args.text or [library / name for name in TEXTS]
    results: dict[str, dict[str, float]] = {}
    for path in args.models:
        python, _ = find_llamacpp(path, args.peer_python)
        peer = LlamaCpp(python, path, threads=default_threads(), n_ctx=args.tokens)
        native, torch_model = NativeModel.from_gguf(path), reference(path)
        sums: dict[str, list[torch.Tensor]] = {}
        for text in texts:
            tokens = peer.ask("tokenize", text=text.read_text()[: 16 * args.tokens])[: args.tokens]
            with torch.no_grad():
                truth = torch_model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "logits.npy")
                peer.ask("logits", tokens=tokens, file=file)
                theirs = torch.from_numpy(np.load(file))
            targets = torch.tensor(tokens[1:])[:, None]
            for name, logits in (
                ("native", ours(native, tokens)),
                ("llama.cpp", theirs),
                ("reference", truth),
            ):
                law = logits.float().log_softmax(-1)
                sums.setdefault(f"{name} kl", []).append((truth.exp() * (truth - law)).sum(-1))
                sums.setdefault(f"{name} top1", []).append(
                    (truth.argmax(-1) == law.argmax(-1)).float()
                )
                sums.setdefault(f"{name} nll", []).append(-law[:-1].gather(1, targets)[:, 0])
        peer.close()
        mean = {key: float(torch.cat(parts).mean()) for key, parts in sums.items()}
        for name in ("native", "llama.cpp", "reference"):
            perplexity, top1 = np.exp(mean[f"{name} nll"]), 100 * mean[f"{name} top1"]
            print(
                f"{path.stem} {name}: KL {mean[f'{name} kl']:.5f}, "
                f"top-1 {top1:.2f} %, perplexity {perplexity:.4f}",
                file=sys.stderr,
            )
        results[path.stem] = {
            "kl": mean["native kl"], "kl_llamacpp": mean["llama.cpp kl"],
            "top1": mean["native top1"], "top1_llamacpp": mean["llama.cpp top1"],
        }  # fmt: skip
    print(json.dumps({"models": results}))


if __name__ == "__main__":
    main()
