"""Prompts that a chat model writes: its own turn's text, never twice, going on after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from train_devices import ENGINE

from paceline import LLM, UserError
from paceline.train.overlap import Forbidden
from paceline.train.own_prompts import PromptPlan, Written, opening, write_prompts
from paceline.train.seeds import from_jsonl


@pytest.fixture(scope="module")
def llm(tiny_target: Path) -> LLM:
    return LLM(str(tiny_target), draft="none", dtype="float32", engine=ENGINE)


@pytest.fixture(autouse=True)
def wordy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model writes bytes, not words."""
    monkeypatch.setattr("paceline.train.own_prompts._is_prompt", lambda text: len(text) > 3)


def write(llm: LLM, out: Path, count: int, *avoid: str, seed: int = 0) -> Written:
    plan = PromptPlan(count=count, seed=seed, temperature=1.6, top_p=1.0, max_tokens=200, batch=4)
    return write_prompts(llm, out, plan, Forbidden(avoid))


def prompts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]


def test_the_opening_ends_where_the_user_begins(llm: LLM) -> None:
    begin = opening(llm)
    assert llm.tokenizer.decode(list(begin), skip_special=False) == "<|im_start|>"
    whole = llm.chat_tokens([{"role": "user", "content": "hello"}])
    assert whole[: len(begin)] == begin


def test_prompts_are_new_and_go_on_after_a_kill(llm: LLM, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    done = write(llm, whole, 12)
    assert done.prompts >= 12
    assert len(set(prompts(whole))) == done.prompts
    assert [seed.turns[0] for seed in from_jsonl(whole)] == prompts(whole)
    write(llm, cut, 5)
    # a kill in the middle of a line: it is dropped with its batch's later ones
    with cut.open("ab") as file:
        file.write('{"prompt": "half an \N{LATIN SMALL LETTER E WITH ACUTE}'.encode()[:-1])
    again = write(llm, cut, 12)
    assert cut.read_text() == whole.read_text()
    assert again.prompts == done.prompts
    assert write(llm, cut, 3).prompts == done.prompts  # there already: nothing is written
    assert cut.read_text() == whole.read_text()


def test_a_benchmark_prompt_is_passed_over(llm: LLM, tmp_path: Path) -> None:
    write(llm, tmp_path / "a.jsonl", 6)
    unwanted = prompts(tmp_path / "a.jsonl")[0]
    done = write(llm, tmp_path / "b.jsonl", 6, unwanted)
    assert done.forbidden >= 1
    assert unwanted not in prompts(tmp_path / "b.jsonl")


def test_a_model_with_nothing_new_ends(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.train.own_prompts.PATIENCE", 2)
    monkeypatch.setattr("paceline.train.own_prompts.Seen.is_new", lambda self, text: False)
    done = write(llm, tmp_path / "none.jsonl", 6)
    assert done.prompts == 0
    assert done.duplicates > 0


def test_what_does_not_fit_is_refused(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with pytest.raises(UserError, match="count = 0"):
        write(llm, path, 0)
    write(llm, path, 3)
    with pytest.raises(UserError, match="begun with --seed 0"):
        write(llm, path, 9, seed=1)
    path.write_text('{"turns": ["x"]}\n')
    with pytest.raises(UserError, match="choose another --out"):
        write(llm, path, 9)
    assert path.read_text() == '{"turns": ["x"]}\n'
    path.write_text("notes without an end of line")
    with pytest.raises(UserError, match="choose another --out"):
        write(llm, path, 9)
    assert path.read_text() == "notes without an end of line"
    with pytest.raises(UserError, match="temperature = 0"):
        PromptPlan(count=3, temperature=0.0)
    with pytest.raises(UserError, match="n = 0"):
        PromptPlan(count=3, batch=0)
    with pytest.raises(UserError, match="seed = -1 is"):
        PromptPlan(count=3, seed=-1)
    bare = LLM(str(_without_template(llm, tmp_path)), draft="none", dtype="float32", engine=ENGINE)
    with pytest.raises(UserError, match="no chat template"):
        write(bare, tmp_path / "b.jsonl", 3)
    assert not (tmp_path / "b.jsonl").exists()


def _without_template(llm: LLM, folder: Path) -> Path:
    from train_devices import write_target

    bare = write_target(folder / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    return bare
