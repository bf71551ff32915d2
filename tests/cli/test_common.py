"""What commands share."""

from __future__ import annotations

import pytest

from paceline.cli.common import own_command


def test_a_published_command_names_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = "/usr/bin/paceline train eagle3 --data /home/me/data1 --out=/home/me/run --lr 1e-3"
    monkeypatch.setattr("sys.argv", [*given.split(), "--init", "stage1/head", "two words"])
    assert own_command() == (
        "paceline train eagle3 --data data1 --out=run --lr 1e-3 --init stage1/head 'two words'"
    )
