"""The one place that turns names into drafters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path

from paceline.core.shapes import Beam, TreeShape, level_widths, parse_beam
from paceline.draft.auto import AutoDrafter
from paceline.draft.base import Drafter
from paceline.draft.cache import DraftCache
from paceline.draft.layerskip import LayerSkipDrafter, mask_path, read_mask, weight_file_bytes
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.slem import STRETCH, SlemDrafter
from paceline.draft.tree import TreeDrafter
from paceline.draft.vocabulary import SameVocabulary, SharedTokens, Vocabulary, through_text
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.heads.shipped import shipped, shipped_folder
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.models.tokenizer import Tokenizer, first_mismatch
from paceline.registry_heads import MAX_NODES, head_tree, is_head, plan_head

#: Drafters without a model of their own.
LIGHT = ("none", "ngram")
#: Before the name of another draft: n-grams where they match, that draft elsewhere.
NGRAM_FIRST = "ngram+"
VOCABULARIES = ("same", "intersect", "slem")
WEIGHTS = ("fast", "stored")


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """What the user asked for. name: none, ngram, a model, or `ngram+MODEL` for both: n-grams
    where they match, the model elsewhere, whose the other options are. tree: see `parse_tree`.
    vocabulary: same, intersect or slem. weights: on the native core, `fast` re-quantises the
    draft to 4 bits and cuts its head to frequent tokens; `stored` takes the file as it is."""

    name: str = "none"
    tree: str | None = None
    vocabulary: str = "same"
    weights: str = "fast"

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise UserError(f"unknown draft weights {self.weights!r}: use {', '.join(WEIGHTS)}")
        if self.vocabulary not in VOCABULARIES:
            raise UserError(
                f"unknown draft vocabulary {self.vocabulary!r}: use {', '.join(VOCABULARIES)}"
            )
        if self.name.startswith(NGRAM_FIRST):
            if self.second.name in LIGHT or self.second.name.startswith(NGRAM_FIRST):
                raise UserError(
                    f"draft {self.name!r} combines n-grams with nothing new: write "
                    f"{NGRAM_FIRST}MODEL, or ngram"
                )
            return  # `second` has checked the rest
        no_model = self.name in LIGHT or is_layerskip(self.name)
        if no_model and (self.tree is not None or self.vocabulary != "same"):
            raise UserError(
                f"draft {self.name!r} has no tree and no vocabulary of its own: give a draft "
                "model, or drop these options"
            )
        if self.vocabulary == "slem" and self.tree is not None:
            raise UserError("draft vocabulary 'slem' proposes chains only: drop the tree")
        if not is_head(self.name):
            parse_tree(self.tree)
            return
        head_tree(self.tree)
        if self.vocabulary != "same":
            raise UserError(
                f"draft {self.name!r} was trained for its target's vocabulary: drop "
                f"--draft-vocab {self.vocabulary}"
            )

    @property
    def second(self) -> DraftSpec:
        """The draft that a combination turns to where n-grams have nothing."""
        return replace(self, name=self.name.removeprefix(NGRAM_FIRST))

    @property
    def label(self) -> str:
        """All that this draft costs depends on, for profiles."""
        options = [v for v in (self.tree, self.vocabulary, self.weights) if v is not None]
        return self.name if self.name in LIGHT else " ".join([self.name, *options])


@dataclass(frozen=True)
class TreePlan:
    """A tree to begin with; fit: nodes of the Sequoia shape that replaces it, once the
    acceptance of each rank is measured."""

    shape: TreeShape | Beam
    sampled: bool
    fit: int | None = None

    @property
    def nodes(self) -> int:
        return self.shape.nodes


def parse_tree(text: str | None) -> TreePlan | None:
    """`3x2x1` (widths per level, siblings sampled), `top:3x2x1` (the most probable tokens),
    `paths:12` (the most probable paths; `paths:60x10x8` with width and depth), `sequoia:12`
    (widths from measured acceptance)."""
    if text is None:
        return None
    if text.startswith("paths:"):
        return TreePlan(parse_beam(text.removeprefix("paths:"), MAX_NODES), sampled=False)
    match = re.fullmatch(r"(?:(top|sequoia):)?(\d+(?:x\d+)*)", text)
    numbers = [int(n) for n in match[2].split("x")] if match else []
    kind = match[1] if match else None
    if not numbers or (kind == "sequoia" and len(numbers) != 1):
        raise UserError(
            f"tree {text!r} is not understood: write 3x2x1, top:3x2x1, paths:12 or sequoia:12"
        )
    nodes = numbers[0]
    if kind in (None, "top"):
        nodes = sum(accumulate(numbers, mul))
    if nodes > MAX_NODES or min(numbers) < 1:
        raise UserError(
            f"tree {text!r} has {nodes} nodes: use widths of 1 or more, and 1 to "
            f"{MAX_NODES} nodes in all"
        )
    if kind == "sequoia":
        return TreePlan(level_widths((4, 2, 1)), sampled=True, fit=numbers[0])
    return TreePlan(level_widths(numbers), sampled=kind is None)


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """A drafter that is known to fit its target, before its weights are loaded.

    memory: bytes it will take, by what they are for. notes: what a user should know.
    """

    build: Callable[[], Drafter]
    memory: dict[str, int]
    tree: TreePlan | None = None
    notes: tuple[str, ...] = ()


def plan_drafter(spec: DraftSpec, target: Checkpoint, config: EngineConfig) -> DraftPlan:
    """UserError where the draft does not fit its target."""
    if spec.name == "none":
        return DraftPlan(build=NoDrafter, memory={})
    if spec.name == "ngram":
        return DraftPlan(build=NgramDrafter, memory={})
    if spec.name.startswith(NGRAM_FIRST):
        second = plan_drafter(spec.second, target, config)
        return replace(second, build=lambda: _with_ngrams(spec.second, second.build()))
    if is_layerskip(spec.name):
        return _plan_layerskip(spec.name, target)
    if is_head(spec.name):
        return _plan_head(spec, target, config)
    # A draft's precision is its own affair: on a CPU it takes the fastest path there is.
    on_cpu = target.device.type == "cpu"
    dtype = "auto" if on_cpu else str(target.dtype).removeprefix("torch.")
    try:
        draft = open_checkpoint(
            spec.name, dtype=dtype, device=str(target.device), on_pack=target.on_pack
        )
    except UserError as e:
        raise UserError(f"draft {spec.name!r} ({', '.join(LIGHT)} or a model): {e}") from None
    if spec.vocabulary == "same":
        _check_same(spec.name, target, draft)
    vocabulary, notes = _vocabulary(spec, target, draft)
    if spec.weights == "fast" and target.native and not draft.native:
        draft, more = _on_the_core(draft)
        notes += more
    if spec.weights == "fast" and draft.native:
        draft = replace(draft, fast=True)
        head = draft.fast_head
        cut = "" if head is None else f", its head cut to {len(head)} frequent tokens"
        notes += (f"the draft is re-quantised to 4 bits{cut} (--draft-weights stored: not)",)
    stretch = STRETCH if spec.vocabulary == "slem" else vocabulary.stretch
    n_blocks = stretch * config.n_blocks
    tree = parse_tree(spec.tree)

    def build() -> Drafter:
        cache = DraftCache(
            draft.load(),
            n_blocks=n_blocks,
            block_size=config.block_size,
            prefill_chunk=config.prefill_chunk,
            max_batch=config.max_batch,
            scratch=tree.shape.scratch if tree and isinstance(tree.shape, Beam) else 0,
        )
        if spec.vocabulary == "slem":
            return SlemDrafter(cache, target.tokenizer, draft.tokenizer)
        if tree is not None:
            return TreeDrafter(cache, vocabulary, tree.shape, sampled=tree.sampled)
        return ModelDrafter(cache, vocabulary)

    return DraftPlan(
        build=build,
        memory={
            f"draft weights ({draft.source.name})": draft.weight_bytes,
            "draft cache": draft.kv_slot_bytes * n_blocks * config.block_size,
        },
        tree=tree,
        notes=notes,
    )


def _on_the_core(draft: Checkpoint) -> tuple[Checkpoint, tuple[str, ...]]:
    """A draft of float weights beside a target on the native core: there too, if it can be,
    because torch is left one thread."""
    try:
        return draft.quantised("q4"), ()
    except UserError as e:
        return draft, (f"the draft runs in torch, on one thread: {e}",)


def _with_ngrams(second: DraftSpec, drafter: Drafter) -> AutoDrafter:
    return AutoDrafter({"ngram": NgramDrafter(), second.name: drafter})


def drafters_of(spec: DraftSpec, drafter: Drafter) -> dict[str, tuple[str, Drafter]]:
    """Of a drafter that was built for `spec`: by the name under which it proposes
    (`Arm.drafter`), the label of its costs and itself; none of it where nothing drafts."""
    if isinstance(drafter, AutoDrafter):
        labels = {"ngram": "ngram", spec.second.name: spec.second.label}
        return {name: (labels[name], d) for name, d in drafter.drafters.items()}
    return {} if spec.name == "none" else {drafter.name: (spec.label, drafter)}


def _plan_head(spec: DraftSpec, target: Checkpoint, config: EngineConfig) -> DraftPlan:
    stored = spec.weights == "stored"
    plan = plan_head(spec.name, head_tree(spec.tree), stored=stored, target=target, config=config)
    tree = None if plan.shape is None else TreePlan(plan.shape, sampled=False)
    return DraftPlan(build=plan.build, memory=plan.memory, tree=tree, notes=plan.notes)


def best_shipped(model: str, folder: Path | None = None) -> str:
    """The best draft that needs no download: n-grams, and the EAGLE-3 head that comes with
    the package (`folder`: other than the package's) where there is one for the catalog
    name."""
    known = any(t == model and kind == "eagle3" for t, kind, _ in shipped(folder))
    return f"{NGRAM_FIRST}eagle3" if known else "ngram"


def is_layerskip(name: str) -> bool:
    """`layerskip`, or `layerskip:MASK.json`: the target drafts with skipped sub-layers."""
    return name == "layerskip" or name.startswith("layerskip:")


def _plan_layerskip(name: str, target: Checkpoint) -> DraftPlan:
    """With the mask file that is named, else with the one that was searched for this target
    here, else with the one that comes with the package."""
    _, colon, given = name.partition(":")
    own = target.source.name
    known = (mask_path(own), shipped_folder() / own / "layerskip.json")
    path = Path(given) if colon else next((p for p in known if p.is_file()), known[0])
    if not path.is_file():
        what = f"mask file {str(path)!r} is not there" if colon else f"no mask of {own!r} is known"
        raise UserError(
            f"draft {name!r}: {what}; search one with: paceline train layerskip --model {own} "
            f"--prompts PROMPTS" + (f" --out {given}" if given else "")
        )
    file = read_mask(path)
    if file.target.n_layers != target.config.n_layers:
        raise UserError(
            f"draft {name!r}: the mask is for {file.target.n_layers} layers of "
            f"{file.target.name!r}, but {own!r} has {target.config.n_layers}"
        )
    notes = []
    if file.target.size != weight_file_bytes(target.source):
        notes.append(
            f"the mask was searched for {file.target.name}, not for these weights: output is "
            "exact all the same, drafts may be poor"
        )
    if file.measured is not None and file.measured.speedup < 1.0:
        notes.append(
            f"layer skipping was slower than plain decoding when this mask was measured "
            f"({file.measured.speedup:.2f} times its speed)"
        )
    return DraftPlan(build=lambda: LayerSkipDrafter(file.plan), memory={}, notes=tuple(notes))


def _check_same(name: str, target: Checkpoint, draft: Checkpoint) -> None:
    mismatch = first_mismatch(target.tokenizer, draft.tokenizer)
    if mismatch is not None:
        token, ours, theirs = mismatch
        raise UserError(
            f"draft {name!r} has another vocabulary than {target.source.name!r}: token {token} "
            f"is {ours!r} for the target and {theirs!r} for the draft; choose a draft of the "
            "target's family, or allow it with --draft-vocab intersect or slem"
        )


def _vocabulary(
    spec: DraftSpec, target: Checkpoint, draft: Checkpoint
) -> tuple[Vocabulary, tuple[str, ...]]:
    if spec.vocabulary != "intersect":
        size = min(target.config.vocab_size, target.tokenizer.vocab_size)
        return SameVocabulary(size), ()
    ours, theirs = target.tokenizer, draft.tokenizer
    try:
        shared = SharedTokens(
            shared_ids(ours, theirs), lambda tokens: through_text(tokens, ours, theirs)
        )
    except ValueError as e:
        raise UserError(f"draft {spec.name!r}: {e}; choose another draft") from None
    note = (
        f"the draft shares {shared.n_shared} of the target's {ours.vocab_size} tokens; it is "
        "restricted to these and renormalised"
    )
    return shared, (note,)


def shared_ids(ours: Tokenizer, theirs: Tokenizer) -> list[int]:
    """For each token of ours, the id of theirs that stands for the same bytes (and is as
    special), -1 where there is none."""
    known: dict[tuple[bool, bytes], int] = {}
    for i in range(theirs.vocab_size):
        if theirs.token(i) is not None:
            known.setdefault((i in theirs.special_ids, theirs.token_bytes(i)), i)
    return [
        -1 if ours.token(i) is None else known.get((i in ours.special_ids, ours.token_bytes(i)), -1)
        for i in range(ours.vocab_size)
    ]
