"""Every transform with every drafter: the same text as plain decoding, and nothing that is
forbidden."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from devices import CONFIG, DRAFTERS, PROMPTS, VOCAB, ids, make_engine, run, target
from toy_grammar import toy_grammars

from paceline.engine.engine import Engine
from paceline.errors import UserError
from paceline.types import FinishReason, Request, RequestOutput, SamplingParams

EOS = 12
GRAMMARS = toy_grammars([bytes([b]) for b in b"abcdefghijkl"] + [b""], (EOS,))
REGEX = "(ab|[c-f]{2}g?|h[ijk]+l)*a"

TRANSFORMS: dict[str, dict] = {
    "filters": {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
    "bias": {"logit_bias": {2: 2.0, 5: -3.0, EOS: -2.0}},
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 1.8},
    "frequency": {"frequency_penalty": 0.9},
    "allowed": {"allowed_tokens": (0, 1, 2, 3, 4, 7, EOS)},
    "banned": {"banned_tokens": (1, 2, 3)},
    "words": {"banned_words": ((4,), (1, 2), (7, 8), (5, 5, 5), *((i, 0) for i in range(6)))},
    "min_tokens": {"min_tokens": 11, "stop_token_ids": (3,)},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": 'start: ("ab" | "cd" | "ef")+ "l"'},
    "everything": {
        "logit_bias": {2: 1.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "banned_tokens": (6,),
        "banned_words": ((0, 1, 0, 1),),
        "min_tokens": 9,
        "regex": REGEX,
        "top_p": 0.95,
    },
}


def make(drafter: str = "none", **kwargs) -> Engine:
    return make_engine(drafter, eos_ids=frozenset({EOS}), grammars=GRAMMARS, **kwargs)


def params_of(name: str, **more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 32, **TRANSFORMS[name], **more})


@cache
def plain(params: SamplingParams) -> list[tuple[int, ...]]:
    """What plain decoding gives for all prompts."""
    return ids(run(make(), PROMPTS, params))


def text(output: RequestOutput) -> str:
    return "".join("abcdefghijkl"[i] for i in output.token_ids if i != EOS)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d != "none"])
def test_greedy_parity(drafter: str, transform: str) -> None:
    params = params_of(transform)
    assert ids(run(make(drafter), PROMPTS, params)) == plain(params)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("drafter", [d for d in DRAFTERS if d != "none"])
def test_seeded_walk_parity(drafter: str, transform: str) -> None:
    params = params_of(transform, temperature=1.1, seed=7, rule="walk")
    assert ids(run(make(drafter), PROMPTS, params)) == plain(params)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_is_always_accepted(transform: str, temperature: float) -> None:
    """So target and draft have the very same transforms, on the very same tokens."""
    params = params_of(transform, temperature=temperature, seed=3)
    for output in run(make("self"), PROMPTS, params):
        assert output.stats.accepted == output.stats.verified
        assert output.stats.drafted > 0 or len(output.tokens) <= 2


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_what_is_forbidden_never_appears(drafter: str, temperature: float) -> None:
    more = {"temperature": temperature, "seed": 5, "max_tokens": 60, "ignore_eos": True}
    for output in run(make(drafter), PROMPTS, params_of("words", **more)):
        tokens = (*output.prompt_tokens, *output.token_ids)
        for word in TRANSFORMS["words"]["banned_words"]:
            for end in range(len(output.prompt_tokens) + 1, len(tokens) + 1):
                assert tokens[:end][-len(word) :] != word
    for output in run(make(drafter), PROMPTS, params_of("banned", **more)):
        assert not set(output.token_ids) & {1, 2, 3}
    for output in run(make(drafter), PROMPTS, params_of("allowed", **more)):
        assert set(output.token_ids) <= {0, 1, 2, 3, 4, 7, EOS}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_where_the_end_is_favoured(drafter: str, temperature: float) -> None:
    """End and stop tokens are by far the most probable: the output ends at min_tokens + 1,
    exactly where plain decoding's does."""

    def eager(context, logits):
        logits[[EOS, 3]] += 30
        return logits

    model = target(change=eager)
    for n in (1, 4, 5, 6, 10):
        params = SamplingParams(
            max_tokens=20, min_tokens=n, stop_token_ids=(3,), temperature=temperature, seed=1
        )
        for output in run(make(drafter, model=model), PROMPTS, params):
            assert len(output.tokens) == n + 1
            assert output.finish_reason in (FinishReason.EOS, FinishReason.STOP)
            assert not set(output.token_ids[:-1]) & {EOS, 3}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_mixed_requests_in_one_batch_equal_their_solo_runs(drafter: str) -> None:
    """Greedy, sampled, banned-words and grammar requests, pairwise and all together."""
    kinds = [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=1),
        params_of("words", max_tokens=20, temperature=0.7, seed=2),
        params_of("regex", max_tokens=20),
        params_of("everything", max_tokens=20, temperature=1.0, seed=3),
    ]
    prompt = PROMPTS[4]
    solo = [run(make(drafter), [prompt], p)[0].token_ids for p in kinds]
    pairs = [[i, j] for i in range(5) for j in range(i + 1, 5)]
    for group in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], *pairs):
        together = run(make(drafter), [prompt] * len(group), [kinds[i] for i in group])
        assert ids(together) == [solo[i] for i in group]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_grammar_that_ends_inside_a_block_ends_the_generation_there(drafter: str) -> None:
    params = SamplingParams(max_tokens=30, regex="abcdefgh?", temperature=1.0, seed=2)
    for output in run(make(drafter), PROMPTS, params):
        assert text(output) in ("abcdefg", "abcdefgh")
        assert output.finish_reason is FinishReason.EOS
        assert output.token_ids[-1] == EOS


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_matcher_stands_where_a_new_one_would(drafter: str, temperature: float) -> None:
    """After every step, whatever was drafted and refused."""
    engine = make(drafter)
    params = params_of("regex", temperature=temperature, seed=4)
    numbers = [engine.submit(Request(prompt=p, params=params))[0] for p in PROMPTS]
    while not engine.idle:
        engine.step()
        for seq in engine.scheduler.running:
            output = seq.tokens[seq.n_prompt :]
            fresh = GRAMMARS.cursor("regex", REGEX).mask(output)
            assert seq.grammar is not None
            now = seq.grammar.mask(output)
            assert now is not None
            assert fresh is not None
            assert np.array_equal(now, fresh)
            assert seq.grammar.consumed == tuple(output)  # type: ignore[attr-defined]
    for number in numbers:
        assert engine.result(number).error is None


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_with_half_of_the_requests_under_a_grammar(
    drafter: str, temperature: float
) -> None:
    small = type(CONFIG)(kv_tokens=56, block_size=4, prefill_chunk=7, max_batch=8)
    sampling = {"temperature": temperature, "seed": 9, "rule": None}
    if temperature:
        sampling["rule"] = "walk"
    kinds = [params_of("regex", **sampling), SamplingParams(max_tokens=24, **sampling)] * 3
    prompts = [PROMPTS[i % 3] for i in range(6)]
    outputs = run(make(drafter, config=small), prompts, kinds)
    assert sum(o.stats.preemptions for o in outputs) > 0
    assert ids(outputs) == ids(run(make(), prompts, kinds))


