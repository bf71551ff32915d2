"""Our own engine, measured like a peer."""

from __future__ import annotations

import time

from paceline.api import LLM
from paceline.bench.peers.base import PeerInfo, PeerPrompt, PeerRun, Speculation
from paceline.draft.base import Drafter
from paceline.draft.none import NoDrafter
from paceline.engine.policy import BudgetPolicy, FixedBudget
from paceline.types import SamplingParams


class Ours:
    """A loaded LLM: `plain` is the same engine with a drafter that does nothing. llm: without
    a prefix cache, or repeats would skip the prefill that peers do; no other requests of it
    may run meanwhile. draft, policy: what the LLM was made with."""

    def __init__(
        self, llm: LLM, version: str, draft: str = "none", policy: str = "adaptive"
    ) -> None:
        self._llm = llm
        self._ways: dict[str, tuple[Drafter, BudgetPolicy]] = {
            "plain": (NoDrafter(), FixedBudget(0)),
            "speculative": (llm.engine.drafter, llm.engine.policy),
        }
        model = llm.engine.model.info
        self.info = PeerInfo(
            name="paceline",
            version=version,
            model=model.name if draft == "none" else f"{model.name}, draft {draft}",
            precision=f"{model.dtype}, {model.numerics.value}",
            modes=("plain",) if draft == "none" else ("plain", "speculative"),
            options={"k": llm.k, "policy": policy},
        )

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        self._llm.engine.drafter, self._llm.engine.policy = self._ways[mode]
        params = SamplingParams(max_tokens=n, ignore_eos=True)
        arrivals: list[float] = []
        begin = time.perf_counter()
        stream = self._llm.stream(prompt.tokens, params)
        for step in stream:
            arrivals += [time.perf_counter() - begin] * len(step.tokens)
            if step.finish_reason is not None:
                result = self._llm.result(step.request_id)
        stream.close()
        stats = result.stats
        told = Speculation.of_counts(
            stats.rounds, stats.drafted, stats.accepted, "counted by the engine"
        )
        return PeerRun(
            n_tokens=len(arrivals),
            seconds=arrivals[-1],
            first=arrivals[0],
            arrivals=tuple(arrivals),
            tokens=result.token_ids,
            text=result.text,
            speculation=told if stats.drafted else None,
            prompt_tokens=len(prompt.tokens),
        )

    def close(self) -> None:
        """The LLM belongs to the caller."""
