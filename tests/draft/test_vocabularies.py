"""Drafts with another vocabulary: intersection and re-tokenising, on toy tokenizers."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest
import torch
from devices import CONFIG, PROMPTS, VOCAB, draft_cache, ids, make_engine, run, target
from scipy import stats

from paceline.draft.model import ModelDrafter
from paceline.draft.slem import SlemDrafter
from paceline.draft.vocabulary import SharedTokens, continue_in, through_text
from paceline.models.toy import TabularModel
from paceline.types import SamplingParams

LETTERS = "abcdefghijklm"


class Letters:
    """The target's tokenizer: one token a letter."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [LETTERS.index(c) for c in text]

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        return "".join(LETTERS[i] for i in ids)


class Pairs:
    """The draft's: some pairs of letters are one token, and the letters stand elsewhere."""

    words = ("ab", "cd", "aa", "ee", *reversed(LETTERS))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        found, at = [], 0
        while at < len(text):
            word = text[at : at + 2] if text[at : at + 2] in self.words else text[at]
            found.append(self.words.index(word))
            at += len(word)
        return found

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str:
        return "".join(self.words[i] for i in ids)


def spell(draft_tokens: Seq[int]) -> tuple[int, ...]:
    return tuple(Letters().encode(Pairs().decode(draft_tokens)))


def pair_draft(noise: float) -> TabularModel:
    """A draft over pairs that thinks of the next letter nearly as the target does."""

    def change(context: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        known = target().logits(spell(context))
        first = np.array([known[LETTERS.index(w[0])] for w in Pairs.words], np.float32)
        return (first + noise * logits).astype(np.float32)

    return TabularModel(len(Pairs.words), order=None, seed=5, change=change)


def shared() -> SharedTokens:
    theirs = [Pairs.words.index(c) for c in LETTERS]
    return SharedTokens(theirs, lambda tokens: through_text(tokens, Letters(), Pairs()))


def make(kind: str):
    cache = draft_cache(pair_draft(0.3), CONFIG, stretch=2)
    if kind == "slem":
        return SlemDrafter(cache, Letters(), Pairs())
    return ModelDrafter(cache, shared())


@pytest.mark.parametrize("kind", ["intersect", "slem"])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_greedy_text_is_plain_text(kind: str, k: int) -> None:
    params = SamplingParams(max_tokens=40)
    outputs = run(make_engine(make(kind), k=k), PROMPTS, params)
    assert ids(outputs) == ids(run(make_engine(), PROMPTS, params))
    assert sum(o.stats.accepted for o in outputs) > 10


def test_slem_is_plain_text_with_a_seed_too() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=4)
    outputs = run(make_engine(make("slem")), PROMPTS, params)
    assert ids(outputs) == ids(run(make_engine(), PROMPTS, params))


@pytest.mark.parametrize("kind", ["intersect", "slem"])
def test_the_law_of_two_tokens(kind: str) -> None:
    """Chi-square of 2,000 samples; the false-alarm probability of each test is 1e-8."""
    counts = np.zeros((VOCAB, VOCAB))
    for part in range(2):
        params = SamplingParams(max_tokens=2, temperature=1.0, seed=part + 50, n=1000)
        for output in run(make_engine(make(kind), k=1), [(4, 4)], params):
            counts[output.token_ids] += 1
    expected = np.zeros((VOCAB, VOCAB))
    for a, p in enumerate(softmax((4, 4))):
        expected[a] = 2000 * p * softmax((4, 4, a))
    big = expected > 8
    observed = [*counts[big], counts[~big].sum()]
    wanted = [*expected[big], expected[~big].sum()]
    assert stats.chisquare(observed, wanted).pvalue > 1e-8


def softmax(context: tuple[int, ...]) -> np.ndarray:
    logits = target().logits(context).astype(np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def test_the_draft_law_is_renormalised_on_shared_tokens() -> None:
    logits = torch.arange(17.0).unsqueeze(0)
    row = shared().logits(logits)[0]
    assert row.shape == (VOCAB,)
    assert row.tolist() == [logits[0, Pairs.words.index(c)].item() for c in LETTERS]
    partial = SharedTokens([3, -1, 0], lambda t: t)
    assert partial.logits(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))[0].tolist() == [4, -np.inf, 1]
    assert partial.n_shared == 2
    with pytest.raises(ValueError, match="share no token"):
        SharedTokens([-1, -1], lambda t: t)


def test_text_continues_in_the_tokenizers_own_way() -> None:
    pairs = Pairs()
    assert pairs.decode(continue_in(pairs.encode("c"), "ab", pairs)) == "ab"
    # "a" + "b" would have been one token: the text is then encoded on its own.
    assert continue_in([pairs.words.index("a")], "b", pairs) == [pairs.words.index("b")]


def test_a_context_that_outgrows_its_share_is_not_drafted_for() -> None:
    """Every target token is three for this draft: more than the pool was made for."""
    long = SharedTokens(range(VOCAB), lambda tokens: [t for t in tokens for _ in range(3)])
    drafter = ModelDrafter(draft_cache(target(), CONFIG, stretch=2), long)
    outputs = run(make_engine(drafter), PROMPTS[3:4], SamplingParams(max_tokens=20))
    assert outputs[0].stats.drafted == 0
