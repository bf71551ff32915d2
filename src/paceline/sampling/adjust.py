"""Transforms of logits, before the temperature: bias, penalties, bans and grammar.

Order (transformers' and vLLM's): bias, repetition, frequency and presence penalty, then
everything that forbids tokens, whose order makes no difference. Legend: V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.context import Context, Ids, Row
from paceline.types import SamplingParams

Mask = npt.NDArray[np.bool_]


class NoTokenLeft(Exception):
    """Bans, allowed tokens and grammar together leave nothing to emit."""


class OutsideLanguage(Exception):
    """A row's path lies outside the grammar's language, or behind its end."""


def adjust(logits_V: torch.Tensor, row: Row) -> torch.Tensor | int:
    """[V] -> new [V] with -inf for forbidden tokens, or the one token that is allowed.

    Raises:
        NoTokenLeft, OutsideLanguage: see there.
    """
    params = row.params
    allowed_V = None
    if params.allowed_tokens is not None or params.language is not None:
        allowed_V = allowed_ids(row, logits_V.shape[0])
        n_left = int(np.count_nonzero(allowed_V))
        if n_left == 0:
            raise NoTokenLeft
        if n_left == 1:
            return int(allowed_V.argmax())
    logits_V = logits_V.clone()
    if params.logit_bias:
        ids, values = _within(dict(params.logit_bias).items(), logits_V)
        logits_V[ids] += values
    if params.penalises:
        _penalise(logits_V, row)
    if allowed_V is not None:
        logits_V.masked_fill_(~torch.from_numpy(allowed_V).to(logits_V.device), -torch.inf)
    else:
        logits_V[_index(_banned(row) | _held(row), logits_V)] = -torch.inf
    return logits_V


def allowed_ids(row: Row, size: int) -> Mask:
    """[V] the tokens that may follow the row's path."""
    params, context = row.params, row.context
    if params.allowed_tokens is None:
        allowed_V = np.ones(size, np.bool_)
    else:
        allowed_V = _listed(params.allowed_tokens, size).copy()
    if params.language is not None:
        assert context is not None
        assert context.grammar is not None, "a grammar needs its cursor"
        mask_V = context.grammar.mask(row.output())
        if mask_V is None:
            raise OutsideLanguage
        known = min(size, len(mask_V))
        allowed_V[:known] &= mask_V[:known]
        allowed_V[known:] = False  # padding of the model's matrix
    _forbid(allowed_V, _banned(row))
    held = _held(row)
    if held:
        without_V = allowed_V.copy()
        _forbid(without_V, held)
        # A complete text can only end: there min_tokens gives way.
        if params.language is None or without_V.any():
            return without_V
    return allowed_V


@lru_cache(maxsize=64)
def _listed(ids: tuple[int, ...], size: int) -> Mask:
    listed_V = np.zeros(size, np.bool_)
    listed_V[[i for i in ids if i < size]] = True
    return listed_V


def _forbid(allowed_V: Mask, ids: Iterable[int]) -> None:
    allowed_V[[i for i in ids if i < len(allowed_V)]] = False


def _banned(row: Row) -> set[int]:
    """Banned tokens, and those that would complete a banned word."""
    banned = set(row.params.banned_tokens)
    for word in row.params.banned_words:
        assert not isinstance(word, str), "words must be resolved to tokens before"
        if len(word) == 1 or row.last(len(word) - 1) == word[:-1]:
            banned.add(word[-1])
    return banned


def _held(row: Row) -> frozenset[int]:
    """Tokens that would end the generation before it has min_tokens."""
    if row.params.min_tokens == 0 or row.n_output >= row.params.min_tokens:
        return frozenset()
    assert row.context is not None
    return row.context.end_ids


def _penalise(logits_V: torch.Tensor, row: Row) -> None:
    """In place. Repetition over prompt and output (Keskar et al. 2019, section 4.1), the
    other two over the output alone, as vLLM's.

    Committed tokens are counted once a round for all nodes. A path's own few tokens are
    then set anew from their old logits, by the same operations, so that a token has the
    same bits whether it is committed or on the path.
    """
    context = row.context
    assert context is not None
    added = Counter(row.path)
    path_ids = [i for i in added if i < logits_V.shape[0]]
    ids = torch.tensor(path_ids, dtype=torch.long, device=logits_V.device)
    times = [float(context.counts[i] + added[i]) for i in path_ids]
    counted = torch.tensor(times, dtype=logits_V.dtype, device=logits_V.device)
    old = logits_V[ids]
    seen, output, output_times = (
        torch.from_numpy(a).to(logits_V.device) for a in _committed(context, logits_V.shape[0])
    )
    if row.params.repetition_penalty != 1.0:
        logits_V[seen] = _repeated(logits_V[seen], row.params)
        old = _repeated(old, row.params)
    logits_V[output] = _counted(logits_V[output], output_times.to(logits_V.dtype), row.params)
    logits_V[ids] = _counted(old, counted, row.params)


def _committed(context: Context, size: int) -> tuple[Ids, Ids, npt.NDArray[np.float32]]:
    """Ids that the vocabulary has, of all tokens and of the output; counts of the latter."""
    seen, output, times = context.seen_ids, context.output_ids, context.output_times
    if seen.size and seen.max() >= size:  # a draft's vocabulary may be smaller
        seen, times = seen[seen < size], times[output < size]
        output = output[output < size]
    return seen, output, times


def _repeated(values: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    factor = params.repetition_penalty
    return torch.where(values < 0, values * factor, values / factor)


def _counted(values: torch.Tensor, times: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    return values - (params.frequency_penalty * times + params.presence_penalty)


def _within(
    pairs: Iterable[tuple[int, float]], logits_V: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that the vocabulary has, and their values, on the logits' device."""
    kept = [(i, v) for i, v in pairs if i < logits_V.shape[0]]
    ids = torch.tensor([i for i, _ in kept], dtype=torch.long, device=logits_V.device)
    return ids, torch.tensor([v for _, v in kept], dtype=logits_V.dtype, device=logits_V.device)


def _index(ids: Iterable[int], logits_V: torch.Tensor) -> torch.Tensor:
    size = logits_V.shape[0]
    return torch.tensor([i for i in ids if i < size], dtype=torch.long, device=logits_V.device)
