"""The proof on the whole engine: every drafter, every rule, every transform.

The enumeration (`proof.enumerate`) shows that rules are exact. This shows that the engine
uses them rightly: that laws are conditioned on the node's own path, that caches, penalties
and grammars hold what was committed and nothing else, that rounds join without a seam.
Everything runs in ragged batches over a cache with small blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.proof import toys
from paceline.sampling.context import Context, Row
from paceline.sampling.law import build_laws
from paceline.types import Request, RequestOutput, SamplingParams

CONFIG = EngineConfig(
    kv_tokens=2048, block_size=4, max_batch=48, prefill_chunk=6, prefix_cache=True
)
#: Lengths 1, 2 and 9: shorter and longer than a block, and than a chunk of prefill.
PROMPTS = ((3,), (0, 6), (1, 2, 3, 1, 2, 3, 1, 2, 3))
#: A law fails where chance would show a deviation as large with less probability than this.
FALSE_ALARM = 1e-9
#: Output tokens whose joint law is compared.
DEPTH = 3

TRANSFORMS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "typical_p": {"typical_p": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "logit_bias": {"logit_bias": {1: 1.5, 4: -2.0}},
    "banned_tokens": {"banned_tokens": (2, 5)},
    "banned_words": {"banned_words": ((1, 2), (4, 4), (0, 6, 7), *((i, 3) for i in range(4)))},
    "allowed_tokens": {"allowed_tokens": (0, 1, 2, 6, toys.EOS)},
    "min_tokens": {"min_tokens": 2, "logit_bias": {toys.EOS: 2.0}},
    "grammar": {"regex": "(ab|[c-f]g?|h[abc]+d)*a"},
}


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One check. what: `greedy parity`, `seeded parity` or `law`. cases: texts or samples.
    failed: transforms that failed; p_value: of the law, all transforms pooled; tau: tokens
    per round."""

    drafter: str
    rule: str
    what: str
    cases: int
    failed: tuple[str, ...] = ()
    p_value: float | None = None
    tau: float = 1.0

    @property
    def ok(self) -> bool:
        return not self.failed


@dataclass(frozen=True)
class EngineReport:
    rows: tuple[EngineRow, ...]
    seconds: float

    @property
    def failed(self) -> int:
        return sum(not row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        laws = [row.p_value for row in self.rows if row.p_value is not None]
        return {
            "combinations": len(self.rows) * len(TRANSFORMS),
            "cases": sum(row.cases for row in self.rows),
            "failed": self.failed,
            "smallest_p_value": min(laws, default=None),
            "false_alarm_odds": FALSE_ALARM * len(laws),
        }


Progress = Callable[[int, int, str], None]


def run(full: bool = False, progress: Progress | None = None) -> EngineReport:
    """All checks; `full` draws 25 times as many samples."""
    start = time.perf_counter()
    samples = 400 if full else 16
    plan = [
        ("parity", name, rule) for name, (_, rules) in toys.DRAFTERS.items() for rule in rules[:1]
    ]
    # Under `walk` seeded parity says more than a law: the very tokens of plain decoding.
    plan += [
        ("law", name, rule)
        for name, (_, rules) in toys.DRAFTERS.items()
        for rule in rules
        if rule != "walk" or name == "none"
    ]
    plain = {key: _texts("none", key) for key in _parity_keys()}
    rows: list[EngineRow] = []
    for done, (what, drafter, rule) in enumerate(plan):
        if progress is not None:
            progress(done, len(plan), f"engine: {drafter}, {rule}")
        if what == "parity":
            rows += _parity(drafter, plain)
        else:
            rows.append(check_law(drafter, rule, samples))
    return EngineReport(tuple(rows), time.perf_counter() - start)


def make_engine(drafter: str, k: int = 4) -> Engine:
    build, _ = toys.DRAFTERS[drafter]
    return Engine(
        toys.target(),
        build(CONFIG),
        FixedBudget(max(k, 8) if "tree" in drafter else k),
        CONFIG,
        eos_ids=frozenset({toys.EOS}),
        grammars=toys.grammars(),
        audit=True,
    )


def generate(engine: Engine, prompts: Seq[Seq[int]], params: SamplingParams) -> list[RequestOutput]:
    ids = [i for p in prompts for i in engine.submit(Request(prompt=tuple(p), params=params))]
    for _ in engine.stream():
        pass
    return [engine.result(i) for i in ids]


def _params(transform: str, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **TRANSFORMS[transform], **more})


def _parity_keys() -> list[tuple[str, bool]]:
    return [(name, greedy) for name in TRANSFORMS for greedy in (True, False)]


def _texts(drafter: str, key: tuple[str, bool]) -> list[RequestOutput]:
    name, greedy = key
    more: dict[str, Any] = {"max_tokens": 16}
    more |= {"temperature": 0.0} if greedy else {"seed": 11, "rule": "walk"}
    return generate(make_engine(drafter), PROMPTS, _params(name, **more))


