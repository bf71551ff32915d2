"""The drafter that never proposes: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.models.base import TargetOutput
from paceline.types import Sequence


class NoDrafter:
    name = "none"
    taps: tuple[int, ...] = ()

    def example(self, greedy: bool) -> TokenTree:
        return chain(0)

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return ()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        return [chain(s.tokens[-1]) for s in seqs]

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None

    def usage(self) -> DrafterUsage:
        return DrafterUsage()
