"""From a draft's name or folder to a drafter with a trained head."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from head_devices import (
    CONFIG,
    PROMPTS,
    VOCAB,
    eagle_config,
    engine,
    random_eagle,
    random_medusa,
    run,
    tiny_config,
    torch_target,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.core.shapes import Beam
from paceline.draft.eagle import EagleDrafter
from paceline.draft.medusa import MedusaDrafter
from paceline.draft.none import NoDrafter
from paceline.errors import UserError
from paceline.models.config import from_hf
from paceline.models.heads.formats import HeadNotes, save_head
from paceline.models.heads.shipped import shipped
from paceline.registry import DraftSpec, best_shipped
from paceline.registry_heads import HeadTree, assumed_accuracy, head_tree, plan_head
from paceline.types import SamplingParams

TARGET = torch_target()
CHECKPOINT = SimpleNamespace(
    source=SimpleNamespace(name="tiny"),
    config=from_hf({**tiny_config(), "eos_token_id": None}),
    native=False,
)


def plan(name: object, tree: str | None = None, stored: bool = False):  # type: ignore[no-untyped-def]
    return plan_head(
        str(name),
        head_tree(tree),
        stored=stored,
        target=CHECKPOINT,  # type: ignore[arg-type]
        config=CONFIG,
    )


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "eagle3": save_head(random_eagle(eagle_config("eagle3", 90), TARGET), tmp_path / "e3"),
        "eagle1": save_head(random_eagle(eagle_config("eagle1", 90), TARGET), tmp_path / "e1"),
        "medusa": save_head(random_medusa(TARGET, draft=90, shared=True), tmp_path / "m"),
    }


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa"])
def test_a_folders_kind_is_read_from_it(kind: str, folders) -> None:
    """Built, bound to the target, run: the text of plain decoding."""
    params = SamplingParams(max_tokens=12)
    want = [o.token_ids for o in run(engine(TARGET, NoDrafter()), PROMPTS, params)]
    found = plan(folders[kind])
    drafter = found.build()
    assert drafter.name == kind
    assert isinstance(drafter, MedusaDrafter if kind == "medusa" else EagleDrafter)
    outputs = run(engine(TARGET, drafter), PROMPTS, params)
    assert [o.token_ids for o in outputs] == want
    assert all(o.stats.drafted > 0 for o in outputs)
    assert all(size > 0 for size in found.memory.values())
    assert ("draft cache" in found.memory) == (kind != "medusa")


def test_trees_are_asked_for_by_option(folders) -> None:
    assert plan(folders["eagle3"]).shape is None
    assert plan(folders["eagle3"], "paths:9").shape == Beam(nodes=9)
    for text, shape in (
        ("paths:9", Beam(nodes=9)),
        ("paths:60x10", Beam(nodes=60, width=10)),
        ("paths:60x10x8", Beam(nodes=60, width=10, depth=8)),
    ):
        drafter = plan(folders["eagle1"], text).build()
        assert isinstance(drafter, EagleDrafter)
        assert drafter.shape == shape
    assert head_tree("sampled") == HeadTree(sampled=True)
    assert plan(folders["medusa"], "paths:5").shape == Beam(nodes=5)
    with pytest.raises(UserError, match="no width or depth of its own"):
        plan(folders["medusa"], "paths:5x10")
    with pytest.raises(UserError, match="drop 'sampled'"):
        plan(folders["medusa"], "sampled")
    for text, why in (
        ("3x2", "does not fit a trained head"),
        ("top:3x2", "does not fit a trained head"),
        ("sequoia:12", "does not fit a trained head"),
        ("beam", "does not fit a trained head"),
        ("paths:0", "has 0 nodes"),
        ("paths:65", "has 65 nodes"),
        ("paths:", "paths: is not understood"),
        ("paths:9x2x3x4", "is not understood"),
        ("paths:9x0", "width = 0 is out of range"),
        ("paths:9x4x65", "depth = 65 is out of range"),
    ):
        with pytest.raises(UserError, match=why):
            head_tree(text)


def test_options_that_a_head_cannot_honour_are_refused_at_once(folders) -> None:
    name = str(folders["eagle3"])
    DraftSpec(name=name, tree="paths:9")
    DraftSpec(name="ngram+" + name, tree="sampled")
    with pytest.raises(UserError, match="drop --draft-vocab intersect"):
        DraftSpec(name=name, vocabulary="intersect")
    with pytest.raises(UserError, match="does not fit a trained head"):
        DraftSpec(name="eagle3", tree="3x2")


def test_what_is_not_shipped_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("paceline.models.heads.shipped.shipped_folder", lambda: tmp_path)
    save_head(random_medusa(TARGET), tmp_path / "other" / "medusa")
    with pytest.raises(UserError, match=r"no eagle3 head for 'tiny'.*medusa for other"):
        plan("eagle3")
    head = random_eagle(eagle_config("eagle1", 90), TARGET)
    save_head(head, tmp_path / "tiny" / "eagle1", notes=HeadNotes(target="tiny"))
    assert plan("eagle1").shape is None
    assert plan("eagle2").shape is not None  # the same head, growing trees


def test_what_ships_names_no_folder_of_whoever_made_it() -> None:
    files = [file for _, _, folder in shipped() for file in folder.iterdir()]
    assert len(files) >= 6
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as f:
                facts = " ".join(f.metadata().values())
        else:
            facts = file.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/\w", facts), file


def test_the_best_draft_without_a_download(tmp_path: Path) -> None:
    save_head(random_medusa(TARGET), tmp_path / "tiny" / "medusa")
    assert best_shipped("tiny", tmp_path) == "ngram"
    save_head(random_eagle(eagle_config("eagle3", 90), TARGET), tmp_path / "tiny" / "eagle3")
    assert best_shipped("tiny", tmp_path) == "ngram+eagle3"
    assert best_shipped("other", tmp_path) == "ngram"


def test_a_missing_calibration_is_said(folders, tmp_path: Path) -> None:
    assert "without a calibration" in plan(folders["medusa"]).notes[0]
    rows = assumed_accuracy(4)
    assert all(0 < sum(row) < 1 for row in rows)
    accuracy = ((0.5, 0.25), (0.25, 0.125), (0.125, 0.0625))
    heads = random_medusa(TARGET, draft=VOCAB)
    save_head(heads, tmp_path / "calibrated", notes=HeadNotes(accuracy_MJ=accuracy))
    assert plan(tmp_path / "calibrated").notes == ()


def test_a_head_of_another_model_is_noted(tmp_path: Path) -> None:
    head = random_eagle(eagle_config("eagle3", 90), TARGET)
    save_head(head, tmp_path, notes=HeadNotes(target="another"))
    assert "trained for another" in plan(tmp_path).notes[0]


def test_a_borrowed_output_projection_is_said(folders) -> None:
    file = folders["eagle3"] / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file)
    found = plan(folders["eagle3"])
    assert "no output projection; the target's is used" in found.notes[0]
    (output,) = run(engine(TARGET, found.build()), [(5,)], SamplingParams(max_tokens=8))
    assert output.stats.drafted > 0


def test_damage_is_found_when_the_head_is_loaded(folders) -> None:
    file = folders["eagle3"] / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] = torch.ones(7)
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"norm\.weight has shape \[7\]"):
        engine(TARGET, plan(folders["eagle3"]).build())
