"""What a request's parameters need of the model and its tokenizer, checked and resolved
before any work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.errors import UserError
from paceline.sampling.adjust import allowed_ids
from paceline.sampling.context import Context, Row
from paceline.sampling.grammar import GrammarCursor, Grammars
from paceline.types import Request, SamplingParams

#: Text to ids, without special tokens.
Encode = Callable[[str], Seq[int]]


@dataclass(frozen=True)
class Admission:
    """vocab_size: of the model. encode, grammars: where there is a tokenizer."""

    vocab_size: int
    eos_ids: frozenset[int]
    encode: Encode | None = None
    grammars: Grammars | None = None

    def resolve(self, request: Request) -> Request:
        """The request with banned words as token ids."""
        words = request.params.banned_words
        if not any(isinstance(word, str) for word in words):
            return request
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            found.update(dict.fromkeys(self._spellings(word)))
        return replace(request, params=replace(request.params, banned_words=tuple(found)))

    def _spellings(self, word: str | tuple[int, ...]) -> list[tuple[int, ...]]:
        if not isinstance(word, str):
            return [word]
        if self.encode is None:
            raise UserError(
                f"banned_words = {word!r} needs a tokenizer, and this model has none; "
                "give token ids"
            )
        ids = [tuple(self.encode(text)) for text in (word, " " + word.lstrip())]
        if not all(ids):
            raise UserError(f"banned_words = {word!r} has no tokens in this vocabulary")
        return ids

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end a generation."""
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        return eos_ids.union(params.stop_token_ids)

    def cursor(self, params: SamplingParams) -> GrammarCursor | None:
        """A new grammar cursor at the beginning, where a grammar is asked for."""
        if params.language is None:
            return None
        kind, text = params.language
        if self.grammars is None:
            raise UserError(f"{kind} needs a tokenizer, and this model has none")
        return self.grammars.cursor(kind, text)

    def check(self, request: Request) -> None:
        """UserError where ids lie outside the vocabulary, a grammar does not compile, or
        nothing at all could be emitted."""
        request = self.resolve(request)
        params = request.params
        self._check_ids("logit_bias", dict(params.logit_bias))
        self._check_ids("allowed_tokens", params.allowed_tokens or ())
        self._check_ids("banned_tokens", params.banned_tokens)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for word in params.banned_words:
            assert not isinstance(word, str)
            self._check_ids("banned_words", word)
        cursor = self.cursor(params)
        if not params.adjusts:
            return
        context = Context(
            request.prompt,
            len(request.prompt),
            frozenset(),  # penalties forbid nothing
            self.end_ids(params),
            cursor,
        )
        if not allowed_ids(Row(params, context), self.vocab_size).any():
            raise UserError(
                "no token could be emitted: allowed_tokens, banned_tokens, banned_words, "
                "min_tokens and the grammar together leave none; loosen one of them"
            )

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = next((i for i in ids if i >= self.vocab_size), None)
        if bad is not None:
            raise UserError(
                f"{name} = {bad} is outside the model's vocabulary of {self.vocab_size}"
            )
