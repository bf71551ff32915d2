"""The registry's part for drafters with a trained head: names, folders, trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.core.shapes import Beam, parse_beam
from paceline.draft.base import Drafter
from paceline.draft.eagle import EagleDrafter
from paceline.draft.medusa import MedusaDrafter
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.base import TargetModel, TargetTables
from paceline.models.heads.config import EagleConfig, MedusaConfig
from paceline.models.heads.eagle import EagleHead
from paceline.models.heads.formats import HeadSource
from paceline.models.heads.medusa import MedusaHeads
from paceline.models.heads.runtime import EagleRunner, Kernels, MedusaRunner, eagle_runner
from paceline.models.heads.shipped import KINDS, Target, find_head, is_head_folder
from paceline.models.loading import Checkpoint

#: Nodes of a tree at most.
MAX_NODES = 64
#: Nodes of an EAGLE-2 tree, and of a Medusa tree, where none are asked for.
DEFAULT_NODES = 12
#: Bytes per weight, about: on the native core as quantised, elsewhere float32.
_NATIVE_BYTES, _TORCH_BYTES = 1.1, 4.0
#: Ranks of a head's guesses that an assumed accuracy covers.
_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """As registry.DraftPlan. shape: of the tree, None for chains."""

    build: Callable[[], Drafter]
    memory: dict[str, int]
    shape: Beam | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class HeadTree:
    """shape: of the most probable paths, None for a chain. sampled: a chain of samples."""

    shape: Beam | None = None
    sampled: bool = False


def is_head(name: str) -> bool:
    """Whether a draft's name asks for a trained head: eagle3, eagle2, eagle1, medusa, or the
    folder of one."""
    return name in KINDS or is_head_folder(Path(name))


def head_tree(text: str | None) -> HeadTree:
    """None: a chain (Medusa: the best paths). `paths:12`, `paths:60x10x8`: the most probable paths.
    `sampled`: a chain drawn from the head's own law."""
    if text is None:
        return HeadTree()
    if text == "sampled":
        return HeadTree(sampled=True)
    if text.startswith("paths:"):
        return HeadTree(shape=parse_beam(text.removeprefix("paths:"), MAX_NODES))
    raise UserError(
        f"tree {text!r} does not fit a trained head: write paths:12 (1 to {MAX_NODES} nodes) or "
        "sampled, or drop it"
    )


def plan_head(
    name: str, tree: HeadTree, *, stored: bool, target: Checkpoint, config: EngineConfig
) -> HeadPlan:
    """UserError where the head is not there or does not fit its target."""
    source, notes = find_head(name, Target(name=target.source.name, config=target.config))
    notes += source.borrows
    each = _NATIVE_BYTES if target.native else _TORCH_BYTES
    weights = int(each * source.weight_bytes / 4)
    memory = {f"draft head ({source.kind})": weights}
    c = source.config
    if isinstance(c, MedusaConfig):
        if tree.sampled:
            raise UserError("Medusa heads propose trees of their best guesses: drop 'sampled'")
        shape = tree.shape or Beam(nodes=DEFAULT_NODES)
        if shape != Beam(nodes=shape.nodes):
            raise UserError(
                "a Medusa tree has no width or depth of its own, as its heads guess all levels at "
                f"once: write paths:{shape.nodes}"
            )
        if not source.about.accuracy_MJ:
            notes += (
                "these heads come without a calibration: the tree assumes how often they are "
                "right; paceline train measures it",
            )
        build = _medusa(source, c, weights, stored)
    else:
        shape = tree.shape or (Beam(nodes=DEFAULT_NODES) if name == "eagle2" else None)
        if shape is not None and tree.sampled:
            raise UserError("eagle2 grows trees of the most probable paths: drop 'sampled'")
        slots = config.n_blocks * config.block_size
        memory["draft cache"] = 8 * c.n_kv_heads * c.head_size * slots
        build = _eagle(source, c, weights, stored, shape, tree.sampled, config.block_size)
    return HeadPlan(build=build, memory=memory, shape=shape, notes=notes)


def _eagle(
    source: HeadSource,
    c: EagleConfig,
    weights: int,
    stored: bool,
    shape: Beam | None,
    sampled: bool,
    block_size: int,
) -> Callable[[], Drafter]:
    def make(model: TargetModel) -> EagleRunner:
        tables = _tables(model)
        loaded = source.load(tables)
        assert isinstance(loaded.module, EagleHead)
        return eagle_runner(
            loaded.module, tables, Kernels.of(model, stored=stored), loaded.embedding_VD
        )

    return lambda: EagleDrafter(
        c, make, shape=shape, sampled=sampled, weight_bytes=weights, block_size=block_size
    )


def _medusa(
    source: HeadSource, c: MedusaConfig, weights: int, stored: bool
) -> Callable[[], Drafter]:
    def make(model: TargetModel) -> MedusaRunner:
        tables = _tables(model)
        loaded = source.load(tables)
        assert isinstance(loaded.module, MedusaHeads)
        device = tables.embedding_rows([0]).device
        return MedusaRunner(loaded.module, Kernels.of(model, stored=stored), device)

    accuracy = source.about.accuracy_MJ or assumed_accuracy(c.num_heads)
    return lambda: MedusaDrafter(c, make, accuracy, weight_bytes=weights)


def assumed_accuracy(heads: int) -> tuple[tuple[float, ...], ...]:
    """For heads without a calibration: one of head i's first guesses is taken to be right with
    probability 0.9^(i + 1), the j-th in proportion to 1 / j^2. An assumption, not a
    measurement."""
    total = sum(1 / (j + 1) ** 2 for j in range(_RANKS))
    return tuple(
        tuple(0.9 ** (i + 1) / (j + 1) ** 2 / total for j in range(_RANKS)) for i in range(heads)
    )


def _tables(model: TargetModel) -> TargetTables:
    if not isinstance(model, TargetTables):
        raise UserError(f"model {model.info.name!r} has no embeddings that a head could borrow")
    return model
