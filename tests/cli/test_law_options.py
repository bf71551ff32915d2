"""Options of the law: forms that are read, and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.common import logit_bias, text_or_file
from paceline.errors import UserError


def test_biases_are_pairs() -> None:
    assert logit_bias(["5=1.5", "7=-2"]) == {5: 1.5, 7: -2.0}
    assert logit_bias(None) == {}
    for bad in ("5", "a=1", "5=b", "="):
        with pytest.raises(UserError, match="ID=VALUE"):
            logit_bias([bad])


def test_grammars_come_as_text_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grammar.lark"
    file.write_text('start: "a"')
    assert text_or_file(f"@{file}") == 'start: "a"'
    assert text_or_file("[a-z]+") == "[a-z]+"
    assert text_or_file(None) is None
    with pytest.raises(UserError, match="can't be read"):
        text_or_file(f"@{tmp_path / 'none'}")
