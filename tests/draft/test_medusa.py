"""Medusa: static trees from calibrated accuracies, and the same text as plain decoding."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from head_devices import (
    ACCURACY,
    PROMPTS,
    VOCAB,
    Alternate,
    Recorder,
    engine,
    features,
    medusa,
    native_target,
    perfect_medusa,
    random_medusa,
    run,
    successor_target,
    torch_target,
)

from paceline.core.rules import Guarantee
from paceline.draft.medusa import MedusaDrafter
from paceline.draft.none import NoDrafter
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.base import FINAL, TargetModel
from paceline.models.heads.calibration import best_paths, rank_accuracy
from paceline.models.heads.runtime import Kernels, MedusaRunner
from paceline.models.native import is_available
from paceline.types import SamplingParams

GREEDY = SamplingParams(max_tokens=30)
SEEDED = SamplingParams(max_tokens=30, temperature=1.0, seed=7)
SURE = ((1.0,),) * 3


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return torch_target()


@pytest.fixture(scope="module")
def steady() -> TargetModel:
    return successor_target()


def ids(outputs) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize("k", [1, 12])
@pytest.mark.parametrize("shared", [True, False])
def test_text_is_that_of_plain_decoding(k: int, shared: bool, target) -> None:
    heads = random_medusa(target, draft=90, shared=shared)
    for params in (GREEDY, SEEDED):
        outputs = run(engine(target, medusa(target, heads), k), PROMPTS, params)
        assert ids(outputs) == ids(run(engine(target, NoDrafter()), PROMPTS, params))
        assert all(o.stats.drafted > 0 for o in outputs)


@pytest.mark.skipif(not is_available()[0], reason="the native core was not built")
def test_text_on_the_native_core() -> None:
    native = native_target()
    for params in (GREEDY, SEEDED):
        drafter = medusa(native, kernels=Kernels.of(native))
        want = ids(run(engine(native, NoDrafter()), PROMPTS, params))
        assert ids(run(engine(native, drafter, 8), PROMPTS, params)) == want


@pytest.mark.parametrize("shared", [True, False])
def test_the_runner_computes_the_module(shared: bool, target) -> None:
    heads = random_medusa(target, draft=90, shared=shared)
    h = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    want = heads(h).transpose(0, 1)
    runner = MedusaRunner(heads, Kernels())
    assert torch.allclose(runner.logits(h, 3), want, atol=1e-4)
    assert torch.allclose(runner.logits(h, 2), want[:, :2], atol=1e-4)


def test_perfect_heads_stay_perfect(steady) -> None:
    """300 tokens, batch of two: every round takes all three guesses; rounds without a
    proposal change nothing."""
    params = SamplingParams(max_tokens=300)
    drafter = medusa(steady, perfect_medusa(steady), accuracy=SURE)
    prompts = PROMPTS[2:4]
    outputs = run(engine(steady, drafter, 3), prompts, params)
    assert ids(outputs) == ids(run(engine(steady, NoDrafter()), prompts, params))
    for o in outputs:
        assert o.stats.accepted == o.stats.drafted > 0
        assert o.stats.tau_histogram[4] >= 299 // 4
    e = engine(steady, medusa(steady, perfect_medusa(steady), accuracy=SURE))
    e.policy = Alternate(3)
    for o in run(e, PROMPTS, SamplingParams(max_tokens=60)):
        assert o.stats.accepted == o.stats.drafted > 0
        assert o.stats.tau_histogram[1] > 3


def test_trees_hold_the_heads_guesses(target) -> None:
    """Every node is its head's guess of its rank, from the target's feature of the token before
    the root, computed anew."""
    heads = random_medusa(target, draft=90)
    drafter = medusa(target, heads)
    recorder = Recorder(drafter)
    e = engine(target, drafter)
    e.policy = Alternate(8)
    run(e, PROMPTS, SamplingParams(max_tokens=12))
    assert len(recorder.seen) > 10
    for tokens, budget, tree in recorder.seen:
        h = features(target, tokens[:-1], (FINAL,))[-1:]
        best = [heads.target_ids[heads.logits(h, i)[0].topk(3).indices].tolist() for i in range(3)]
        want = {
            tuple(best[depth][rank] for depth, rank in enumerate(path))
            for path in best_paths(ACCURACY, budget)
        }
        got = {tuple(tree.tokens[u] for u in tree.path(v)) for v in range(1, len(tree))}
        assert got == want
        assert len(tree) == budget + 1


def test_best_paths_against_all_trees() -> None:
    """Brute force over every tree of n nodes: none has more expected accepted tokens."""
    accuracy = ((0.6, 0.3), (0.5, 0.35))
    everything = [(a,) for a in (0, 1)] + list(itertools.product((0, 1), (0, 1)))

    def value(paths) -> float:  # type: ignore[no-untyped-def]
        return sum(math.prod(accuracy[d][r] for d, r in enumerate(p)) for p in paths)

    for n in range(1, 7):
        trees = [
            t
            for t in itertools.combinations(everything, n)
            if all(p[:-1] in t or len(p) == 1 for p in t)
        ]
        got = best_paths(accuracy, n)
        assert len(got) == n
        assert math.isclose(value(got), max(value(t) for t in trees))


@pytest.mark.parametrize("nodes", [1, 5, 40])
def test_parents_come_first_also_among_equals(nodes: int) -> None:
    for accuracy in (((1.0, 1.0), (1.0, 1.0), (1.0,)), ((0.5, 0.0), (0.5, 0.5))):
        paths = best_paths(accuracy, nodes)
        for i, path in enumerate(paths):
            assert len(path) == 1 or path[:-1] in paths[:i]
            assert all(accuracy[d][r] > 0 for d, r in enumerate(path))
    assert best_paths(((0.0,),), 3) == []


def test_calibration_counts_right_guesses(steady) -> None:
    heads = perfect_medusa(steady)
    (text,) = ids(run(engine(steady, NoDrafter()), [(5,)], SamplingParams(max_tokens=40)))
    tokens = torch.tensor((5, *text))
    h = features(steady, tokens.tolist(), (FINAL,))
    accuracy = rank_accuracy(heads, h, tokens, ranks=4)
    assert [row[0] for row in accuracy] == [1.0, 1.0, 1.0]
    assert all(sum(row[1:]) == 0 for row in accuracy)
    # Against a plain count with other heads.
    other = random_medusa(steady, draft=90)
    found = rank_accuracy(other, h, tokens, ranks=5)
    for i in range(3):
        for j in range(5):
            hits = [
                int(other.target_ids[other.logits(h[t : t + 1], i)[0].topk(5).indices[j]])
                == int(tokens[t + 2 + i])
                for t in range(len(tokens) - 2 - i)
            ]
            assert math.isclose(found[i][j], sum(hits) / len(hits))
    with pytest.raises(ValueError, match="more than 4 tokens"):
        rank_accuracy(heads, h[:4], tokens[:4])


def test_preemption_batch_and_order_do_not_matter(steady) -> None:
    params = [
        SamplingParams(max_tokens=20, temperature=float(i % 2), seed=i, k=(None, 3, 0)[i % 3])
        for i in range(5)
    ]

    def make() -> MedusaDrafter:
        return medusa(steady, perfect_medusa(steady))

    together = run(engine(steady, make(), 6), PROMPTS, params)
    backwards = run(engine(steady, make(), 6), PROMPTS[::-1], params[::-1])
    solo = [run(engine(steady, make(), 6), [p], s)[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert ids(together) == ids(solo) == ids(backwards[::-1])
    assert [o.stats.drafted for o in together] == [o.stats.drafted for o in solo]
    small = EngineConfig(kv_tokens=84, block_size=4, prefill_chunk=7, max_batch=8)
    tight = run(engine(steady, make(), 6, small), PROMPTS, params)
    assert sum(o.stats.preemptions for o in tight) > 0
    assert ids(tight) == ids(together)


def test_banned_tokens_are_not_proposed(target) -> None:
    banned = tuple(range(0, VOCAB, 2))
    drafter = medusa(target)
    recorder = Recorder(drafter)
    run(engine(target, drafter, 9), PROMPTS, SamplingParams(max_tokens=9, banned_tokens=banned))
    drafted = [t for _, _, tree in recorder.seen for t in tree.tokens[1:]]
    assert drafted
    assert not set(drafted) & set(banned)


def test_the_papers_rule_is_labelled(steady) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, rule="typical")
    drafter = medusa(steady, perfect_medusa(steady), accuracy=SURE)
    outputs = run(engine(steady, drafter, 3), PROMPTS, params)
    assert {o.guarantee for o in outputs} == {Guarantee.APPROXIMATE}
    assert sum(o.stats.accepted for o in outputs) > 0


def test_accuracies_must_fit_the_heads(target) -> None:
    for accuracy in (ACCURACY[:2], (*ACCURACY[:2], (1.5,))):
        with pytest.raises(UserError, match="accuracies between 0 and 1"):
            medusa(target, accuracy=accuracy)
