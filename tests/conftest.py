"""Settings and fixtures of all tests; see `devices` for what they share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

# Tiny tensors gain nothing from a second thread, and on a busy machine threads wait long.
torch.set_num_threads(1)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would the
# commands that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    """The cached SmolLM2 file (98 MB, fetched once)."""
    from paceline.models.catalog import pull

    return pull("smollm2-135m")
