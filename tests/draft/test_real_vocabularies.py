"""SmolLM2-135M drafting for Qwen2.5-Coder: two real tokenizers."""

from __future__ import annotations

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.models.catalog import pull
from paceline.models.loading import open_checkpoint
from paceline.registry import shared_ids

PROMPT = "Write a Python function that returns the n-th Fibonacci number."


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["intersect", "slem"])
def test_another_tokenizer_changes_no_text(vocabulary: str) -> None:
    torch.set_num_threads(2)
    pull("qwen2.5-coder-0.5b")
    llm = LLM(
        "qwen2.5-coder-0.5b", draft="smollm2-135m", draft_vocab=vocabulary, policy="fixed", k=4
    )
    prompt = llm.chat_tokens([{"role": "user", "content": PROMPT}])
    plain = llm.generate(prompt, SamplingParams(max_tokens=64, k=0))[0]
    fast = llm.generate(prompt, SamplingParams(max_tokens=64))[0]
    torch.set_num_threads(1)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tau > 1.3


@pytest.mark.slow
def test_shared_tokens_spell_alike() -> None:
    target = open_checkpoint("qwen2.5-coder-0.5b").tokenizer
    draft = open_checkpoint("smollm2-135m").tokenizer
    theirs = shared_ids(target, draft)
    pairs = [(i, j) for i, j in enumerate(theirs) if j >= 0]
    assert len(pairs) > 20_000
    assert all(target.token_text(i) == draft.token_text(j) for i, j in pairs[::97])
    assert theirs[target.encode("<|im_end|>")[0]] == draft.encode("<|im_end|>")[0]
