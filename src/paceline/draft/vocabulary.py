"""Between a draft's tokens and its target's.

Legend: R rows, V the target's vocabulary, U the draft's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np
import torch


class Vocabulary(Protocol):
    """How a drafter reads the target's tokens and writes its own as the target's.

    stretch: draft tokens that one target token may take in the draft's cache, which is
    made so many times as large as the target's; longer contexts are not drafted for.
    """

    @property
    def stretch(self) -> int: ...

    def context(self, tokens: Seq[int]) -> Seq[int]:
        """The draft's tokens for a committed sequence of target tokens."""
        ...

    def logits(self, logits_RU: torch.Tensor) -> torch.Tensor:
        """[R, V] logits over the target's tokens; -inf where the draft has none."""
        ...

    def own(self, token: int) -> int | None:
        """The draft's id of a target token. None where it has none: `logits` gives such
        tokens no chance, but a grammar can force one."""
        ...


def room(vocabulary: Vocabulary, fed: Seq[int], tokens: Seq[int], budget: int) -> int:
    """Tokens that may be drafted without outgrowing the sequence's share of the draft's
    pool: the target's pool holds its tokens and the budget, the draft's `stretch` times
    that."""
    share = vocabulary.stretch * (len(tokens) + budget)
    return max(0, min(budget, share - len(fed)))


class SameVocabulary:
    """Equal ids. size: tokens that the target defines; the draft's others (padding of its
    matrix) are never drawn, and those it lacks have probability zero."""

    stretch = 1

    def __init__(self, size: int) -> None:
        self._size = size

    def context(self, tokens: Seq[int]) -> Seq[int]:
        return tokens

    def logits(self, logits_RU: torch.Tensor) -> torch.Tensor:
        return logits_RU[:, : self._size]

    def own(self, token: int) -> int | None:
        return token


class SharedTokens:
    """Token-level intersection (Timor et al. 2025, algorithm 4): the draft's law is
    restricted to the tokens that both vocabularies spell alike, and renormalised. It is then
    an ordinary law over the target's tokens, so every rule stays exact.

    theirs[i] is the draft's id of target token i, -1 where it has none. `translate` turns
    committed target tokens into draft tokens (through text).
    """

    stretch = 2

    def __init__(self, theirs: Seq[int], translate: Callable[[Seq[int]], Seq[int]]) -> None:
        own_V = np.asarray(theirs, np.int64)
        if not (own_V >= 0).any():
            raise ValueError("the two vocabularies share no token")
        self._own_V = own_V
        shared = own_V >= 0
        self._target_ids = torch.from_numpy(np.flatnonzero(shared))
        self._draft_ids = torch.from_numpy(own_V[shared])
        self._translate = translate

    @property
    def n_shared(self) -> int:
        return len(self._target_ids)

    def context(self, tokens: Seq[int]) -> Seq[int]:
        return self._translate(tokens)

    def logits(self, logits_RU: torch.Tensor) -> torch.Tensor:
        device = logits_RU.device
        shape = (logits_RU.shape[0], len(self._own_V))
        logits_RV = torch.full(shape, -float("inf"), device=device)
        logits_RV[:, self._target_ids.to(device)] = logits_RU[:, self._draft_ids.to(device)]
        return logits_RV

    def own(self, token: int) -> int | None:
        own = int(self._own_V[token])
        return own if own >= 0 else None


class Codec(Protocol):
    """What is needed of a tokenizer to go through text."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    def decode(self, ids: Seq[int], skip_special: bool = True) -> str: ...


def through_text(tokens: Seq[int], source: Codec, target: Codec) -> list[int]:
    """The same text, special tokens included, in another tokenizer's tokens."""
    return target.encode(source.decode(tokens, skip_special=False))


def continue_in(tokens: Seq[int], text: str, codec: Codec, *, window: int = 16) -> list[int]:
    """Tokens that `text` adds behind `tokens`, as the tokenizer would have written them in
    one go; where it would have joined them differently, `text` encoded on its own."""
    tail = list(tokens[-window:])
    whole = codec.encode(codec.decode(tail, skip_special=False) + text, add_special=False)
    if whole[: len(tail)] == tail:
        return whole[len(tail) :]
    return codec.encode(text, add_special=False)
