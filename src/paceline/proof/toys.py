"""Tiny models, drafts and tokenizers on which the whole engine is proven.

The target is a table over nine tokens: the letters a to h, and end-of-sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache

import numpy as np

from paceline.core.shapes import Beam, TreeShape, level_widths
from paceline.draft.base import Drafter
from paceline.draft.cache import DraftCache
from paceline.draft.layerskip import LayerSkipDrafter, SkipPlan, skip_mask
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.slem import SlemDrafter
from paceline.draft.tree import TreeDrafter
from paceline.draft.vocabulary import SameVocabulary, SharedTokens, through_text
from paceline.engine.engine import EngineConfig
from paceline.models.toy import Logits, TabularModel
from paceline.sampling.grammar import Grammars, Vocabulary

LETTERS = "abcdefgh"
EOS = len(LETTERS)
SIZE = EOS + 1
#: Another tokenizer's tokens: letters in another order, one of them missing, some pairs.
WORDS = ("ab", "cc", "de", "h", "g", "f", "e", "d", "c", "b", "")


@cache
def target() -> TabularModel:
    """Every token of the context matters, so that nothing stale can go unseen. With skipped
    layers it is as good as `draft`."""
    return TabularModel(SIZE, order=None, seed=17, scale=1.2, skipped=draft())


@cache
def draft() -> TabularModel:
    """The target with as much noise as signal: often wrong, never hopeless."""

    def change(context: tuple[int, ...], logits: Logits) -> Logits:
        rng = np.random.default_rng([5, len(context), *context])
        return (logits + rng.normal(0.0, 1.5, SIZE)).astype(np.float32)

    return TabularModel(SIZE, order=None, seed=17, scale=1.2, change=change)


class Spelling:
    """A tokenizer that takes the first of its words that fits; "" is end-of-sequence and
    spelt "$"; letters without a word are left out."""

    def __init__(self, words: Seq[str]) -> None:
        self._words = [w or "$" for w in words]

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        found, at = [], 0
        while at < len(text):
            fits = (i for i, w in enumerate(self._words) if text.startswith(w, at))
            token = next(fits, None)
            if token is not None:
                found.append(token)
            at += len(self._words[token]) if token is not None else 1
        return found

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        return "".join(self._words[i] for i in ids)


OURS = Spelling([*LETTERS, ""])
THEIRS = Spelling(WORDS)


@cache
def foreign_draft() -> TabularModel:
    """A draft over other tokens that expects the next letter nearly as the target does."""
    known = target()
    first = [EOS if w == "" else LETTERS.index(w[0]) for w in WORDS]

    def change(context: tuple[int, ...], logits: Logits) -> Logits:
        ours = known.logits(tuple(through_text(context, THEIRS, OURS)))
        return (ours[first] + 0.5 * logits).astype(np.float32)

    return TabularModel(len(WORDS), order=None, seed=3, change=change)


def _cache(
    model: TabularModel, config: EngineConfig, stretch: int = 1, scratch: int = 0
) -> DraftCache:
    return DraftCache(
        model,
        n_blocks=stretch * config.n_blocks,
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_batch=config.max_batch,
        scratch=scratch,
    )


def _tree(shape: TreeShape | Beam, sampled: bool) -> Callable[[EngineConfig], Drafter]:
    scratch = shape.scratch if isinstance(shape, Beam) else 0
    return lambda c: TreeDrafter(
        _cache(draft(), c, scratch=scratch), SameVocabulary(SIZE), shape, sampled=sampled
    )


def _intersect(config: EngineConfig) -> Drafter:
    theirs = [WORDS.index(c) if c in WORDS else -1 for c in LETTERS] + [WORDS.index("")]
    shared = SharedTokens(theirs, lambda tokens: through_text(tokens, OURS, THEIRS))
    return ModelDrafter(_cache(foreign_draft(), config, 2), shared)


_CHOSEN = ("walk", "recursive", "traversal")
_CHAIN = ("block", "token", "recursive", "traversal", "walk")
_SAMPLED = ("traversal", "recursive", "walk")

#: Name, how it is made, and the rules that may judge it above temperature 0, the default
#: one first.
DRAFTERS: dict[str, tuple[Callable[[EngineConfig], Drafter], tuple[str, ...]]] = {
    "none": (lambda c: NoDrafter(), ("walk",)),
    "ngram": (lambda c: NgramDrafter(longest=3, shortest=1), ("walk", "token", "block")),
    "model": (lambda c: ModelDrafter(_cache(draft(), c), SameVocabulary(SIZE)), _CHAIN),
    "model, tree 2x2x1": (_tree(level_widths((2, 2, 1)), True), _SAMPLED),
    "model, tree top:2x2": (_tree(level_widths((2, 2)), False), _CHOSEN),
    "model, tree paths:7": (_tree(Beam(nodes=7, width=3, depth=4), False), _CHOSEN),
    "model, intersect": (_intersect, _CHAIN),
    "layerskip": (
        lambda c: LayerSkipDrafter(SkipPlan(mask=skip_mask(1, mlp=[0]), gamma=0.25)),
        ("block", "token", "walk"),
    ),
    "model, slem": (
        lambda c: SlemDrafter(_cache(foreign_draft(), c, 2), OURS, THEIRS),
        ("walk",),
    ),
}


@cache
def grammars() -> Grammars:
    return Grammars(
        Vocabulary(
            token_bytes=lambda: [c.encode() for c in LETTERS] + [b""],
            special_ids=frozenset({EOS}),
            eos_ids=frozenset({EOS}),
            encode=lambda text: [LETTERS.index(c) for c in text if c in LETTERS],
        )
    )
