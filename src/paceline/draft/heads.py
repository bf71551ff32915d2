"""What drafters with a trained head share: target states by sequence, and ranked tokens.

Legend: N rows, D hidden, U draft vocabulary, V the target's vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache

import torch

from paceline.core.law import Law, PointLaw
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree
from paceline.models.base import TargetOutput
from paceline.models.heads.ranking import best_tokens
from paceline.sampling.context import Row
from paceline.sampling.law import BrokenLaw, EmptyLaw, build_laws
from paceline.types import SamplingParams, Sequence

log = logging.getLogger(__name__)

#: Temperatures below this rank as this one: a head's logits divided by less would overflow.
_COLDEST = 0.05
#: A token and its log-probability under the head.
Ranked = tuple[int, float]


def committed_rows(
    seqs: Seq[Sequence],
    trees: Seq[TokenTree],
    output: TargetOutput,
    verdicts: Seq[Verdict | None],
    *,
    ended: bool = False,
) -> list[range | list[int]]:
    """For each sequence, the packed rows of the pass whose tokens are committed now, in order
    of position: its pending tokens, then the accepted nodes. They are the last of the
    positions [0, seq.computed). Of a sequence that ended, none, or (`ended`) all that was accepted,
    also behind its end.

        pass   [pending ... root][node 1 ... node n]
        rows    all of these     those on the path
    """
    starts = output.starts_B1.tolist()
    assert len(starts) == len(seqs) + 1, "the target does not say where its rows begin"
    found: list[range | list[int]] = []
    for b, (seq, tree, verdict) in enumerate(zip(seqs, trees, verdicts, strict=True)):
        if seq.done and not ended:
            found.append(range(0))
            continue
        root = starts[b + 1] - len(tree)
        path = verdict.path if verdict is not None else ()
        if not path or path == tuple(range(1, len(path) + 1)):  # nothing, or a chain's
            found.append(range(starts[b], root + 1 + len(path)))
        else:
            found.append([*range(starts[b], root + 1), *(root + u for u in path)])
    return found


class HeadVocabulary:
    """A head's tokens among the target's, and the best of them under a request's rules."""

    def __init__(self, target_ids_U: torch.Tensor, vocab_size: int) -> None:
        self._ids_U = target_ids_U.cpu()
        self._ids: list[int] = self._ids_U.tolist()
        self._size = vocab_size
        self._warned = False

    def token(self, index: int) -> int:
        """The target's id of the head's token."""
        return self._ids[index]

    def spread(self, logits_NU: torch.Tensor) -> torch.Tensor:
        """[N, V] on the CPU: -inf for tokens that the head does not have."""
        logits_NV = torch.full((logits_NU.shape[0], self._size), -torch.inf)
        logits_NV[:, self._ids_U] = logits_NU.float().cpu()
        return logits_NV

    def ranked(self, logits_NU: torch.Tensor, rows: Seq[Row], count: int) -> list[list[Ranked]]:
        """For each row its `count` best tokens, the best first, with log-probabilities at the
        request's temperature (1 where greedy). Tokens that the request bans, or that its
        grammar does not allow next, are left out; fewer, or none, where no others are left or
        the head's logits are unusable."""
        out: list[list[Ranked]] = [[] for _ in rows]
        plain = [i for i, row in enumerate(rows) if not row.params.adjusts]
        if plain:
            part = logits_NU if len(plain) == len(rows) else logits_NU[plain]
            best_of = self._plain(part, [rows[i] for i in plain], count)
            for i, best in zip(plain, best_of, strict=True):
                out[i] = best
        others = [i for i, row in enumerate(rows) if row.params.adjusts]
        if others:
            asked = [replace(rows[i], params=_ranking(rows[i].params)) for i in others]
            laws = build_laws(self.spread(logits_NU[others]), asked, masked=True)
            for i, law in zip(others, laws, strict=True):
                out[i] = _best(law, count) if self.usable(law) else []
        return out

    def _plain(self, logits_NU: torch.Tensor, rows: Seq[Row], count: int) -> list[list[Ranked]]:
        ids_NJ, scores_NJ = best_tokens(logits_NU, [heat(row.params) for row in rows], count)
        return [
            [(self._ids[u], s) for u, s in zip(ids, scores, strict=True)]
            if self.healthy(scores[0])
            else []
            for ids, scores in zip(ids_NJ, scores_NJ, strict=True)
        ]

    def usable(self, law: Law) -> bool:
        """Whether a law can be drawn from; says once that a head gave bad logits."""
        if isinstance(law, BrokenLaw):
            return self.healthy(math.nan)
        return not isinstance(law, EmptyLaw)

    def healthy(self, value: float) -> bool:
        """Whether a score is a number; says once that a head gave bad logits."""
        good = math.isfinite(value)
        if not good and not self._warned:
            self._warned = True
            log.warning("the drafting head gave NaN or infinite logits; such drafts end there")
        return good


def heat(params: SamplingParams) -> float:
    """The temperature at which a request's drafts are ranked."""
    return 1.0 if params.greedy else max(params.temperature, _COLDEST)


@lru_cache(maxsize=256)
def _ranking(params: SamplingParams) -> SamplingParams:
    """Parameters whose law ranks tokens: the request's own, without the filters that would
    leave too few."""
    return replace(
        params,
        temperature=heat(params),
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        rule=None,
    )


def _best(law: Law, count: int) -> list[Ranked]:
    if isinstance(law, PointLaw):
        return [(law.token, 0.0)]
    probs_V = law.dense()
    top = probs_V.topk(min(count, probs_V.shape[0]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [(token, math.log(p)) for token, p in pairs if p > 0.0]
