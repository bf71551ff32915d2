"""Prefix reuse: what matches, what is evicted, and that output never changes."""

from __future__ import annotations

import pytest
from devices import CONFIG, DRAFTERS, ids, make_engine, run, target

from paceline.cache.allocator import BlockAllocator
from paceline.cache.prefix import PrefixCache
from paceline.engine.engine import EngineConfig
from paceline.types import SamplingParams

COLD = EngineConfig(kv_tokens=1024, block_size=4, prefill_chunk=7, max_batch=8, prefix_cache=False)


def filled(tokens: list[int]) -> tuple[BlockAllocator, PrefixCache]:
    """A cache that holds the blocks of one finished sequence."""
    allocator = BlockAllocator(16, 4)
    cache = PrefixCache(allocator)
    table: list[int] = []
    allocator.grow(table, len(tokens))
    cache.store(tokens, table)
    allocator.free(table)
    return allocator, cache


def test_only_whole_blocks_short_of_the_last_token_match() -> None:
    allocator, cache = filled(list(range(10)))
    assert allocator.n_used == 2
    for length, blocks in ((3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2)):
        table = cache.match([*range(10), 50, 51][:length])
        assert len(table) == blocks
        allocator.free(table)
    other = cache.match([0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert len(other) == 1
    allocator.audit([other, cache.table])


def test_a_block_matches_only_behind_its_own_prefix() -> None:
    _, cache = filled([1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert cache.match([9, 9, 9, 9, 2, 2, 2, 2, 3]) == []


def test_eviction_takes_ends_first_and_never_what_is_in_use() -> None:
    allocator, cache = filled(list(range(12)))
    held = cache.match([0, 1, 2, 3, 4])
    assert (len(held), cache.n_evictable) == (1, 2)
    assert cache.evict(1) == 1
    left = cache.match([*range(12), 0])
    assert len(left) == 2  # the end of the chain went first
    allocator.audit([held, left, cache.table])
    allocator.free(left)
    assert cache.evict(5) == 1
    assert cache.evict(5) == 0  # what is left is in use
    allocator.audit([held, cache.table])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_warm_prompt_gives_the_cold_output_and_acceptance(drafter: str) -> None:
    """Twice the same prompt, then after eviction: same text, same acceptance."""
    prompt = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=6)

    def key(outputs):
        return [(o.token_ids, o.stats.drafted, o.stats.accepted) for o in outputs]

    cold = key(run(make_engine(drafter, config=COLD), [prompt], params))
    engine = make_engine(drafter)
    for cached in (0, 12, 12):
        outputs = run(engine, [prompt], params)
        assert key(outputs) == cold
        assert outputs[0].stats.cached == cached
    assert engine.scheduler.prefix_cache is not None
    engine.scheduler.prefix_cache.clear()
    assert key(run(engine, [prompt], params)) == cold


@pytest.mark.parametrize("drafter", ["none", "noisy", "ngram", "tree"])
def test_five_turns_warm_equal_cold(drafter: str) -> None:
    params = SamplingParams(max_tokens=13)
    warm, history = make_engine(drafter), [1, 2, 3]
    for turn in range(5):
        outputs = run(warm, [history], params)
        assert ids(outputs) == ids(run(make_engine(drafter, config=COLD), [history], params))
        assert (outputs[0].stats.cached > 0) == (turn > 0)
        history = [*history, *outputs[0].token_ids, turn, turn]


def test_a_full_pool_evicts_before_it_preempts() -> None:
    config = EngineConfig(kv_tokens=64, block_size=4, prefill_chunk=16, max_batch=4)
    engine = make_engine("noisy", config=config)
    for start in range(6):
        prompt = tuple((start + i) % 13 for i in range(20))
        output = run(engine, [prompt], SamplingParams(max_tokens=20))[0]
        assert output.stats.preemptions == 0
        cold = run(make_engine(config=COLD), [prompt], SamplingParams(max_tokens=20))[0]
        assert output.token_ids == cold.token_ids


def test_entries_of_a_failed_request_are_not_kept() -> None:
    def poison(context, logits):
        if len(context) > 12:
            logits[0] = float("nan")
        return logits

    engine = make_engine(model=target(change=poison))
    output = run(engine, [tuple(range(12))], SamplingParams(max_tokens=5))[0]
    assert output.error is not None
    assert engine.usage()["kv_blocks_cached"] == 0
    assert CONFIG.prefix_cache
