"""Seed prompts: many, different, reproducible, and never a benchmark's."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import UserError
from paceline.train import seed_words
from paceline.train.overlap import NGRAM, Forbidden, Seen, text_key
from paceline.train.seeds import (
    Seed,
    SeedStats,
    admissible,
    from_folders,
    from_jsonl,
    invented,
    mixed,
    python_functions,
    word_problem,
)

NOTHING = Forbidden(())


def test_thousands_of_different_prompts_are_invented() -> None:
    stats = SeedStats()
    seeds = list(islice(admissible(invented(0), NOTHING, stats), 6000))
    assert len({s.key for s in seeds}) == len(seeds) == stats.taken == 6000
    assert not [s for s in seeds if re.search(r"[{}]", s.text) and "{{" not in s.text]
    words = {w for s in seeds for w in s.text.split()}
    assert len(words) > 1000
    assert any(len(s.turns) == 2 for s in seeds)
    assert [s.turns for s in islice(invented(0), 50)] == [s.turns for s in islice(invented(0), 50)]
    assert [s.turns for s in islice(invented(1), 50)] != [s.turns for s in islice(invented(0), 50)]


def test_every_template_can_be_filled() -> None:
    for kind, templates in seed_words.INVENTED.items():
        assert seed_words.INVENTED_WEIGHTS[kind] > 0
        for template in templates:
            assert set(re.findall(r"\{(\w+)\}", template)) <= {*seed_words.SLOTS, "n"}
    rng = np.random.default_rng(0)
    problems = {word_problem(rng) for _ in range(300)}
    assert len(problems) == 300
    assert not any("{" in p for p in problems)


def test_files_become_prompts(tmp_path: Path) -> None:
    module = (
        'def area(width: float, height: float) -> float:\n    """The area of a rectangle."""\n'
        "    if width < 0 or height < 0:\n        raise ValueError\n    return width * height\n"
    )
    (tmp_path / "shapes.py").write_text(module * 3)
    (tmp_path / "notes.md").write_text(
        "A paragraph about gardens and rain. " * 12 + "\n\n" + "x " * 99
    )
    (tmp_path / "data.bin").write_bytes(b"\0" * 500)
    elsewhere = tmp_path / "site-packages"
    elsewhere.mkdir()
    (elsewhere / "foreign.py").write_text("SECRET = 1\n" * 50)
    seeds = list(islice(from_folders([tmp_path], 0), 200))
    text = "\n".join(s.text for s in seeds)
    assert "def area" in text
    assert "gardens" in text
    assert "SECRET" not in text
    assert any(s.raw for s in seeds)
    assert len({s.text for s in seeds}) > 20
    with pytest.raises(UserError, match="no such folder"):
        next(from_folders([tmp_path / "missing"], 0))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no readable"):
        next(from_folders([tmp_path / "empty"], 0))


def test_python_functions_are_cut_with_their_stub() -> None:
    source = (
        "class A:\n    def method(self, x):\n        '''Adds one.'''\n        y = x + 1\n"
        "        print(y)\n        return y\n\ndef tiny(): pass\n"
    )
    (function,) = python_functions(source)
    assert function.stub == "def method(self, x):\n    '''Adds one.'''"
    assert function.source.endswith("    return y")
    assert function.documented
    assert python_functions("def broken(:\n") == []


def test_jsonl_prompts_and_their_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"turns": ["a", "b"], "id": 3}\n\n{"prompt": "c"}\n')
    assert [s.turns for s in from_jsonl(file)] == [("a", "b"), ("c",)]
    file.write_text('{"prompt": "c"}\n{"question": "d"}\n')
    with pytest.raises(UserError, match="line 2"):
        list(from_jsonl(file))
    with pytest.raises(UserError, match="can't be read"):
        list(from_jsonl(tmp_path / "missing.jsonl"))


def test_thirteen_words_in_a_row_are_an_overlap(tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(40)]
    file = tmp_path / "bench.jsonl"
    file.write_text(json.dumps({"id": 1, "turns": [" ".join(words), "Why so?"]}) + "\n")
    bench = Forbidden.from_files([file])
    assert bench.overlaps("before " + ", ".join(words[5 : 5 + NGRAM]).upper() + "\n after")
    assert not bench.overlaps(" ".join(words[5 : 5 + NGRAM - 1]) + " after")
    assert bench.overlaps("  why SO ")  # a short prompt as a whole
    assert not bench.overlaps("why so late")
    stats = SeedStats()
    source = iter(
        [Seed(turns=("ok", " ".join(words))), Seed(turns=("fine",)), Seed(turns=("Fine!",))]
    )
    assert [s.turns for s in admissible(source, bench, stats)] == [("fine",)]
    assert (stats.taken, stats.forbidden, stats.duplicates) == (1, 1, 1)
    file.write_text("not json\n")
    with pytest.raises(UserError, match="line 1"):
        Forbidden.from_files([file])


def test_near_duplicates_are_dropped() -> None:
    seen = Seen()
    text = " ".join(f"w{i}" for i in range(60))
    assert seen.is_new(text)
    assert not seen.is_new(text.upper() + "!")
    assert not seen.is_new(text + " and one more word")
    assert seen.is_new(" ".join(f"v{i}" for i in range(60)))
    assert text_key("A b,  c") == text_key("a B c.")


def test_an_endless_source_without_news_ends() -> None:
    def same():
        while True:
            yield Seed(turns=("again",))

    stats = SeedStats()
    assert len(list(admissible(same(), NOTHING, stats, patience=50))) == 1
    a = iter([Seed(turns=("a",))])
    b = iter([Seed(turns=("b",)), Seed(turns=("c",))])
    assert [s.turns[0] for s in mixed([a, b])] == ["a", "b", "c"]
