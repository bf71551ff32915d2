"""The look-up that the worker borrows: what followed the last token's first occurrence."""

from __future__ import annotations

import numpy as np


class LlamaPromptLookupDecoding:
    @staticmethod
    def find_candidate_pred_tokens(ids: np.ndarray, ngram: int, k: int) -> np.ndarray:
        for i in range(len(ids) - ngram):
            if (ids[i : i + ngram] == ids[-ngram:]).all():
                return ids[i + ngram : i + ngram + k]
        return np.array([], np.intc)
