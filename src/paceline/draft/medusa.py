"""Medusa: heads on the target's last feature guess several tokens ahead at once.

Cai et al. 2024. The tree is static: the paths of guesses that were most often right on
calibration text. Proposals are deterministic, so the walk and greedy match are exact; the
paper's own rule is `typical`, which is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache

import torch

from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Arm, DrafterUsage
from paceline.draft.heads import HeadVocabulary, committed_rows
from paceline.errors import UserError
from paceline.models.base import FINAL, KVStore, TargetModel, TargetOutput
from paceline.models.heads.calibration import Accuracy, best_paths
from paceline.models.heads.config import MedusaConfig
from paceline.models.heads.runtime import MedusaRunner
from paceline.sampling.context import Row, context_of
from paceline.types import Sequence

Ranks = tuple[int, ...]


class MedusaDrafter:
    """State of a sequence: the target's feature of its last computed token, from which head i
    guesses the i-th token below the root. Nothing is cached, so nothing can go stale.

    accuracy_MJ: how often head i's j-th guess is right; the tree of n nodes is the n best
    paths under it.
    """

    name = "medusa"
    blind = True
    taps: tuple[int, ...] = (FINAL,)

    def __init__(
        self,
        config: MedusaConfig,
        make: Callable[[TargetModel], MedusaRunner],
        accuracy_MJ: Accuracy,
        *,
        weight_bytes: int = 0,
    ) -> None:
        """make: the heads of this config, ready to run beside the target that they are bound
        to."""
        heads = config.num_heads
        if len(accuracy_MJ) != heads or any(not 0 <= a <= 1 for row in accuracy_MJ for a in row):
            raise UserError(
                f"{heads} Medusa heads need as many rows of accuracies between 0 and 1; "
                f"got {len(accuracy_MJ)}"
            )
        self.config = config
        self._make = make
        self._weight_bytes = weight_bytes
        self._features: dict[int, torch.Tensor] = {}
        self.paths = lru_cache(maxsize=128)(lambda nodes: tuple(best_paths(accuracy_MJ, nodes)))

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        """See `draft.base`: the heads run where the target does."""
        self._runner = self._make(model)
        self._vocabulary = HeadVocabulary(self._runner.target_ids, self.config.vocab_size)

    def example(self, greedy: bool) -> TokenTree:
        return TokenTree((0, 0, 1), (-1, 0, 0))

    def arms(self, seq: Sequence) -> tuple[Arm, ...]:
        return (Arm(drafter=self.name, tree=True),) if self._ready(seq) else ()

    def _ready(self, seq: Sequence) -> bool:
        """Whether the feature before the root is there: after a preemption more tokens than
        the root may be pending."""
        return seq.pending == 1 and seq.id in self._features

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        trees = [chain(seq.tokens[-1]) for seq in seqs]
        plans = []
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            paths = self.paths(budget) if budget else ()
            if paths and self._ready(seq):
                plans.append((i, seq, paths))
        if not plans:
            return trees
        depth = max(len(path) for _, _, paths in plans for path in paths)
        h_ND = torch.stack([self._features[seq.id] for _, seq, _ in plans])
        logits_NMU = self._runner.logits(h_ND, depth)
        for (i, seq, paths), logits_MU in zip(plans, logits_NMU, strict=True):
            trees[i] = self._grow(seq, paths, logits_MU)
        return trees

    def _grow(self, seq: Sequence, paths: Seq[Ranks], logits_MU: torch.Tensor) -> TokenTree:
        """The tokens of the tree's places. Without transforms a place's token depends on its
        depth and rank alone; with them, on its parent's path too."""
        context = context_of(seq)
        adjusts = seq.params.adjusts
        count = 1 + max(path[-1] for path in paths)
        if not adjusts:
            depth = max(len(path) for path in paths)
            by_depth = self._vocabulary.ranked(logits_MU[:depth], [Row(seq.params)] * depth, count)
        tokens, parents = [seq.tokens[-1]], [-1]
        node_of: dict[Ranks, int] = {(): 0}
        drafted: dict[Ranks, Ranks] = {(): ()}
        guesses: dict[Ranks, list[tuple[int, float]]] = {}
        for path in paths:
            above, rank = path[:-1], path[-1]
            if above not in node_of or (above and tokens[node_of[above]] in seq.end_ids):
                continue
            if not adjusts:
                best = by_depth[len(above)]
            elif above in guesses:
                best = guesses[above]
            else:
                row = Row(seq.params, context, drafted[above])
                at = len(above)
                (best,) = self._vocabulary.ranked(logits_MU[at : at + 1], [row], count)
                guesses[above] = best
            if rank < len(best):
                node_of[path] = len(tokens)
                drafted[path] = (*drafted[above], best[rank][0])
                tokens.append(best[rank][0])
                parents.append(node_of[above])
        return TokenTree(tuple(tokens), tuple(parents))

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        features_ND = output.taps[FINAL]
        for seq, rows in zip(seqs, committed_rows(seqs, trees, output, verdicts), strict=True):
            if rows:
                self._features[seq.id] = features_ND[rows[-1]].float()

    def forget(self, seq_id: int) -> None:
        self._features.pop(seq_id, None)

    def usage(self) -> DrafterUsage:
        return DrafterUsage(bytes_total=self._weight_bytes)
