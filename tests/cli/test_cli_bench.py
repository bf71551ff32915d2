"""`paceline bench` as a user runs it: results, resumption, interruption, mistakes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import runner
from paceline.bench.results import load_results
from paceline.cli import main

SMALL = ("--prompts", "1", "-n", "6", "--repeats", "1", "-w", "code-edit")


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", *args])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_small_matrix_resumes_and_survives_an_interruption(
    smollm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "out"
    args = (*SMALL, "--k", "2,3", "-t", "0,1", "--out", str(out), "--json")
    measured: list[int] = []
    real = runner.measure

    def once(*a: Any) -> Any:
        if measured:
            raise KeyboardInterrupt
        measured.append(1)
        return real(*a)

    monkeypatch.setattr(runner, "measure", once)
    monkeypatch.setattr(runner, "read_bandwidth", lambda model: 1e10)  # it takes a second
    assert call(monkeypatch, *args) == 130
    text = capsys.readouterr()
    assert text.out == ""
    assert "2 finished cells are in" in text.err
    assert len(load_results(out).cells) == 2

    # The same command goes on: the other temperature alone is measured.
    monkeypatch.setattr(runner, "measure", lambda *a: (measured.append(2), real(*a))[1])
    assert call(monkeypatch, *args) == 0
    text = capsys.readouterr()
    assert measured == [1, 2]
    assert "2 cells were measured earlier" in text.err
    (line,) = text.out.splitlines()
    cells = json.loads(line)["cells"]
    assert sorted((c["k"], c["temperature"]) for c in cells) == [(2, 0), (2, 1), (3, 0), (3, 1)]
    for c in cells:
        assert c["lossless"] is True
        assert c["verdict"] == "identical"
        assert c["speedup_low"] <= c["speedup"] <= c["speedup_high"]
        assert (c["workload"], c["drafter"], c["policy"]) == ("code-edit", "ngram", "fixed")
        assert c["tau"] >= 1
        assert c["concurrency"] == 1

    # Once more: nothing is left to do, and no model is loaded.
    monkeypatch.setattr(runner, "LLM", None)
    assert call(monkeypatch, *args) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == cells

    result = load_results(out)
    assert len(result.runs) == 2
    assert "--json" in result.runs[0].command
    assert result.cells[0].models[0].sha256
    assert result.cells[0].speculative.machine.weight_read_bytes_s
    assert (out / "cells.parquet").exists()
    assert (out / "samples.parquet").exists()

    assert call(monkeypatch, *args, "--seed", "1") == 2
    assert "seed was 0 and is now 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--k", "two"), "'two' is no number"),
        (("--k", ","), "--k is empty"),
        (("--k", "0"), "k = 0"),
        (("-t", "-1"), "temperature = -1"),
        (("--draft", "none"), "'none'"),
        (("--draft", "nonsense"), "nonsense"),
        (("-w", "missing.jsonl"), "missing.jsonl"),
        (("-w", "suite:cooking"), "cooking"),
        (("-w", "random:99999"), "99999"),
        (("--lengths", "long"), "long"),
        (("--repeats", "0"), "repeats = 0"),
        (("--max-tokens", "0"), "max_tokens = 0"),
        (("--prompts", "0"), "prompts = 0"),
        (("--policy", "clever"), "clever"),
        (("--ablate", "tree"), "needs a draft model"),
        (("--ablate", "colour"), "colour"),
        (("--rule", "nonsense"), "nonsense"),
        (("--model", "missing.gguf"), "missing.gguf"),
        (("--tree", "9x9"), "9x9"),
        (("--memory-limit", "much"), "much"),
    ],
)
def test_a_mistake_is_one_clear_line(
    smollm_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    args: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.setattr(runner, "LLM", None)  # refused before anything is loaded
    assert call(monkeypatch, *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert len([line for line in err.strip().splitlines() if line.startswith("error")]) == 1
