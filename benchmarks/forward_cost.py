"""What one forward pass costs on the native CPU core, beside llama.cpp on the same file.

    python benchmarks/forward_cost.py qwen2.5-coder-1.5b=FILE.gguf smollm2-135m=FILE.gguf

Two ways to time a pass. *From memory*: a buffer larger than the last cache is read before each
one, so that the weights come from memory, as they do on most machines; T(k) / T(1) and the share
of the bandwidth are of these. *Steady*: one pass after another, as decoding has them, both
engines alike; a small model may then live in the cache, which makes T(1) faster and T(k) / T(1)
larger (`steady_...` in the JSON).

Prediction: a pass over few rows costs the time to read the weights once, T(1) = bytes /
bandwidth; arithmetic takes over where rows * 2 * weights / (int8 rate) exceeds that, near
eight rows. llama.cpp's pass grows almost linearly with rows. Both run in turn, in one run,
with medians; a table goes to stderr, one JSON line to stdout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from paceline import _native
from paceline.bench.peers import LlamaCpp, find_llamacpp
from paceline.models.base import Batch, RowGroup, pack
from paceline.models.native import NativeKV, NativeModel, default_threads
from paceline.models.native_weights import anonymous_memory

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT, PREFILL, LONG, BLOCK = 128, 512, 8192, 64
STEADY = 0.04  # seconds that passes run before they count, and then at least do


class Ours:
    """One sequence on a native model, with random tokens."""

    def __init__(self, model: NativeModel, slots: int) -> None:
        self.model = model
        kv = model.new_kv(-(-slots // BLOCK), BLOCK)
        assert isinstance(kv, NativeKV)
        self.kv = kv
        self.table = np.arange(kv.n_blocks, dtype=np.int32)
        self.rng = np.random.default_rng(0)
        # Content does not change the cost; numbers of ordinary size keep exp() ordinary.
        planes = kv.flat.reshape(-1, kv.values.shape[-2] * kv.values.shape[-1])
        planes[...] = self.rng.normal(0, 0.5, planes.shape[1]).astype(np.float16).view(np.uint16)

    def batch(self, rows: int, context: int, wanted: int) -> Batch:
        group = RowGroup(
            tokens=self.rng.integers(100, 1000, rows).astype(np.int32),
            parents=np.arange(-1, rows - 1, dtype=np.int32),
            context=context,
            table=self.table,
            wanted=np.arange(rows - wanted, rows, dtype=np.int32),
        )
        return pack([group], BLOCK)

    def seconds(self, rows: int, context: int, *, last_only: bool = False) -> float:
        batch = self.batch(rows, context, 1 if last_only else rows)
        begin = time.perf_counter()
        self.model.forward(batch, self.kv)
        return time.perf_counter() - begin


def steady(run: Callable[[], float]) -> list[float]:
    """Seconds of passes one after another, as decoding has them: what a pause leaves behind
    (sleeping threads, cold caches, a low clock) is over before they count."""
    warm = 0.0
    while warm < STEADY:
        warm += run()
    times = [run(), run()]
    while sum(times) < STEADY:
        times.append(run())
    return times


class Flush:
    """Reads more than any cache holds, with all threads."""

    def __init__(self, threads: int, size: int = 1 << 29) -> None:
        self._data = np.frombuffer(anonymous_memory(size), np.uint8)
        self._data[:] = 1
        self._threads = threads

    def run(self) -> float:
        """Bytes per second."""
        return len(self._data) / float(_native.read_seconds(self._data, self._threads, ""))


def memory_and_start(path: Path) -> tuple[float, float]:
    """(resident bytes that a loaded model adds to a process, seconds of a second start)."""
    code = (
        "import sys, time; from paceline.models.native import NativeModel\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "sys.path.insert(0, sys.argv[2]); import forward_cost\n"
        "before, begin = rss(), time.perf_counter()\n"
        "model = NativeModel.from_gguf(sys.argv[1]); start = time.perf_counter() - begin\n"
        "ours = forward_cost.Ours(model, 256); ours.seconds(16, 64)\n"
        "print(rss() - before, start)\n"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), here], capture_output=True, text=True, check=True
    )
    used, start = done.stdout.split()
    return float(used), float(start)


def measure(name: str, path: Path, args: argparse.Namespace, peer_python: str) -> dict[str, float]:
    threads = args.threads or default_threads()
    model = NativeModel.from_gguf(path, threads=threads)
    ours = Ours(model, CONTEXT + PREFILL + 64)
    peer = LlamaCpp(peer_python, path, threads=threads)
    mine: dict[int, list[float]] = {k: [] for k in ROWS}
    theirs: dict[int, list[float]] = {k: [] for k in ROWS}
    cold: dict[int, list[float]] = {k: [] for k in ROWS}
    flush, speeds = Flush(threads), []
    for repeat in range(args.repeats + 1):
        for k in ROWS:
            # The pause lets the other engine's threads go to sleep.
            time.sleep(0.02)
            a = steady(lambda k=k: ours.seconds(k, CONTEXT))
            time.sleep(0.02)
            b = steady(lambda k=k: peer.ask("step", rows=k, context=CONTEXT))
            c = []
            for _ in range(3):
                speeds.append(flush.run())
                c.append(ours.seconds(k, CONTEXT))
            if repeat:
                mine[k] += a
                theirs[k] += b
                cold[k] += c
    prefill = [
        (ours.seconds(PREFILL, 0, last_only=True), peer.ask("prefill", tokens=PREFILL))
        for _ in range(3)
    ]
    peer.close()
    bandwidth = statistics.median(speeds)
    t, p, m = (
        {k: statistics.median(v) for k, v in times.items()} for times in (mine, theirs, cold)
    )
    fraction = model.bytes_per_pass / m[1] / bandwidth
    my_prefill, peer_prefill = (statistics.median(x) for x in zip(*prefill, strict=True))
    used, start = memory_and_start(path)

    say = lambda *text: print(*text, file=sys.stderr)  # noqa: E731
    say(f"\n{name}: {model.info.dtype}, {model.info.device}, {threads} threads")
    say(
        f"  read bandwidth {bandwidth / 1e9:.1f} GB/s, "
        f"weights per pass {model.bytes_per_pass / 1e6:.0f} MB"
    )
    say("         from memory           steady           llama.cpp, steady")
    say("  rows      ms  T(k)/T(1)      ms  T(k)/T(1)      ms  T(k)/T(1)")
    for k in ROWS:
        columns = (f"{1e3 * x[k]:7.2f} {x[k] / x[1]:10.2f}" for x in (m, t, p))
        say(f"  {k:4d} {' '.join(columns)}")
    say(f"  prefill of {PREFILL}: {my_prefill:.2f} s, llama.cpp {peer_prefill:.2f} s")
    say(f"  resident / file {used / path.stat().st_size:.2f}, second start {start:.2f} s")
    if model.info.max_context > LONG and not args.skip_long:
        long = Ours(model, LONG + 64)
        times = [(long.seconds(1, CONTEXT), long.seconds(1, LONG)) for _ in range(args.repeats)]
        short_s, long_s = (statistics.median(x) for x in zip(*times, strict=True))
        extra = model.info.kv_slot_bytes * (LONG - CONTEXT)
        rate = extra / max(long_s - short_s, 1e-9)
        say(
            f"  T(1) at context {LONG}: {1e3 * long_s:.2f} ms, at {CONTEXT}: "
            f"{1e3 * short_s:.2f} ms ({long_s / short_s:.2f}); the difference reads "
            f"{extra / 1e6:.0f} MB of keys and values at {rate / 1e9:.1f} GB/s"
        )
    return {
        "t1_vs_llamacpp": t[1] / p[1],
        **{f"t{k}_over_t1": m[k] / m[1] for k in (4, 8, 16)},
        **{f"steady_t{k}_over_t1": t[k] / t[1] for k in (4, 8, 16)},
        "bandwidth_fraction": fraction,
        "steady_bandwidth_fraction": model.bytes_per_pass / t[1] / bandwidth,
        "prefill_vs_llamacpp": peer_prefill / my_prefill,
    }


def measure_draft(path: Path, args: argparse.Namespace) -> None:
    """A draft model's step: as it is, at 4 bits, and with a head of 32k ids."""
    for label, options in (
        ("as stored", {}),
        ("4 bits", {"quantize": "q4"}),
        (
            "4 bits, head of 32768 ids",
            {"quantize": "q4", "head_ids": np.arange(32768), "compact_logits": True},
        ),
    ):
        model = NativeModel.from_gguf(path, threads=args.threads or None, **options)
        ours = Ours(model, CONTEXT + 64)
        t = statistics.median([ours.seconds(1, CONTEXT) for _ in range(2 * args.repeats + 1)][1:])
        print(
            f"draft step, {label}: {1e3 * t:.2f} ms ({model.bytes_per_pass / 1e6:.0f} MB)",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="NAME=FILE.gguf")
    parser.add_argument("--draft", type=Path, help="GGUF file of a draft model to time")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    parser.add_argument("--peer-python", help="Python of an environment that has llama-cpp-python")
    parser.add_argument("--skip-long", action="store_true", help="leave out context 8192")
    args = parser.parse_args()
    results = {}
    for text in args.models:
        name, _, file = text.rpartition("=")
        path = Path(file)
        if not path.is_file():
            parser.error(f"{path}: no such file")
        python, how = find_llamacpp(path, args.peer_python)
        print(f"peer: llama-cpp-python, {how}", file=sys.stderr)
        results[name or path.stem] = measure(name or path.stem, path, args, python)
    if args.draft:
        measure_draft(args.draft, args)
    print(json.dumps({"models": results}))


if __name__ == "__main__":
    main()
