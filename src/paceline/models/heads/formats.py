"""Reading and writing folders of trained heads.

A folder holds `config.json`, one weight file and, where paceline wrote it, `paceline.json`:
which target it was trained for, how it was made (provenance), and for Medusa how often each
head's j-th guess was right. Legend: U draft vocabulary, V the target's, M heads, J ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from paceline.errors import UserError
from paceline.models.base import TargetTables
from paceline.models.config import load_json
from paceline.models.heads import layouts, storage
from paceline.models.heads.config import EagleConfig, MedusaConfig
from paceline.models.heads.eagle import EagleHead
from paceline.models.heads.medusa import MedusaHeads

NOTES_FILE: Final = "paceline.json"
LAYOUTS: Final = ("official", "speculators")


@dataclass(frozen=True, kw_only=True)
class HeadNotes:
    """What paceline knows of a head beyond its layout.

    target: name of the model that it was trained for; target_hash: SHA-256 of that model's
    file ("" where unknown); architecture: its class, like LlamaForCausalLM. provenance: how
    it was made (command, data hash, ...). accuracy_MJ: Medusa: how often head i's j-th guess
    was right on calibration text.
    """

    target: str = ""
    target_hash: str = ""
    architecture: str = "LlamaForCausalLM"
    provenance: Mapping[str, str] = field(default_factory=dict)
    accuracy_MJ: tuple[tuple[float, ...], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "target_sha256": self.target_hash,
            "target_architecture": self.architecture,
            "provenance": dict(self.provenance),
            "rank_accuracy": [list(row) for row in self.accuracy_MJ],
        }


@dataclass(frozen=True, kw_only=True)
class LoadedHead:
    """embedding_VD: the head's own embeddings, None where the target's are used.
    notes: what was borrowed, a sentence each."""

    module: EagleHead | MedusaHeads
    embedding_VD: torch.Tensor | None
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HeadSource:
    """A head whose config and tensor names are read and whose weights are not."""

    folder: Path
    layout: str
    config: EagleConfig | MedusaConfig
    shapes: Mapping[str, tuple[int, ...]]
    about: HeadNotes

    @property
    def kind(self) -> str:
        """eagle1, eagle3 or medusa."""
        return self.config.kind if isinstance(self.config, EagleConfig) else "medusa"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights in float32."""
        return 4 * sum(math.prod(s) for s in self.shapes.values())

    @property
    def borrows(self) -> tuple[str, ...]:
        """What an EAGLE-3 folder lacks and takes from the target, a sentence each. (EAGLE-1
        heads and embeddings are always the target's unless the folder has them.)"""
        if self.kind != "eagle3" or "lm_head.weight" in self.shapes:
            return ()
        return (f"{self.folder} has no output projection; the target's is used",)

    def check_target(self, *, hidden: int, vocab_size: int, n_layers: int, name: str) -> None:
        """UserError where the head can't belong to such a target."""
        c, where = self.config, self.folder
        if c.hidden != hidden:
            raise UserError(
                f"{where}: the head is {c.hidden} wide and {name!r} is {hidden}: it was trained "
                "for another model"
            )
        if c.vocab_size != vocab_size:
            raise UserError(
                f"{where}: the head's target has {c.vocab_size} tokens and {name!r} has "
                f"{vocab_size}: it was trained for another model"
            )
        deep = [t for t in c.taps if t > n_layers]
        if deep:
            raise UserError(
                f"{where}: the head reads layer {deep[0]} and {name!r} has {n_layers} layers"
            )

    def load(self, tables: TargetTables | None = None) -> LoadedHead:
        """tables: the target's, from which missing embeddings and output rows are borrowed.
        UserError where a tensor is missing, unknown or misshapen, by name."""
        tensors = storage.read(storage.weight_file(self.folder))
        where = str(self.folder)
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                tensors[name] = tensor.float()
        ids = _target_ids(tensors, self.config, where)
        embedding = tensors.pop("embed_tokens.weight", None)
        if isinstance(self.config, EagleConfig):
            names = layouts.eagle_names(self.config, self.layout)
            module: EagleHead | MedusaHeads = EagleHead(self.config, ids)
        else:
            names = layouts.medusa_names(self.config)
            module = MedusaHeads(self.config, ids)
        notes = _borrow(tensors, names, module, tables, where)
        if embedding is None and isinstance(self.config, EagleConfig):
            notes += ("the head's embeddings are the target's",)
        if embedding is not None and embedding.shape[1:] != (self.config.hidden,):
            raise UserError(f"{where}: embed_tokens.weight has shape {list(embedding.shape)}")
        _fill(module, tensors, names, where)
        return LoadedHead(module=module.eval(), embedding_VD=embedding, notes=notes)