def test_a_dead_end_fails_its_request_alone_and_by_name() -> None:
    """A banned word forbids the only continuation that the grammar leaves."""
    params = SamplingParams(max_tokens=20, regex="(ab)*c", banned_words=((0, 1),))
    outs = []
    for drafter in DRAFTERS:
        model = target(change=lambda c, x: x + 20 * np.eye(VOCAB, dtype=np.float32)[0])
        dead, good = run(
            make(drafter, model=model), [(1, 2), (3, 1, 4)], [params, SamplingParams(max_tokens=9)]
        )
        assert dead.finish_reason is FinishReason.ERROR
        assert dead.error is not None
        assert "no token may follow" in dead.error
        outs.append(good.token_ids)
    assert len(set(outs)) == 1


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"banned_tokens": (VOCAB,)}, "banned_tokens = 13 is outside"),
        ({"allowed_tokens": (1, 99)}, "allowed_tokens = 99 is outside"),
        ({"logit_bias": {50: 1.0}}, "logit_bias = 50 is outside"),
        ({"stop_token_ids": (13,)}, "stop_token_ids = 13 is outside"),
        ({"banned_words": ((1, 77),)}, "banned_words = 77 is outside"),
        ({"banned_words": ("text",)}, "needs a tokenizer"),
        ({"banned_tokens": tuple(range(VOCAB))}, "no token could be emitted"),
        ({"allowed_tokens": (1,), "banned_words": ((1,),)}, "no token could be emitted"),
        ({"allowed_tokens": (EOS,), "min_tokens": 2}, "no token could be emitted"),
        ({"regex": "[0-9]"}, "no token could be emitted"),
        ({"regex": "a", "banned_tokens": (0,)}, "no token could be emitted"),
        ({"regex": "(a"}, "regex is invalid: .*unclosed group"),
        ({"grammar": "start: foo"}, "grammar is invalid: .*unknown name"),
        ({"json_schema": {"type": "objekt"}}, "json_schema is invalid: .*objekt"),
    ],
)
def test_what_can_not_be_served_is_refused_before_any_work(params: dict, fault: str) -> None:
    engine = make()
    with pytest.raises(UserError, match=fault) as e:
        engine.submit(Request(prompt=(1, 2), params=SamplingParams(**params)))
    assert "\n" not in str(e.value)
    assert engine.idle


