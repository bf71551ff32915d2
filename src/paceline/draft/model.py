"""A smaller language model that proposes chains.

Leviathan et al. 2022; Chen et al. 2023. Legend: R rows, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.core.law import Law, PointLaw
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.cache import DraftCache, Feed
from paceline.draft.coupling import next_token
from paceline.draft.health import DraftHealth
from paceline.draft.vocabulary import Vocabulary, room
from paceline.models.base import TargetOutput
from paceline.sampling.context import Context, Row, context_of
from paceline.sampling.law import build_laws
from paceline.types import Sequence


@dataclass
class _Chain:
    """A proposal in the making. fed: the draft's own tokens, committed and drafted."""

    seq: Sequence
    budget: int
    context: Context | None
    fed: list[int]
    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)


class ModelDrafter:
    """Argmax tokens at temperature 0, and tokens tied to the target's draws where the
    request's text must not depend on budgets (`draft.coupling`): both judged as
    deterministic. Else samples of the draft's own law under the request's transforms."""

    name = "model"
    blind = True
    taps: tuple[int, ...] = ()

    def __init__(self, cache: DraftCache, vocabulary: Vocabulary) -> None:
        self.cache = cache
        self._vocabulary = vocabulary
        self._health = DraftHealth()

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0], None if greedy else [PointLaw(0, 1)])

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return self.cache.arm(self.name, seq)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        chains: dict[int, _Chain] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            if budget == 0:
                continue
            fed = list(self._vocabulary.context(seq.tokens))
            # The last drafted token is not fed, so the context may end just before it.
            budget = room(self._vocabulary, fed, seq.tokens, budget)
            budget = min(budget, self.cache.max_context - len(fed) + 1)
            if budget > 0 and fed:
                self.cache.roll_back(seq.id, fed)
                chains[seq.id] = _Chain(seq, budget, context_of(seq), fed)
        active = list(chains.values())
        while active:
            self._extend(active)
            active = [c for c in active if len(c.tokens) < c.budget]
        return [_tree(seq, chains.get(seq.id)) for seq in seqs]

    def _extend(self, chains: list[_Chain]) -> None:
        """One draft step: feed what each chain lacks, and draw its next token."""
        logits_RU = self.cache.feed([Feed(c.seq.id, c.fed) for c in chains])
        rows = [Row(c.seq.params, c.context, tuple(c.tokens)) for c in chains]
        laws = build_laws(self._vocabulary.logits(logits_RU), rows, masked=True)
        for c, law in zip(chains, laws, strict=True):
            if not self._health.usable(law):
                c.budget = len(c.tokens)
                continue
            token, drawn = next_token(law, c.seq, len(c.tokens))
            if drawn:
                c.laws.append(law)
            c.tokens.append(token)
            own = self._vocabulary.own(token)
            if own is None or token in c.seq.end_ids:
                c.budget = len(c.tokens)  # nothing can follow, or be said of what follows
            else:
                c.fed.append(own)

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        self.cache.settle(seqs, trees, self._vocabulary.context)

    def forget(self, seq_id: int) -> None:
        self.cache.forget(seq_id)

    def usage(self) -> DrafterUsage:
        return self.cache.usage()


def _tree(seq: Sequence, c: _Chain | None) -> TokenTree:
    root = seq.tokens[-1]
    if c is None:
        return chain(root)
    return chain(root, c.tokens, c.laws if c.laws else None)
