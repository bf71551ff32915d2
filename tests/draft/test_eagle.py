"""EAGLE chains: the same text as plain decoding, and a cache that never goes stale."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
import torch
from head_devices import (
    PROMPTS,
    TORCH,
    VOCAB,
    Alternate,
    Recorder,
    eagle,
    eagle_config,
    engine,
    native_target,
    perfect_eagle,
    random_eagle,
    run,
    scratch_logits,
    shaken,
    successor_target,
    target_logits,
    torch_target,
)
from scipy.stats import chisquare

from paceline.core.shapes import Beam
from paceline.draft.eagle import EagleDrafter
from paceline.draft.none import NoDrafter
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.base import TargetModel
from paceline.models.heads.passes import Part
from paceline.models.heads.runtime import Kernels, eagle_runner
from paceline.models.native import is_available
from paceline.sampling.law import build_laws
from paceline.types import Request, SamplingParams

KINDS = ("eagle1", "eagle3")
GREEDY = SamplingParams(max_tokens=30)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
TREE = Beam(nodes=8, width=3, depth=4)
needs_core = pytest.mark.skipif(not is_available()[0], reason="the native core was not built")


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return torch_target()


@pytest.fixture(scope="module")
def steady() -> TargetModel:
    return successor_target()


def ids(outputs) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [o.token_ids for o in outputs]


@pytest.fixture(scope="module")
def plain(target) -> dict[bool, list[tuple[int, ...]]]:
    return {p.greedy: ids(run(engine(target, NoDrafter()), PROMPTS, p)) for p in (GREEDY, SEEDED)}


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_that_of_plain_decoding(kind: str, shape, k: int, target, plain) -> None:
    for params in (GREEDY, SEEDED):
        outputs = run(engine(target, eagle(target, kind, shape=shape), k), PROMPTS, params)
        assert ids(outputs) == plain[params.greedy]
        assert all(o.stats.drafted > 0 for o in outputs)


@needs_core
@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("kind", KINDS)
def test_text_on_the_native_core(kind: str, shape) -> None:
    native = native_target()
    kernels = Kernels.of(native)
    assert kernels.threads == 1
    for params in (GREEDY, SEEDED):
        want = ids(run(engine(native, NoDrafter()), PROMPTS, params))
        drafter = eagle(native, kind, shape=shape, kernels=kernels)
        assert ids(run(engine(native, drafter, 5), PROMPTS, params)) == want


@pytest.mark.parametrize("kind", KINDS)
def test_the_runner_computes_the_module(kind: str, target) -> None:
    """Committed rows in two passes, then scratch rows under a tree's mask."""
    for extra in ({}, {"norm_before_residual": True, "norm_before_fc": True}):
        if kind == "eagle1" and extra:
            continue
        head = random_eagle(eagle_config(kind, 90, **extra), target)
        runner = eagle_runner(head, target, TORCH)
        g = torch.Generator().manual_seed(1)
        taps = torch.randn(10, 96 * len(head.config.taps), generator=g)
        feature = head.fuse(taps)
        whole = torch.ones(10, 10, dtype=torch.bool).tril()
        whole[8, 7] = whole[9, 8] = False
        places = [*range(8), 7, 8]
        want, _ = head.layer(
            target.embedding_rows(range(10)), feature, torch.tensor(places), mask_NT=whole
        )
        cache = runner.new_cache()
        for a, b in ((0, 4), (4, 7)):
            last = runner.feed([Part(cache, a, b - a)], range(a, b), taps[a:b], places[a:b])
            assert torch.allclose(last, want[b - 1 : b], atol=1e-4)
            cache.rows = b
        part = Part(cache, 7, 3, 3, above=[[], [], [7]])
        rows = runner.run([part], range(7, 10), feature[7:], places[7:])
        assert torch.allclose(rows, want[7:], atol=1e-4)
        assert torch.allclose(runner.logits(rows), head.logits(want[7:]), atol=1e-4)


