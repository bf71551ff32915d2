"""A peer's process: JSON commands in, JSON answers out, one a line."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.bench.peers.base import PeerError

WORKER = Path(__file__).with_name("worker.py")


class Worker:
    """`worker.py` under the peer's Python. Answers come in order; a late or dead process is a
    PeerError that ends with the last lines of what it wrote.

    python: the peer's interpreter. kind: which part of the script. timeout: seconds to wait
    for an answer. env: further environment variables.
    """

    def __init__(
        self,
        python: str,
        kind: str,
        *,
        timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.kind, self._timeout = kind, timeout
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env={**os.environ, **(env or {})},
            )
        except OSError as e:
            self._errors.close()
            raise PeerError(f"{kind}: '{python}' can't be run: {e}; give its Python") from None
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")  # the process ended

    def ask(self, op: str, **fields: Any) -> Any:
        """Send a command, wait for its answer. Raises PeerError."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead; reading says why
            self._process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            self._process.kill()
            raise PeerError(f"{self.kind}: no answer to '{op}' in {self._timeout:.0f} s") from None
        if not line:
            raise PeerError(f"{self.kind}: {self._end()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.kind}: {answer['error']}")
        return answer["ok"]

    def _end(self) -> str:
        status = self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors.tell() - 2000, 0))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return died(status) + (": " + " | ".join(said[-3:]) if said else "")

    def close(self) -> None:
        """End the process; harmless when it is dead or closed already."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def died(status: int) -> str:
    """How a process ended, in words; a negative status is a signal's."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"died of {name}"
