"""Skips these tests where the extension was not built."""

from __future__ import annotations

import pytest

from paceline.models.native import is_available


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ok, reason = is_available()
    if ok:
        return
    for item in items:
        if "/native/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=reason))
