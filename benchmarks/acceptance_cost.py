"""What the mathematics of a round costs: laws from logits, and the verdict.

One sequence (batch 1), a chain of k = 7 drafted tokens, so 8 rows of logits over a real
vocabulary (V = 151,936, Qwen 2.5). Timed are building the target's laws from its logits
and accepting; the draft's laws exist already (a drafter pays for them as it draws).

Prediction: each pass over 8 rows of float32 reads 4.9 MB, about 0.3 ms on one core out of
cache; greedy is one pass, a sampled law four, top-p about six and a small sort per row;
accepting scans one row of the vocabulary per refused prefix, 0.1 ms each.

One thread unless asked: the work is too short to share, and where other processes use the
cores, torch's threads wait for each other tens of milliseconds.

    python benchmarks/acceptance_cost.py --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from paceline.core.draws import KeyedDraws
from paceline.core.law import Law
from paceline.core.rules import default_rule, rule_named
from paceline.core.tree import TokenTree, chain
from paceline.sampling.law import build_laws
from paceline.types import SamplingParams

VOCABULARY = 151_936
TARGETS_MS = {"greedy_ms": 1.0, "sampled_ms": 3.0, "top_p_ms": 8.0}
SETTINGS = {
    "greedy_ms": SamplingParams(temperature=0.0),
    "sampled_ms": SamplingParams(temperature=0.8),
    "top_p_ms": SamplingParams(temperature=0.8, top_p=0.95),
}


def logits_like(rows: int, generator: torch.Generator, device: str) -> torch.Tensor:
    """[rows, V] float32 logits with the spread of a language model's: a broad bulk and a
    few tokens that stand out, so that a nucleus of 0.95 holds tens to thousands."""
    logits = 2.0 * torch.randn(rows, VOCABULARY, generator=generator)
    ids = torch.randint(VOCABULARY, (rows, 50), generator=generator)
    logits.scatter_add_(1, ids, 12.0 + 3.0 * torch.randn(rows, 50, generator=generator))
    return logits.to(device)


def rounds(key: str, k: int, count: int, device: str) -> list[tuple[torch.Tensor, TokenTree]]:
    """`count` rounds: target logits [k + 1, V] and a draft drawn from nearby logits."""
    generator = torch.Generator().manual_seed(1)
    params = SETTINGS[key]
    made = []
    for position in range(count):
        logits = logits_like(k + 1, generator, device)
        noise = torch.randn(k, VOCABULARY, generator=generator).to(device)
        q = build_laws(logits[:k] + 0.5 * noise, [params] * k)
        draws = KeyedDraws(1, position)
        tokens = tuple(law.sample(draws.draft(i)) for i, law in enumerate(q))
        made.append((logits, chain(0, tokens, None if params.greedy else q)))
    return made


def milliseconds(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def measure(key: str, rule: str | None, k: int, repeats: int, device: str) -> dict[str, float]:
    """Medians over `repeats` rounds of eight different inputs, in milliseconds."""
    params = SETTINGS[key]
    inputs = rounds(key, k, 8, device)
    build_ms, accept_ms, accepted = [], [], []
    for i in range(repeats + 5):
        logits, tree = inputs[i % len(inputs)]
        laws: list[Law] = []
        judge = default_rule(tree, params.greedy)
        if rule is not None and not params.greedy:
            judge = rule_named(rule)
        draws = KeyedDraws(2, i)
        build = milliseconds(lambda: laws.extend(build_laws(logits, [params] * (k + 1))), device)  # noqa: B023
        paths: list[int] = []
        accept = milliseconds(
            lambda: paths.append(len(judge.accept(tree, laws, draws).path)),  # noqa: B023
            device,
        )
        if i >= 5:  # warm
            build_ms.append(build)
            accept_ms.append(accept)
            accepted.append(paths[0])
    total = [b + a for b, a in zip(build_ms, accept_ms, strict=True)]
    return {
        "total": statistics.median(total),
        "best": min(total),
        "p90": sorted(total)[int(0.9 * len(total))],
        "build": statistics.median(build_ms),
        "accept": statistics.median(accept_ms),
        "accepted": statistics.mean(accepted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print one JSON line and no table")
    parser.add_argument("--k", type=int, default=7, help="drafted tokens (rows - 1)")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--rule", help="rule for sampled rounds (default: the best exact one)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {key: measure(key, args.rule, args.k, args.repeats, args.device) for key in SETTINGS}
    if not args.json:
        print(f"V = {VOCABULARY:,}, {args.k + 1} rows, {args.repeats} rounds, {args.device}, "
              f"torch threads: {torch.get_num_threads()}; medians in ms")  # fmt: skip
        for key, v in found.items():
            print(
                f"{key:11s} {v['total']:7.3f} (best {v['best']:.3f}, p90 {v['p90']:.3f}; "
                f"laws {v['build']:.3f}, "
                f"accept {v['accept']:.3f}; {v['accepted']:.2f} of {args.k} accepted; "
                f"target {TARGETS_MS[key]:.0f})"
            )
    print(
        json.dumps(
            {key: round(v["total"], 3) for key, v in found.items()}
            | {f"{key[:-3]}_{part}_ms": round(v[part], 3)
               for key, v in found.items() for part in ("build", "accept", "best", "p90")}
            | {"vocabulary": VOCABULARY, "rows": args.k + 1, "device": args.device,
               "threads": torch.get_num_threads()}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
