"""Shared devices: tabular models, drafters that are always right or wrong, a runner."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from paceline.core.rules import Verdict
from paceline.core.shapes import Beam, TreeShape, level_widths
from paceline.core.tree import TokenTree, chain
from paceline.draft.auto import AutoDrafter
from paceline.draft.base import Drafter, DrafterUsage
from paceline.draft.cache import DraftCache
from paceline.draft.layerskip import LayerSkipDrafter, SkipPlan, skip_mask
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.draft.tree import TreeDrafter
from paceline.draft.vocabulary import SameVocabulary
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.models.base import TargetOutput
from paceline.models.toy import TabularModel
from paceline.types import Request, RequestOutput, SamplingParams, Sequence, StepOutput

VOCAB = 13

#: Prompts of lengths 1, 2, 3 and several prefill chunks; the last one repeats itself.
PROMPTS = ((5,), (1, 2), (3, 1, 4), tuple(range(1, 13)) * 2, (7, 8, 9, 7, 8, 9, 7, 8))

CONFIG = EngineConfig(kv_tokens=1024, block_size=4, prefill_chunk=7, max_batch=8)


def target(**kwargs: object) -> TabularModel:
    return TabularModel(VOCAB, order=None, **kwargs)  # type: ignore[arg-type]


def noisy(noise: float) -> TabularModel:
    """The target's table plus noise: a draft that is right most of the time."""

    def change(context: tuple[int, ...], logits: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([99, len(context), *context])
        return (logits + rng.normal(0, noise, len(logits))).astype(np.float32)

    return target(change=change)


def anti() -> TabularModel:
    """The target's least probable token is the draft's most probable one."""
    return target(change=lambda context, logits: -4 * logits)


class ChosenTrees:
    """Deterministic trees from a tabular model: the best `width` tokens of each node, level
    by level, until the budget is used: a tree drafter without a cache of its own."""

    name = "tree"
    taps: tuple[int, ...] = ()

    def __init__(self, model: TabularModel, width: int = 2) -> None:
        self.model, self.width = model, width

    def example(self, greedy: bool) -> TokenTree:
        return TokenTree((0, 0, 1), (-1, 0, 0))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            # What is left of max_tokens bounds the depth, and the budget bounds the nodes.
            contexts = [tuple(seq.tokens)]
            tokens, parents, node = [seq.tokens[-1]], [-1], 0
            while len(tokens) <= budget and node < len(tokens):
                order = np.argsort(-self.model.logits(contexts[node]), kind="stable")
                for token in order[: self.width].tolist():
                    if len(tokens) <= budget:
                        tokens.append(token)
                        parents.append(node)
                        contexts.append((*contexts[node], token))
                node += 1
            trees.append(TokenTree(tuple(tokens), tuple(parents)))
        return trees

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        return None

    def forget(self, seq_id: int) -> None:
        return None

    def usage(self) -> DrafterUsage:
        return DrafterUsage()


class ScriptDrafter(NoDrafter):
    """Proposes what `script` says for the tokens so far."""

    name = "script"

    def __init__(self, script: Callable[[list[int]], list[int]]) -> None:
        self.script = script

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        return [
            chain(s.tokens[-1], self.script(s.tokens)[:budget])
            for s, budget in zip(seqs, budgets, strict=True)
        ]


def model_drafter(model: TabularModel, config: EngineConfig = CONFIG) -> ModelDrafter:
    return ModelDrafter(draft_cache(model, config), SameVocabulary(VOCAB))


def draft_cache(
    model: TabularModel, config: EngineConfig, stretch: int = 1, scratch: int = 0
) -> DraftCache:
    return DraftCache(
        model,
        n_blocks=stretch * config.n_blocks,
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_batch=config.max_batch,
        scratch=scratch,
    )


def tree_drafter(
    model: TabularModel,
    shape: TreeShape | Beam,
    config: EngineConfig = CONFIG,
    *,
    sampled: bool = True,
) -> TreeDrafter:
    cache = draft_cache(model, config, scratch=shape.scratch if isinstance(shape, Beam) else 0)
    return TreeDrafter(cache, SameVocabulary(VOCAB), shape, sampled=sampled)


#: Every kind of drafter that the engine must give the same text with.
DRAFTERS: dict[str, Callable[[EngineConfig], Drafter]] = {
    "none": lambda c: NoDrafter(),
    "ngram": lambda c: NgramDrafter(longest=3, shortest=1),
    "self": lambda c: model_drafter(target(), c),
    "noisy": lambda c: model_drafter(noisy(0.7), c),
    "anti": lambda c: model_drafter(anti(), c),
    "tree": lambda c: ChosenTrees(noisy(0.7)),
    "anti-tree": lambda c: ChosenTrees(anti(), 3),
    "ngram+noisy": lambda c: AutoDrafter(
        {"ngram": NgramDrafter(longest=3, shortest=2), "model": model_drafter(noisy(0.7), c)}
    ),
    "layerskip": lambda c: LayerSkipDrafter(SkipPlan(mask=skip_mask(1, mlp=[0]), gamma=0.2)),
    "widths": lambda c: tree_drafter(noisy(0.7), level_widths((2, 2, 1)), c),
    "anti-widths": lambda c: tree_drafter(anti(), level_widths((3, 2)), c),
    "top-widths": lambda c: tree_drafter(noisy(0.7), level_widths((2, 2, 1)), c, sampled=False),
    "beam": lambda c: tree_drafter(noisy(0.7), Beam(nodes=9, width=3, depth=4), c, sampled=False),
}

#: Those whose proposals are deterministic at every temperature.
DETERMINISTIC = ("ngram", "tree", "anti-tree", "top-widths", "beam")


def make_engine(
    drafter: Drafter | str = "none",
    *,
    k: int = 4,
    config: EngineConfig = CONFIG,
    model: TabularModel | None = None,
    **kwargs: object,
) -> Engine:
    built = DRAFTERS[drafter](config) if isinstance(drafter, str) else drafter
    model = model or target(skipped=noisy(0.7))
    return Engine(model, built, FixedBudget(k), config, audit=True, **kwargs)  # type: ignore[arg-type]


def run(
    engine: Engine,
    prompts: Seq[Seq[int]],
    params: SamplingParams | Seq[SamplingParams],
    each: Callable[[StepOutput], None] | None = None,
) -> list[RequestOutput]:
    """Submit all, step to the end with all invariants checked, and see the pool empty."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    ids = [
        i
        for prompt, p in zip(prompts, many, strict=True)
        for i in engine.submit(Request(prompt=tuple(prompt), params=p))
    ]
    for step in engine.stream():
        if isinstance(engine.drafter, ModelDrafter | TreeDrafter):
            engine.drafter.cache.audit()
        if each is not None:
            each(step)
    cache = engine.scheduler.prefix_cache
    assert engine.scheduler.allocator.n_used == (len(cache.table) if cache else 0)
    assert engine.drafter.usage().blocks_used == 0
    return [engine.result(i) for i in ids]


def ids(outputs: Seq[RequestOutput]) -> list[tuple[int, ...]]:
    return [o.token_ids for o in outputs]
