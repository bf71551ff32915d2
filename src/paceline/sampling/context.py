"""What a law depends on besides logits: a request's parameters and the tokens so far.

A `Context` belongs to one sequence and one round; a `Row` is one node, with the tokens on
its own path. Requests whose transforms look at no tokens get rows without a context, so
that nothing is copied or counted for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paceline.types import SamplingParams, Sequence, TokenMask

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """The committed tokens of one sequence.

    tokens: prompt and output, by reference: it must not change while this is in use.
    end_ids: tokens that end the generation.
    """

    tokens: Seq[int]
    n_prompt: int = 0
    prompt_ids: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()
    grammar: TokenMask | None = None

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @cached_property
    def output(self) -> list[int]:
        return list(self.tokens[self.n_prompt :])

    @cached_property
    def counts(self) -> Counter[int]:
        """Occurrences in the output."""
        return Counter(self.output)

    @cached_property
    def output_ids(self) -> Ids:
        """Distinct tokens of the output; `output_times` says how often each occurs."""
        return np.fromiter(self.counts, np.int64, len(self.counts))

    @cached_property
    def output_times(self) -> npt.NDArray[np.float32]:
        return np.fromiter(self.counts.values(), np.float32, len(self.counts))

    @cached_property
    def seen_ids(self) -> Ids:
        """Distinct tokens of prompt and output."""
        seen = self.prompt_ids.union(self.counts)
        return np.fromiter(seen, np.int64, len(seen))


@dataclass(frozen=True)
class Row:
    """Whose logits a row holds: those after the committed tokens and `path`.

    path: tokens below the root, the node's own last. context: None where the parameters
    are not `contextual`.
    """

    params: SamplingParams
    context: Context | None = None
    path: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.context is None and self.params.contextual:
            raise ValueError("these parameters depend on the tokens so far: give a context")

    @property
    def n_output(self) -> int:
        """Output tokens so far, those on the path included."""
        assert self.context is not None
        return self.context.n_output + len(self.path)

    def output(self) -> list[int]:
        assert self.context is not None
        return [*self.context.output, *self.path]

    def last(self, n: int) -> tuple[int, ...]:
        """The last n tokens of prompt, output and path (fewer where there are not so many)."""
        assert self.context is not None
        if n <= len(self.path):
            return self.path[len(self.path) - n :]
        start = max(len(self.context.tokens) - (n - len(self.path)), 0)
        return (*self.context.tokens[start:], *self.path)


def context_of(seq: Sequence) -> Context | None:
    """A sequence's context for one round, None where its parameters need none."""
    if not seq.params.contextual:
        return None
    return Context(seq.tokens, seq.n_prompt, seq.request.prompt_ids, seq.end_ids, seq.grammar)


def tree_rows(seq: Sequence, tokens: Seq[int], parents: Seq[int]) -> list[Row]:
    """The rows of a proposal's nodes (node 0: the last committed token)."""
    context = context_of(seq)
    if context is None:
        return [Row(seq.params)] * len(tokens)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [Row(seq.params, context, path) for path in paths]