def test_grammars_need_a_tokenizer_and_an_end() -> None:
    request = Request(prompt=(1,), params=SamplingParams(regex="a"))
    with pytest.raises(UserError, match="regex needs a tokenizer"):
        make_engine().submit(request)
    with pytest.raises(UserError, match="end-of-sequence"):
        make_engine(grammars=toy_grammars([b"a"], ())).submit(request)


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        ({"typical_p": 0.0}, "typical_p = "),
        ({"typical_p": 1.5}, "typical_p = "),
        ({"repetition_penalty": 0}, "repetition_penalty = "),
        ({"repetition_penalty": -1.0}, "repetition_penalty = "),
        ({"presence_penalty": 2.1}, "presence_penalty = "),
        ({"frequency_penalty": -2.1}, "frequency_penalty = "),
        ({"frequency_penalty": float("nan")}, "frequency_penalty = "),
        ({"logit_bias": {1: 101}}, "logit_bias = "),
        ({"logit_bias": {-1: 1}}, "logit_bias = "),
        ({"logit_bias": 5}, "logit_bias must map"),
        ({"allowed_tokens": ()}, "allowed_tokens = "),
        ({"allowed_tokens": ("a",)}, "allowed_tokens = "),
        ({"banned_tokens": (-1,)}, "banned_tokens = "),
        ({"banned_words": ("",)}, "banned_words = "),
        ({"banned_words": ((),)}, "banned_words = "),
        ({"min_tokens": -1}, "min_tokens = "),
        ({"min_tokens": 10, "max_tokens": 9}, "min_tokens = 10 "),
        ({"regex": ""}, "regex = "),
        ({"regex": "a", "grammar": "b"}, "regex and grammar exclude"),
        ({"json_schema": "{"}, "json_schema can't be read"),
        ({"json_schema": "[]"}, "json_schema must be a JSON object"),
        ({"json_schema": {}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: dict, fault: str) -> None:
    with pytest.raises(UserError, match=fault):
        SamplingParams(**params)


def test_parameters_stay_immutable_and_hashable() -> None:
    given = {
        "logit_bias": {5: 1, 2: -1.0},
        "json_schema": {"type": "object"},
        "banned_words": ["a", [1, 2]],
        "allowed_tokens": [3],
    }
    params = SamplingParams(**given)  # type: ignore[arg-type]
    assert params.logit_bias == ((2, -1.0), (5, 1))
    assert params.banned_words == ("a", (1, 2))
    assert hash(params) == hash(SamplingParams(**given))  # type: ignore[arg-type]
