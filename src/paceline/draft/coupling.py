"""Proposals that the target's own random numbers will probably repeat.

Under `walk` the token at a position is the target's law at the quantile of one keyed
uniform. A draft that takes *its* law at the very same quantile proposes what the target would
draw if the two laws were equal (common random numbers). The proposal is then a
deterministic function of prompt, seed and draft model, and `walk` emits the text of plain
decoding whatever is proposed and however much: so a request with a seed has one text, though
budgets depend on measured times. Block verification accepts more, but what it emits depends
on how much was proposed.

Only `walk` may judge such a proposal. Other rules decide by other draws whether to keep a
token, and a later round that proposed by the same uniform again would see one that this
decision had conditioned.
"""

from __future__ import annotations

from paceline.core.draws import KeyedDraws, Purpose, uniform
from paceline.core.law import Law
from paceline.types import SamplingParams, Sequence


def coupled(params: SamplingParams) -> bool:
    """Whether proposals for such a request are tied to the target's draws: where it samples
    under `walk`, asked for by name or because a seed promises the same text again."""
    if params.greedy:
        return False
    return params.rule == "walk" or (params.rule is None and params.seed is not None)


def unsteady(params: SamplingParams) -> bool:
    """Whether a request's text depends on how many tokens are proposed although it has a
    seed: where it names a rule that decides by other draws than the target's. Its budgets
    must then not depend on times."""
    return params.seed is not None and not params.greedy and params.rule not in (None, "walk")


def coupled_token(law: Law, seq: Sequence, depth: int) -> int:
    """The draft's guess of what the target will draw `depth` tokens below the root: its own
    law's token at the quantile that the target will take. Right where the laws are equal."""
    return law.sample(uniform(seq.seed, len(seq.tokens) + depth, Purpose.TARGET))


def next_token(law: Law, seq: Sequence, depth: int) -> tuple[int, bool]:
    """A draft token `depth` below the first, as the request wants it: the most probable, one
    tied to the target's draw, or one drawn from `law`; and whether it was drawn, so that the
    rule must know the law."""
    if seq.params.greedy:
        return law.mode(), False
    if coupled(seq.params):
        return coupled_token(law, seq, depth), False
    return law.sample(KeyedDraws(seq.seed, len(seq.tokens)).draft(depth)), True
