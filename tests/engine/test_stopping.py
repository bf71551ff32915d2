"""Where a generation ends inside an accepted block."""

from __future__ import annotations

import numpy as np
import pytest
from devices import PROMPTS, ScriptDrafter, ids, make_engine, run, target

from paceline.core.rules import Origin
from paceline.errors import UserError
from paceline.types import FinishReason, Request, SamplingParams

LETTERS = "abcdefghijklm"


def decode(tokens) -> str:
    return "".join(LETTERS[t] for t in tokens)


@pytest.fixture(scope="module")
def free_run() -> tuple[int, ...]:
    """40 greedy tokens with nothing to stop them."""
    return run(make_engine(), [(3, 1, 4)], SamplingParams(max_tokens=40))[0].token_ids


@pytest.mark.parametrize("k", [1, 4, 16])
def test_max_tokens_is_exact(k: int, free_run) -> None:
    for n in range(1, k + 4):
        output = run(make_engine("self", k=k), [(3, 1, 4)], SamplingParams(max_tokens=n))[0]
        assert output.token_ids == free_run[:n]
        assert output.finish_reason is FinishReason.LENGTH
        assert output.stats.emitted == n


@pytest.mark.parametrize("drafter", ["none", "self", "tree", "ngram"])
def test_end_of_sequence_ends_an_accepted_block(drafter: str, free_run) -> None:
    for eos in sorted(set(free_run)):
        end = free_run.index(eos) + 1
        engine = make_engine(drafter, k=16, eos_ids=frozenset({eos}), decode=decode)
        output = run(engine, [(3, 1, 4)], SamplingParams(max_tokens=40))[0]
        assert output.token_ids == free_run[:end]
        assert output.finish_reason is FinishReason.EOS
        assert output.text == decode(free_run[: end - 1])


def test_ignored_end_of_sequence_goes_on(free_run) -> None:
    engine = make_engine("self", k=16, eos_ids=frozenset(free_run))
    output = run(engine, [(3, 1, 4)], SamplingParams(max_tokens=40, ignore_eos=True))[0]
    assert output.token_ids == free_run


@pytest.mark.parametrize("drafter", ["none", "self", "tree"])
def test_stop_tokens(drafter: str, free_run) -> None:
    stop = free_run[9]
    end = free_run.index(stop) + 1
    params = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
    output = run(make_engine(drafter, k=16, decode=decode), [(3, 1, 4)], params)[0]
    assert output.token_ids == free_run[:end]
    assert output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("drafter", ["none", "self", "tree"])
def test_a_stop_string_at_every_offset(drafter: str, length: int, free_run) -> None:
    """Text, ids, log-probabilities and counts all end with the stop string."""
    whole = decode(free_run)
    for offset in range(0, 30):
        stop = whole[offset : offset + length]
        at = whole.index(stop)
        params = SamplingParams(max_tokens=40, stop=(stop,), logprobs=2)
        streamed: list[str] = []
        output = run(
            make_engine(drafter, k=16, decode=decode),
            [(3, 1, 4)],
            params,
            each=lambda step, streamed=streamed: streamed.append(step.text),
        )[0]
        assert output.text == whole[:at] == "".join(streamed)
        assert output.token_ids == free_run[: at + length]
        assert all(t.logprob is not None for t in output.tokens)
        assert output.stats.emitted == at + length
        assert output.finish_reason is FinishReason.STOP


def test_two_stop_strings_the_earlier_end_wins(free_run) -> None:
    whole = decode(free_run)
    stops = (whole[5:9], whole[7:8])
    at = min(whole.index(s) for s in stops)
    output = run(
        make_engine("self", k=16, decode=decode),
        [(3, 1, 4)],
        SamplingParams(max_tokens=40, stop=stops),
    )[0]
    plain = run(make_engine(decode=decode), [(3, 1, 4)], SamplingParams(max_tokens=40, stop=stops))[
        0
    ]
    assert (output.text, output.token_ids) == (plain.text, plain.token_ids)
    assert len(output.text) <= at + 2


