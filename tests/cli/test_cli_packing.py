"""A model's first start packs its weights, which takes a while: every command says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import pytest
from train_devices import write_target

from paceline.bench import advise as advisor
from paceline.bench import runner
from paceline.cli import bench, common, demo, generate, main, peers, train_capture
from paceline.cli import train_layerskip as layerskip
from paceline.models.native import is_available

pytestmark = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return write_target(tmp_path / "tiny", max_position_embeddings=4096, **SHAPE)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What spinners and bars show, in order."""
    texts: list[str] = []

    @contextmanager
    def status(text: str) -> Iterator[Callable[[str], None]]:
        texts.append(text)
        yield texts.append

    class Bar(bench.Progress):
        def update(self, *args, description: str | None = None, **more) -> None:
            texts.extend([] if description is None else [description])
            super().update(*args, description=description, **more)

    monkeypatch.setattr(common, "status", status)
    monkeypatch.setattr(bench, "Progress", Bar)
    return texts


def stop(*args: object, **options: object) -> None:
    """In place of what follows the loading of models."""
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "owner", "name"),
    [
        (("generate", "x"), generate.LLM, "tokens"),
        (("chat",), common.console, "input"),
        (("demo",), demo, "_compare"),
        (("bench", "--no-chat", "-w", "random:8", "--repeats", "1"), runner, "read_bandwidth"),
        (("advise", "-d", "ngram"), advisor, "collect"),
        (("peers", "--peer", "transformers"), peers, "peer_prompts"),
        (("train", "capture", "--tokens", "9", "--out", "OUT"), train_capture.cap, "capture"),
        (("train", "layerskip", "--prompts", "PROMPTS"), layerskip, "find_mask"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_packing_is_shown_once(
    folder: Path,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    owner: object,
    name: str,
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["one"]}\n')
    places = {"OUT": str(tmp_path / "out"), "PROMPTS": str(prompts)}
    args = [places.get(word, word) for word in command]
    monkeypatch.setattr(sys, "argv", ["paceline", *args, "--model", str(folder), "--dtype", "q4"])
    monkeypatch.setattr(owner, name, stop)
    for packs in (True, False):
        said.clear()
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 130
        kinds = [
            text.split()[0] for text in said if text.startswith(("loading ", "packing tiny, "))
        ]
        expected = ["loading", "packing", "loading"] if packs else ["loading"]
        assert [kind for kind, _ in groupby(kinds)] == expected
