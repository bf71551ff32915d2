"""Several drafters for one request: each round has the one that serves it best.

By default the first that has something to propose: n-grams cost nothing and are right where
text repeats itself, a model takes the rest. A policy that measures may decide otherwise, for
each sequence and round (`route`). It decides before anything is drafted, so the proposal
is one drafter's alone, and the rule that judges it is that proposal's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace

from paceline.core.rules import Verdict
from paceline.core.tree import Proposal, TokenTree, chain
from paceline.draft.base import Arm, Drafter, DrafterUsage, SelfDrafter, arms_of, blind
from paceline.models.base import KVStore, TargetModel, TargetOutput
from paceline.types import Sequence

#: Who shall propose for a sequence in this round; None: the first that can.
Route = Callable[[Sequence], str | None]


class AutoDrafter:
    """drafters: by name, the preferred first. All of them are told of every round, so that
    each can catch up when it is asked next."""

    name = "auto"

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        assert drafters, "a combination needs drafters"
        self.drafters = dict(drafters)
        self.route: Route | None = None
        self.blind = all(blind(d) for d in drafters.values())
        self.taps = tuple(sorted({t for d in self.drafters.values() for t in d.taps}))

    def example(self, greedy: bool) -> TokenTree:
        """The hardest to judge of what the drafters propose: drawn before chosen, trees
        before chains."""
        examples = [d.example(greedy) for d in self.drafters.values()]
        return max(examples, key=lambda t: (t.proposal is not Proposal.DELTA, not t.is_chain))

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        """For drafters that run the target themselves."""
        for drafter in self.drafters.values():
            if isinstance(drafter, SelfDrafter):
                drafter.bind(model, kv)

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return tuple(
            replace(arm, drafter=name)
            for name, drafter in self.drafters.items()
            for arm in arms_of(drafter, seq)
        )

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        trees = [chain(s.tokens[-1]) for s in seqs]
        asked: dict[str, list[int]] = {}
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            name = self._who(seq) if budget > 0 else None
            if name is not None:
                asked.setdefault(name, []).append(i)
        for name, who in asked.items():
            proposed = self.drafters[name].propose(
                [seqs[i] for i in who], [budgets[i] for i in who]
            )
            for i, tree in zip(who, proposed, strict=True):
                trees[i] = tree
        return trees

    def _who(self, seq: Sequence) -> str | None:
        wanted = self.route(seq) if self.route is not None else None
        if wanted is not None:
            return wanted
        return next((name for name, d in self.drafters.items() if arms_of(d, seq)), None)

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        for drafter in self.drafters.values():
            drafter.observe(seqs, trees, output, verdicts)

    def forget(self, seq_id: int) -> None:
        for drafter in self.drafters.values():
            drafter.forget(seq_id)

    def usage(self) -> DrafterUsage:
        parts = [d.usage() for d in self.drafters.values()]
        return DrafterUsage(
            blocks_used=sum(p.blocks_used for p in parts),
            blocks_total=sum(p.blocks_total for p in parts),
            bytes_total=sum(p.bytes_total for p in parts),
        )
