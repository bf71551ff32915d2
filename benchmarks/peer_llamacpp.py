"""llama.cpp behind a line protocol, run by the peer's own Python (never by the project's).

Reads one JSON command per line, answers with one JSON line:
  {"op": "step", "rows": k, "context": n}   seconds of one pass over k rows after n positions
  {"op": "prefill", "tokens": n}            seconds to process n tokens from nothing
  {"op": "tokenize", "text": s}             token ids
  {"op": "logits", "tokens": [...], "file": f}   float32 logits of every token, as .npy
  {"op": "generate", "tokens": [...], "n": n}    greedy ids and seconds of plain decoding
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import numpy as np
from llama_cpp import Llama

path, threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = Llama(
    path, n_ctx=n_ctx, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
    logits_all=True, verbose=False,
)  # fmt: skip
rng = np.random.default_rng(0)


def decode(tokens: list[int], past: int, every: bool) -> float:
    """Seconds of llama_decode; the cache is cut back to `past` first."""
    model._ctx.kv_cache_seq_rm(-1, past, -1)
    model._batch.set_batch(batch=tokens, n_past=past, logits_all=every)
    begin = time.perf_counter()
    model._ctx.decode(model._batch)
    llama_cpp.llama_synchronize(model._ctx.ctx)
    return time.perf_counter() - begin


def some(n: int) -> list[int]:
    return [int(t) for t in rng.integers(100, 1000, n)]


filled = 0
for line in sys.stdin:
    command = json.loads(line)
    if command["op"] == "step":
        n = command["context"]
        if filled != n:
            for at in range(0, n, 512):
                decode(some(min(512, n - at)), at, False)
            filled = n
        answer: object = decode(some(command["rows"]), n, True)
    elif command["op"] == "prefill":
        filled = 0
        answer = decode(some(command["tokens"]), 0, False)
    elif command["op"] == "tokenize":
        answer = model.tokenize(command["text"].encode(), add_bos=False, special=False)
    elif command["op"] == "logits":
        filled = 0
        model.reset()
        model.eval(command["tokens"])
        np.save(command["file"], np.asarray(model.scores[: len(command["tokens"])]))
        answer = True
    elif command["op"] == "generate":
        filled = 0
        tokens, ids = command["tokens"], []
        decode(tokens, 0, False)
        vocab = model.n_vocab()
        begin = time.perf_counter()
        for i in range(command["n"]):
            logits = np.ctypeslib.as_array(model._ctx.get_logits_ith(-1), (vocab,))
            ids.append(int(logits.argmax()))
            decode([ids[-1]], len(tokens) + i, False)
        answer = [ids, time.perf_counter() - begin]
    else:
        raise SystemExit(f"unknown op {command['op']}")
    print(json.dumps(answer), flush=True)
