"""Captured sequences on disk: shards that survive a kill, and packs for training.

A folder holds `capture.json` (what was captured, and how) and `shard-00000.safetensors`, ...
A shard appears under its name only when it is whole, and its header says which seeds it
holds, so a capture goes on behind the last whole shard and nothing else has to be in step.

Row t of a sequence of T + 1 tokens x_0 .. x_T (the last one was never fed to the target):

    tokens_T  x_t                      next_T  x_{t+1}
    law_T     whether the target itself chose x_{t+1} (an answer's token, not a prompt's)
    top_T     the most probable next token of the whole vocabulary (where law_T)
    logz_T    log sum exp of the target's logits (where law_T), before any transform
    taps      bfloat16 [T, D]: `tap{l}` enters layer l, `final` is behind the final norm

Legend: N rows of packed sequences, B sequences, D hidden width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from paceline.errors import UserError

LAYOUT = 1
FINAL_NAME = "final"
_COLUMNS = {
    "tokens_N": torch.int32,
    "next_N": torch.int32,
    "law_N": torch.uint8,
    "top_N": torch.int32,
    "logz_N": torch.float32,
}


def tap_name(layer: int) -> str:
    """The tensor that holds the states entering a layer; -1: behind the final norm."""
    return FINAL_NAME if layer < 0 else f"tap{layer}"


@dataclass(frozen=True, kw_only=True)
class CaptureInfo:
    """What a folder's sequences are: shards of one folder all agree in it."""

    model: str
    target_sha256: str
    hidden_size: int
    n_layers: int
    vocab_size: int
    taps: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    seeds: str
    layout: int = LAYOUT


@dataclass(frozen=True, kw_only=True)
class Record:
    """One captured sequence; see the top of the file. key: its seed's, unique in a folder."""

    key: str
    tokens_T: torch.Tensor
    next_T: torch.Tensor
    law_T: torch.Tensor
    top_T: torch.Tensor
    logz_T: torch.Tensor
    taps: Mapping[str, torch.Tensor]

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Sequences back to back; sequence b is rows [starts_B1[b], starts_B1[b + 1]). filling: so
    many of the last rows are no captured ones, but a sequence of zeros (`filled_up`)."""

    starts_B1: tuple[int, ...]
    tokens_N: torch.Tensor
    next_N: torch.Tensor
    law_N: torch.Tensor
    top_N: torch.Tensor
    logz_N: torch.Tensor
    taps: Mapping[str, torch.Tensor]
    filling: int = 0

    @property
    def n_rows(self) -> int:
        return self.starts_B1[-1]

    def filled_up(self, multiple: int) -> Pack:
        """With a sequence of zeros behind, of which nobody knows a law, so that the rows are a
        multiple of so many."""
        n = -self.n_rows % multiple
        if n == 0:
            return self
        columns = {name: F.pad(getattr(self, name), (0, n)) for name in _COLUMNS}
        taps = {name: F.pad(t, (0, 0, 0, n)) for name, t in self.taps.items()}
        starts = (*self.starts_B1, self.n_rows + n)
        return Pack(starts_B1=starts, taps=taps, filling=n, **columns)

    def to(self, device: torch.device) -> Pack:
        move = {name: getattr(self, name).to(device) for name in _COLUMNS}
        taps = {name: t.to(device) for name, t in self.taps.items()}
        return replace(self, taps=taps, **move)


class ShardWriter:
    """Collects records and writes whole shards. Mutable; `close` writes what is left."""

    def __init__(self, folder: Path, info: CaptureInfo, *, shard_tokens: int = 32768) -> None:
        """UserError where the folder holds a capture of another kind."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._shard_tokens = folder, shard_tokens
        path = folder / "capture.json"
        if path.exists():
            _check_same(path, info)
        else:
            write_json(path, asdict(info))
        for leftover in folder.glob("shard-*.tmp"):
            leftover.unlink()
        shards = shard_paths(folder)
        self.keys = {key for s in shards for key in _header(s)["keys"]}
        self.tokens = sum(_header(s)["tokens"] for s in shards)
        self._next = 1 + max((int(s.stem.split("-")[1]) for s in shards), default=-1)
        self._held: list[Record] = []

    def add(self, record: Record) -> None:
        """Keep a record unless its key is here already; a full shard is written at once."""
        if record.key in self.keys:
            return
        self.keys.add(record.key)
        self.tokens += len(record)
        self._held.append(record)
        if sum(len(r) for r in self._held) >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        pack = pack_records(self._held)
        columns = {name: getattr(pack, name).to(kind) for name, kind in _COLUMNS.items()}
        tensors = {
            **columns,
            "starts_B1": torch.tensor(pack.starts_B1, dtype=torch.int64),
            **{name: t.to(torch.bfloat16).contiguous() for name, t in pack.taps.items()},
        }
        digest = hashlib.sha256(columns["tokens_N"].numpy().tobytes())
        digest.update(columns["next_N"].numpy().tobytes())
        about = {
            "layout": LAYOUT,
            "keys": [r.key for r in self._held],
            "tokens": pack.n_rows,
            "sha256": digest.hexdigest(),
        }
        path = self._folder / f"shard-{self._next:05}.safetensors"
        temporary = path.with_suffix(".tmp")
        save_file(tensors, temporary, metadata={"paceline": json.dumps(about)})
        replace_synced(temporary, path)
        self._next += 1
        self._held = []

    def close(self) -> None:
        self.flush()


