"""The suffix index against a rescan, and the drafter's edges."""

from __future__ import annotations

import random

import pytest
from devices import ids, make_engine, run

from paceline.draft.ngram import NgramDrafter, SuffixIndex
from paceline.errors import UserError
from paceline.types import SamplingParams


def rescan(tokens: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The longest suffix that occurred before, its latest occurrence, token by token."""
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                grown = list(tokens)
                for i in range(count):
                    grown.append(grown[start + n + i])
                return grown[len(tokens) :]
    return []


def test_lookup_equals_a_rescan() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(0, 40))]
        longest = rng.randrange(1, 6)
        shortest = rng.randrange(1, longest + 1)
        index, fed = SuffixIndex(longest), 0
        while fed < len(tokens):  # in uneven pieces
            step = rng.randrange(1, 5)
            index.extend(tokens[fed : fed + step])
            fed += step
        assert index.lookup(7, shortest) == rescan(tokens, longest, shortest, 7)


def test_a_copy_may_run_into_its_own_output() -> None:
    index = SuffixIndex(3)
    index.extend([1, 2, 1, 2])
    assert index.lookup(5, 1) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("prompt", [(1,), (1, 1), (1, 2)])
def test_prompts_shorter_than_the_longest_suffix(prompt: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=30)
    engine = make_engine(NgramDrafter(longest=8, shortest=1))
    assert ids(run(engine, [prompt], params)) == ids(run(make_engine(), [prompt], params))


def test_requests_do_not_see_each_other() -> None:
    """A prompt that another request continues gives no proposal."""
    engine = make_engine(NgramDrafter(longest=3, shortest=2))
    prompts = [(1, 2, 3, 4, 1, 2, 3, 4), (1, 2)]
    together = run(engine, prompts, SamplingParams(max_tokens=6))
    alone = run(
        make_engine(NgramDrafter(longest=3, shortest=2)), [(1, 2)], SamplingParams(max_tokens=6)
    )
    assert together[1].stats.drafted == alone[0].stats.drafted


@pytest.mark.parametrize(("longest", "shortest"), [(0, 0), (2, 3), (3, 0), (40, 1)])
def test_lengths_out_of_range_are_refused(longest: int, shortest: int) -> None:
    with pytest.raises(UserError, match="out of range"):
        NgramDrafter(longest=longest, shortest=shortest)
