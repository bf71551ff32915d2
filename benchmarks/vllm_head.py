"""An EAGLE-3 head in vLLM and in our engine: does it accept as many tokens there as here?

    python benchmarks/vllm_head.py --head DIR --workload humaneval.jsonl --out DIR

The head is exported as vLLM reads it (bfloat16, the target in bfloat16 too), and both systems
decode the same prompts greedily with chains of k tokens. Only counts are compared, no times:
how often a round accepts at least i tokens, and tau = 1 + the sum of these. Our arms: the target
that vLLM has, under torch; the GGUF file on the native core, with the head's weights as stored
and as it runs by default (8 and 4 bits). Prediction: tau differs from vLLM's by less than its
sampling error for the first arm, and by a few per cent for the others, whose target has other
numerics, so that texts part after a while. A wrong tap, rotary base, norm or `d2t` would lower
one side's by far more than that.
Intervals are bootstraps over prompts. A table goes to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.api import LLM
from paceline.bench.peers import PeerPrompt, Server, vllm
from paceline.bench.peers.choose import context_of, peer_prompts
from paceline.bench.peers.environments import prepare
from paceline.bench.stats import RESAMPLES, tail_share
from paceline.engine.engine import EngineConfig
from paceline.models.catalog import resolve_model
from paceline.models.native import default_threads
from paceline.types import SamplingParams

Floats = npt.NDArray[np.float64]
#: Which prompts to count.
Picks = npt.NDArray[np.int64] | slice
#: Ours: (name, whether the target is the dequantised folder, options of `LLM`).
ARMS: tuple[tuple[str, bool, dict[str, str]], ...] = (
    ("native core, head in 8 and 4 bits", False, {}),
    ("native core, head as stored", False, {"draft_weights": "stored"}),
    ("torch bfloat16, head in float32", True, {"dtype": "bfloat16"}),
)


@dataclass(frozen=True)
class Counted:
    """One arm. proposed_PK, accepted_PK: rounds of a prompt that proposed, and that accepted,
    at least so many tokens. texts: what each prompt gave."""

    name: str
    proposed_PK: Floats
    accepted_PK: Floats
    texts: list[str]

    def joint(self, prompts: Picks = slice(None)) -> Floats:
        """[K] share of rounds that accepted position i and all before it."""
        accepted, proposed = self.accepted_PK[prompts], self.proposed_PK[prompts]
        share: Floats = accepted.sum(0) / np.maximum(proposed.sum(0), 1)
        return share

    def tau(self, prompts: Picks = slice(None)) -> float:
        """Tokens a round. Of shares by position, because the end of an output shortens our
        last proposal and not vLLM's."""
        return float(1 + self.joint(prompts).sum())


def decode_ours(llm: LLM, name: str, prompts: Seq[PeerPrompt], n: int) -> Counted:
    proposed, accepted, texts = [], [], []
    for i, prompt in enumerate(prompts):
        print(f"{i + 1}/{len(prompts)} paceline: {name}", file=sys.stderr)
        out = llm.generate(prompt.tokens, SamplingParams(max_tokens=n, ignore_eos=True))[0]
        proposed.append([float(out.stats.proposed_at[j]) for j in range(llm.k)])
        accepted.append([float(out.stats.accepted_at[j]) for j in range(llm.k)])
        texts.append(out.text)
    return Counted(name, np.array(proposed), np.array(accepted), texts)


def decode_vllm(server: Server, prompts: Seq[PeerPrompt], n: int, k: int) -> Counted:
    """From the counters of its Prometheus page, before and after each request."""
    proposed, accepted, texts = [], [], []
    for i, prompt in enumerate(prompts):
        print(f"{i + 1}/{len(prompts)} vLLM", file=sys.stderr)
        run = server.generate("served", prompt, n)
        told = run.speculation
        if told is None or told.rounds is None or len(told.joint) != k:
            raise SystemExit(f"vLLM told no counts by position ({told})")
        proposed.append([float(told.rounds)] * k)
        accepted.append([share * told.rounds for share in told.joint])
        texts.append(run.text)
    return Counted("vLLM", np.array(proposed), np.array(accepted), texts)