def pack_records(records: Seq[Record]) -> Pack:
    """Lay sequences back to back (a copy; nothing is padded)."""
    starts = np.cumsum([0, *(len(r) for r in records)]).tolist()
    names = records[0].taps.keys()
    return Pack(
        starts_B1=tuple(starts),
        tokens_N=torch.cat([r.tokens_T for r in records]),
        next_N=torch.cat([r.next_T for r in records]),
        law_N=torch.cat([r.law_T for r in records]),
        top_N=torch.cat([r.top_T for r in records]),
        logz_N=torch.cat([r.logz_T for r in records]),
        taps={name: torch.cat([r.taps[name] for r in records]) for name in names},
    )


class Corpus:
    """Captured folders of one target, read-only. Tensors are read where they are needed.

    A seed that several folders hold counts once, as the first one has it: else what is held
    out of one could be trained on from another. info: the first folder's, with the seeds of
    all. held_out: every so-manieth sequence is kept from training (0: none). Raises UserError
    where there is nothing to read, or the folders do not fit each other.
    """

    def __init__(self, *folders: str | Path, held_out: int = 32) -> None:
        self.folders = [Path(folder) for folder in folders]
        self.info, shards, digest = _joined(self.folders)
        self._files: list[Any] = [safe_open(s, framework="pt") for s in shards]
        self._places: list[tuple[int, int, int, str]] = []
        known: set[str] = set()
        for i, (shard, file) in enumerate(zip(shards, self._files, strict=True)):
            about = _header(shard)
            digest.update(about["sha256"].encode())
            starts = file.get_tensor("starts_B1").tolist()
            for b, key in enumerate(about["keys"]):
                if key not in known:
                    known.add(key)
                    self._places.append((i, starts[b], starts[b + 1], key))
        self.sha256 = digest.hexdigest()
        everything = range(len(self._places))
        self.held_out = [i for i in everything if held_out and i % held_out == held_out - 1]
        out = set(self.held_out)
        self.training = [i for i in everything if i not in out]
        if not self.training:
            raise UserError(f"{self.folders[0]}: all sequences are held out; capture more")

    def tokens(self, which: Seq[int]) -> int:
        return sum(self._places[i][2] - self._places[i][1] for i in which)

    def sequence(self, i: int, taps: Seq[str]) -> Record:
        """Sequence i with the named taps; UserError where one was not captured."""
        shard, first, last, key = self._places[i]
        file = self._files[shard]

        def read(name: str) -> torch.Tensor:
            return torch.as_tensor(file.get_slice(name)[first:last])

        missing = [t for t in taps if t not in set(file.keys())]
        if missing:
            raise UserError(
                f"{self.folders[0]} has no states {missing[0]!r}: capture them with --taps, or "
                "train a head that reads what is there"
            )
        return Record(
            key=key,
            tokens_T=read("tokens_N").long(),
            next_T=read("next_N").long(),
            law_T=read("law_N").bool(),
            top_T=read("top_N").long(),
            logz_T=read("logz_N"),
            taps={t: read(t) for t in taps},
        )

    def packs(self, which: Seq[int], pack_tokens: int) -> list[list[int]]:
        """Sequences in the given order, grouped so that a group's rows stay within
        `pack_tokens`; a longer sequence is a group of its own."""
        groups: list[list[int]] = []
        room = 0
        for i in which:
            length = self._places[i][2] - self._places[i][1]
            if length > room or not groups:
                groups.append([])
                room = pack_tokens
            groups[-1].append(i)
            room -= length
        return groups

    def epoch(self, seed: int, epoch: int, pack_tokens: int) -> list[list[int]]:
        """The packs of one epoch: a function of its arguments alone, so that a resumed run
        reads what the uninterrupted one would have."""
        order = np.random.default_rng([seed, epoch]).permutation(len(self.training))
        return self.packs([self.training[i] for i in order.tolist()], pack_tokens)

    def read(self, group: Seq[int], taps: Seq[str]) -> Pack:
        return pack_records([self.sequence(i, taps) for i in group])

    def frequencies(self) -> torch.Tensor:
        """How often each token was chosen by the target in the training part: int64 [V]."""
        counts = torch.zeros(self.info.vocab_size, dtype=torch.int64)
        for i in self.training:
            record = self.sequence(i, ())
            for ids in (record.next_T[record.law_T], record.top_T[record.law_T]):
                counts += torch.bincount(ids, minlength=len(counts))
        return counts


