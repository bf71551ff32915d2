"""transformers as a peer: plain generate, assisted generation, prompt lookup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from paceline.bench.peers.base import PeerInfo, PeerPrompt, PeerRun
from paceline.bench.peers.llamacpp import timed
from paceline.bench.peers.process import Worker


class Transformers:
    """transformers in a process of its own, on a checkpoint folder or a GGUF file.

    A GGUF file is dequantised to `dtype`, so its weights take more bytes than ours do, and
    every row of results says so. python: interpreter that has transformers (default: ours).
    k: tokens that lookup and draft propose a round (constant schedule, no confidence stop).
    """

    def __init__(
        self,
        model: Path,
        *,
        threads: int,
        dtype: str = "bfloat16",
        draft: Path | None = None,
        k: int = 4,
        ngram: int = 2,
        device: str = "cpu",
        python: str | None = None,
    ) -> None:
        self._k = k
        self._worker = Worker(
            python or sys.executable,
            "transformers",
            env={"OMP_NUM_THREADS": str(threads), "TRANSFORMERS_OFFLINE": "1"},
        )
        try:
            loaded: dict[str, Any] = self._worker.ask(
                "load", model=str(model), threads=threads, dtype=dtype, ngram=ngram,
                device=device, draft=None if draft is None else str(draft),
            )  # fmt: skip
        except BaseException:
            self._worker.close()
            raise
        dequantised = model.suffix == ".gguf"
        self.info = PeerInfo(
            name="transformers",
            version=loaded["version"],
            model=model.name if draft is None else f"{model.name}, draft {draft.name}",
            precision=f"{dtype}, dequantised from GGUF" if dequantised else dtype,
            modes=tuple(loaded["modes"]),
            options={
                "k": k,
                "ngram": ngram,
                "threads": threads,
                "dtype": dtype,
                "weight_bytes": loaded["weight_bytes"],
            },
        )

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        answer = self._worker.ask("generate", tokens=list(prompt.tokens), n=n, mode=mode, k=self._k)
        return timed(answer)

    def close(self) -> None:
        self._worker.close()
