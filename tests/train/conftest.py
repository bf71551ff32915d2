from __future__ import annotations

from pathlib import Path

import pytest
from train_devices import write_capture, write_target


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_capture(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    return write_capture(tmp_path_factory.mktemp("capture"), tiny_target, 1600)