def _joined(folders: Seq[Path]) -> tuple[CaptureInfo, list[Path], hashlib._Hash]:
    """What the folders are together, their shards, and a digest of what describes them."""
    infos, shards, digest = [], [], hashlib.sha256()
    for folder in folders:
        path = folder / "capture.json"
        if not path.is_file():
            raise UserError(f"{folder}: no capture.json; make one with 'paceline train capture'")
        infos.append(read_info(path))
        found = shard_paths(folder)
        if not found:
            raise UserError(f"{folder}: the capture holds no whole shard yet; let it run on")
        shards += found
        digest.update(path.read_bytes())
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("a captured folder was named twice: name each once")
    first = infos[0]
    for folder, info in zip(folders, infos, strict=True):
        for name in ("target_sha256", "taps"):
            if getattr(info, name) != getattr(first, name):
                raise UserError(
                    f"{folder} was captured with {name} = {getattr(info, name)!r}, {folders[0]} "
                    f"with {getattr(first, name)!r}: train on captures of one kind"
                )
    return replace(first, seeds="; ".join(info.seeds for info in infos)), shards, digest


def draft_vocabulary(counts_V: torch.Tensor, size: int) -> torch.Tensor:
    """The `size` most frequent tokens, ascending: int64 [Vd]. Lower ids win ties (in a
    byte-pair vocabulary they were merged earlier, so they are the more common text)."""
    if not 1 <= size <= len(counts_V):
        raise UserError(f"draft vocabulary = {size} is out of range: use 1 to {len(counts_V)}")
    order = torch.sort(counts_V, descending=True, stable=True).indices
    return order[:size].sort().values


def shard_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def read_info(path: Path) -> CaptureInfo:
    """UserError where the file is damaged or of another layout."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("taps", "temperatures"):
            fields[name] = tuple(fields[name])
        info = CaptureInfo(**fields)
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"{path} can't be read ({e}); capture into a new folder") from None
    if info.layout != LAYOUT:
        raise UserError(f"{path}: layout {info.layout} is not {LAYOUT}; capture anew")
    return info


def write_json(path: Path, value: object) -> None:
    """Atomic: the file is the old one or the new one, whole."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    replace_synced(temporary, path)


def replace_synced(temporary: Path, path: Path) -> None:
    """Rename over `path` once the data is on the disk, so that a crash leaves a whole file."""
    with temporary.open("rb") as f:
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _header(shard: Path) -> dict[str, Any]:
    try:
        with safe_open(shard, framework="pt") as file:
            about: dict[str, Any] = json.loads(file.metadata()["paceline"])
    except Exception as e:  # safetensors raises its own kinds
        raise UserError(f"{shard} is damaged ({e}); delete it, its seeds are run again") from None
    return about


def _check_same(path: Path, info: CaptureInfo) -> None:
    old, new = asdict(read_info(path)), asdict(info)
    for name, value in new.items():
        if old[name] != value:
            raise UserError(
                f"{path.parent} holds a capture with {name} = {old[name]!r}, not {value!r}: "
                "choose another --out, or the same settings"
            )
