"""Incremental text: whole characters, and the same text however tokens arrive."""

from __future__ import annotations

import random

import pytest

from paceline.engine.text import INCOMPLETE, advance, find_stop, held_back
from paceline.types import TextState

#: Byte-level tokens: id = byte.
TEXT = "naïve café 👩‍👩‍👧 — 日本語 ok\n"


def decode(ids) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def decode_words(ids) -> str:
    """Joins words with spaces and strips the first, as sentence-piece tokenizers do."""
    return "".join(f" {'abcdef'[i]}" for i in ids).removeprefix(" ")


def stream(ids, sizes, decoder) -> list[str]:
    state, sent, pieces, done = TextState(), 0, [], 0
    for size in sizes:
        for _ in range(size):
            if done < len(ids):
                done += 1
                state = advance(state, ids[:done], decoder, last=done == len(ids))
        pieces.append(state.text[sent:])
        sent = len(state.text)
    return pieces


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
def test_characters_that_span_tokens_never_stream_broken(size: int) -> None:
    ids = list(TEXT.encode())
    pieces = stream(ids, [size] * len(ids), decode)
    assert "".join(pieces) == TEXT
    assert not any(INCOMPLETE in p for p in pieces)


def test_an_unfinished_character_shows_at_the_end_only() -> None:
    ids = list("ok 👩".encode())[:-1]
    pieces = stream(ids, [1] * len(ids), decode)
    assert "".join(pieces) == decode(ids)
    assert INCOMPLETE not in "".join(pieces[:-1])


def test_invalid_bytes_do_not_swallow_what_follows() -> None:
    ids = [0x61, 0xFF, 0xFE, 0x62, 0x63]
    assert "".join(stream(ids, [1] * 5, decode)) == decode(ids)


def test_leading_spaces_join_as_in_the_whole_text() -> None:
    ids = [0, 1, 2, 3, 4, 5]
    for size in (1, 2, 4):
        assert "".join(stream(ids, [size] * 6, decode_words)) == decode_words(ids)


def test_random_bytes_and_block_sizes_agree_with_the_whole() -> None:
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choice("aé€😀 \n") for _ in range(rng.randrange(1, 12)))
        ids = list(text.encode())
        sizes = [rng.randrange(1, 6) for _ in ids]
        assert "".join(stream(ids, sizes, decode)) == text


def test_the_earliest_stop_string_is_found_across_the_seam() -> None:
    assert find_stop("hello END", 7, ("END", "lo")) == 6
    assert find_stop("hello END", 0, ("END", "lo")) == 3
    assert find_stop("hello", 0, ("x",)) is None


def test_only_a_possible_beginning_is_held_back() -> None:
    assert held_back("abc EN", ("END",)) == 2
    assert held_back("abc END", ("END",)) == 0
    assert held_back("aab", ("ab c", "bx")) == 2
    assert held_back("", ("a",)) == 0
