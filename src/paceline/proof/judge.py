"""One case of the proof: a rule, a way of drafting and a world, summed over everything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from paceline.core.law import Law
from paceline.core.rules import AcceptanceRule
from paceline.core.tree import TokenTree
from paceline.proof.branches import Span, branches
from paceline.proof.drafts import Drafting
from paceline.proof.worlds import Prefix, World

Drafts = list[tuple[float, TokenTree]]


@dataclass(frozen=True)
class Finding:
    """max_abs_error: largest |output - target| over all strings of depth + 1 tokens;
    tau: expected committed tokens of the round."""

    max_abs_error: float
    tau: float


def judge(
    rule: AcceptanceRule,
    drafting: Drafting,
    world: World,
    *,
    greedy: bool = False,
    drafts: Drafts | None = None,
    seen: World | None = None,
    spans: Callable[[TokenTree], Mapping[int, Span]] | None = None,
) -> Finding:
    """Run `rule` on every draft and along every branch; continue with the target to
    depth + 1 tokens, and compare with the target's own joint law of these strings.

    greedy: the target emits its most probable token with certainty. drafts: the drafts of
    `drafting` in `world`, where they are at hand.

    To plant faults: `seen` is where the rule reads the target's laws (else in `world`), and
    `spans(draft)` what the draft's own draws tell about the uniforms of flips (else
    nothing, because drafting and acceptance share none). AssertionError where the rule breaks a
    promise on the way (a uniform used twice, a law read that can't be).
    """
    mass: defaultdict[Prefix, float] = defaultdict(float)
    tau = 0.0
    for chance, tree in drafting.trees(world) if drafts is None else drafts:
        rule.check(tree, greedy)
        laws = target_laws(seen or world, tree)
        for branch, verdict in branches(
            partial(rule.accept, tree, laws), spans(tree) if spans else None
        ):
            emitted = verdict.emitted(tree)
            mass[emitted] += chance * branch
            tau += chance * branch * len(emitted)
    return Finding(deviation(mass, world, drafting.depth + 1, greedy), tau)


def target_laws(world: World, tree: TokenTree) -> list[Law]:
    """The target's law after each node's path."""
    paths: list[Prefix] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [world.target(s) for s in paths]


def deviation(mass: dict[Prefix, float], world: World, length: int, greedy: bool) -> float:
    """Largest difference between the joint of `mass`, continued with p, and p's joint.

    Mass on strings that are too long or hold tokens that the target lacks is all error.
    """
    tokens = range(world.size)
    stray = max((v for s, v in mass.items() if not _possible(s, world, length)), default=0.0)
    output: dict[Prefix, float] = {(): 0.0}
    target: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Prefix, float] = {}
        wanted: dict[Prefix, float] = {}
        for s, v in output.items():
            law = world.p[s]
            mode = law.mode() if greedy else -1
            for x in tokens:
                p_x = float(x == mode) if greedy else law.probability(x)
                longer[(*s, x)] = v * p_x + mass.get((*s, x), 0.0)
                wanted[(*s, x)] = target[s] * p_x
        output, target = longer, wanted
    worst = max(abs(output[s] - target[s]) for s in output)
    return max(worst, stray, abs(sum(mass.values()) - 1.0))


def _possible(s: Prefix, world: World, length: int) -> bool:
    return len(s) <= length and all(0 <= x < world.size for x in s)