def _parity(drafter: str, plain: dict[tuple[str, bool], list[RequestOutput]]) -> list[EngineRow]:
    """Greedy, and seeded under `walk`: token for token what plain decoding gives."""
    rows = []
    for greedy in (True, False):
        failed, outputs = [], []
        for name in TRANSFORMS:
            got = _texts(drafter, (name, greedy))
            outputs += got
            if [o.token_ids for o in got] != [o.token_ids for o in plain[name, greedy]]:
                failed.append(name)
        rows.append(
            EngineRow(
                drafter=drafter,
                rule="greedy" if greedy else "walk",
                what="greedy parity" if greedy else "seeded parity",
                cases=len(outputs),
                failed=tuple(failed),
                tau=_tau(outputs),
            )
        )
    return rows


def _tau(outputs: list[RequestOutput]) -> float:
    rounds = sum(o.stats.rounds for o in outputs)
    return sum(o.stats.accepted + o.stats.rounds for o in outputs) / max(rounds, 1)


def check_law(drafter: str, rule: str, samples: int) -> EngineRow:
    """Chi-square of the joint law of the first three tokens, for each transform and for all
    of them pooled; each of these fails below `FALSE_ALARM`.

    Each token becomes its quantile under its exact conditional law (Rosenblatt's transform,
    randomised within the token's own interval). If the laws are right, the three quantiles
    of an output are independent and uniform, whatever the prompt and the transform, and may
    be counted together. Tokens that the draft overrates come first: what goes wrong between
    p and q then piles up at one end.
    """
    outputs: list[RequestOutput] = []
    failed = []
    pooled: list[Quantiles] = []
    for number, name in enumerate(TRANSFORMS):
        # Two tokens more than are compared, so that a round can propose a whole block.
        params = _params(name, max_tokens=DEPTH + 2, seed=number, n=samples, rule=rule)
        got = generate(make_engine(drafter), PROMPTS, params)
        outputs += got
        rng = np.random.default_rng(number)
        found = [quantiles(o.prompt_tokens, o.token_ids, params, rng) for o in got]
        # A token that the law forbids has no quantile: that needs no statistics.
        if None in found or _p_value([q for q in found if q], 2) < FALSE_ALARM:
            failed.append(name)
        pooled += [q for q in found if q is not None]
    p_value = _p_value(pooled, 4)
    if p_value < FALSE_ALARM and not failed:
        failed.append("all together")
    return EngineRow(
        drafter=drafter,
        rule=rule,
        what="law",
        cases=len(outputs),
        failed=tuple(failed),
        p_value=p_value,
        tau=_tau(outputs),
    )


Quantiles = tuple[float, ...]


def quantiles(
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    params: SamplingParams,
    rng: np.random.Generator,
) -> Quantiles | None:
    """Three quantiles; None where a token has probability zero. What would follow an
    end-of-sequence is uniform by definition."""
    found: list[float] = []
    for i in range(DEPTH):
        if i >= len(output):
            found.append(float(rng.random()))
            continue
        law, order = exact_law(prompt, output[:i], params)
        mass = law[output[i]]
        if mass <= 0.0:
            return None
        before = law[order[: int((order == output[i]).argmax())]].sum()
        found.append(min(float(before + rng.random() * mass), 1.0 - 1e-12))
    return tuple(found)


def _p_value(found: list[Quantiles], bins: int) -> float:
    """The smaller of two, doubled: of a chi-square over bins ** 3 equal cells for the joint
    law, and of one over 3 * bins for each token's own, which sees a steady bias sooner."""
    if not found:
        return 1.0
    cells_3 = (np.array(found) * bins).astype(np.int64)
    joint = np.bincount(cells_3 @ [bins * bins, bins, 1], minlength=bins**3)
    each = np.bincount((np.array(found) * 3 * bins).astype(np.int64).ravel(), minlength=3 * bins)
    smaller = min(stats.chisquare(joint).pvalue, stats.chisquare(each).pvalue)
    return min(1.0, 2.0 * float(smaller))


@cache
def exact_law(
    prompt: tuple[int, ...], output: tuple[int, ...], params: SamplingParams
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """[V] probabilities of the next token, by the law's definition and without an engine,
    and [V] tokens, those first that the draft's plain law overrates most."""
    params = replace(params, seed=None, n=1)
    cursor = toys.grammars().cursor(*params.language) if params.language else None
    context = Context(prompt, len(prompt), frozenset(prompt), frozenset({toys.EOS}), cursor)
    logits = torch.from_numpy(toys.target().logits((*prompt, *output))).unsqueeze(0)
    law = build_laws(logits, [Row(params, context, output)])[0]
    probs = np.array([law.probability(t) for t in range(law.size)])
    overrated = toys.draft().logits((*prompt, *output)) - np.log(np.maximum(probs, 1e-9))
    return probs, np.argsort(-overrated, kind="stable")