def open_head(
    folder: str | Path, *, n_layers: int | None = None, vocab_size: int | None = None
) -> HeadSource:
    """Read a head's config and tensor names. n_layers, vocab_size: the target's, for layouts
    that don't say them. UserError where it is no head, or one that is not supported."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    config = load_json(path / "config.json")
    shapes = storage.shapes(storage.weight_file(path))
    shapes = {n: s for n, s in shapes.items() if not n.endswith(storage.SCALE)}
    layout = layouts.detect(config, shapes, str(path))
    read: EagleConfig | MedusaConfig
    if layout == "medusa":
        read = layouts.read_medusa(config, shapes, str(path), vocab_size)
    else:
        read = layouts.read_eagle(layout, config, shapes, str(path), n_layers)
    return HeadSource(
        folder=path, layout=layout, config=read, shapes=shapes, about=_read_notes(path)
    )


def save_head(
    head: EagleHead | MedusaHeads,
    folder: str | Path,
    *,
    layout: str = "official",
    dtype: str = "bfloat16",
    notes: HeadNotes | None = None,
    k: int = 4,
    embedding_VD: torch.Tensor | None = None,
) -> Path:
    """Write a head's folder; returns it.

    layout: official, or speculators (EAGLE-3; what vLLM loads). dtype: float32, bfloat16,
    float16, or int8 (ours: other systems don't read it). k: tokens to draft, for
    speculators. embedding_VD: written too where given, for readers that don't take the
    target's. The output rows of an EAGLE-1 head and of Medusa heads with a shared head are
    the target's and not written.
    """
    if layout not in LAYOUTS:
        raise UserError(f"unknown head layout {layout!r}: use {', '.join(LAYOUTS)}")
    about = notes or HeadNotes()
    path = Path(folder)
    if layout == "speculators":
        if not isinstance(head, EagleHead):
            raise UserError("Medusa heads have no speculators layout: use official")
        if dtype == "int8":
            raise UserError("a speculators folder is for other systems, which don't read int8")
        config = layouts.write_speculators(head.config, k, about.target, about.architecture)
        names = layouts.eagle_names(head.config, layout)
    elif isinstance(head, EagleHead):
        config = layouts.write_eagle(head.config)
        names = layouts.eagle_names(head.config, head.config.kind)
    else:
        config = layouts.write_medusa(head.config, about.target)
        names = layouts.medusa_names(head.config)
    if head.config.draft_vocab_size == head.config.vocab_size and layout == "official":
        names = {n: m for n, m in names.items() if n not in ("d2t", "t2d")}
    if dtype == "int8":  # the smallest file: d2t says it all
        names = {n: m for n, m in names.items() if n != "t2d"}
    state = head.state_dict()
    tensors = {m: state[n] for n, m in names.items() if not _frozen(head, n)}
    if embedding_VD is not None:
        tensors["embed_tokens.weight"] = embedding_VD
    path.mkdir(parents=True, exist_ok=True)
    medusa = isinstance(head, MedusaHeads)
    file = path / ("medusa_lm_head.safetensors" if medusa else "model.safetensors")
    storage.write(file, tensors, dtype, {f"paceline.{k}": v for k, v in about.provenance.items()})
    storage.write_json(path / "config.json", config)
    storage.write_json(path / NOTES_FILE, about.as_dict())
    return path


def _frozen(head: EagleHead | MedusaHeads, name: str) -> bool:
    """Whether a tensor is the target's."""
    if isinstance(head, EagleHead):
        return head.config.kind == "eagle1" and name == "lm_head.weight"
    return head.config.shared_head and name.startswith("lm_heads.")


def _read_notes(path: Path) -> HeadNotes:
    file = path / NOTES_FILE
    if not file.is_file():
        return HeadNotes()
    found = load_json(file)
    try:
        return HeadNotes(
            target=str(found.get("target", "")),
            target_hash=str(found.get("target_sha256", "")),
            architecture=str(found.get("target_architecture", "LlamaForCausalLM")),
            provenance={str(k): str(v) for k, v in dict(found.get("provenance", {})).items()},
            accuracy_MJ=tuple(
                tuple(float(a) for a in row) for row in found.get("rank_accuracy", [])
            ),
        )
    except (TypeError, ValueError):
        raise UserError(f"{file}: is damaged; write the head again") from None


def _target_ids(
    tensors: dict[str, torch.Tensor], config: EagleConfig | MedusaConfig, where: str
) -> torch.Tensor | None:
    """The target's ids of the head's tokens, from `d2t` (offsets) checked against `t2d`."""
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    n, vocab = config.draft_vocab_size, config.vocab_size
    if d2t is None:
        if n == vocab:
            return None
        raise UserError(
            f"{where}: lacks d2t, the map from its {n} tokens to the target's {vocab}: "
            "nothing can be drafted without it"
        )
    if d2t.shape != (n,) or d2t.is_floating_point():
        raise UserError(f"{where}: d2t must hold {n} integers, it is {list(d2t.shape)}")
    offsets = d2t.to(torch.int64)
    ids = offsets + torch.arange(n)
    if _fits(ids, t2d, vocab) and not _looks_absolute(offsets, t2d):
        return ids
    if _fits(offsets, t2d, vocab):
        raise UserError(
            f"{where}: d2t holds the target's ids; it must hold offsets (id less the draft's own "
            "index): subtract 0, 1, 2, …"
        )
    raise UserError(f"{where}: d2t does not map to different tokens of the target's {vocab}")


def _fits(ids: torch.Tensor, t2d: torch.Tensor | None, vocab: int) -> bool:
    """Different ids of the vocabulary, and just those that t2d marks."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != len(ids):
        return False
    if t2d is None:
        return True
    return t2d.shape == (vocab,) and bool(t2d[ids].all()) and int(t2d.sum()) == len(ids)


def _looks_absolute(offsets: torch.Tensor, t2d: torch.Tensor | None) -> bool:
    """Without t2d, offsets that never repeat: no two neighbours of a frequent-token
    vocabulary are then adjacent ids, which does not happen."""
    return t2d is None and len(offsets) >= 64 and len(set(offsets.tolist())) == len(offsets)


def _borrow(
    tensors: dict[str, torch.Tensor],
    names: Mapping[str, str],
    module: EagleHead | MedusaHeads,
    tables: TargetTables | None,
    where: str,
) -> tuple[str, ...]:
    """Take missing output rows from the target."""
    heads = [n for n in names if n.startswith("lm_head")]
    missing = [n for n in heads if names[n] not in tensors]
    if not missing:
        return ()
    if len(missing) < len(heads) or tables is None:
        what = ", ".join(names[n] for n in missing)
        raise UserError(f"{where}: lacks {what}, and there is no target to take it from")
    module.borrow_head(tables.head_rows(module.target_ids.tolist()))
    for n in missing:
        tensors[names[n]] = module.state_dict()[n]
    return ("the head's output projection is the target's",)


def _fill(
    module: EagleHead | MedusaHeads,
    tensors: dict[str, torch.Tensor],
    names: Mapping[str, str],
    where: str,
) -> None:
    state = module.state_dict()
    given = {}
    for ours, theirs in names.items():
        if ours in ("d2t", "t2d"):
            continue
        if theirs not in tensors:
            if theirs == "fc.bias":  # EAGLE-1 checkpoints come with and without
                given[ours] = torch.zeros_like(state[ours])
                continue
            raise UserError(f"{where}: lacks the tensor {theirs}")
        tensor = tensors.pop(theirs)
        if tensor.shape != state[ours].shape:
            raise UserError(
                f"{where}: {theirs} has shape {list(tensor.shape)}, its config asks for "
                f"{list(state[ours].shape)}"
            )
        given[ours] = tensor
    if tensors:
        raise UserError(f"{where}: has tensors that are not part of such a head: {sorted(tensors)}")
    module.load_state_dict({**state, **given})
