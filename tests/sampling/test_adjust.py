"""Bias, penalties and bans: on every node's own path, against the plainest form and
transformers' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain_law import plain_law
from transformers.generation import logits_process as hf

from paceline.core.law import PointLaw
from paceline.sampling.context import Context, Row, tree_rows
from paceline.sampling.law import EmptyLaw, NoTokenLeft, build_laws
from paceline.types import Request, SamplingParams, Sequence

V = 23
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
OUTPUT = [5, 3, 5, 8, 9, 7, 9]
END = frozenset({0, 22})

CASES: dict[str, dict] = {
    "bias": {"logit_bias": {2: 3.0, 5: -4.0, 22: 1.0}},
    "repetition": {"repetition_penalty": 1.8},
    "repetition below 1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": -0.8},
    "all penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {5: 2.0},
    },
    "allowed": {"allowed_tokens": (1, 5, 9, 10, 22)},
    "banned": {"banned_tokens": (0, 5, 11)},
    "words": {"banned_words": ((4,), (9, 11), (7, 9, 12), (9, 11, 13), (2, 6, 5))},
    "min_tokens": {"min_tokens": 9, "max_tokens": 20},
    "everything": {
        "logit_bias": {9: 4.0},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "allowed_tokens": tuple(range(16)),
        "banned_tokens": (3,),
        "banned_words": ((9, 11),),
        "min_tokens": 9,
        "top_k": 8,
        "top_p": 0.9,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
}

#: A tree whose branches end differently.
TOKENS = (OUTPUT[-1], 11, 4, 13, 9, 11, 9, 12)
PARENTS = (-1, 0, 0, 1, 2, 4, 1, 6)


def sequence(params: SamplingParams) -> Sequence:
    seq = Sequence(0, Request(prompt=PROMPT, params=params), seed=1, end_ids=END)
    seq.tokens += OUTPUT
    return seq


def path_of(node: int) -> list[int]:
    path = []
    while node > 0:
        path.append(TOKENS[node])
        node = PARENTS[node]
    return path[::-1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_node_sees_its_own_path(case: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **CASES[case])
    generator = torch.Generator().manual_seed(len(case))
    logits = 3 * torch.randn(len(TOKENS), V, generator=generator)
    kept = logits.clone()
    laws = build_laws(logits, tree_rows(sequence(params), TOKENS, PARENTS))
    assert torch.equal(logits, kept)  # the model's own logits are reported, so stay whole
    for node, law in enumerate(laws):
        output = OUTPUT + path_of(node)
        want = plain_law(logits[node].numpy(), params, PROMPT, output, END)
        np.testing.assert_allclose(law.dense().double().numpy(), want, rtol=2e-5, atol=1e-9)


def test_logits_equal_those_of_transformers() -> None:
    """All processors in transformers' order, on many contexts."""
    rng = np.random.default_rng(2)
    params = SamplingParams(
        temperature=0.7,
        logit_bias={2: 1.5, 7: -2.0},
        repetition_penalty=1.4,
        banned_words=((4,), (5, 6), (6, 5, 3)),
        banned_tokens=(8,),
        min_tokens=6,
        top_k=12,
    )
    processors = hf.LogitsProcessorList(
        [
            hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in params.logit_bias]),
            hf.RepetitionPenaltyLogitsProcessor(1.4),
            hf.NoBadWordsLogitsProcessor([list(w) for w in params.banned_words]),
            hf.MinNewTokensLengthLogitsProcessor(4, 6, sorted(END), device="cpu"),
            hf.SuppressTokensLogitsProcessor([8], device="cpu"),
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(12),
        ]
    )
    for _ in range(60):
        tokens = rng.integers(3, 8, 4 + rng.integers(0, 9)).tolist()
        logits = torch.from_numpy(rng.normal(0, 2, (1, V)).astype(np.float32))
        want = processors(torch.tensor([tokens]), logits.clone()).softmax(-1)[0]
        context = Context(tokens, 4, frozenset(tokens[:4]), END)
        law = build_laws(logits, [Row(params, context)])[0]
        torch.testing.assert_close(law.dense(), want, rtol=2e-5, atol=1e-8)


def test_min_length_equals_that_of_transformers() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=3)
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    for n in range(5):
        tokens = list(PROMPT) + OUTPUT[:n]
        processor = hf.MinLengthLogitsProcessor(len(PROMPT) + 3, sorted(END), device="cpu")
        want = processor(torch.tensor([tokens]), logits.clone()).softmax(-1)[0]
        context = Context(tokens, len(PROMPT), frozenset(PROMPT), END)
        law = build_laws(logits, [Row(params, context)])[0]
        torch.testing.assert_close(law.dense(), want, rtol=2e-5, atol=1e-8)


def test_one_allowed_token_is_a_point_whatever_the_logits() -> None:
    params = SamplingParams(temperature=1.0, allowed_tokens=(3, 4), banned_tokens=(4,))
    assert build_laws(torch.randn(1, V), [params])[0] == PointLaw(3, V)


def test_a_draft_can_not_be_forced_to_a_token_that_it_lacks() -> None:
    logits = torch.randn(1, V)
    logits[0, 3] = -torch.inf
    for allowed in ((3,), (3, 4)):
        params = SamplingParams(allowed_tokens=allowed, banned_tokens=(4,))
        assert build_laws(logits, [params], masked=True) == [EmptyLaw(V)]


def test_no_allowed_token_is_empty_and_says_so_when_drawn() -> None:
    params = SamplingParams(temperature=1.0, allowed_tokens=(3,), banned_tokens=(3,))
    for p in (params, SamplingParams(banned_tokens=tuple(range(V)))):
        law = build_laws(torch.randn(1, V), [p])[0]
        assert isinstance(law, EmptyLaw)
        assert law.probability(3) == 0.0
        with pytest.raises(NoTokenLeft):
            law.sample(0.5)


def test_ids_that_a_draft_lacks_are_left_out() -> None:
    """A draft's matrix may be smaller than the target's; `everything` names ids of both."""
    for case in CASES.values():
        params = SamplingParams(temperature=1.0, **case)
        law = build_laws(torch.randn(1, 16), tree_rows(sequence(params), [9], [-1]))[0]
        assert law.size == 16


def test_rows_cost_nothing_where_no_transform_looks_at_tokens() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, logit_bias={1: 1.0}, banned_tokens=(2,))
    rows = tree_rows(sequence(params), TOKENS, PARENTS)
    assert all(row is rows[0] and row.context is None for row in rows)
    with pytest.raises(ValueError, match="give a context"):
        Row(SamplingParams(presence_penalty=1.0))
