"""A real draft and target: plain, speculative, and transformers on the same weights.

    python benchmarks/draft_model.py --prompts humaneval.jsonl [--count 8] [--k 4]

Runs are interleaved (plain, speculative, speculative, plain) by prompt; speeds are medians
over prompts of tokens per second behind the first token. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median

import torch
import transformers

from paceline import LLM, RequestOutput, SamplingParams
from paceline.models.gguf_weights import iter_tensors
from paceline.models.loading import open_checkpoint

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def speed(output: RequestOutput) -> float:
    stats = output.stats
    assert stats.finished is not None
    assert stats.first_token is not None
    return (len(output.tokens) - 1) / (stats.finished - stats.first_token)


def in_transformers(model: str) -> transformers.PreTrainedModel:
    """The same weights (bfloat16, dequantised from the same file) in transformers."""
    checkpoint = open_checkpoint(model, dtype="bfloat16", device="cpu")
    c = checkpoint.config
    family = FAMILIES[c.architecture]
    config = getattr(transformers, f"{family}Config")(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads,
        max_position_embeddings=c.max_context,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        theirs = getattr(transformers, f"{family}ForCausalLM")(config)
    state = dict(iter_tensors(checkpoint.source.path, c, torch.bfloat16))
    theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    rotary = theirs.model.rotary_emb
    theirs.model.rotary_emb = type(rotary)(config)
    return theirs.eval()


def transformers_speed(
    theirs: transformers.PreTrainedModel, tokens: tuple[int, ...], n: int
) -> float:
    """Tokens per second of plain greedy generation, prefill excluded."""
    ids = torch.tensor([tokens])
    times = []
    for count in (1, n):
        start = time.perf_counter()
        theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        times.append(time.perf_counter() - start)
    return (n - 1) / (times[1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with 'turns'")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--peer", action="store_true", help="also run transformers")
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    stride = max(1, len(lines) // args.count)
    prompts = [json.loads(line)["turns"][0] for line in lines[::stride][: args.count]]

    llm = LLM(args.model, draft=args.draft, policy="fixed", k=args.k, dtype=args.dtype)
    theirs = in_transformers(args.model) if args.peer else None
    plain, fast, peer, taus, same = [], [], [], [], 0
    for i, prompt in enumerate(prompts):
        tokens = llm.chat_tokens([{"role": "user", "content": prompt}])
        llm.generate(tokens, SamplingParams(max_tokens=6))
        runs: dict[int, list[RequestOutput]] = {0: [], args.k: []}
        for k in (0, args.k, args.k, 0):
            runs[k] += llm.generate(tokens, SamplingParams(max_tokens=args.max_tokens, k=k))
        plain.append(median(speed(o) for o in runs[0]))
        fast.append(median(speed(o) for o in runs[args.k]))
        taus.append(runs[args.k][0].stats.tau)
        same += len({o.token_ids for o in (*runs[0], *runs[args.k])}) == 1
        if theirs is not None:
            peer.append(transformers_speed(theirs, tokens, 32))
        print(
            f"{i + 1}/{len(prompts)}: plain {plain[-1]:.2f}, speculative {fast[-1]:.2f} tok/s "
            f"({fast[-1] / plain[-1]:.2f}x), tau {taus[-1]:.2f}"
            + (f", transformers {peer[-1]:.2f}" if peer else ""),
            file=sys.stderr,
            flush=True,
        )
    result = {
        "model": args.model,
        "draft": args.draft,
        "dtype": llm.engine.model.info.dtype,
        "k": args.k,
        "prompts": len(prompts),
        "identical": same,
        "plain_tok_s": round(median(plain), 3),
        "speculative_tok_s": round(median(fast), 3),
        "speedup": round(median(f / p for f, p in zip(fast, plain, strict=True)), 3),
        "tau": round(sum(taus) / len(taus), 3),
    }
    if peer:
        result["transformers_tok_s"] = round(median(peer), 3)
        result["plain_vs_transformers"] = round(
            median(p / t for p, t in zip(plain, peer, strict=True)), 3
        )
    s = llm.engine.stats
    result["ms_per_step"] = {
        "T_p": round(1e3 * s.time_target / s.steps, 2),
        "T_q": round(1e3 * s.time_draft / s.steps, 2),
        "T_o": round(1e3 * s.time_other / s.steps, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
