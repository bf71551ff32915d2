"""Speculative output equals plain output, token for token, in every arrangement."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from devices import (
    CONFIG,
    DETERMINISTIC,
    DRAFTERS,
    PROMPTS,
    VOCAB,
    ids,
    make_engine,
    model_drafter,
    run,
    target,
)

from paceline.engine.engine import EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.models.toy import TabularModel
from paceline.types import SamplingParams

GREEDY = SamplingParams(max_tokens=40)
SEEDED = SamplingParams(max_tokens=40, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def plain() -> dict[bool, list[tuple[int, ...]]]:
    return {p.greedy: ids(run(make_engine(), PROMPTS, p)) for p in (GREEDY, SEEDED)}


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_plain(drafter: str, k: int, plain) -> None:
    assert ids(run(make_engine(drafter, k=k), PROMPTS, GREEDY)) == plain[True]


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("drafter", DETERMINISTIC)
def test_walk_with_a_seed_equals_plain(drafter: str, k: int, plain) -> None:
    assert ids(run(make_engine(drafter, k=k), PROMPTS, SEEDED)) == plain[False]


@pytest.mark.parametrize("drafter", ["self", "noisy", "anti"])
def test_walk_on_sampled_drafts_equals_plain(drafter: str, plain) -> None:
    """The walk draws the target's own tokens, whatever was proposed and how."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=7, rule="walk")
    assert ids(run(make_engine(drafter), PROMPTS, params)) == plain[False]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("drafter", ["noisy", "tree"])
def test_block_and_chunk_sizes_do_not_matter(
    drafter: str, chunk: int, block_size: int, plain
) -> None:
    config = EngineConfig(kv_tokens=960, block_size=block_size, prefill_chunk=chunk, max_batch=8)
    assert ids(run(make_engine(drafter, config=config), PROMPTS, GREEDY)) == plain[True]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_preemption_does_not_matter(drafter: str) -> None:
    """A pool for two of five sequences: all finish, with the same text."""
    params = [
        SamplingParams(max_tokens=30, temperature=0.0 if i % 2 else 1.0, seed=i) for i in range(5)
    ]
    roomy = run(make_engine(drafter), PROMPTS, params)
    small = EngineConfig(kv_tokens=84, block_size=4, prefill_chunk=7, max_batch=8)
    tight = run(make_engine(drafter, config=small), PROMPTS, params)
    assert sum(o.stats.preemptions for o in tight) > 0
    assert ids(tight) == ids(roomy)
    assert [o.stats.drafted for o in tight] == [o.stats.drafted for o in roomy]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_batch_and_order_do_not_matter(drafter: str) -> None:
    """Eight mixed requests (greedy, sampled, filtered, plain) equal their solo runs, in
    tokens and in draft counts, in either order."""
    prompts = [*PROMPTS, (2, 2), (6, 5, 4), (9,)]
    params = [
        SamplingParams(max_tokens=25),
        SamplingParams(max_tokens=31, temperature=1.0, seed=1),
        SamplingParams(max_tokens=17, temperature=0.7, top_k=4, seed=2),
        SamplingParams(max_tokens=29, temperature=1.3, top_p=0.8, seed=3),
        SamplingParams(max_tokens=20, k=0),
        SamplingParams(max_tokens=20, temperature=0.9, min_p=0.1, seed=4, k=7),
        SamplingParams(max_tokens=5, k=2),
        SamplingParams(max_tokens=33, temperature=1.0, seed=5, k=0),
    ]

    def key(outputs):
        return [(o.token_ids, o.stats.drafted, o.stats.accepted, o.guarantee) for o in outputs]

    together = key(run(make_engine(drafter), prompts, params))
    solo = [key(run(make_engine(drafter), [p], s))[0] for p, s in zip(prompts, params, strict=True)]
    backwards = key(run(make_engine(drafter), prompts[::-1], params[::-1]))
    assert together == solo == backwards[::-1]


