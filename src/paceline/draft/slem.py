"""A draft model with another tokenizer: its text, re-tokenised, must match exactly.

String-level exact match (Timor et al. 2025, algorithm 2). The draft continues greedily, so
the proposal is deterministic, and `walk` (or greedy match) keeps the target's law exactly,
whatever the two tokenizers make of the text. Legend: U the draft's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.cache import DraftCache, Feed
from paceline.draft.vocabulary import Codec, continue_in, through_text
from paceline.models.base import TargetOutput
from paceline.types import Sequence

#: What decoders put where bytes do not make a character yet.
_INCOMPLETE = "\ufffd"

#: How many times as many tokens as the target's the draft may need for the same text.
STRETCH = 2


@dataclass
class _Text:
    """What is drafted for one sequence, in the draft's own tokens."""

    seq: Sequence
    budget: int
    fed: list[int]
    start: int
    proposal: list[int] = field(default_factory=list)
    done: bool = False


class SlemDrafter:
    """Chains whose tokens are the target's spelling of the draft's greedy text."""

    name = "slem"
    blind = True
    taps: tuple[int, ...] = ()

    def __init__(self, cache: DraftCache, target: Codec, draft: Codec) -> None:
        self.cache = cache
        self._target = target
        self._draft = draft

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0])

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return self.cache.arm(self.name, seq)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        texts: dict[int, _Text] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            if budget == 0:
                continue
            fed = self._own(seq.tokens)
            share = STRETCH * (len(seq.tokens) + budget)
            if fed and len(fed) + budget <= min(share, self.cache.max_context):
                self.cache.roll_back(seq.id, fed)
                texts[seq.id] = _Text(seq, budget, fed, len(fed))
        active = list(texts.values())
        while active:
            self._extend(active)
            active = [t for t in active if not t.done]
        return [chain(s.tokens[-1], texts[s.id].proposal if s.id in texts else ()) for s in seqs]

    def _extend(self, texts: list[_Text]) -> None:
        """One draft step; a text is done when it spells `budget` tokens of the target's."""
        logits_RU = self.cache.feed([Feed(t.seq.id, t.fed) for t in texts])
        best_R = logits_RU.max(dim=-1)
        for t, token, value in zip(
            texts, best_R.indices.tolist(), best_R.values.tolist(), strict=True
        ):
            if not math.isfinite(value):
                t.done = True
                continue
            t.fed.append(token)
            tail = t.fed[max(t.start - 8, 0) : t.start]
            known = self._draft.decode(tail, skip_special=False)
            both = self._draft.decode([*tail, *t.fed[t.start :]], skip_special=False)
            text = both[len(known) :].rstrip(_INCOMPLETE)
            t.proposal = continue_in(t.seq.tokens, text, self._target)[: t.budget] if text else []
            # As many draft tokens as the budget: the last of them is not fed.
            t.done = len(t.proposal) >= t.budget or len(t.fed) - t.start >= t.budget

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        self.cache.settle(seqs, trees, self._own)

    def _own(self, tokens: Seq[int]) -> list[int]:
        return through_text(tokens, self._target, self._draft)

    def forget(self, seq_id: int) -> None:
        self.cache.forget(seq_id)

    def usage(self) -> DrafterUsage:
        return self.cache.usage()
