"""From command-line lists to the cells of a matrix, in the order that loads least."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from paceline.bench.results import CellConfig
from paceline.errors import UserError
from paceline.registry import LIGHT, DraftSpec, is_layerskip, parse_tree
from paceline.registry_heads import head_tree, is_head

POLICIES = ("fixed", "adaptive")
#: In a list of trees: no tree.
CHAIN = "chain"
#: Cells that are measured against the same plain runs.
GROUP = 4

ABLATIONS = ("draft", "k", "tree", "temperature")
_K_GRID = (1, 2, 3, 4, 6, 8, 12)
_TREE_GRID = (CHAIN, "2x1", "2x2", "3x2x1", "top:3x2x1", "paths:8", "paths:16")
_TEMPERATURE_GRID = (0.0, 0.3, 0.6, 1.0)


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What is combined. trees: `chain` or a tree's spec, for drafts with a model. rates:
    None is the closed loop."""

    workloads: tuple[str, ...] = ("suite",)
    drafts: tuple[str, ...] = ("ngram",)
    trees: tuple[str, ...] = (CHAIN,)
    ks: tuple[int, ...] = (4,)
    policies: tuple[str, ...] = ("fixed",)
    temperatures: tuple[float, ...] = (0.0,)
    concurrencies: tuple[int, ...] = (1,)
    rates: tuple[float | None, ...] = (None,)
    vocabulary: str = "same"
    weights: str = "fast"

    def __post_init__(self) -> None:
        for name in ("workloads", "drafts", "trees", "ks", "policies", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise UserError(f"{name} must be a list without repetition, not {list(values)}")
        for policy in self.policies:
            if policy not in POLICIES:
                raise UserError(f"unknown policy {policy!r}: use {' or '.join(POLICIES)}")
        for k in self.ks:
            if not 1 <= k <= 64:
                raise UserError(f"k = {k} is out of range: use 1 to 64 (plain is always measured)")
        for c in self.concurrencies:
            if c < 1:
                raise UserError(f"concurrency = {c} is out of range: use 1 or more")
        for rate in self.rates:
            if rate is not None and not rate > 0:
                raise UserError(f"rate = {rate} is out of range: use requests per second above 0")
        if "none" in self.drafts:
            raise UserError("draft 'none' is plain decoding, which is measured beside every cell")
        if self.trees != (CHAIN,) and not any(map(has_trees, self.drafts)):
            raise UserError(
                f"--tree {','.join(self.trees)}: none of the drafts ({', '.join(self.drafts)}) "
                "proposes trees; name a draft model, or drop it"
            )

    def ablate(self, what: str, given: frozenset[str] = frozenset()) -> Axes:
        """The default grid of one axis, unless the user gave that axis. UserError where the
        drafts can't vary along it."""
        if what == "k":
            return self if "k" in given else replace(self, ks=_K_GRID)
        if what == "temperature":
            grid = _TEMPERATURE_GRID
            return self if "temperature" in given else replace(self, temperatures=grid)
        if what == "tree":
            if not any(map(has_trees, self.drafts)):
                raise UserError("--ablate tree needs a draft model: name one with --draft")
            return self if "tree" in given else replace(self, trees=_TREE_GRID)
        if what == "draft":
            if len(self.drafts) < 2:
                raise UserError("--ablate draft needs two drafts at least: repeat --draft")
            return self
        raise UserError(f"unknown ablation {what!r}: use {', '.join(ABLATIONS)}")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that differ in policy and k alone: one model in memory, the same plain runs."""

    spec: DraftSpec
    cells: tuple[CellConfig, ...]


def expand(axes: Axes) -> list[Group]:
    """All cells, those of one drafter together. Drafts without a model have no trees; a tree
    has one k, its nodes; `adaptive` has one cell, at the largest k."""
    groups = []
    for draft in axes.drafts:
        for tree in _trees(draft, axes.trees):
            spec = DraftSpec(
                name=draft,
                tree=tree,
                vocabulary=axes.vocabulary if has_trees(draft) else "same",
                weights=axes.weights,
            )
            for workload in axes.workloads:
                for temperature in axes.temperatures:
                    for concurrency in axes.concurrencies:
                        for rate in axes.rates:
                            base = CellConfig(
                                workload=workload,
                                drafter=draft,
                                tree=tree,
                                vocabulary=spec.vocabulary,
                                weights=spec.weights,
                                k=1,
                                temperature=temperature,
                                concurrency=concurrency,
                                rate=rate,
                            )
                            cells = _choices(base, spec, axes)
                            groups += [
                                Group(spec=spec, cells=tuple(cells[i : i + GROUP]))
                                for i in range(0, len(cells), GROUP)
                            ]
    return groups


def has_trees(draft: str) -> bool:
    """Whether a drafter can propose trees: those with a model or heads of their own."""
    name = DraftSpec(name=draft).second.name
    return name not in LIGHT and not is_layerskip(name)


def _trees(draft: str, trees: Seq[str]) -> list[str | None]:
    if not has_trees(draft):
        return [None]
    return [None if t == CHAIN else t for t in trees]


def _choices(base: CellConfig, spec: DraftSpec, axes: Axes) -> list[CellConfig]:
    """The policies and lengths of one drafter."""
    nodes = tree_nodes(spec)
    ks = axes.ks if nodes is None else (nodes,)
    cells = []
    if "fixed" in axes.policies:
        cells += [base.model_copy(update={"policy": "fixed", "k": k}) for k in ks]
    if "adaptive" in axes.policies:
        cells.append(base.model_copy(update={"policy": "adaptive", "k": max(ks)}))
    return cells


def tree_nodes(spec: DraftSpec) -> int | None:
    """Nodes of the tree that was asked for; None for chains, and where k says how many."""
    if spec.tree is None:
        return None
    if is_head(spec.second.name):
        shape = head_tree(spec.tree).shape
        return None if shape is None else shape.nodes
    plan = parse_tree(spec.tree)
    return None if plan is None else plan.fit or plan.nodes