def test_the_same_seed_gives_the_same_text() -> None:
    """Sampled drafts: alone, twice, and among others; k = 0 requests in between."""
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=11)
    alone = ids(run(make_engine("noisy"), [PROMPTS[2]], params))
    again = ids(run(make_engine("noisy"), [PROMPTS[2]], params))
    others = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, k=i % 3) for i in range(6)]
    crowd = run(
        make_engine("noisy"), [PROMPTS[i % 5] for i in range(6)] + [PROMPTS[2]], [*others, params]
    )
    assert alone == again == [crowd[-1].token_ids]


def test_samples_of_one_request_differ_and_repeat() -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=4)
    first = run(make_engine("noisy"), [(1, 2, 3)], params)
    assert len({o.token_ids for o in first}) == 4
    assert [o.index for o in first] == [0, 1, 2, 3]
    assert ids(run(make_engine("noisy"), [(1, 2, 3)], params)) == ids(first)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_a_perfect_draft_stays_perfect(k: int) -> None:
    """500 tokens at temperature 0: a draft cache that misses one token would decay."""
    output = run(make_engine("self", k=k), [(1, 2, 3)], SamplingParams(max_tokens=500))[0]
    assert output.stats.accepted == output.stats.drafted > 0


def test_a_perfect_draft_is_never_refused_when_sampling() -> None:
    params = SamplingParams(max_tokens=300, temperature=1.0, seed=5, rule="token")
    output = run(make_engine("self", k=5), [(1, 2, 3)], params)[0]
    assert output.stats.accepted == output.stats.drafted > 0


def test_rounds_without_a_proposal_leave_the_draft_intact() -> None:
    """The policy alternates between 0 and 4: acceptance stays complete."""

    @dataclass(frozen=True)
    class Alternate(FixedBudget):
        calls: list[int] = field(default_factory=list)

        def budgets(self, seqs):
            self.calls.append(1)
            return [0 if len(self.calls) % 3 else self.k for _ in seqs]

    engine = make_engine("self")
    engine.policy = Alternate(4)
    output = run(engine, [(1, 2, 3)], SamplingParams(max_tokens=120))[0]
    assert output.stats.accepted == output.stats.drafted > 0
    assert output.stats.tau_histogram[1] > 10


def test_acceptance_does_not_depend_on_concurrency() -> None:
    params = SamplingParams(max_tokens=40)
    for n in (1, 4, 16):
        config = EngineConfig(kv_tokens=4096, block_size=4, prefill_chunk=64, max_batch=16)
        outputs = run(make_engine("self", config=config), [(i % VOCAB,) for i in range(n)], params)
        assert all(o.stats.accepted == o.stats.drafted > 0 for o in outputs)


def test_a_draft_with_a_shorter_context_falls_back_to_plain() -> None:
    short = target(max_context=20)
    plain = ids(run(make_engine(), PROMPTS, GREEDY))
    outputs = run(make_engine(model_drafter(short)), PROMPTS, GREEDY)
    assert ids(outputs) == plain
    assert outputs[0].stats.drafted > 0
    assert outputs[3].stats.drafted == 0  # its prompt alone is longer


def test_a_larger_draft_vocabulary_is_cut() -> None:
    """Tokens that the target does not have are never drafted."""
    wide = TabularModel(VOCAB + 5, order=None, seed=3)
    params = SamplingParams(max_tokens=60, temperature=1.5, seed=1)
    output = run(make_engine(model_drafter(wide)), [(1,)], params)[0]
    assert output.stats.drafted > 0
    assert max(output.token_ids) < VOCAB


def test_hundred_requests_return_every_block() -> None:
    engine = make_engine("noisy")
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(100)]
    run(engine, prompts, SamplingParams(max_tokens=9))
    assert engine.scheduler.prefix_cache is not None
    engine.scheduler.prefix_cache.clear()
    assert engine.scheduler.allocator.n_free == CONFIG.n_blocks


def test_a_draft_that_is_always_wrong_costs_no_extra_rounds() -> None:
    """ANTI at concurrency 8: as many rounds as plain decoding has tokens, and no more."""
    outputs = run(make_engine("anti"), [(i,) for i in range(8)], SamplingParams(max_tokens=25))
    assert all(o.stats.rounds == 25 and o.stats.accepted == 0 for o in outputs)
