"""The best tokens of rows of logits.

Legend: N rows, U vocabulary, J ranks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from paceline.models.native_core import is_available, native_core


def best_tokens(
    logits_NU: torch.Tensor, heats: Seq[float], count: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Of each row the indices [N, J] of its J = min(count, U) largest logits, the best first,
    and their log-probabilities at the row's temperature in `heats`. A row with logits that are
    NaN or infinite has a first log-probability that is not finite, and no meaning."""
    n, size = logits_NU.shape
    count = min(count, size)
    if logits_NU.device.type == "cpu" and is_available()[0]:
        ids = np.zeros((n, count), np.int32)
        scores = np.zeros((n, count), np.float32)
        rows = np.ascontiguousarray(logits_NU.float().numpy())
        native_core().rank(rows, np.array(heats, np.float32), ids, scores)
        return ids.tolist(), scores.tolist()
    heat_N1 = torch.tensor(heats, device=logits_NU.device).unsqueeze(-1)
    logits_NU = logits_NU / heat_N1
    top = logits_NU.topk(count)
    scores_NJ = top.values - logits_NU.logsumexp(-1, keepdim=True)
    return top.indices.tolist(), scores_NJ.tolist()
