"""Settings and fixtures of all tests; see `devices` for what they share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Tiny tensors gain nothing from a second thread, and on a busy machine threads wait long.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The cached SmolLM2 file (98 MB, fetched once)."""
    from paceline.models.catalog import pull

    return pull("smollm2-135m")
