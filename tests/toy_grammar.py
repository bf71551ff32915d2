"""A vocabulary of bytes and a few longer tokens, for grammars without a real tokenizer."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.sampling.grammar import Grammars, Vocabulary


def toy_grammars(tokens: Seq[bytes], eos_ids: Seq[int]) -> Grammars:
    """tokens: the bytes of each id; those of end tokens do not matter."""
    table = {t: i for i, t in enumerate(tokens) if len(t) == 1}
    return Grammars(
        Vocabulary(
            token_bytes=lambda: tokens,
            special_ids=frozenset(eos_ids),
            eos_ids=frozenset(eos_ids),
            encode=lambda text: [table[bytes([b])] for b in text.encode() if bytes([b]) in table],
        )
    )
