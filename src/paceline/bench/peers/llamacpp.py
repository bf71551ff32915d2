"""llama.cpp as a peer, on the same GGUF file as ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.bench.peers.base import PeerError, PeerInfo, PeerPrompt, PeerRun, Speculation
from paceline.bench.peers.process import Worker


class LlamaCpp:
    """A running llama.cpp with one model, and a draft where one is given.

    python: interpreter of an environment that has llama-cpp-python (`find_llamacpp`).
    model, draft: GGUF files. threads, n_ctx: as of llama.cpp. k: tokens that lookup and draft
    propose a round. ngram: longest suffix that lookup searches for.
    """

    def __init__(
        self,
        python: str,
        model: Path,
        *,
        threads: int,
        n_ctx: int = 2048,
        draft: Path | None = None,
        k: int = 4,
        ngram: int = 2,
        how: str = "",
    ) -> None:
        for path in (model, draft):
            if path is not None and path.suffix != ".gguf":
                raise PeerError(f"llama.cpp reads .gguf files, and '{path}' is none")
        self._k = k
        self._worker = Worker(python, "llamacpp")
        loaded = self.ask(
            "load", model=str(model), threads=threads, n_ctx=n_ctx, ngram=ngram,
            draft=None if draft is None else str(draft),
        )  # fmt: skip
        self.info = PeerInfo(
            name="llama.cpp",
            version=f"llama-cpp-python {loaded['version']}" + (f" ({how})" if how else ""),
            model=model.name if draft is None else f"{model.name}, draft {draft.name}",
            precision="weights as stored",
            modes=tuple(loaded["modes"]),
            notes=(
                "passes and proposals are llama.cpp's; the greedy loop around them is this "
                "benchmark's, and cheaper than the binding's own",
            ),
            options={"k": k, "ngram": ngram, "threads": threads, "system": loaded["system"]},
        )

    def ask(self, op: str, **fields: Any) -> Any:
        """A command of `worker.py`; what the benchmarks of single passes use."""
        try:
            return self._worker.ask(op, **fields)
        except PeerError:
            self._worker.close()
            raise

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        return timed(self.ask("generate", tokens=list(prompt.tokens), n=n, mode=mode, k=self._k))

    def close(self) -> None:
        self._worker.close()


def timed(answer: dict[str, Any]) -> PeerRun:
    """A worker's answer to `generate`."""
    told = Speculation.of_counts(
        answer["rounds"], answer["drafted"], answer["accepted"], "counted by the benchmark"
    )
    return PeerRun(
        n_tokens=len(answer["tokens"]),
        tokens=tuple(answer["tokens"]),
        arrivals=tuple(answer["times"]),
        first=answer["times"][0],
        seconds=answer["times"][-1],
        speculation=told if answer["drafted"] else None,
    )