@pytest.mark.parametrize(("kind", "k"), [("eagle1", 4), *(("eagle3", k) for k in (1, 4, 6))])
def test_a_perfect_head_stays_perfect(kind: str, k: int, steady) -> None:
    """300 tokens, two sequences: every proposal is accepted to the end."""
    params = SamplingParams(max_tokens=300)
    drafter = eagle(steady, kind, head=perfect_eagle(kind, steady))
    prompts = PROMPTS[2:4]
    outputs = run(engine(steady, drafter, k), prompts, params)
    assert ids(outputs) == ids(run(engine(steady, NoDrafter()), prompts, params))
    for o in outputs:
        assert o.stats.accepted == o.stats.drafted > 0
        # The last round may have less room, and the first token comes from the prompt's pass.
        assert o.stats.tau_histogram[k + 1] >= (300 - 1) // (k + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_without_a_proposal_leave_the_head_intact(kind: str, steady) -> None:
    e = engine(steady, eagle(steady, kind, head=perfect_eagle(kind, steady)))
    e.policy = Alternate(4)
    for o in run(e, PROMPTS, SamplingParams(max_tokens=120)):
        assert o.stats.accepted == o.stats.drafted > 0
        assert o.stats.tau_histogram[1] > 5


def chain_of(head, target, tokens, budget: int) -> list[int]:  # type: ignore[no-untyped-def]
    path: list[int] = []
    for _ in range(budget):
        path.append(int(scratch_logits(head, target, tokens, path).argmax()))
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_proposals_are_those_of_a_head_that_starts_afresh(kind: str, steady) -> None:
    """Rejections, rounds without a proposal, chunks of 7, block size 4 and a batch in which
    counts differ: each chain equals the one computed from the committed tokens alone."""
    head = shaken(perfect_eagle(kind, steady))
    drafter = eagle(steady, kind, head=head)
    recorder = Recorder(drafter)
    e = engine(steady, drafter)
    e.policy = Alternate(3)
    outputs = run(e, PROMPTS, SamplingParams(max_tokens=16))
    taken = sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs)
    assert 0.1 < taken < 0.95, taken
    assert len(recorder.seen) > 15
    for tokens, budget, tree in recorder.seen:
        assert list(tree.tokens[1:]) == chain_of(head, steady, tokens, budget)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_and_attention_are_those_of_a_head_that_starts_afresh(kind: str, target) -> None:
    """As above with random weights, under which attention decides every token: nothing is
    accepted, but each drafted row's place and what it sees count."""
    head = random_eagle(eagle_config(kind), target)
    drafter = eagle(target, kind, head=head)
    recorder = Recorder(drafter)
    e = engine(target, drafter)
    original = drafter._runner.run

    def checked(parts, tokens, g, positions):  # type: ignore[no-untyped-def]
        """In a chain a row's place is its place in the cache."""
        assert list(positions) == [i for p in parts for i in range(p.at, p.at + p.count)]
        return original(parts, tokens, g, positions)

    drafter._runner.run = checked  # type: ignore[method-assign]
    run(e, PROMPTS[1:4], SamplingParams(max_tokens=6))
    assert len(recorder.seen) == 12
    for tokens, budget, tree in recorder.seen:
        assert list(tree.tokens[1:]) == chain_of(head, target, tokens, budget)


@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize(("block", "chunk"), [(1, 1), (3, 5), (64, 512)])
def test_block_and_chunk_sizes_do_not_matter(block: int, chunk: int, shape, target, plain) -> None:
    config = EngineConfig(kv_tokens=1920, block_size=block, prefill_chunk=chunk, max_batch=8)
    usual = run(engine(target, eagle(target, shape=shape)), PROMPTS, GREEDY)
    outputs = run(engine(target, eagle(target, shape=shape), 4, config), PROMPTS, GREEDY)
    assert ids(outputs) == plain[True]
    assert [o.stats.accepted for o in outputs] == [o.stats.accepted for o in usual]


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_does_not_matter(kind: str, steady) -> None:
    params = SamplingParams(max_tokens=30)
    roomy = run(
        engine(steady, eagle(steady, kind, head=perfect_eagle(kind, steady))), PROMPTS, params
    )
    small = EngineConfig(kv_tokens=84, block_size=4, prefill_chunk=7, max_batch=8)
    drafter = eagle(steady, kind, head=perfect_eagle(kind, steady))
    tight = run(engine(steady, drafter, 4, small), PROMPTS, params)
    assert sum(o.stats.preemptions for o in tight) > 0
    assert ids(tight) == ids(roomy)
    # The round that recomputes a sequence has no feature before its root and proposes nothing;
    # afterwards the head is whole again.
    assert all(o.stats.accepted == o.stats.drafted > 0 for o in tight)


