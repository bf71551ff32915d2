"""T_o: what a step costs beside the target pass and drafting, at batch 1.

SmolLM2 drafts for itself, so that every round proposes and accepts k tokens: the most that
laws, rules, commit and text can cost.

    python benchmarks/host_overhead.py [--k 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys

from paceline import LLM, SamplingParams

PROMPT = "Write a short story about a lighthouse keeper who finds a map."


def overhead_ms(llm: LLM, params: SamplingParams) -> float:
    """Mean T_o of a step, milliseconds, behind a warm-up."""
    tokens = llm.chat_tokens([{"role": "user", "content": PROMPT}])
    llm.generate(tokens, params)
    before = (llm.engine.stats.time_other, llm.engine.stats.steps)
    llm.generate(tokens, params)
    stats = llm.engine.stats
    return 1e3 * (stats.time_other - before[0]) / (stats.steps - before[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout")
    args = parser.parse_args()
    llm = LLM(args.model, draft=args.model, policy="fixed", k=args.k)
    cases = {
        "greedy_ms": SamplingParams(max_tokens=200, ignore_eos=True),
        "sampled_ms": SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.8, seed=1),
        "top_p_ms": SamplingParams(
            max_tokens=200, ignore_eos=True, temperature=0.8, top_p=0.95, seed=1
        ),
    }
    result = {name: round(overhead_ms(llm, params), 3) for name, params in cases.items()}
    print("  ".join(f"{n} {v}" for n, v in result.items()), file=sys.stderr)
    print(json.dumps({"model": args.model, "k": args.k, **result}))


if __name__ == "__main__":
    main()
