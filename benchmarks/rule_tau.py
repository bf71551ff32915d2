"""Tokens per round of acceptance rules, paired: all judge the very same proposals.

    python benchmarks/rule_tau.py --prompts humaneval.jsonl [--rules block token] [--tree 3x2x1]

One sampled generation per prompt. In every round each rule judges the proposal many times
with fresh draws, so that only the rules differ. The difference of the first two rules gets
a 95 % bootstrap interval over prompts. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from paceline import LLM, Guarantee, SamplingParams
from paceline.core.draws import Draws, KeyedDraws
from paceline.core.law import Law
from paceline.core.rules import AcceptanceRule, Verdict, rule_named
from paceline.core.tree import TokenTree


class Comparison:
    """An acceptance rule that lets others judge along; `rounds` collects mean tau of each."""

    name = "comparison"
    guarantee = Guarantee.EXACT_SAMPLING

    def __init__(self, rules: Seq[AcceptanceRule], repeats: int) -> None:
        self.rules = rules
        self.repeats = repeats
        self.rounds: list[list[float]] = []

    def check(self, tree: TokenTree, greedy: bool) -> None:
        for rule in self.rules:
            rule.check(tree, greedy)

    def accept(self, tree: TokenTree, laws: Seq[Law], draws: Draws) -> Verdict:
        if len(tree) > 1:
            self.rounds.append([self._tau(rule, tree, laws) for rule in self.rules])
        return self.rules[0].accept(tree, laws, draws)

    def _tau(self, rule: AcceptanceRule, tree: TokenTree, laws: Seq[Law]) -> float:
        lengths = [
            len(rule.accept(tree, laws, KeyedDraws(secrets.randbits(64), 0)).path)
            for _ in range(self.repeats)
        ]
        return 1.0 + sum(lengths) / self.repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", default="qwen2.5-coder-0.5b")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with 'turns'")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--rules", nargs="+", default=["block", "token"])
    parser.add_argument("--tree", default=None)
    parser.add_argument("--k", type=int, default=None)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=16, help="judgements per round and rule")
    args = parser.parse_args()
    lines = args.prompts.read_text(encoding="utf-8").splitlines()
    lines = lines[:: max(1, len(lines) // args.count)][: args.count]
    llm = LLM(args.model, draft=args.draft, policy="fixed", k=args.k, tree=args.tree)
    by_prompt = []
    for number, line in enumerate(track(lines, console=Console(stderr=True))):
        comparison = Comparison([rule_named(r) for r in args.rules], args.repeats)
        llm.engine.rule_for = lambda seq, tree, c=comparison: c  # type: ignore[method-assign]
        tokens = llm.chat_tokens([{"role": "user", "content": json.loads(line)["turns"][0]}])
        llm.generate(
            tokens,
            SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, seed=number),
        )
        if comparison.rounds:
            by_prompt.append(np.array(comparison.rounds))
    everything = np.concatenate(by_prompt)
    rng = np.random.default_rng(0)
    differences = []
    for _ in range(4000):
        chosen = rng.integers(0, len(by_prompt), len(by_prompt))
        rounds = np.concatenate([by_prompt[i] for i in chosen])
        differences.append((rounds[:, 0] - rounds[:, 1]).mean())
    low, high = np.percentile(differences, [2.5, 97.5])
    result = {
        "model": args.model,
        "draft": args.draft,
        "prompts": args.prompts.name,
        "temperature": args.temperature,
        "tree": args.tree,
        "k": llm.k,
        "rounds": len(everything),
        "tau": {r: round(float(t), 4) for r, t in zip(args.rules, everything.mean(0), strict=True)},
        "difference": round(float((everything[:, 0] - everything[:, 1]).mean()), 4),
        "interval_95": [round(float(low), 4), round(float(high), 4)],
    }
    print(f"{args.rules[0]} - {args.rules[1]}: {result['difference']}", file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
