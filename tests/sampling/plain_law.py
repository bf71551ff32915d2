"""The law of one row in its plainest form: float64, whole sorts, no shortcuts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from paceline.types import SamplingParams


def plain_logits(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Iterable[int] = (),
    output: Iterable[int] = (),
    end_ids: Iterable[int] = (),
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Bias, penalties, then everything that forbids."""
    x = logits.astype(np.float64).copy()
    prompt, output = list(prompt), list(output)
    for i, value in params.logit_bias:
        x[i] += value
    for i in set(prompt + output):
        r = params.repetition_penalty
        x[i] = x[i] / r if x[i] > 0 else x[i] * r
    for i in set(output):
        x[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty
    for i in range(len(x)):
        text = tuple(prompt + output + [i])
        banned = i in params.banned_tokens
        banned |= params.allowed_tokens is not None and i not in params.allowed_tokens
        banned |= any(text[-len(w) :] == w for w in params.banned_words)
        banned |= i in end_ids and len(output) < params.min_tokens
        banned |= mask is not None and not mask[i]
        if banned:
            x[i] = -np.inf
    return x


def plain_law(logits: np.ndarray, params: SamplingParams, *context, **more) -> np.ndarray:
    """Probabilities of the next token."""
    return plain_filters(plain_logits(logits, params, *context, **more), params)


def plain_filters(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, typical-p."""
    if params.greedy:
        return np.eye(len(x))[x.argmax()]
    x = x.astype(np.float64)
    probs = np.exp((x - x.max()) / params.temperature)
    order = np.argsort(-x, kind="stable")
    if params.top_k:
        probs[order[params.top_k :]] = 0.0
    probs /= probs.sum()
    if params.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= params.top_p]] = 0.0
    probs[probs < params.min_p * probs.max()] = 0.0
    probs /= probs.sum()
    if params.typical_p < 1:
        with np.errstate(divide="ignore"):
            surprise = -np.log(probs)
        entropy = np.sum(probs[probs > 0] * surprise[probs > 0])
        away = np.abs(surprise - entropy)
        order = np.argsort(away, kind="stable")
        before = np.cumsum(probs[order]) - probs[order]
        probs[away > away[order[before < params.typical_p]].max()] = 0.0
        probs /= probs.sum()
    return probs
