"""The packaged suite is whole and original to itself; files of all shapes are read or refused."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from paceline.bench.workloads import (
    DOMAINS,
    LENGTHS,
    TIERS,
    Fit,
    Item,
    compose,
    documents,
    load_workload,
    read_jsonl,
    spread,
)
from paceline.errors import UserError


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


#: A tokenizer for which each word is one token.
FIT = Fit(encode=words, limit=8192, vocab_size=500, special_ids=frozenset({0, 1, 499}))  # type: ignore[arg-type]


def all_items() -> list[Item]:
    return [*load_workload("suite").items, *load_workload("code-edit").items]


def test_every_domain_has_ten_prompts_and_every_tier_is_there() -> None:
    suite = load_workload("suite").items
    counts = Counter(i.domain for i in suite)
    assert set(counts) == set(DOMAINS)
    assert min(counts.values()) >= 10
    assert {i.tier for i in suite} == set(TIERS)
    assert sum(len(i.turns) > 1 for i in suite) >= 11
    assert len(load_workload("code-edit").items) >= 10
    assert not any(i.synthetic for i in all_items())


def test_ids_and_prompts_are_unique() -> None:
    items = all_items()
    assert len({i.id for i in items}) == len(items)
    turns = [t for i in items for t in i.turns]
    assert len(set(turns)) == len(turns)
    assert all(t == t.strip() and t for t in turns)


def test_no_thirteen_words_stand_in_two_items() -> None:
    """One prompt written from another would make the suite smaller than it looks."""
    owner: dict[tuple[str, ...], str] = {}
    texts = [(i.id, " ".join(i.turns)) for i in all_items()]
    texts += [(f"document {n}", t) for n, t in enumerate(documents()[:12])]
    for name, text in texts:
        w = words(text.lower())
        for gram in zip(*(w[i:] for i in range(13)), strict=False):
            assert owner.setdefault(gram, name) == name, " ".join(gram)


def test_prompts_vary_in_length_and_language() -> None:
    lengths = sorted(len(" ".join(i.turns)) for i in load_workload("suite").items)
    assert lengths[0] < 150
    assert lengths[-1] > 1500
    foreign = " ".join(t for i in load_workload("suite:multilingual").items for t in i.turns)
    for script in (
        "[\u0430-\u044f]",  # Cyrillic
        "[\u4e00-\u9fa5]",  # Chinese
        "[\u3041-\u3093]",  # Japanese
        "[\u0627-\u064a]",  # Arabic
        "[ñ¿]",
        "[çãê]",
    ):
        assert re.search(script, foreign), script


def test_embedded_passages_end_with_the_question() -> None:
    for domain in ("rag", "summarization"):
        for item in load_workload(f"suite:{domain}").items:
            passage, _, question = item.turns[0].rpartition("\n\n")
            assert len(passage) > 3 * len(question)


def test_one_domain_and_an_even_choice() -> None:
    assert {i.domain for i in load_workload("suite:math").items} == {"math"}
    few = load_workload("suite", prompts=11).items
    assert [i.domain for i in few] == list(DOMAINS)
    assert load_workload("suite", prompts=11) == load_workload("suite", prompts=11)
    many = load_workload("suite", prompts=24).items
    assert max(Counter(i.domain for i in many).values()) == 3
    assert spread(few, 100) == few


@pytest.mark.parametrize("length", LENGTHS)
def test_composed_prompts_have_the_length_that_they_claim(length: int) -> None:
    found = load_workload(f"throughput:{length}", fit=FIT)
    assert {i.tier for i in found.items} == set(TIERS)
    assert all(i.synthetic for i in found.items)
    for item in found.items:
        assert 0.95 * length <= len(words(item.turns[0])) <= length
    assert len({i.turns for i in found.items}) == len(found.items)


def test_composition_is_deterministic_and_depends_on_its_key() -> None:
    one = compose(200, "Why?", "a", words)  # type: ignore[arg-type]
    assert one == compose(200, "Why?", "a", words)  # type: ignore[arg-type]
    assert one != compose(200, "Why?", "b", words)  # type: ignore[arg-type]
    assert one.endswith("\n\nWhy?")


def test_lengths_beyond_the_context_are_left_out_aloud() -> None:
    small = Fit(encode=words, limit=600, vocab_size=500)  # type: ignore[arg-type]
    found = load_workload("throughput", fit=small)
    assert {i.domain for i in found.items} == {"input 128", "input 256", "input 512"}
    assert len(found.notes) == 4
    with pytest.raises(UserError, match="2048"):
        load_workload("throughput:2048", fit=small)
    nearly = Fit(encode=words, limit=8000, vocab_size=500)  # type: ignore[arg-type]
    assert "input 8192" in {i.domain for i in load_workload("throughput", fit=nearly).items}


def test_random_prompts_are_labelled_and_hold_ordinary_tokens() -> None:
    found = load_workload("random:64", prompts=3, seed=5, fit=FIT)
    assert [len(i.tokens or ()) for i in found.items] == [64] * 3
    assert all(i.synthetic for i in found.items)
    used = {t for i in found.items for t in i.tokens or ()}
    assert used <= set(range(2, 499))
    assert found == load_workload("random:64", prompts=3, seed=5, fit=FIT)
    assert found != load_workload("random:64", prompts=3, seed=6, fit=FIT)
    with pytest.raises(UserError, match="9000"):
        load_workload("random:9000", fit=FIT)


def write(path: Path, *lines: object) -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_shapes_of_other_benchmarks(tmp_path: Path) -> None:
    file = write(
        tmp_path / "mixed.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["One.", "Two."]},
        {"question_id": "s1", "category": "rag", "tier": "low", "turns": ["Three."]},
        {"task_id": "HumanEval/0", "prompt": "def f():\n"},
        {"turns": "A single text."},
        {
            "id": "m",
            "domain": "chat",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "Bye"},
            ],
        },
    )
    items = read_jsonl(file)
    assert [i.id for i in items] == ["81", "s1", "HumanEval/0", "4", "m"]
    assert [i.domain for i in items] == ["writing", "rag", "mixed", "mixed", "chat"]
    assert items[0].turns == ("One.", "Two.")
    assert items[1].tier == "low"
    assert items[3].turns == ("A single text.",)
    assert items[4].turns == ("Hi", "Bye")
    workload = load_workload(str(file), prompts=2)
    assert workload.name == "mixed"
    assert [i.domain for i in workload.items] == ["writing", "rag"]


@pytest.mark.parametrize(
    ("line", "words_"),
    [
        ("{broken", "line 2 is no JSON"),
        ('["turns"]', "line 2: expected an object"),
        ('{"text": "x"}', "line 2 has no 'turns'"),
        ('{"turns": []}', "line 2: the turns must be"),
        ('{"turns": ["", "x"]}', "line 2: the turns must be"),
        ('{"turns": [3]}', "line 2: the turns must be"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "'system'"),
        ('{"id": "1", "turns": ["x"]}', "the id '1' twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words_: str) -> None:
    file = write(tmp_path / "bad.jsonl", {"id": "1", "turns": ["fine"]}, line)
    with pytest.raises(UserError, match=re.escape(words_)) as e:
        read_jsonl(file)
    assert "bad.jsonl" in str(e.value)


@pytest.mark.parametrize(
    ("spec", "words_"),
    [
        ("missing.jsonl", "missing.jsonl"),
        ("suite:cooking", "cooking"),
        ("random:many", "many"),
        ("random:0", "random:0"),
        ("throughput:x", "throughput:x"),
    ],
)
def test_unknown_workloads_are_refused(spec: str, words_: str) -> None:
    with pytest.raises(UserError, match=re.escape(words_)):
        load_workload(spec, fit=FIT)


def test_an_empty_file_and_no_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no prompt"):
        read_jsonl(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(UserError, match="prompts = 0"):
        load_workload("suite", prompts=0)
