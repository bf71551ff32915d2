"""What a layer mask would buy, predicted: matches against the target's own text, and costs.

Running the engine for every mask is slow and noisy. Instead the masked target drafts at many
places of texts that the target wrote at temperature 0, with the committed part of the cache
as the target left it, just as in the engine; how far each draft agrees is counted. With
measured costs of the passes that gives the speed of the best draft length (Leviathan et al.
2022, theorem 3.8). Legend: L layers, K longest draft, R rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.models.base import KVStore, LayerMask, RowGroup, TargetModel, pack
from paceline.sampling.law import build_laws
from paceline.types import SamplingParams

#: Rows of one pass while texts are read, and while drafts are compared.
_CHUNK = 256
_ROWS = 64


@dataclass(frozen=True)
class Text:
    """A prompt with the target's own continuation at temperature 0."""

    tokens: tuple[int, ...]
    n_prompt: int


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds at batch 1. base, attention, mlp: one drafted token (a one-row pass and its law)
    takes base and so much for each sub-layer that runs; verify[n - 1]: a whole pass of n rows;
    host: the rest of a round."""

    base: float
    attention: float
    mlp: float
    verify: tuple[float, ...]
    host: float = 0.0

    def draft(self, mask: LayerMask) -> float:
        """Seconds of one drafted token."""
        return self.base + self.attention * sum(mask.attention_L) + self.mlp * sum(mask.mlp_L)

    def best(self, mask: LayerMask, reach: Seq[float]) -> tuple[float, int]:
        """The most tokens per second relative to plain decoding, and the draft length that
        gives it. reach[j]: how often the first j + 1 drafted tokens all match."""
        plain = self.verify[0] + self.host
        step = self.draft(mask)
        tau, found = 1.0, (0.0, 0)
        for k, p in enumerate(reach, 1):
            tau += p
            found = max(found, (tau * plain / (k * step + self.verify[k] + self.host), -k))
        return found[0], -found[1]

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "attention": self.attention,
            "mlp": self.mlp,
            "verify": list(self.verify),
            "host": self.host,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Costs:
        return Costs(**{**data, "verify": tuple(data["verify"])})


def measure_costs(
    model: TargetModel,
    *,
    context: int,
    max_draft: int,
    host: float,
    repeats: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> Costs:
    """Medians over interleaved passes behind `context` entries, so that a machine which speeds
    up or slows down meanwhile does so for all of them. Sub-layers of a kind cost the same."""
    n_layers = model.info.n_layers
    on, off = (True,) * n_layers, (False,) * n_layers
    masks = [LayerMask(attention_L=a, mlp_L=m) for a, m in ((on, on), (off, on), (on, off))]
    block = 16
    table = np.arange(-(-(context + max_draft + 1) // block), dtype=np.int32)
    kv = model.new_kv(len(table), block)
    for at in range(0, context, _CHUNK):
        _pass(model, kv, [_chain(range(min(_CHUNK, context - at)), at, table, wanted=0)])
    plans: list[tuple[int, LayerMask | None]] = [(1, m) for m in masks]
    plans += [(n, None) for n in range(1, max_draft + 2)]
    seconds: list[list[float]] = [[] for _ in plans]
    params = SamplingParams(temperature=1.0)  # as the drafter ranks tokens at temperature 0
    for _ in range(repeats + 1):
        for (n, mask), found in zip(plans, seconds, strict=True):
            batch = pack([_chain(range(n), context, table, wanted=n)], block)
            start = clock()
            output = model.forward(batch, kv, layer_mask=mask)
            if mask is not None:
                build_laws(output.logits_RV, [params], masked=True)
            found.append(clock() - start)
    full, no_attention, no_mlp, *verify = (statistics.median(s[1:]) for s in seconds)
    attention = max(0.0, (full - no_attention) / n_layers)
    mlp = max(0.0, (full - no_mlp) / n_layers)
    base = max(0.0, full - n_layers * (attention + mlp))
    return Costs(base=base, attention=attention, mlp=mlp, verify=tuple(verify), host=host)


@dataclass(frozen=True)
class _Place:
    """Where a draft begins: `at` committed entries, then a block of its own for its rows."""

    text: Text
    at: int
    table: np.ndarray


class Screen:
    """Texts in a cache, and places every `max_draft` tokens of them where drafts begin.

    The cache's blocks hold `max_draft` slots, so that a place's own rows fill one block of
    its own and the committed ones are shared by all places.
    """

    def __init__(self, model: TargetModel, texts: Seq[Text], *, max_draft: int) -> None:
        """UserError where no text is long enough for a place."""
        self._model = model
        self.max_draft = max_draft
        n_text = sum(-(-len(t.tokens) // max_draft) for t in texts)
        n_places = sum(len(_starts(t, max_draft)) for t in texts)
        if n_places == 0:
            raise UserError(
                "the answers are too short to compare drafts with: give other prompts, or "
                "raise --max-tokens"
            )
        self._kv = model.new_kv(n_text + n_places, max_draft)
        self.places: list[_Place] = []
        used, own = 0, n_text
        for text in texts:
            blocks = -(-len(text.tokens) // max_draft)
            table = np.arange(used, used + blocks, dtype=np.int32)
            used += blocks
            for at in range(0, len(text.tokens), _CHUNK):
                rows = _chain(text.tokens[at : at + _CHUNK], at, table, wanted=0)
                _pass(model, self._kv, [rows])
            for at in _starts(text, max_draft):
                mine = np.append(table[: at // max_draft], np.int32(own))
                self.places.append(_Place(text, at, mine))
                own += 1

    def reach(self, mask: LayerMask) -> tuple[float, ...]:
        """[K] share of places where the first 1, 2, ... drafted tokens all match."""
        alive, found = self.places, []
        for depth in range(self.max_draft):
            matched: list[_Place] = []
            for first in range(0, len(alive), _ROWS):
                part = alive[first : first + _ROWS]
                groups = [
                    _chain([p.text.tokens[p.at + depth]], p.at + depth, p.table, wanted=1)
                    for p in part
                ]
                drafted = _pass(self._model, self._kv, groups, mask)
                wanted = (p.text.tokens[p.at + depth + 1] for p in part)
                matched += [p for p, d, w in zip(part, drafted, wanted, strict=True) if d == w]
            alive = matched
            found.append(len(alive) / len(self.places))
        return tuple(found)


def _starts(text: Text, step: int) -> list[int]:
    """Positions of roots: whole blocks, and `step` tokens of the answer follow."""
    first = -(-(text.n_prompt - 1) // step) * step
    return list(range(first, len(text.tokens) - step, step))


def _chain(tokens: Seq[int], context: int, table: np.ndarray, *, wanted: int) -> RowGroup:
    """Rows behind `context` entries; logits of the last `wanted` ones."""
    n = len(tokens)
    return RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, n - 1, dtype=np.int32),
        context=context,
        table=table,
        wanted=np.arange(n - wanted, n, dtype=np.int32),
    )


def _pass(
    model: TargetModel, kv: KVStore, groups: Seq[RowGroup], mask: LayerMask | None = None
) -> list[int]:
    """The most probable next token of each wanted row (the first among equals)."""
    if not groups:
        return []
    output = model.forward(pack(groups, kv.block_size), kv, layer_mask=mask)
    tokens: list[int] = output.logits_RV.cpu().numpy().argmax(-1).tolist()
    return tokens
