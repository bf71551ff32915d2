"""Grammars: JSON schemas, regular expressions, Lark and EBNF, through llguidance.

The end of a text is an end-of-sequence token: it is allowed where the text is complete,
and nothing else is where it can't go on. So a grammar that ends inside a block ends the
generation there, with finish reason `eos`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from paceline.errors import UserError

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]


class GrammarCursor:
    """The grammar's state for one sequence. `mask` is a pure function of the output tokens;
    what it keeps is where the matcher stands, and every question moves that: back to the
    common prefix of old and new tokens, then on. So no rejected, preempted or drafted token
    can leave it off. Not thread-safe.
    """

    def __init__(self, fresh: LLMatcher, eos_ids: frozenset[int], size: int) -> None:
        """fresh: a matcher that has consumed nothing (only copied from). size: of the masks."""
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._eos_ids = eos_ids
        self._size = size
        self._consumed: list[int] = []

    def mask(self, output: Seq[int]) -> Mask | None:
        """[V] tokens that may follow; None where `output` is no beginning of a text of the
        language, or holds its end.

        All False where the grammar is too complex there for the matcher's limits.
        """
        if not self._move(list(output)):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return self._give_up()
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    @property
    def consumed(self) -> tuple[int, ...]:
        """Where the matcher stands (for tests; no answer depends on it)."""
        return tuple(self._consumed)

    def _move(self, output: list[int]) -> bool:
        """Bring the matcher behind `output`; False, as far as it goes, where it can't be."""
        same = _common_prefix(self._consumed, output)
        if same < len(self._consumed):
            moved = self._matcher.rollback(len(self._consumed) - same)
            assert moved, "a matcher must go back over what it has consumed"
            del self._consumed[same:]
        rest = output[same:]
        good = next((i for i, t in enumerate(rest) if not self._ordinary(t)), len(rest))
        taken = self._matcher.try_consume_tokens(rest[:good]) if good else 0
        self._consumed += rest[:taken]
        return taken == len(rest)

    def _ordinary(self, token: int) -> bool:
        return token < self._size and token not in self._eos_ids

    def _give_up(self) -> Mask:
        log.warning("a grammar failed: %s", _first_line(self._matcher.get_error()))
        self._matcher = self._fresh.deep_copy()
        self._consumed = []
        return np.zeros(self._size, np.bool_)


def _common_prefix(a: list[int], b: list[int]) -> int:
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar must know of a tokenizer.

    token_bytes: the bytes that each id stands for (none for an undefined one).
    special_ids: control tokens, which no text contains. eos_ids: those that end it.
    encode: text to ids, without special tokens.
    """

    token_bytes: Callable[[], Seq[bytes]]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    encode: Callable[[str], Seq[int]]


class Grammars:
    """Compiles grammars for one vocabulary; keeps the last few. Not thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._matcher = lru_cache(maxsize=32)(self._compile)

    def cursor(self, kind: str, text: str) -> GrammarCursor:
        """A cursor at the beginning. kind: json_schema, regex or grammar.

        Raises:
            UserError: the grammar does not compile (one line says where), or no
                end-of-sequence token could end its texts.
        """
        eos_ids = self._vocabulary.eos_ids
        if not eos_ids:
            raise UserError(f"{kind} needs an end-of-sequence token, and this model has none")
        return GrammarCursor(self._matcher(kind, text), eos_ids, self._tokenizer.vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        wrapper: Any = _Wrapper(self._vocabulary)
        return LLTokenizer(wrapper, eos_token=sorted(self._vocabulary.eos_ids))

    def _compile(self, kind: str, text: str) -> LLMatcher:
        try:
            source = _SOURCES[kind](text)
        except Exception as e:  # the EBNF reader raises bare ones
            raise UserError(f"{kind} is invalid: {_first_line(str(e))}") from None
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, self._tokenizer)
        if failed:
            raise UserError(f"{kind} is invalid: {_first_line(messages[0])}")
        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise UserError(f"{kind} is invalid: {_first_line(matcher.get_error())}")
        return matcher


def _lark(text: str) -> str:
    return LLMatcher.grammar_from_lark(any_to_lark(text))


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": LLMatcher.grammar_from_json_schema,
    "regex": LLMatcher.grammar_from_regex,
    "grammar": _lark,
}


class _Wrapper:
    """A vocabulary as llguidance asks for it (see its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.tokens = list(vocabulary.token_bytes())
        self.special_token_ids = sorted(vocabulary.special_ids | vocabulary.eos_ids)
        self.eos_token_id = min(vocabulary.eos_ids)
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


def _first_line(message: str) -> str:
    """The line of a compiler's message that names the fault."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    fault = next((line for line in lines[1:] if line.startswith("error:")), None)
    return " ".join(filter(None, [lines[0] if lines else "unknown fault", fault]))
