"""The target drafts for itself, with some of its sub-layers skipped.

Draft & Verify (Zhang et al. 2023): attention and MLP of each layer are switched one by one;
the draft reads the target's own cache and has none of its own. `paceline train layerskip`
finds a mask, a `MaskFile` carries it. Legend: L layers, R rows, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from paceline.core.law import Law, PointLaw
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.coupling import next_token
from paceline.draft.health import DraftHealth
from paceline.errors import UserError
from paceline.models.base import KVStore, LayerMask, RowGroup, TargetModel, TargetOutput, pack
from paceline.models.catalog import ModelSource, cache_dir
from paceline.models.safetensors_weights import shards
from paceline.sampling.context import Context, Row, context_of
from paceline.sampling.law import build_laws
from paceline.types import SamplingParams, Sequence

#: Tokens drafted a round at most.
MAX_DRAFT = 8
#: Exit threshold to begin with, where the mask's file names none.
GAMMA = 0.6
# The controller's constants (section 3.3): wanted match rate, its smoothing, the threshold's
# step and smoothing.
_WANTED, _RATE_KEEP, _STEP, _GAMMA_KEEP = 0.9, 0.5, 0.01, 0.9


def skip_mask(
    n_layers: int, *, attention: Iterable[int] = (), mlp: Iterable[int] = ()
) -> LayerMask:
    """A mask that skips these sub-layers; ValueError for a layer that is not there."""
    skipped = (frozenset(attention), frozenset(mlp))
    bad = [i for group in skipped for i in group if not 0 <= i < n_layers]
    if bad:
        raise ValueError(f"layer {bad[0]} can't be skipped: there are {n_layers}, from 0")
    kinds = (tuple(i not in group for i in range(n_layers)) for group in skipped)
    return LayerMask(attention_L=next(kinds), mlp_L=next(kinds))


@dataclass(frozen=True, kw_only=True)
class SkipPlan:
    """mask: which sub-layers the draft runs. gamma: probability below which a drafted token
    is the last of its round, to begin with. max_draft: tokens a round at most."""

    mask: LayerMask
    gamma: float = GAMMA
    max_draft: int = MAX_DRAFT

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise UserError(f"gamma = {self.gamma} is out of range: use 0 (never stop) to 1")
        if not 1 <= self.max_draft <= 64:
            raise UserError(f"max_draft = {self.max_draft} is out of range: use 1 to 64")


@dataclass
class ExitThreshold:
    """The adaptive threshold of one sequence (section 3.3): it rises while fewer than 90 %
    of the drafted tokens are accepted and falls otherwise."""

    gamma: float
    match_rate: float = _WANTED

    def update(self, matched: int, drafted: int) -> None:
        """After a verification of `drafted` > 0 tokens, of which `matched` were accepted."""
        self.match_rate = _RATE_KEEP * self.match_rate + (1 - _RATE_KEEP) * matched / drafted
        wanted = self.gamma + (_STEP if self.match_rate < _WANTED else -_STEP)
        moved = _GAMMA_KEEP * self.gamma + (1 - _GAMMA_KEEP) * wanted
        self.gamma = min(1.0, max(0.0, moved))


@dataclass
class _Chain:
    """A proposal in the making. ranking: the law's parameters that tokens are drawn by."""

    seq: Sequence
    budget: int
    gamma: float
    params: SamplingParams
    context: Context | None
    tokens: list[int] = field(default_factory=list)
    laws: list[Law] = field(default_factory=list)


