"""Is the speculative text what plain decoding gives? One verdict for a cell.

- All texts equal: `identical`.
- They differ at temperature 0: `different` where numerics are row-invariant; else `near_tie` where
  every first difference is between two tokens closer than the tolerance, and `different` if not.
- They differ at temperature > 0: `different` where equal seeds promise equal texts; else (no
  seeds, or proposals are sampled) `law` where the law test does not reject them, and `different`
  where it does.

The law test is exact and looks at the speculative texts alone. Under the target's law, the
probability integral transform of each token given the tokens before it is uniform and
independent of all others, however long the texts and whatever their prefixes (Rosenblatt
1952). Tokens are ordered by their probability, so that a rule which is too greedy or too flat
shifts the transform; mass of equal tokens is spread by a uniform. Laws come from the target
itself, fed the text; Kolmogorov and Smirnov's test compares with the uniform law.

Legend: V vocabulary, n output tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from paceline.bench.results import Lossless
from paceline.models.base import Numerics, RowGroup, TargetModel, pack
from paceline.sampling.law import build_laws
from paceline.types import SamplingParams

#: Odds at which the law test accuses a cell without cause.
FALSE_ALARM = 1e-6
#: Logit difference below which two tokens are tied, where a row's logits depend on its batch:
#: a few units in the last place of logits near 20, summed over layers.
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
_CHUNK, _BLOCK = 128, 32


@dataclass(frozen=True)
class Pair:
    """Outputs of one request in one repeat, in token ids."""

    prompt: tuple[int, ...]
    plain: tuple[int, ...]
    speculative: tuple[int, ...]

    @property
    def same(self) -> bool:
        return self.plain == self.speculative

    @property
    def first_difference(self) -> int:
        """Output position of the first difference."""
        pairs = zip(self.plain, self.speculative, strict=False)
        shorter = min(len(self.plain), len(self.speculative))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Under which the texts were made. comparable: equal seeds promise equal texts."""

    temperature: float
    comparable: bool
    seed: int = 0


def judge(pairs: Seq[Pair], model: TargetModel, conditions: Conditions) -> Lossless:
    """The verdict of a cell (see the module)."""
    differing = [p for p in pairs if not p.same]
    if not differing:
        return Lossless(
            verdict="identical",
            ok=True,
            compared=len(pairs),
            differing=0,
            detail=f"all {len(pairs)} texts equal plain decoding token by token",
        )
    if conditions.temperature > 0:
        invariant = model.info.numerics is Numerics.ROW_INVARIANT
        if not conditions.comparable or not invariant:
            return _by_law(pairs, len(differing), model, conditions)
    elif model.info.numerics is Numerics.TOLERANT:
        return _by_margin(pairs, differing, model)
    first = min(differing, key=lambda p: p.first_difference)
    return Lossless(
        verdict="different",
        ok=False,
        compared=len(pairs),
        differing=len(differing),
        detail=f"{len(differing)} of {len(pairs)} texts differ from plain decoding and nothing "
        f"allows it; {_describe(first, model)}",
    )


def _describe(pair: Pair, model: TargetModel) -> str:
    """Where a text leaves the plain one, for whoever looks for the fault."""
    at = pair.first_difference
    both = [text[at] if at < len(text) else None for text in (pair.plain, pair.speculative)]
    return (
        f"the first at output token {at + 1} behind {len(pair.prompt)} prompt tokens: "
        f"{both[0]} plainly, {both[1]} speculatively, {_margin(pair, model):.3g} below the "
        "largest logit"
    )


def _by_margin(pairs: Seq[Pair], differing: Seq[Pair], model: TargetModel) -> Lossless:
    tolerance = TOLERANCES.get(model.info.dtype, TOLERANCES["float32"])
    margin = max(_margin(p, model) for p in differing)
    ok = margin <= tolerance
    return Lossless(
        verdict="near_tie" if ok else "different",
        ok=ok,
        compared=len(pairs),
        differing=len(differing),
        detail=f"{len(differing)} of {len(pairs)} texts differ; the largest logit difference of "
        f"two tokens at a first difference is {margin:.3g}, allowed are {tolerance:g}",
        largest_margin=margin,
        tolerance=tolerance,
    )


