"""The compiled CPU core, where it was built, and the threads that it may use."""

from __future__ import annotations

import importlib
import os
from typing import Any

from paceline.errors import UserError

_native: Any = None
_reason = ""
try:
    # By name: the extension is no part of the package's import graph.
    _native = importlib.import_module("paceline._native")
except ImportError as error:
    _reason = str(error)


def is_available() -> tuple[bool, str]:
    """(True, kernel path) where the extension imported, else (False, the reason)."""
    if _native is None:
        return False, f"the native CPU core was not built: {_reason}"
    return True, str(_native.paths()[0])


def native_core() -> Any:
    """The extension module; UserError where it was not built."""
    if _native is None:
        raise UserError(f"the native CPU core was not built ({_reason}); use the torch path")
    return _native


def kernel_paths() -> list[str]:
    """Instruction-set paths that run on this machine, fastest first."""
    return list(native_core().paths())


def default_threads() -> int:
    """The cores that this process may use ($PACELINE_THREADS overrides)."""
    text = os.environ.get("PACELINE_THREADS", "")
    if text:
        if not text.isdigit() or not 1 <= int(text) <= 64:
            raise UserError(f"PACELINE_THREADS must be in 1..64, not {text!r}")
        return int(text)
    return max(1, min(64, len(os.sched_getaffinity(0))))