class LayerSkipDrafter:
    """Chains from the target with `plan.mask`: argmax tokens at temperature 0, and tokens tied
    to the target's draws where the request's text must not depend on budgets
    (`draft.coupling`): both judged as deterministic. Else samples of the draft's own law under
    the request's transforms.

    It reads the committed entries [0, computed) of the target's cache and writes its own
    into the scratch slots behind them, which the scheduler reserved for the proposal:

        [0 ... computed)                    the target's, only read
        [computed, computed + 1 + drafted)  the root's and the drafted tokens'

    The target's pass then writes the very same slots in every layer before it reads them
    (one for the root and one for each proposed token, and no fed token is left unproposed),
    so nothing that the draft computed outlives the round, accepted or not.

    A token less probable than the sequence's threshold is the last of its round. It stays in
    the proposal: dropping it for its probability would bias the output. `plan` may be
    replaced between requests.
    """

    name = "layerskip"
    blind = True
    taps: tuple[int, ...] = ()

    def __init__(self, plan: SkipPlan) -> None:
        self.plan = plan
        self._bound: tuple[TargetModel, KVStore] | None = None
        self._health = DraftHealth()
        # By the record itself, so that a preempted sequence goes on with its threshold.
        self._thresholds: WeakKeyDictionary[Sequence, ExitThreshold] = WeakKeyDictionary()
        self._proposed: dict[int, TokenTree] = {}  # in the last round, to be told from others'

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        """Draft with this target on this cache, which is the engine's."""
        n = len(self.plan.mask.attention_L)
        if n != model.info.n_layers:
            raise UserError(
                f"the layer mask is for {n} layers, but {model.info.name!r} has "
                f"{model.info.n_layers}; search one with: paceline train layerskip"
            )
        self._bound = model, kv

    def example(self, greedy: bool) -> TokenTree:
        return chain(0, [0], None if greedy else [PointLaw(0, 1)])

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return (Arm(drafter=self.name, lag=seq.pending, most=self.plan.max_draft),)

    def gamma(self, seq: Sequence) -> float:
        """The present exit threshold of a sequence."""
        known = self._thresholds.get(seq)
        return self.plan.gamma if known is None else known.gamma

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        chains: dict[int, _Chain] = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            budget = min(budget, self.plan.max_draft)
            if budget > 0:
                params = _ranking(seq.params)
                chains[seq.id] = _Chain(seq, budget, self.gamma(seq), params, context_of(seq))
        self._compute_pending([c.seq for c in chains.values()])
        active = list(chains.values())
        while active:
            self._extend(active)
            active = [c for c in active if len(c.tokens) < c.budget]
        self._proposed = {c.seq.id: _tree(c) for c in chains.values()}
        return [self._proposed.get(seq.id) or chain(seq.tokens[-1]) for seq in seqs]

    def _compute_pending(self, seqs: Seq[Sequence]) -> None:
        """Entries that a preempted sequence lacks below its root, by the whole target: the
        draft then sees what it would have seen. (The pass that verifies writes them again.)"""
        groups = [
            _rows(seq, seq.tokens[seq.computed : -1], seq.computed, wanted=0)
            for seq in seqs
            if seq.pending > 1
        ]
        if groups:
            self._forward(groups, None)

    def _extend(self, chains: list[_Chain]) -> None:
        """One pass with skipped sub-layers: the next token of each chain."""
        groups = []
        for c in chains:
            last = c.tokens[-1] if c.tokens else c.seq.tokens[-1]
            at = len(c.seq.tokens) - 1 + len(c.tokens)
            groups.append(_rows(c.seq, [last], at, wanted=1))
        logits_RV = self._forward(groups, self.plan.mask)
        rows = [Row(c.params, c.context, tuple(c.tokens)) for c in chains]
        laws = build_laws(logits_RV, rows, masked=True)
        for c, law in zip(chains, laws, strict=True):
            if not self._health.usable(law):
                c.budget = len(c.tokens)
                continue
            token, drawn = next_token(law, c.seq, len(c.tokens))
            if drawn:
                c.laws.append(law)
            c.tokens.append(token)
            if law.probability(token) < c.gamma or token in c.seq.end_ids:
                c.budget = len(c.tokens)

    def _forward(self, groups: Seq[RowGroup], mask: LayerMask | None) -> torch.Tensor:
        assert self._bound is not None, "the drafter was never bound"
        model, kv = self._bound
        return model.forward(pack(groups, kv.block_size), kv, layer_mask=mask).logits_RV

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        for seq, tree, verdict in zip(seqs, trees, verdicts, strict=True):
            drafted = len(tree) - 1
            # Another drafter's tokens say nothing about this one.
            mine = tree is self._proposed.get(seq.id)
            if mine and verdict is not None and drafted:
                known = self._thresholds.setdefault(seq, ExitThreshold(self.plan.gamma))
                known.update(len(verdict.path), drafted)

    def forget(self, seq_id: int) -> None:
        """Nothing to drop: there is no cache, and a threshold goes with its sequence."""

    def usage(self) -> DrafterUsage:
        return DrafterUsage()


