"""Seeds that must not be used: benchmark prompts, and what was seen before.

Text is compared as lower-case words without punctuation, so that line breaks, quotes and
Markdown do not hide a copy. Two texts overlap where they share 13 words in a row (the length
that Brown et al. 2020, appendix C, use to find test data in training data).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.errors import UserError

#: Words in a row that make an overlap.
NGRAM = 13
#: Words of a shingle, and the share of known shingles that makes a near-duplicate.
SHINGLE = 8
NEAR = 0.7

_WORD = re.compile(r"\w+", re.UNICODE)


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def text_key(text: str) -> str:
    """A fingerprint of the words of a text."""
    return hashlib.sha256(" ".join(words(text)).encode()).hexdigest()[:24]


class Forbidden:
    """The 13-grams (and whole texts, for shorter ones) of benchmark files."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._grams: set[int] = set()
        self._whole: set[str] = set()
        for text in texts:
            w = words(text)
            self._whole.add(" ".join(w))
            self._grams.update(_grams(w, NGRAM))

    @classmethod
    def from_files(cls, paths: Iterable[Path]) -> Forbidden:
        """Every string of every JSON line. UserError where a file can't be read."""
        return cls(text for path in paths for text in _strings_of(path))

    def __len__(self) -> int:
        return len(self._grams)

    def overlaps(self, text: str) -> bool:
        """Whether the text repeats a benchmark's, or 13 words in a row of one."""
        w = words(text)
        return " ".join(w) in self._whole or any(g in self._grams for g in _grams(w, NGRAM))


class Seen:
    """Exact and near duplicates among seeds. Mutable: `is_new` remembers what it let pass."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._shingles: set[int] = set()

    def is_new(self, text: str) -> bool:
        key = text_key(text)
        if key in self._keys:
            return False
        shingles = set(_grams(words(text), SHINGLE))
        known = sum(s in self._shingles for s in shingles)
        if shingles and known > NEAR * len(shingles):
            return False
        self._keys.add(key)
        self._shingles |= shingles
        return True


def _grams(w: list[str], n: int) -> Iterator[int]:
    for i in range(len(w) - n + 1):
        digest = hashlib.blake2b(" ".join(w[i : i + n]).encode(), digest_size=8)
        yield int.from_bytes(digest.digest(), "little")


def _strings_of(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be read: {e}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield from _strings(json.loads(line))
            except ValueError:
                raise UserError(
                    f"{path}, line {number}: not JSON; give one object a line"
                ) from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _strings(v)
    elif isinstance(value, list):
        for v in value:
            yield from _strings(v)
