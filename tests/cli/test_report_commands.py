"""`paceline report` and `paceline peers` as a user meets them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fake_server import Behaviour, serving
from report_data import cell, result

from paceline.cli import main


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_report_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(result(cell()).model_dump_json())
    assert run(monkeypatch, "report", str(tmp_path), "--json") == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert Path(said["report"]).read_text().startswith("<!doctype html>")
    assert len(said["files"]) == 5
    assert run(monkeypatch, "report", str(tmp_path / "none")) == 2
    assert "no results" in capsys.readouterr().err


def test_peers_against_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    behaviour = Behaviour(bursts=(1, 3), counters=True)
    with serving(behaviour) as url:
        status = run(
            monkeypatch, "peers", "--peer", f"mine={url}", "-w", "code-edit", "--prompts", "1",
            "-n", "4", "--repeats", "2", "--out", str(tmp_path), "--json",
        )  # fmt: skip
    out = capsys.readouterr()
    assert status == 0, out.err
    arms = {f"{a['system']} {a['mode']}": a for a in json.loads(out.out)["arms"]}
    assert set(arms) == {"paceline plain", "paceline speculative", "mine served"}
    mine = arms["mine served"]
    assert mine["error"] is None
    assert (mine["tokens"], mine["counted"], mine["equal_lengths"]) == (8, "stream-usage", True)
    assert mine["tau"] == pytest.approx(2.0)
    assert mine["versus_ours"]["low"] > 0
    assert "had 3 there" in mine["notes"][-1]  # the fake server's count of the prompt
    assert behaviour.seen[-1]["prompt"][:1] == [1]  # ids, as our chat template renders them
    page = (tmp_path / "report.html").read_text()
    assert "Peers on code-edit" in page
    assert "mine" in page


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--peer", "nothing"], "unknown"),
        (["--peer", "http://127.0.0.1:9", "-n", "1"], "use 2 or more"),
        (["--peer", "http://127.0.0.1:9", "--prompts", "0"], "--prompts 0"),
        (["--peer", "transformers", "--peer-python", "x"], "--peer llamacpp"),
    ],
)
def test_mistakes_are_refused_before_anything_is_loaded(
    args: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, "peers", "-m", "no-such-model", *args) == 2
    assert says in capsys.readouterr().err.replace("\n", " ")
