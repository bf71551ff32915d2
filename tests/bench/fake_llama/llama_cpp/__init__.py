"""Stands in for llama-cpp-python: a model whose next token follows from all tokens before it,
read back from the cache that was really written. A wrong position or a missing cut shows."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import numpy as np

__version__ = "0.0-fake"
VOCAB = 11


def llama_print_system_info() -> bytes:
    return b"FAKE = 1"


def llama_synchronize(ctx: Any) -> None:
    pass


class _Batch:
    def set_batch(self, batch: list[int], n_past: int, logits_all: bool) -> None:
        self.tokens, self.past, self.all = list(batch), n_past, logits_all


class _Context:
    ctx = None

    def __init__(self, twist: int) -> None:
        self.cache: list[int] = []
        self.twist = twist
        self.passes = 0

    def kv_cache_seq_rm(self, seq: int, start: int, end: int) -> None:
        del self.cache[start:]

    def decode(self, batch: _Batch) -> None:
        assert len(self.cache) == batch.past, "a token would go to a wrong position"
        self.passes += 1
        rows = []
        for token in batch.tokens:
            self.cache.append(token)
            rows.append(self.next(self.cache))
        self.rows = rows if batch.all else rows[-1:]

    def next(self, tokens: list[int]) -> np.ndarray:
        # Few states, so that texts repeat and prompt look-up finds something.
        chosen = (tokens[-1] * 3 + len(tokens) % 2 + 1) % VOCAB
        if self.twist and len(tokens) % self.twist == 0:
            chosen = (chosen + 1) % VOCAB
        logits = np.zeros(VOCAB, np.float32)
        logits[chosen] = 1.0
        return logits

    def get_logits_ith(self, i: int) -> Any:
        self.kept = np.ascontiguousarray(self.rows[i])
        return self.kept.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


class Llama:
    def __init__(self, path: str, **options: Any) -> None:
        if "sigill" in path:
            os.kill(os.getpid(), signal.SIGILL)
        if "broken" in path:
            raise ValueError(f"failed to load model from file: {path}")
        self._batch = _Batch()
        self._ctx = _Context(twist=5 if "draft" in path else 0)
        self._vocab = 7 if "other" in path else VOCAB

    def n_vocab(self) -> int:
        return self._vocab

    def eval(self, tokens: list[int]) -> None:
        pass

    def tokenize(self, text: bytes, **_: Any) -> list[int]:
        return [b % VOCAB for b in text]
