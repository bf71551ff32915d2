"""JSON schemas: always valid output, whatever is drafted; a real tokenizer; real extraction."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from devices import CONFIG, draft_cache
from toy_grammar import toy_grammars

from paceline.api import LLM
from paceline.core.shapes import level_widths
from paceline.draft.base import Drafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.tree import TreeDrafter
from paceline.draft.vocabulary import SameVocabulary
from paceline.engine.engine import Engine
from paceline.engine.policy import FixedBudget
from paceline.models.toy import TabularModel
from paceline.types import FinishReason, Request, SamplingParams

TOKENS = [bytes([b]) for b in b'{}[]":, abcdefmnorstlu\\/-.+E0123456789']
TOKENS += [b'":', b'",', b"true", b"false", b'{"', b"name", b"<eos>"]
EOS = len(TOKENS) - 1
V = len(TOKENS) + 2  # with padding, as real matrices have

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "on": {"type": "boolean"},
        "n": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
    },
    "required": ["name", "on", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "on", "n"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 4
        and isinstance(value["on"], bool)
        and len(value["n"]) <= 3
        and all(isinstance(i, int) and 0 <= i <= 99 for i in value["n"])
    )


def model(factor: float = 1.0) -> TabularModel:
    return TabularModel(V, order=3, change=lambda context, logits: factor * logits)


def drafter(name: str) -> Drafter:
    if name == "ngram":
        return NgramDrafter(longest=3, shortest=1)
    cache = draft_cache(model(-4.0), CONFIG)
    if name == "anti":
        return ModelDrafter(cache, SameVocabulary(V))
    return TreeDrafter(cache, SameVocabulary(V), level_widths((3, 2)))


@pytest.mark.parametrize(("name", "runs"), [("anti", 200), ("anti-widths", 40), ("ngram", 40)])
def test_a_schema_is_always_met(name: str, runs: int) -> None:
    """With a draft that is always wrong, and with trees and copies."""
    engine = Engine(
        model(),
        drafter(name),
        FixedBudget(5),
        CONFIG,
        eos_ids=frozenset({EOS}),
        grammars=toy_grammars(TOKENS, (EOS,)),
        audit=True,
    )
    params = SamplingParams(json_schema=SCHEMA, temperature=1.0, seed=1, n=runs, max_tokens=80)
    numbers = engine.submit(Request(prompt=(0, 9), params=params))
    list(engine.stream())
    texts = set()
    for number in numbers:
        output = engine.result(number)
        assert output.finish_reason is FinishReason.EOS
        text = b"".join(TOKENS[i] for i in output.token_ids[:-1]).decode()
        assert valid(text), text
        texts.add(text)
    assert len(texts) > runs / 2


@pytest.fixture(scope="module")
def llm(smollm_path: Path) -> LLM:
    return LLM("smollm2-135m", draft="ngram", policy="fixed", dtype="float32")


def test_extraction_with_copied_drafts_equals_plain_decoding(llm: LLM) -> None:
    prompt = (
        "Records: Johannes Kepler was born in Weil der Stadt in 1571. Galileo Galilei was born "
        'in Pisa in 1564. As JSON: [{"name": "Johannes Kepler", "place": "Weil der Stadt", '
        '"year": 1571}, {"name": "Galileo Galilei", "place": "Pisa", "year": 1564}]\n'
        "The record of Johannes Kepler alone: "
    )
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "place": {"type": "string", "maxLength": 30},
            "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        },
        "required": ["name", "place", "year"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
    }
    plain, fast = (
        llm.generate(prompt, SamplingParams(max_tokens=48, json_schema=schema, k=k))[0]
        for k in (0, 6)
    )
    assert fast.token_ids == plain.token_ids
    assert fast.finish_reason is FinishReason.EOS
    assert json.loads(fast.text)["year"] == 1571
    assert fast.stats.tau > 1.3


def test_masks_of_a_real_tokenizer_spell_the_language(llm: LLM) -> None:
    """Any allowed token keeps the text a beginning of the language."""
    cursor = llm.engine._admission.cursor(SamplingParams(regex="(foo bar|fool), [0-9]{2}!"))
    assert cursor is not None
    ids, text, rng = [], "", np.random.default_rng(1)
    while True:
        mask = cursor.mask(ids)
        assert mask is not None
        for i in np.flatnonzero(mask).tolist():
            grown = text + llm.tokenizer.token_text(i)
            if i not in llm.tokenizer.eos_ids:
                digits = "".join("7" if c.isdigit() else c for c in grown)
                assert "foo bar, 77!".startswith(digits) or "fool, 77!".startswith(digits)
        ids.append(int(rng.choice(np.flatnonzero(mask))))
        if ids[-1] in llm.tokenizer.eos_ids:
            break
        text += llm.tokenizer.token_text(ids[-1])
    assert text.endswith("!")


def test_banned_words_are_texts_with_and_without_a_leading_space(llm: LLM) -> None:
    free = llm.generate("The capital of France is", SamplingParams(max_tokens=4))[0]
    assert "Paris" in free.text
    outputs = [
        llm.generate(
            "The capital of France is",
            SamplingParams(max_tokens=5, banned_words=("Paris",), k=k),
        )[0]
        for k in (0, 4)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert "Paris" not in outputs[0].text