def test_what_was_preempted_is_drafted_for_as_before(target) -> None:
    """With random weights, under which every row and place counts."""
    head = random_eagle(eagle_config("eagle3"), target)
    small = EngineConfig(kv_tokens=84, block_size=4, prefill_chunk=7, max_batch=8)
    drafter = eagle(target, head=head)
    recorder = Recorder(drafter)
    e = engine(target, drafter, 2, small)
    e.policy = Alternate(2)
    outputs = run(e, PROMPTS, SamplingParams(max_tokens=26))
    assert sum(o.stats.preemptions for o in outputs) > 0
    drafted = [d for d in recorder.seen if len(d[2]) > 1]
    assert len(drafted) > 20
    for tokens, budget, tree in drafted:
        assert list(tree.tokens[1:]) == chain_of(head, target, tokens, budget)


def test_batch_and_order_do_not_matter(target) -> None:
    prompts = [*PROMPTS, (2, 2), (6, 5, 4)]
    params = [
        SamplingParams(max_tokens=15),
        SamplingParams(max_tokens=21, temperature=1.0, seed=1),
        SamplingParams(max_tokens=17, temperature=0.7, top_k=4, seed=2),
        SamplingParams(max_tokens=10, k=0),
        SamplingParams(max_tokens=12, banned_tokens=tuple(range(0, VOCAB, 2))),
        SamplingParams(max_tokens=5, k=2),
        SamplingParams(max_tokens=13, temperature=1.3, seed=5, k=0),
    ]

    def key(outputs):  # type: ignore[no-untyped-def]
        return [(o.token_ids, o.stats.drafted, o.stats.accepted) for o in outputs]

    for shape in (None, TREE):
        together = key(run(engine(target, eagle(target, shape=shape)), prompts, params))
        backwards = key(
            run(engine(target, eagle(target, shape=shape)), prompts[::-1], params[::-1])
        )
        solo = [
            key(run(engine(target, eagle(target, shape=shape)), [p], s))[0]
            for p, s in zip(prompts, params, strict=True)
        ]
        assert together == solo == backwards[::-1]


def test_banned_tokens_are_not_proposed(target) -> None:
    banned = tuple(range(0, VOCAB, 2))
    for shape in (None, TREE):
        drafter = eagle(target, shape=shape)
        recorder = Recorder(drafter)
        run(engine(target, drafter), PROMPTS, SamplingParams(max_tokens=12, banned_tokens=banned))
        drafted = [t for _, _, tree in recorder.seen for t in tree.tokens[1:]]
        assert drafted
        assert not set(drafted) & set(banned)


def test_nothing_follows_a_stop_token(steady) -> None:
    """The perfect head would go on behind it."""
    stop = run(engine(steady, NoDrafter()), [(5,)], GREEDY)[0].token_ids[2]
    drafter = eagle(steady, head=perfect_eagle("eagle3", steady))
    recorder = Recorder(drafter)
    params = SamplingParams(max_tokens=30, stop_token_ids=(stop,))
    output = run(engine(steady, drafter, 6), [(5,)], params)[0]
    assert output.token_ids[-1] == stop
    for _, _, tree in recorder.seen:
        for node, parent in enumerate(tree.parents[1:], 1):
            assert parent == 0 or tree.tokens[parent] != stop, node


def test_a_shorter_context_falls_back_to_plain_decoding(target, plain) -> None:
    head = random_eagle(eagle_config("eagle3", 90, max_context=20), target)
    outputs = run(engine(target, eagle(target, head=head)), PROMPTS, GREEDY)
    assert ids(outputs) == plain[True]
    assert outputs[0].stats.drafted > 0
    assert outputs[3].stats.drafted == 0  # its prompt alone is longer


def test_a_broken_head_proposes_nothing_and_says_so(target, plain, caplog) -> None:
    head = random_eagle(eagle_config("eagle3", 90), target)
    with torch.no_grad():
        head.norm.weight.fill_(torch.nan)
    for shape in (None, TREE):
        with caplog.at_level(logging.WARNING):
            outputs = run(engine(target, eagle(target, head=head, shape=shape)), PROMPTS, GREEDY)
        assert ids(outputs) == plain[True]
        assert sum(o.stats.drafted for o in outputs) == 0
        assert "NaN" in caplog.text