def _rows(seq: Sequence, tokens: Seq[int], context: int, *, wanted: int) -> RowGroup:
    """A chain of rows behind `context` entries; logits of the last `wanted` ones."""
    n = len(tokens)
    return RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, n - 1, dtype=np.int32),
        context=context,
        table=np.array(seq.table, np.int32),
        wanted=np.arange(n - wanted, n, dtype=np.int32),
    )


@lru_cache(maxsize=256)
def _ranking(params: SamplingParams) -> SamplingParams:
    """A request's own parameters, but at temperature 0, where its law is a point, those that
    give the token's probability under the draft (the threshold needs it)."""
    return replace(params, temperature=1.0, rule=None) if params.greedy else params


def _tree(c: _Chain) -> TokenTree:
    return chain(c.seq.tokens[-1], c.tokens, c.laws if c.laws else None)


class MaskTarget(BaseModel):
    """The model that a mask was searched for: its layers, and its weights' bytes and hash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    n_layers: int = Field(ge=1)
    size: NonNegativeInt
    sha256: str


class Measured(BaseModel):
    """Batch 1, temperature 0, drafts of `max_draft` at most. tok_s, plain_tok_s: output tokens
    per second behind the first, with the mask and by plain decoding; tau: tokens per round;
    acceptance: accepted tokens of those drafted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tok_s: float = Field(gt=0.0)
    plain_tok_s: float = Field(gt=0.0)
    tau: float = Field(ge=1.0)
    acceptance: float = Field(ge=0.0, le=1.0)

    @property
    def speedup(self) -> float:
        return self.tok_s / self.plain_tok_s


class MaskFile(BaseModel):
    """A mask as JSON. skip_attention, skip_mlp: layers (from 0) whose sub-layer is skipped.
    measured: None where the search was ended before it could be. search, command: how it was
    found, for people."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["paceline-layerskip"] = "paceline-layerskip"
    version: Literal[1] = 1
    target: MaskTarget
    skip_attention: tuple[NonNegativeInt, ...]
    skip_mlp: tuple[NonNegativeInt, ...]
    gamma: float = Field(default=GAMMA, ge=0.0, le=1.0)
    max_draft: int = Field(default=MAX_DRAFT, ge=1, le=64)
    measured: Measured | None = None
    search: dict[str, Any] = {}
    command: str = ""

    @property
    def plan(self) -> SkipPlan:
        mask = skip_mask(self.target.n_layers, attention=self.skip_attention, mlp=self.skip_mlp)
        return SkipPlan(mask=mask, gamma=self.gamma, max_draft=self.max_draft)

    def write(self, path: Path) -> None:
        """Whole or not at all; UserError where it can't be written."""
        temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except OSError as e:
            raise UserError(f"mask file '{path}' can't be written: {e.strerror or e}") from None


def mask_path(target: str) -> Path:
    """Where the mask that was searched for a target of this name is kept."""
    return cache_dir() / "layerskip" / f"{target.replace('/', '--')}.json"


def read_mask(path: Path) -> MaskFile:
    """UserError where the file is missing, damaged or names layers that are not there."""
    try:
        found = MaskFile.model_validate_json(path.read_text(encoding="utf-8"))
        _ = found.plan
    except OSError as e:
        raise UserError(f"mask file '{path}' can't be read: {e.strerror or e}") from None
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"'{path}' is no mask of paceline train layerskip: {where or 'file'}: {first['msg']}"
        ) from None
    except ValueError as e:
        raise UserError(f"mask file '{path}': {e}") from None
    return found


def weight_file_bytes(source: ModelSource) -> int:
    """Bytes of a model's weight files, by which another model's mask is noticed."""
    paths = [source.path] if source.kind == "gguf" else shards(source.path)
    return sum(path.stat().st_size for path in paths)