def test_a_possible_stop_string_is_held_back_and_released(free_run) -> None:
    """Text that could begin a stop string is not streamed until it is known not to."""
    whole = decode(free_run)
    stop = whole[3:6] + "~"
    pieces: list[str] = []
    run(
        make_engine(decode=decode),
        [(3, 1, 4)],
        SamplingParams(max_tokens=20, stop=(stop,)),
        each=lambda step: pieces.append(step.text),
    )
    assert "".join(pieces) == whole[:20]
    assert pieces[3:6] == ["", "", ""] or whole[3] in whole[4:6]


def test_proposed_end_of_sequence_is_only_a_proposal(free_run) -> None:
    eos = 0
    engine = make_engine(ScriptDrafter(lambda tokens: [eos] * 4), eos_ids=frozenset({eos}))
    plain = run(make_engine(eos_ids=frozenset({eos})), PROMPTS, SamplingParams(max_tokens=40))
    assert ids(run(engine, PROMPTS, SamplingParams(max_tokens=40))) == ids(plain)


def test_context_limit_ends_at_the_same_token() -> None:
    model = target(max_context=24)
    plain = run(make_engine(model=model), [(3, 1, 4)], SamplingParams(max_tokens=100))[0]
    fast = run(make_engine("self", model=model, k=8), [(3, 1, 4)], SamplingParams(max_tokens=100))[
        0
    ]
    assert plain.token_ids == fast.token_ids
    assert len(plain.token_ids) == 21
    assert plain.finish_reason is fast.finish_reason is FinishReason.CONTEXT


def test_discarded_tokens_are_counted_and_change_nothing(free_run) -> None:
    eos = free_run[4]
    engine = make_engine("self", k=16, eos_ids=frozenset({eos}))
    s = run(engine, [(3, 1, 4)], SamplingParams(max_tokens=40))[0].stats
    assert s.discarded > 0
    assert s.emitted == s.accepted + s.rounds - s.discarded
    assert s.accepted <= s.verified <= s.drafted


def test_origins_tell_who_brought_each_token(free_run) -> None:
    def script(tokens: list[int]) -> list[int]:
        done = len(tokens) - 3
        right = list(free_run[done : done + 4])
        if done >= 12:  # from here on the third guess is wrong
            right[2] = (right[2] + 1) % len(LETTERS)
        return right

    output = run(make_engine(ScriptDrafter(script)), [(3, 1, 4)], SamplingParams(max_tokens=30))[0]
    a, r, b = Origin.ACCEPTED, Origin.REPLACEMENT, Origin.BONUS
    assert output.token_ids == free_run[:30]
    got = [t.origin for t in output.tokens[:22]]
    assert got == [Origin.PLAIN, a, a, a, a, b, a, a, a, a, b, a, a, a, a, b, a, a, r, a, a, r]


@pytest.mark.parametrize("drafter", ["self", "noisy", "tree", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logprobs_equal_plain_ones(drafter: str, temperature: float) -> None:
    """Of the emitted token and of the most probable ones, from the untransformed logits."""
    params = SamplingParams(
        max_tokens=30, temperature=temperature, seed=2, top_k=5, logprobs=3, rule="walk"
    )
    plain = run(make_engine(), PROMPTS, params)
    fast = run(make_engine(drafter), PROMPTS, params)
    for a, b in zip(plain, fast, strict=True):
        assert [(t.id, t.top_logprobs) for t in a.tokens] == [
            (t.id, t.top_logprobs) for t in b.tokens
        ]
        assert [t.logprob for t in a.tokens] == [t.logprob for t in b.tokens]
    context = PROMPTS[0]
    for token in plain[0].tokens:
        logits = target().logits(context)
        exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
        assert token.logprob == pytest.approx(exact[token.id], abs=1e-5)
        assert [i for i, _ in token.top_logprobs] == sorted(range(13), key=lambda i: -logits[i])[:3]
        context = (*context, token.id)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((), {}, "prompt is empty"),
        ((1, 99), {}, "token 99"),
        ((1,) * 2000, {}, "the context holds"),
        ((1,), {"stop": ("x",)}, "need a tokenizer"),
        ((1,), {"rule": "nonsense"}, "nonsense"),
        ((1,), {"rule": "greedy", "temperature": 1.0}, "temperature"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt, params, words: str) -> None:
    engine = make_engine("self")
    with pytest.raises(UserError, match=words):
        engine.submit(Request(prompt=prompt, params=SamplingParams(**params)))
    assert engine.idle
