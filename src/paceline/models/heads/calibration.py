"""Medusa's static tree: how often each guess is right, and the best tree for that.

Cai et al. 2024, section 2.3.3. Legend: N rows, D hidden, M heads, J ranks, U draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

import torch

from paceline.models.heads.medusa import MedusaHeads

Accuracy = tuple[tuple[float, ...], ...]


@torch.inference_mode()
def rank_accuracy(
    heads: MedusaHeads, features_ND: torch.Tensor, tokens_N: torch.Tensor, ranks: int = 10
) -> Accuracy:
    """How often head i's j-th most probable token is the right one, over one calibration text.

    features_ND[t]: the target's final feature of token tokens_N[t]; head i guesses token
    t + 2 + i. Concatenate texts by averaging results weighted with their lengths. ValueError
    for a text that is too short for the last head.
    """
    n, m = len(tokens_N), heads.config.num_heads
    if len(features_ND) != n or n < m + 2:
        raise ValueError(f"calibration needs more than {m + 1} tokens and a feature for each")
    ids_U = heads.target_ids
    found = []
    for i in range(m):
        guesses = heads.logits(features_ND[: n - 2 - i], i).topk(min(ranks, len(ids_U))).indices
        right = ids_U[guesses] == tokens_N[2 + i :].unsqueeze(-1)
        found.append(tuple(right.double().mean(0).tolist()))
    return tuple(found)


def best_paths(accuracy_MJ: Seq[Seq[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` paths of ranks with the largest product of accuracies, the best first.

    A path (r0, r1, ...) is head 0's guess of rank r0, then head 1's of rank r1, ... Parents come
    before their children, also where accuracies are 1 or tie. Fewer paths where there are not
    so many of positive probability.
    """
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def offer(path: tuple[int, ...], log_p: float) -> None:
        if len(path) < len(accuracy_MJ):
            for rank, a in enumerate(accuracy_MJ[len(path)]):
                if a > 0.0:
                    child = (*path, rank)
                    heapq.heappush(heap, (-log_p - math.log(a), len(child), child))

    offer((), 0.0)
    while heap and len(paths) < nodes:
        cost, _, path = heapq.heappop(heap)
        paths.append(path)
        offer(path, -cost)
    return paths
