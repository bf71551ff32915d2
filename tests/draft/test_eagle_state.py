"""What an EAGLE head knows of a long text, of a cached beginning, and of sequences that ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from head_devices import (
    PROMPTS,
    Recorder,
    Seldom,
    eagle,
    eagle_config,
    engine,
    random_eagle,
    run,
    scratch_logits,
    torch_target,
)

from paceline.core.shapes import Beam
from paceline.draft.none import NoDrafter
from paceline.engine.policy import FixedBudget
from paceline.models.base import TargetModel
from paceline.types import Request, SamplingParams

GREEDY = SamplingParams(max_tokens=30)
TREE = Beam(nodes=8, width=3, depth=4)


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return torch_target()


@pytest.fixture(scope="module")
def plain(target) -> list[tuple[int, ...]]:
    return ids(run(engine(target, NoDrafter()), PROMPTS, GREEDY))


def ids(outputs) -> list[tuple[int, ...]]:  # type: ignore[no-untyped-def]
    return [o.token_ids for o in outputs]


def drafts_afresh(target, params, policy, prompt, **kind):  # type: ignore[no-untyped-def]
    """Text and drafts of an engine that has seen nothing else."""
    drafter = eagle(target, **kind)
    e = engine(target, drafter)
    e.policy = policy
    recorder = Recorder(drafter)
    return run(e, [prompt], params)[0].token_ids, recorder.seen


@pytest.mark.parametrize("most", [30, 31, 32, 33, 34])
@pytest.mark.parametrize("shape", [None, TREE])
@pytest.mark.parametrize("policy", [FixedBudget(4), Seldom(4)])
def test_a_cached_beginning_is_remembered(target, policy, shape, most: int) -> None:
    """Two conversations that begin alike take turns, then the same prompts come again: nothing is
    read twice, and what is drafted is what a head drafts that reads everything."""
    params = SamplingParams(max_tokens=most)
    drafter = eagle(target, shape=shape)
    e = engine(target, drafter)
    e.policy = policy
    recorder = Recorder(drafter)
    histories = [[*PROMPTS[3], 5, 6], [*PROMPTS[3], 5, 7, 8]]
    for turn in range(3):
        for i, history in enumerate(histories):
            seen = len(recorder.seen)
            warm = run(e, [history], params)[0]
            assert (warm.stats.cached > 0) == (turn + i > 0)
            text, drafts = drafts_afresh(target, params, policy, history, shape=shape)
            assert warm.token_ids == text
            assert recorder.seen[seen:] == drafts
            assert len(drafts) > 3
            if turn == 0:
                history += [*warm.token_ids, 5, 6, 7]


def test_requests_that_begin_alike_share_what_is_remembered(target) -> None:
    drafter = eagle(target)
    e = engine(target, drafter)
    run(e, [PROMPTS[3]], GREEDY)
    recorder = Recorder(drafter)
    outputs = run(e, [PROMPTS[3]] * 3, GREEDY)
    assert [o.stats.cached for o in outputs] == [20] * 3
    text, drafts = drafts_afresh(target, GREEDY, e.policy, PROMPTS[3])
    assert ids(outputs) == [text] * 3
    assert sorted(recorder.seen, key=lambda d: len(d[0])) == [d for d in drafts for _ in range(3)]


def test_what_is_remembered_of_a_long_text_is_its_end(target, monkeypatch) -> None:
    """The window begins behind the prompt's first block: what is left of it is of use where it
    reaches into the beginning that is cached, else the head begins anew."""
    monkeypatch.setattr("paceline.draft.eagle_state.WINDOW", 12)
    head = random_eagle(eagle_config("eagle3"), target)
    drafter = eagle(target, head=head)
    e = engine(target, drafter, 0)
    first = run(e, [PROMPTS[3]], GREEDY)[0]
    (state,) = drafter._ended
    assert (state.start, state.known) == (53 - 12, 53)
    e.policy = FixedBudget(3)
    recorder = Recorder(drafter)
    history = [*PROMPTS[3], *first.token_ids, 1, 2]
    run(e, [history], SamplingParams(max_tokens=3))
    tokens, budget, tree = recorder.seen[0]
    path: list[int] = []
    for _ in range(budget):
        path.append(int(scratch_logits(head, target, tokens, path, len(tokens) - 13).argmax()))
    assert list(tree.tokens[1:]) == path
    again = run(e, [PROMPTS[3]], GREEDY)[0]
    assert again.token_ids == first.token_ids
    assert again.stats.drafted > 0


def test_a_failed_request_leaves_nothing_behind(target) -> None:
    drafter = eagle(target)
    e = engine(target, drafter)
    (i,) = e.submit(Request(prompt=PROMPTS[3], params=GREEDY))
    for _ in range(6):
        e.step()
    forward = e.model.forward

    def broken(*args, **more):  # type: ignore[no-untyped-def]
        out = forward(*args, **more)
        return replace(out, logits_RV=torch.full_like(out.logits_RV, torch.nan))

    e.model = SimpleNamespace(forward=broken)  # type: ignore[assignment]
    for _ in e.stream():
        pass
    assert e.result(i).error is not None
    assert not list(drafter._ended)


def test_behind_a_beginning_that_nobody_remembers_a_head_begins_anew(
    target, plain, monkeypatch
) -> None:
    drafter = eagle(target)
    e = engine(target, drafter)
    run(e, [PROMPTS[3]], GREEDY)
    (state,) = drafter._ended
    monkeypatch.setattr("paceline.draft.eagle_state.ENDED_BYTES", state.nbytes)
    run(e, [(91, 3)], SamplingParams(max_tokens=3))
    assert [s.tokens[:2] for s in drafter._ended] == [[91, 3]]
    again = run(e, [PROMPTS[3]], GREEDY)[0]
    assert again.stats.cached == 20
    assert again.token_ids == plain[3]
    assert again.stats.drafted > 0


def test_features_wait_but_not_without_end(target, monkeypatch) -> None:
    """Rounds without a proposal store features only, up to a bound."""
    monkeypatch.setattr("paceline.draft.eagle_state.WINDOW", 40)
    drafter = eagle(target)
    e = engine(target, drafter, 0)
    e.submit(Request(prompt=tuple(range(1, 30)), params=SamplingParams(max_tokens=20)))
    lags = []
    for _ in range(19):
        e.step()
        lags += [arm.lag for arm in drafter.arms(e.scheduler.running[0])]
    assert e.scheduler.running[0].computed > 41 > lags[0]
    assert lags == [*range(lags[0], 40), *[40] * (len(lags) + lags[0] - 40)]
    waiting = 4 * 40 * len(drafter.taps) * drafter.config.hidden
    assert drafter.usage().blocks_used == 0
    assert drafter.usage().bytes_total >= waiting


def test_a_head_begins_with_the_last_features_of_a_long_text(target, monkeypatch) -> None:
    """Behind a prompt longer than the window, and again where it was silent for longer."""
    window = 10
    monkeypatch.setattr("paceline.draft.eagle_state.WINDOW", window)
    head = random_eagle(eagle_config("eagle3"), target)
    drafter = eagle(target, head=head)
    recorder = Recorder(drafter)
    e = engine(target, drafter)
    e.policy = Seldom(4)
    prompts = [PROMPTS[3], tuple(range(40, 49))]
    run(e, prompts, SamplingParams(max_tokens=60))
    starts = set()
    for prompt in prompts:
        start = fed = 0
        for tokens, budget, tree in recorder.seen:
            if tokens[: len(prompt)] != prompt:
                continue
            known = len(tokens) - 1
            if known - fed > window:
                start = known - window
            fed = known
            starts.add(start)
            path: list[int] = []
            for _ in range(budget):
                path.append(int(scratch_logits(head, target, tokens, path, start).argmax()))
            assert list(tree.tokens[1:]) == path
    assert len(starts) > 4


def test_what_is_remembered_costs_a_round_nothing(target, monkeypatch) -> None:
    """Its size is asked for in every round of a benchmark: it is counted once, when a sequence
    ends, and its features lie in one piece."""
    drafter = eagle(target)
    e = engine(target, drafter, 0)
    for first in range(5):
        run(e, [(first, *range(30))], SamplingParams(max_tokens=6))
    ended = list(drafter._ended)
    assert len(ended) == 5
    assert all(len(s.waiting.storages()) == 1 for s in ended)
    size = sum(s.nbytes for s in ended)
    monkeypatch.setattr("paceline.draft.eagle_state.State.nbytes", None)
    assert drafter.usage().bytes_total == size
