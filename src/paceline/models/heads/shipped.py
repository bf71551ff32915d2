"""Heads that come with the package: `paceline/heads/<target>/<kind>/`.

They are found by the name of the target that they were trained for, or by its shape where
the model goes by another name (a path, another quantisation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, load_json
from paceline.models.heads import layouts, storage
from paceline.models.heads.formats import HeadSource, open_head

#: Names by which a shipped head is asked for, and the kind of head each is. EAGLE-2 is an
#: EAGLE-1 head that grows trees.
KINDS: Final = {"eagle3": "eagle3", "eagle2": "eagle1", "eagle1": "eagle1", "medusa": "medusa"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a head has to fit. name: as reports call it."""

    name: str
    config: DecoderConfig


def shipped_folder() -> Path:
    return Path(__file__).parents[2] / "heads"


def shipped(folder: Path | None = None) -> Iterator[tuple[str, str, Path]]:
    """Target, kind and folder of every head that comes with the package."""
    for file in sorted((folder or shipped_folder()).glob("*/*/config.json")):
        yield file.parent.parent.name, file.parent.name, file.parent


def is_head_folder(path: Path) -> bool:
    """Whether a folder holds a trained head and not a language model."""
    if not (path / "config.json").is_file():
        return False
    try:
        config = load_json(path / "config.json")
        if {"speculators_model_type", "medusa_num_heads"} & set(config):
            return True
        layouts.detect(config, storage.shapes(storage.weight_file(path)), str(path))
    except UserError:
        return False
    return True


def find_head(
    name: str, target: Target, folder: Path | None = None
) -> tuple[HeadSource, tuple[str, ...]]:
    """The head that `name` asks for (one of KINDS, or a folder), checked against its target,
    and notes. UserError where there is none, saying which there are."""
    c = target.config
    notes: tuple[str, ...] = ()
    if name in KINDS:
        path, notes = _shipped_for(name, target, folder)
    else:
        path = Path(name)
    source = open_head(path, n_layers=c.n_layers, vocab_size=c.vocab_size)
    source.check_target(
        hidden=c.hidden_size, vocab_size=c.vocab_size, n_layers=c.n_layers, name=target.name
    )
    trained_for = source.about.target
    if name not in KINDS and trained_for and trained_for != target.name:
        notes = (f"the head was trained for {trained_for}; output is exact all the same",)
    return source, notes


def _shipped_for(name: str, target: Target, folder: Path | None) -> tuple[Path, tuple[str, ...]]:
    kind = KINDS[name]
    known = [(t, path) for t, k, path in shipped(folder) if k == kind]
    for model, path in known:
        if model == target.name:
            return path, ()
    for model, path in known:
        if _same_shape(path, target.config):
            note = f"the head was trained for {model}, whose shape {target.name} has"
            return path, (note,)
    there = ", ".join(sorted({f"{k} for {t}" for t, k, _ in shipped(folder)})) or "none"
    raise UserError(
        f"no {kind} head for {target.name!r} comes with paceline (there is: {there}); train one "
        "with paceline train, and give its folder as the draft"
    )


def _same_shape(path: Path, c: DecoderConfig) -> bool:
    try:
        source = open_head(path, n_layers=c.n_layers, vocab_size=c.vocab_size)
        source.check_target(
            hidden=c.hidden_size, vocab_size=c.vocab_size, n_layers=c.n_layers, name=""
        )
    except UserError:
        return False
    return True