def _margin(pair: Pair, model: TargetModel) -> float:
    """How far below the largest logit the worse of the two tokens is; infinite where one text
    is the beginning of the other."""
    at = pair.first_difference
    if at >= min(len(pair.plain), len(pair.speculative)):
        return math.inf
    before = (*pair.prompt, *pair.plain[: at + 1])
    (logits_V,) = output_logits(model, before, 1)
    worse = min(logits_V[pair.plain[at]], logits_V[pair.speculative[at]])
    return float(logits_V.max() - worse)


def _by_law(
    pairs: Seq[Pair], differing: int, model: TargetModel, conditions: Conditions
) -> Lossless:
    values = transforms(pairs, model, conditions)
    impossible = sum(math.isnan(v) for v in values)
    p_value = 0.0 if impossible else float(stats.kstest(values, "uniform").pvalue)
    # The deviation that would be accused: P(D > d) <= 2 exp(-2 n d^2) (Massart 1990).
    visible = math.sqrt(math.log(2 / FALSE_ALARM) / (2 * len(values)))
    ok = p_value >= FALSE_ALARM
    detail = (
        f"{len(values)} tokens follow the target's law as far as can be seen (p = {p_value:.2g}; "
        f"a shift of {visible:.2f} of the probability would be noticed)"
        if ok
        else f"{len(values)} tokens do not follow the target's law (p = {p_value:.2g}, "
        f"{impossible} tokens are impossible under it)"
    )
    return Lossless(
        verdict="law" if ok else "different",
        ok=ok,
        compared=len(pairs),
        differing=differing,
        detail=detail,
        test="probability integral transform by rank, Kolmogorov-Smirnov",
        p_value=p_value,
        false_alarm=FALSE_ALARM,
    )


def transforms(pairs: Seq[Pair], model: TargetModel, conditions: Conditions) -> list[float]:
    """The transform of every speculative token, in [0, 1]; NaN for one that the target can't
    emit. Uniform and independent where the texts follow the law."""
    rng = np.random.default_rng(conditions.seed)
    params = SamplingParams(temperature=conditions.temperature)
    values = []
    for pair in pairs:
        output = pair.speculative
        tokens = (*pair.prompt, *output)
        for token, logits_V in zip(output, output_logits(model, tokens, len(output)), strict=True):
            (law,) = build_laws(logits_V.unsqueeze(0), [params])
            weights_V = law.dense().double()
            weights_V /= weights_V.sum()
            own = float(weights_V[token])
            above = float(weights_V[weights_V > own].sum())
            level = float(weights_V[weights_V == own].sum())
            values.append(above + float(rng.random()) * level if own > 0 else math.nan)
    return [min(v, 1.0) for v in values]


def output_logits(model: TargetModel, tokens: Seq[int], n: int) -> Iterator[torch.Tensor]:
    """Logits [V] from which each of the last n tokens was chosen, the text being given."""
    fed = tokens[:-1]  # the last token is chosen, never read
    kv = model.new_kv(-(-len(fed) // _BLOCK), _BLOCK)
    table = np.arange(kv.n_blocks, dtype=np.int32)
    first = len(fed) - n
    for start in range(0, len(fed), _CHUNK):
        end = min(start + _CHUNK, len(fed))
        rows = end - start
        group = RowGroup(
            tokens=np.array(fed[start:end], np.int32),
            parents=np.arange(-1, rows - 1, dtype=np.int32),
            context=start,
            table=table,
            wanted=np.arange(max(first - start, 0), rows, dtype=np.int32),
        )
        yield from model.forward(pack([group], _BLOCK), kv).logits_RV.float().cpu()
