"""The command line as a user runs it: output, JSON, exit codes, one-line errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.cli import main

BASE = [sys.executable, "-m", "paceline"]


def call(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [*BASE, *args],
        input=stdin if stdin is not None else "",
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
        check=False,
    )


def test_json_is_the_last_line_and_alone_on_stdout(smollm_path: Path) -> None:
    done = call("generate", "The capital of France is", "-n", "8", "--logprobs", "2", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    output = value["outputs"][0]
    assert output["completion_tokens"] == len(output["tokens"]) == 8
    assert "Paris" in output["text"]
    assert len(output["tokens"][0]["top_logprobs"]) == 2
    assert output["guarantee"] == "exact_greedy"
    assert value["engine"]["kv_blocks_used"] == value["engine"]["kv_blocks_cached"]


def test_prompt_from_stdin_and_file_give_the_same_text(smollm_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("The capital of France is")
    by_stdin = call("generate", "-", "-n", "8", stdin="The capital of France is")
    by_file = call("generate", "--file", str(file), "-n", "8", "--show")
    assert by_stdin.returncode == by_file.returncode == 0, by_stdin.stderr + by_file.stderr
    assert by_stdin.stdout == by_file.stdout
    assert "Paris" in by_stdin.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("generate", "x", "--model", "missing.gguf"), "missing.gguf"),
        (("generate", "x", "--model", "smolm2-135m"), "smollm2-135m"),
        (("generate", "x", "--temperature", "-1"), "temperature = -1"),
        (("generate", "x", "--top-p", "0"), "top_p = 0"),
        (("generate", "x", "-k", "-2"), "k = -2"),
        (("generate", "x", "--policy", "brave"), "adaptive or fixed"),
        (("generate", "x", "--profile", "missing.json"), "missing.json"),
        (("generate", "x", "--dtype", "int3"), "int3"),
        (("generate", ""), "empty"),
        (("generate", "x", "--file", "missing.txt"), "not both"),
        (("generate", "--file", "missing.txt"), "missing.txt"),
        (("generate", "x", "--rule", "nonsense"), "nonsense"),
        (("generate", "x", "--system", "y"), "--chat"),
        (("generate", "x", "--kv-tokens", "0"), "kv_tokens = 0"),
        (("generate", "x", "--memory-limit", "much"), "much"),
        (("generate", "x", "--memory-limit", "50MB"), "available"),
        (("generate", "word " * 300, "--kv-tokens", "128"), "tokens"),
        (("pull", "nonsense"), "nonsense"),
        (("chat", "--draft", "smollm2-135m", "--tree", "sequoia:8"), "sequoia:8"),
        (("generate", "x", "--max-tokens", "many"), "max-tokens"),
        (("generate", "x", "--no-such-flag"), "no-such-flag"),
    ],
)
def test_a_mistake_is_one_clear_line(
    smollm_path: Path, args: tuple[str, ...], words: str, monkeypatch, capsys
) -> None:
    """In this process: `main` ends with the exit code that a shell would see."""
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    lines = [line for line in err.strip().splitlines() if not line.startswith("note: ")]
    assert len(lines) == 1


def test_a_damaged_file_is_refused(smollm_path: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm_path.read_bytes()[:5_000_000])
    done = call("generate", "x", "--model", str(cut))
    assert done.returncode == 2
    assert "cut.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_ends_cleanly(smollm_path: Path) -> None:
    process = subprocess.Popen(
        [*BASE, "generate", "Hello", "-n", "4000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.read(1)  # it has begun
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_chat_keeps_the_conversation(smollm_path: Path) -> None:
    lines = "My name is Ada.\n/nonsense\nWhat is my name?\n/exit\n"
    done = call("chat", "-t", "0", "-n", "12", stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "unknown command /nonsense" in done.stderr
    assert len(done.stdout.strip().splitlines()) >= 2
