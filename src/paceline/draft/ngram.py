"""Prompt lookup: what followed the longest earlier occurrence of the current suffix.

Saxena 2023 (prompt lookup decoding); Leviathan et al. 2022, section 2.3, allow any such
drafter. Proposals are deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.errors import UserError
from paceline.models.base import TargetOutput
from paceline.types import Sequence


class SuffixIndex:
    """Where each n-gram of a growing token list was last followed by something.

    ends[n - 1] maps an n-gram to the index behind its latest occurrence that has a
    successor. Appending a token costs one insertion for each length.
    """

    def __init__(self, longest: int) -> None:
        self._tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Seq[int]) -> None:
        for token in tokens:
            # The grams that end here get their successor now.
            here = len(self._tokens)
            for n in range(1, min(len(self._ends), here) + 1):
                self._ends[n - 1][tuple(self._tokens[here - n :])] = here
            self._tokens.append(token)

    def match(self, shortest: int, most: int = 32) -> int:
        """Length of the suffix that `lookup` would continue, as far as its earlier
        occurrence agrees with it backwards, up to `most`; 0 without one."""
        size = len(self._tokens)
        for n in range(min(len(self._ends), size), shortest - 1, -1):
            start = self._ends[n - 1].get(tuple(self._tokens[size - n :]))
            if start is not None:
                while n < min(most, start) and self._tokens[start - n - 1] == self._tokens[-n - 1]:
                    n += 1
                return n
        return 0

    def lookup(self, count: int, shortest: int) -> list[int]:
        """Up to `count` tokens that followed the latest earlier occurrence of the longest
        known suffix. A copy may run into its own output, as in "a b a b a b"."""
        size = len(self._tokens)
        for n in range(min(len(self._ends), size), shortest - 1, -1):
            start = self._ends[n - 1].get(tuple(self._tokens[size - n :]))
            if start is not None:
                found: list[int] = []
                period = size - start
                for i in range(count):
                    found.append(self._tokens[start + i] if i < period else found[i - period])
                return found
        return []


class NgramDrafter:
    """longest, shortest: suffix lengths that are looked up, the longest first."""

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest <= 32:
            raise UserError(
                f"ngram lengths {shortest} to {longest} are out of range: use "
                "1 <= shortest <= longest <= 32"
            )
        self.longest = longest
        self.shortest = shortest
        self._indices: dict[int, SuffixIndex] = {}

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0])

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        """The one arm where something matches, by the match's length: to a power of two."""
        length = self._index(seq).match(self.shortest)
        return (Arm(drafter=self.name, bucket=length.bit_length()),) if length else ()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            found = self._index(seq).lookup(budget, self.shortest) if budget > 0 else []
            trees.append(chain(seq.tokens[-1], found))
        return trees

    def _index(self, seq: Sequence) -> SuffixIndex:
        index = self._indices.get(seq.id)
        if index is None:
            index = self._indices[seq.id] = SuffixIndex(self.longest)
        index.extend(seq.tokens[len(index) :])
        return index

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        return None  # the index reads what was committed when it is next asked

    def forget(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)

    def usage(self) -> DrafterUsage:
        return DrafterUsage()
