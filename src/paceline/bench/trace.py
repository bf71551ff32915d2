"""What drafters would have proposed along texts that the target wrote: the advisor's trace.

The target decodes the prompts plainly, once for each way to sample. At every position each
drafter is asked what it would propose there, and the answer is compared with what came. No
drafter's choice touches the text, so one run serves any number of them, and any k.

A proposal is kept in the form from which `paceline.bench.predict` computes the rounds of every
k exactly (see there): for drafters whose next token depends on the committed tokens alone, the
ratio q / p of the token that came; for others the depth to which the proposal agreed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.core.law import Law
from paceline.core.rules import Verdict
from paceline.core.tree import TokenTree, chain
from paceline.draft.base import Drafter, DrafterUsage, SelfDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.base import KVStore, TargetModel, TargetOutput
from paceline.sampling.context import Context, Row, context_of
from paceline.sampling.law import build_laws
from paceline.types import FinishReason, Request, RequestOutput, SamplingParams, Sequence

#: Layout of `Trace.to_json`.
FORMAT = 1

#: Drafters whose next token is a function of the committed tokens (and the request's seed)
#: alone: one token asked at every position tells all of every k.
PREFIX_ONLY = ("model",)


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """A drafter's proposals along one output, one entry for each token behind the first.

    kind `ratio`: value[t] = q(y) / p(y) of token t under draft and target law, 0 or 1 where
    the proposal is deterministic; NaN where nothing was proposed. kind `match`: value[t]
    tokens of the proposal made just before token t agreed with the output, of nodes[t]
    proposed ones.
    """

    kind: Literal["ratio", "match"]
    value: tuple[float, ...]
    nodes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        value = [None if math.isnan(v) else round(v, 6) for v in self.value]
        return {"kind": self.kind, "value": value, "nodes": list(self.nodes)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Guesses:
        if value["kind"] not in ("ratio", "match"):
            raise ValueError(f"unknown kind of guesses {value['kind']!r}")
        return Guesses(
            kind=value["kind"],
            value=tuple(math.nan if v is None else float(v) for v in value["value"]),
            nodes=tuple(int(n) for n in value["nodes"]),
        )


@dataclass(frozen=True, kw_only=True)
class Traced:
    """One request. prompt, output: tokens. cut: whether max_tokens ended it. guesses: by
    drafter."""

    prompt: int
    output: int
    cut: bool
    guesses: dict[str, Guesses]

    def __post_init__(self) -> None:
        for label, g in self.guesses.items():
            if len(g.value) != self.output - 1 or (g.kind == "match") != (len(g.nodes) > 0):
                raise ValueError(f"the guesses of {label!r} do not fit an output of {self.output}")
            if g.kind == "match" and len(g.nodes) != len(g.value):
                raise ValueError(f"the guesses of {label!r} lack proposal lengths")

    def to_json(self) -> dict[str, Any]:
        guesses = {label: g.to_json() for label, g in self.guesses.items()}
        return {"prompt": self.prompt, "output": self.output, "cut": self.cut, "guesses": guesses}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Traced:
        return Traced(
            prompt=int(value["prompt"]),
            output=int(value["output"]),
            cut=bool(value["cut"]),
            guesses={str(n): Guesses.from_json(g) for n, g in value["guesses"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A way to sample: temperature, and above 0 whether requests name a seed (their text then
    does not depend on drafting, and proposals follow the target's draws)."""

    temperature: float = 0.0
    seeded: bool = False

    @property
    def label(self) -> str:
        return f"temperature {self.temperature:g}" + (", seeded" if self.seeded else "")

    def params(self, *, max_tokens: int, seed: int, ignore_eos: bool) -> SamplingParams:
        """A seed in any case, so that a trace can be repeated; a rule is named where
        proposals must be drawn from the draft's law although there is one."""
        drawn = self.temperature > 0.0 and not self.seeded
        return SamplingParams(
            temperature=self.temperature, seed=seed, rule="block" if drawn else None,
            max_tokens=max_tokens, ignore_eos=ignore_eos,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """A drafter of a trace. most: nodes that it was asked for at most; tree: whether its
    proposals are trees, so that fewer nodes would be other ones. memory: bytes, by what they
    are for; flags: how the command line asks for it."""

    most: int
    flags: str
    tree: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "notes": list(self.notes)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> DraftInfo:
        return DraftInfo(
            most=int(value["most"]),
            flags=str(value["flags"]),
            tree=bool(value["tree"]),
            memory={str(n): int(b) for n, b in value["memory"].items()},
            notes=tuple(str(n) for n in value["notes"]),
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """requests: by setting. workload: name of the prompts; synthetic: whether some were
    composed or random, which says little about acceptance. seconds: that tracing took."""

    model: str
    workload: str
    synthetic: bool
    drafts: dict[str, DraftInfo]
    requests: dict[Setting, tuple[Traced, ...]]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": self.model,
            "workload": self.workload,
            "synthetic": self.synthetic,
            "drafts": {label: d.to_json() for label, d in self.drafts.items()},
            "settings": [
                {**vars(s), "requests": [r.to_json() for r in many]}
                for s, many in self.requests.items()
            ],
            "seconds": round(self.seconds, 3),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Trace:
        """ValueError where the value is no trace of this format."""
        try:
            if value["format"] != FORMAT:
                raise ValueError(f"format {value['format']!r}, expected {FORMAT}")
            return Trace(
                model=str(value["model"]),
                workload=str(value["workload"]),
                synthetic=bool(value["synthetic"]),
                drafts={str(n): DraftInfo.from_json(d) for n, d in value["drafts"].items()},
                requests={
                    Setting(temperature=float(s["temperature"]), seeded=bool(s["seeded"])): tuple(
                        Traced.from_json(r) for r in s["requests"]
                    )
                    for s in value["settings"]
                },
                seconds=float(value["seconds"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as e:
            raise ValueError(f"not a trace: {type(e).__name__}: {e}") from None


def read_json(path: str | Path) -> Any:
    """A JSON file that the user names. UserError where it can't be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as e:
        raise UserError(f"'{path}' can't be read as JSON: {e}") from None


# --- collecting ------------------------------------------------------------------------------


@dataclass
class _Asked:
    """What was asked just before a token. row: the law that it will be drawn from."""

    row: Row
    trees: dict[str, TokenTree]


@dataclass
class _Record:
    """trees, ratios: by drafter, one for each token behind the first."""

    trees: dict[str, list[TokenTree]]
    ratios: dict[str, list[float]]


class Listener:
    """Asks drafters for proposals at every position and proposes nothing itself.

    drafters: by label; depth: nodes to ask each for.
    """

    name = "none"

    def __init__(self, drafters: Mapping[str, Drafter], depth: Mapping[str, int]) -> None:
        self._drafters = dict(drafters)
        self._depth = dict(depth)
        self.taps = tuple(sorted({t for d in drafters.values() for t in d.taps}))
        self.records: dict[int, _Record] = {}
        self._asked: dict[int, _Asked] = {}

    def bind(self, model: TargetModel, kv: KVStore) -> None:
        for drafter in self._drafters.values():
            if isinstance(drafter, SelfDrafter):
                drafter.bind(model, kv)

    def example(self, greedy: bool) -> TokenTree:
        return chain(0)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
        self._asked = {}
        for seq, budget in zip(seqs, budgets, strict=True):
            if budget:
                # A snapshot: the tokens grow before the law is computed.
                context = context_of(seq)
                if context is not None:
                    context = Context(
                        list(seq.tokens), seq.n_prompt, context.prompt_ids, seq.end_ids, seq.grammar
                    )
                self._asked[seq.id] = _Asked(Row(seq.params, context), {})
        for label, drafter in self._drafters.items():
            asked = [min(self._depth[label], b) for b in budgets]
            for seq, tree in zip(seqs, drafter.propose(seqs, asked), strict=True):
                if seq.id in self._asked:
                    self._asked[seq.id].trees[label] = tree
        return [chain(s.tokens[-1]) for s in seqs]

    def observe(
        self,
        seqs: Seq[Sequence],
        trees: Seq[TokenTree],
        output: TargetOutput,
        verdicts: Seq[Verdict | None],
    ) -> None:
        row = 0
        for seq, verdict in zip(seqs, verdicts, strict=True):
            if verdict is not None:
                self._note(seq, output, row)
                row += 1
        for drafter in self._drafters.values():
            drafter.observe(seqs, trees, output, verdicts)

    def _note(self, seq: Sequence, output: TargetOutput, row: int) -> None:
        """Compare what was asked with the token that came."""
        if seq.n_output == 1:
            return  # the first token is never drafted
        labels = list(self._drafters)
        record = self.records.setdefault(
            seq.id, _Record({n: [] for n in labels}, {n: [] for n in labels})
        )
        asked = self._asked.get(seq.id)
        token = seq.tokens[-1]
        p: Law | None = None
        for label in labels:
            tree = asked.trees[label] if asked else chain(seq.tokens[-2])
            ratio = math.nan
            if len(tree) > 1 and tree.laws is not None and asked is not None:
                if not tree.is_chain:
                    raise UserError(
                        f"draft {label!r} draws trees at this temperature, which can't be "
                        "traced: trace it at temperature 0, or with --seeded"
                    )
                if p is None:
                    p = build_laws(output.logits_RV[row : row + 1], [asked.row])[0]
                ratio = tree.first_law(1).probability(token) / p.probability(token)
            elif len(tree) > 1:
                ratio = float(any(tree.tokens[u] == token for u in tree.children[0]))
            record.trees[label].append(TokenTree(tree.tokens, tree.parents))
            record.ratios[label].append(ratio)

    def forget(self, seq_id: int) -> None:
        for drafter in self._drafters.values():
            drafter.forget(seq_id)

    def usage(self) -> DrafterUsage:
        return DrafterUsage()


def trace_requests(
    model: TargetModel,
    drafters: Mapping[str, Drafter],
    most: Mapping[str, int],
    prompts: Seq[tuple[int, ...]],
    setting: Setting,
    config: EngineConfig,
    *,
    max_tokens: int,
    eos_ids: frozenset[int] = frozenset(),
    vocab_size: int | None = None,
    seed: int = 0,
    ignore_eos: bool = False,
    on_done: Callable[[], None] | None = None,
) -> tuple[Traced, ...]:
    """Decode the prompts plainly and ask every drafter at every position.

    most: nodes to ask each drafter for. on_done: called as each request ends. UserError where
    a request can't be served (too long a prompt).
    """
    depth = {n: 1 if d.name in PREFIX_ONLY else most[n] for n, d in drafters.items()}
    listener = Listener(drafters, depth)
    policy = FixedBudget(max(depth.values(), default=0))
    engine = Engine(model, listener, policy, config, eos_ids=eos_ids, vocab_size=vocab_size)
    requests = [
        Request(
            prompt=p,
            params=setting.params(max_tokens=max_tokens, seed=seed + i, ignore_eos=ignore_eos),
        )
        for i, p in enumerate(prompts)
    ]
    for request in requests:
        engine.check(request)
    ids = [i for request in requests for i in engine.submit(request)]
    while not engine.idle:
        for step in engine.step():
            if step.finish_reason is not None and on_done is not None:
                on_done()
    return tuple(_traced(engine.result(i), listener.records.get(i), drafters, most) for i in ids)


def _traced(
    output: RequestOutput,
    record: _Record | None,
    drafters: Mapping[str, Drafter],
    most: Mapping[str, int],
) -> Traced:
    if output.error is not None:
        raise UserError(f"a prompt can't be traced: {output.error}")
    ids = output.token_ids
    guesses = {}
    for label, drafter in drafters.items():
        trees = record.trees[label] if record else []
        ratios = record.ratios[label] if record else []
        if drafter.name in PREFIX_ONLY or _drawn(ratios):
            guesses[label] = Guesses(kind="ratio", value=tuple(ratios))
        else:
            matched = tuple(float(_agreed(t, ids[i + 1 :])) for i, t in enumerate(trees))
            nodes = tuple(len(t) - 1 for t in trees)
            guesses[label] = Guesses(kind="match" if nodes else "ratio", value=matched, nodes=nodes)
    return Traced(
        prompt=len(output.prompt_tokens),
        output=len(ids),
        cut=output.finish_reason in (FinishReason.LENGTH, FinishReason.CONTEXT),
        guesses=guesses,
    )


def _drawn(ratios: Seq[float]) -> bool:
    """Whether any proposal was drawn from a law (others have ratio 0 or 1)."""
    found = np.array(ratios)
    return bool(((found != 0.0) & (found != 1.0) & ~np.isnan(found)).any())


def _agreed(tree: TokenTree, ids: Seq[int]) -> int:
    """Nodes on the path through the tree that the output took."""
    node, depth = 0, 0
    while depth < len(ids):
        child = next((u for u in tree.children[node] if tree.tokens[u] == ids[depth]), None)
        if child is None:
            break
        node, depth = child, depth + 1
    return depth
