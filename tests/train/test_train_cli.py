"""`paceline train` as a user runs it: captured, trained, and refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.models.heads.formats import open_head


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["paceline", "train", *map(str, args)])
    with pytest.raises(SystemExit) as e:
        main()
    out, err = capsys.readouterr()
    return int(e.value.code or 0), out, " ".join(err.split())


def test_capture_then_train(
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"turns": [f"number {i}", "why?"]} for i in range(30)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    avoided = tmp_path / "bench.jsonl"
    avoided.write_text('{"turns": ["number 3"]}\n')
    data = tmp_path / "data"
    capture = [
        "capture", "--model", tiny_target, "--dtype", "float32", "--out", data, "--tokens", 900,
        "--prompts", prompts, "--no-invent", "--avoid", avoided, "-n", 12, "--batch", 4,
        "--max-prompt", 120, "--json",
    ]  # fmt: skip
    code, out, _ = run(monkeypatch, capsys, *capture)
    assert code == 0
    value = json.loads(out.splitlines()[-1])
    assert value["tokens"] >= 900
    assert value["seeds"]["forbidden"] == 1
    code, out, err = run(monkeypatch, capsys, *capture)
    assert json.loads(out.splitlines()[-1])["new_tokens"] == 0
    assert "already" in err
    code, out, _ = run(
        monkeypatch, capsys, "medusa", "--model", tiny_target, "--data", data, "--out",
        tmp_path / "run", "--vocabulary", 64, "--heads", 2, "--pack-tokens", 200, "--epochs", 1,
        "--save-dtype", "float32", "--json",
    )  # fmt: skip
    assert code == 0
    value = json.loads(out.splitlines()[-1])
    assert value["finished"]
    assert value["updates"] > 1
    head = open_head(tmp_path / "run" / "head", n_layers=8, vocab_size=260)
    assert head.config.draft_vocab_size == 64
    assert "medusa" in head.about.provenance["command"]
    assert (tmp_path / "run" / "curve.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("prompts", "--count", 0), "count = 0"),
        (("prompts", "--count", 9, "--batch", 0), "n = 0"),
        (("prompts", "--count", 9, "-t", 0), "temperature = 0"),
        (("capture", "--tokens", 0), "tokens = 0"),
        (("capture", "--tokens", 9, "--no-invent"), "nothing to ask"),
        (("capture", "--tokens", 9, "--taps", "2,99"), "tap 99 is no layer"),
        (("capture", "--tokens", 9, "--taps", "two"), "is not understood"),
        (("capture", "--tokens", 9, "--text", "/no/such"), "no such folder"),
        (("capture", "--tokens", 9, "--avoid", "/no/such"), "can't be read"),
        (("capture", "--tokens", 9, "-t", "-1"), "temperature"),
        (("eagle3", "--data", "/no/such"), "paceline train capture"),
        (("eagle3", "--data", "/no/such", "--loss", "mse"), "ce or overlap"),
        (("eagle3", "--data", "/no/such", "--init", "x"), "target or random"),
        (("eagle3", "--data", "/no/such", "--threads", "0"), "threads = 0"),
        (("medusa", "--data", "/no/such", "--heads", "99"), "heads = 99"),
        (("eagle1", "--data", "/no/such", "--lr", "-1"), "lr = -1"),
    ],
)
def test_mistakes_are_one_line(
    args: tuple[object, ...],
    words: str,
    tiny_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = ("--model", tiny_target, "--out", tmp_path / "out")
    code, out, err = run(monkeypatch, capsys, *args, *where)
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert out == ""