def ask_vllm(args: argparse.Namespace, target: Path, prompts: Seq[PeerPrompt]) -> Counted:
    """vLLM runs uncompiled: nothing is timed, and compiling takes minutes."""
    python = args.python or prepare(vllm.RECIPE)
    head = vllm.export_head(args.head, args.out / "head", args.layout)
    port = vllm.free_port()
    command = vllm.serve_command(
        python,
        target,
        port,
        max_len=context_of(prompts, args.max_tokens, args.k),
        speculative=vllm.speculative_config("eagle3", args.k, head.resolve()),
        extra=["--enforce-eager"],
    )
    log, url = args.out / "vllm-eagle3.log", f"http://127.0.0.1:{port}"
    print(f"starting vLLM; its log is {log}", file=sys.stderr)
    env = vllm.environment(python, args.threads)
    with vllm.running(command, url, env=env, log=log):
        return decode_vllm(Server(url), prompts, args.max_tokens, args.k)


def agreement(a: str, b: str) -> float:
    """Share of the longer text before the first difference."""
    longest = max(len(a), len(b), 1)
    return next((i for i in range(longest) if a[i : i + 1] != b[i : i + 1]), longest) / longest


def beside(arm: Counted, peer: Counted) -> dict[str, object]:
    """An arm's figures next to the peer's: the difference of tau with its 95 % interval over
    prompts, and how far the texts agree."""
    rng, n = np.random.default_rng(0), len(arm.texts)
    picks = rng.integers(0, n, (RESAMPLES, n))
    differences = [arm.tau(p) - peer.tau(p) for p in picks]
    tail = tail_share(n, 0.95) if n > 1 else 0.0
    low, high = np.quantile(differences, [tail, 1 - tail])
    shared = [agreement(a, b) for a, b in zip(arm.texts, peer.texts, strict=True)]
    return {
        "arm": arm.name,
        "tau": round(arm.tau(), 4),
        "joint": [round(float(j), 4) for j in arm.joint()],
        "rounds": int(arm.proposed_PK[:, 0].sum()),
        "minus_vllm": round(arm.tau() - peer.tau(), 4),
        "interval_95": [round(float(low), 4), round(float(high), 4)],
        "same_text": sum(a == b for a, b in zip(arm.texts, peer.texts, strict=True)),
        "text_agreed": round(float(np.mean(shared)), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="a GGUF model")
    parser.add_argument("--head", type=Path, required=True, help="folder of an EAGLE-3 head")
    parser.add_argument("--layout", default="speculators", choices=["official", "speculators"])
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--workload", default="suite:coding", help="or a JSONL file with turns")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=default_threads(), help="of vLLM")
    parser.add_argument("--python", type=Path, help="Python that has vLLM (default: set one up)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head and the log")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    prompts: list[PeerPrompt] = []
    ours, target = [], vllm.export(resolve_model(args.model).path)
    for name, dense, options in ARMS:
        llm = LLM(
            str(target) if dense else args.model,
            draft=str(args.head),
            policy="fixed",
            k=args.k,
            engine=EngineConfig(prefix_cache=False),
            **options,  # type: ignore[arg-type]
        )
        prompts = prompts or peer_prompts(
            llm, args.workload, prompts=args.prompts, max_tokens=args.max_tokens
        )
        ours.append(decode_ours(llm, name, prompts, args.max_tokens))
        del llm
        gc.collect()
    peer = ask_vllm(args, target, prompts)
    rows = [beside(arm, peer) for arm in (peer, *ours)]
    for row in rows:
        print(
            f"{row['arm']}: tau {row['tau']}, by position {row['joint']}, {row['minus_vllm']} of "
            f"vLLM's {row['interval_95']}, texts agree for {row['text_agreed']}",
            file=sys.stderr,
        )
    print(
        json.dumps(
            {
                "model": args.model,
                "workload": Path(args.workload).name,
                "prompts": len(prompts),
                "max_tokens": args.max_tokens,
                "k": args.k,
                "vllm": vllm.VERSION,
                "layout": args.layout,
                "arms": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
