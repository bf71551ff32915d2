"""The engine on the native core: speculative text is plain text, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, EngineConfig, Numerics, SamplingParams, UserError
from paceline.models.native import NativeModel

PROMPTS = [
    "def fibonacci(n):\n    ",
    "Repeat: one two three one two three one two three one",
    "The capital of France is",
]
CONFIG = EngineConfig(kv_tokens=2048, prefill_chunk=16)


@pytest.fixture(scope="module")
def plain(smollm_path: Path) -> dict[float, list[tuple[tuple[int, ...], float]]]:
    llm = LLM("smollm2-135m", engine=CONFIG)
    return {t: texts(llm, t) for t in (0.0, 0.9)}


def texts(llm: LLM, temperature: float) -> list[tuple[tuple[int, ...], float]]:
    """Tokens and the exact log-probability of the last one."""
    params = SamplingParams(
        max_tokens=40, temperature=temperature, seed=3, logprobs=0, rule="walk", ignore_eos=True
    )
    return [(o.token_ids, o.tokens[-1].logprob) for o in llm.generate(PROMPTS, params)]


def test_auto_takes_the_native_core(smollm_path: Path) -> None:
    llm = LLM("smollm2-135m", engine=CONFIG)
    assert isinstance(llm.engine.model, NativeModel)
    assert llm.engine.model.info.numerics is Numerics.ROW_INVARIANT
    torch_llm = LLM("smollm2-135m", engine=CONFIG, dtype="float32")
    assert torch_llm.engine.model.info.numerics is Numerics.TOLERANT


@pytest.mark.parametrize(
    "kwargs",
    [
        {"draft": "ngram", "k": 7},
        {"draft": "smollm2-135m", "k": 4},
        {"draft": "smollm2-135m", "k": 3, "draft_weights": "stored"},
        {"draft": "smollm2-135m", "tree": "2x2x1"},
        {"draft": "smollm2-135m", "tree": "paths:6"},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_bits_with_every_draft(kwargs: dict, temperature: float, plain) -> None:
    """Ids and log-probabilities, to the last bit, at any chunking and in any company."""
    engine = EngineConfig(kv_tokens=2048, prefill_chunk=5)
    llm = LLM("smollm2-135m", engine=engine, policy="fixed", **kwargs)
    assert texts(llm, temperature) == plain[temperature]
    assert llm.engine.stats.totals.accepted > 0


def test_a_stored_draft_of_itself_is_never_refused(smollm_path: Path) -> None:
    llm = LLM(
        "smollm2-135m",
        draft="smollm2-135m",
        draft_weights="stored",
        policy="fixed",
        engine=CONFIG,
    )
    stats = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))[0].stats
    assert stats.accepted == stats.drafted > 0


def test_what_was_done_to_the_draft_is_said(smollm_path: Path) -> None:
    llm = LLM("smollm2-135m", draft="smollm2-135m", engine=CONFIG)
    assert any("4 bits" in note for note in llm.notes)
    with pytest.raises(UserError, match="draft weights 'slow'"):
        LLM("smollm2-135m", draft="smollm2-135m", draft_weights="slow")