def test_a_sampled_chain_carries_the_law_that_it_was_drawn_from(target) -> None:
    head = random_eagle(eagle_config("eagle3", 90), target)
    drafter = eagle(target, head=head, sampled=True)
    recorder = Recorder(drafter)
    params = SamplingParams(max_tokens=8, temperature=0.8, top_k=20, seed=3, rule="block")
    run(engine(target, drafter, 3), [PROMPTS[2]], params)
    assert recorder.seen
    for tokens, _, tree in recorder.seen:
        assert tree.laws is not None
        for node in range(len(tree) - 1):
            logits = scratch_logits(head, target, tokens, tree.tokens[1 : node + 1])
            (want,) = build_laws(logits.unsqueeze(0), [params], masked=True)
            assert torch.allclose(tree.law(node).dense(), want.dense(), atol=1e-4)
    drafter = eagle(target, head=head, sampled=True)
    assert ids(run(engine(target, drafter), PROMPTS, GREEDY)) == ids(
        run(engine(target, NoDrafter()), PROMPTS, GREEDY)
    )
    with pytest.raises(UserError, match="drop the tree"):
        eagle(target, sampled=True, shape=TREE)


def test_a_seed_has_one_text_with_sampled_chains_too(steady) -> None:
    """Tied to the target's draws, whatever k is; and right more often than by chance."""
    params = SamplingParams(max_tokens=25, temperature=0.7, seed=9)
    want = ids(run(engine(steady, NoDrafter()), PROMPTS, params))
    for k in (1, 4):
        drafter = eagle(steady, head=perfect_eagle("eagle3", steady), sampled=True)
        outputs = run(engine(steady, drafter, k), PROMPTS, params)
        assert ids(outputs) == want
        assert sum(o.stats.accepted for o in outputs) > 0.2 * sum(o.stats.drafted for o in outputs)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_sampled_chains_leave_the_law_alone(rule: str, steady) -> None:
    """Three tokens (the head drafts the second and third) of 800 samples against the target's
    own joint law. The head is the perfect one with its output rows shaken, so that it is
    right often and not always. False alarm below 1e-6 (the bound on the p-value)."""
    n, prompt = 800, (3, 1, 4)
    base = {"temperature": 2.0, "top_k": 3, "max_tokens": 3}
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for path, p in law.items():
            logits = target_logits(steady, (*prompt, *path))
            (after,) = build_laws(logits, [SamplingParams(**base)])  # type: ignore[arg-type]
            for token in after.dense().nonzero().flatten().tolist():
                grown[(*path, token)] = p * after.probability(token)
        law = grown
    head = perfect_eagle("eagle1", steady)
    with torch.no_grad():
        rows = head.lm_head.weight
        rows += 0.03 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    config = EngineConfig(kv_tokens=4096, block_size=8, max_batch=128)
    e = engine(steady, eagle(steady, head=head, sampled=True), 3, config)
    params = [
        SamplingParams(**base, n=n // 2, seed=s, rule=rule)  # type: ignore[arg-type]
        for s in (1, 2)
    ]
    outputs = run(e, [prompt, prompt], params)
    taken = sum(o.stats.accepted for o in outputs) / sum(o.stats.drafted for o in outputs)
    assert 0.2 < taken < 0.98
    seen = Counter(o.token_ids for o in outputs)
    assert set(seen) <= set(law)
    assert chisquare([seen[path] for path in law], [n * p for p in law.values()]).pvalue > 1e-6


def test_usage_counts_the_heads_cache(target) -> None:
    drafter = EagleDrafter(
        eagle_config("eagle3"),
        lambda m: eagle_runner(random_eagle(eagle_config("eagle3"), m), m, TORCH),  # type: ignore[arg-type]
        weight_bytes=1000,
        block_size=4,
    )
    e = engine(target, drafter, 2)
    assert drafter.usage().bytes_total == 1000
    e.submit(Request(prompt=tuple(range(1, 10)), params=GREEDY))
    for _ in range(5):
        e.step()
    used = drafter.usage()
    assert used.blocks_used > 0
    assert used.bytes_total > 1000
