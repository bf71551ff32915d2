"""Real weights: SmolLM2-135M against transformers, and its perplexity."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from paceline.api import LLM
from paceline.models.base import RowGroup, pack
from paceline.models.catalog import pull
from paceline.models.gguf_weights import iter_tensors
from paceline.models.loading import open_checkpoint
from paceline.types import SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village,",
    "The three laws of thermodynamics are",
    "import numpy as np\n\n",
    "Water boils at 100 degrees",
    "To be, or not to be,",
    "The recipe needs two eggs, 200 g of flour and",
    "SELECT name, age FROM users WHERE",
    "In 1969, the first humans",
    "Dear Sir or Madam,\n\nI am writing to",
    "Les chats sont des animaux",
    "1, 1, 2, 3, 5, 8, 13,",
    "The mitochondria is",
    "<html>\n<head>\n",
    "My favourite colour is",
    "A list of prime numbers: 2, 3, 5, 7, 11,",
    "class Stack:\n    def __init__(self):\n",
    "The quick brown fox",
    "Photosynthesis converts",
]


@pytest.fixture(scope="module")
def llm(smollm_path: Path) -> LLM:
    return LLM("smollm2-135m", draft="ngram", policy="fixed", dtype="float32")


@pytest.fixture(scope="module")
def reference(smollm_path: Path) -> transformers.LlamaForCausalLM:
    config = open_checkpoint("smollm2-135m", dtype="float32").config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_context,
            rms_norm_eps=config.rms_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=True,
        )
    )
    state = dict(iter_tensors(smollm_path, config, torch.float32))
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing in ([], ["lm_head.weight"])
    assert unexpected == []
    theirs.tie_weights()
    return theirs.float().eval()


def test_greedy_tokens_equal_transformers(llm: LLM, reference) -> None:
    """20 prompts x 64 tokens in one speculating batch; each token is the argmax that
    transformers gives for the tokens before it."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params)
    assert sum(o.stats.accepted for o in outputs) > 0
    for output in outputs:
        tokens = [*output.prompt_tokens, *output.token_ids]
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens[:-1]])).logits[0]
        expected = logits[len(output.prompt_tokens) - 1 :].argmax(-1).tolist()
        assert list(output.token_ids) == expected


@pytest.mark.parametrize("k", [3, 16])
def test_speculative_text_equals_plain_text(llm: LLM, k: int) -> None:
    code = "Repeat this code:\n```python\nfor i in range(10):\n    print(i, i * i)\n```\n"
    prompts = [llm.chat_tokens([{"role": "user", "content": code}]), PROMPTS[1]]
    plain = llm.generate(prompts, SamplingParams(max_tokens=32, k=0))
    fast = llm.generate(prompts, SamplingParams(max_tokens=32, k=k))
    assert [(o.token_ids, o.text) for o in fast] == [(o.token_ids, o.text) for o in plain]
    assert fast[0].stats.accepted > 0
    sampled = [
        llm.generate(prompts, SamplingParams(max_tokens=16, k=n, temperature=0.8, seed=5))
        for n in (0, k)
    ]
    assert [o.token_ids for o in sampled[0]] == [o.token_ids for o in sampled[1]]


def test_streamed_text_equals_the_whole(llm: LLM) -> None:
    prompt = llm.chat_tokens([{"role": "user", "content": "Write three emoji: 😀 🎉 🚀"}])
    pieces = []
    for step in llm.stream(prompt, SamplingParams(max_tokens=40)):
        pieces.append(step.text)
        if step.finish_reason is not None:
            result = llm.result(step.request_id)
    assert "".join(pieces) == result.text == llm.tokenizer.decode(result.token_ids)


def perplexity(model, tokenizer) -> float:
    """Over the first 512 tokens of four files of Python's library."""
    folder = Path(ast.__file__).parent
    total, count = 0.0, 0
    for name in ("ast.py", "textwrap.py", "heapq.py", "shelve.py"):
        text = (folder / name).read_text(encoding="utf-8")
        tokens = tokenizer.encode(text)[:512]
        group = RowGroup(
            tokens=np.array(tokens, np.int32),
            parents=np.arange(-1, 511, dtype=np.int32),
            context=0,
            table=np.arange(16, dtype=np.int32),
            wanted=np.arange(511, dtype=np.int32),
        )
        logits = model.forward(pack([group], 32), model.new_kv(16, 32)).logits_RV
        losses = torch.nn.functional.cross_entropy(
            logits, torch.tensor(tokens[1:]), reduction="sum"
        )
        total, count = total + float(losses), count + 511
    return math.exp(total / count)


def test_perplexity_is_that_of_the_model(llm: LLM) -> None:
    """A wrong permutation, rope base or block format gives hundreds."""
    assert 4 < perplexity(llm.engine.model, llm.tokenizer) < 14


@pytest.mark.slow
def test_perplexity_of_the_larger_model() -> None:
    pull("qwen2.5-coder-1.5b")
    checkpoint = open_checkpoint("qwen2.5-coder-1.5b", dtype="bfloat16")
    assert 2 < perplexity(checkpoint.load(), checkpoint.tokenizer) < 4.5


@pytest.mark.slow
def test_a_real_draft_agrees_as_often_as_it_should() -> None:
    """The 0.5B for the 1.5B on code, k = 4, greedy: tau near 4.5 (other engines agree on
    about 0.97 of the tokens); far below would mean a wrong cache or prompt format."""
    llm = LLM("qwen2.5-coder-1.5b", draft="qwen2.5-coder-0.5b", policy="fixed", k=4)
    question = "Write a Python function that returns the n-th Fibonacci number, with a docstring."
    prompt = llm.chat_tokens([{"role": "user", "content": question}])
    plain = llm.generate(prompt, SamplingParams(max_tokens=96, k=0))[0]
    fast = llm.generate(prompt, SamplingParams(max_tokens=96))[0]
    assert fast.token_ids == plain.token_ids
    assert fast.stats.tau > 3.5
