"""Rules on vocabularies of real size and at the edges of their domain."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.core.draws import KeyedDraws
from paceline.core.law import Law, PointLaw, WeightLaw, weight_laws
from paceline.core.rules import (
    RULES,
    BlockVerification,
    GreedyMatch,
    Guarantee,
    Origin,
    TraversalVerification,
    Typical,
    Verdict,
    Walk,
    default_rule,
    rule_named,
)
from paceline.core.tree import Proposal, TokenTree, chain

SAMPLING = ("token", "block", "recursive", "traversal")


def softmax_weights(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return ((logits - logits.amax(-1, keepdim=True)) / temperature).exp()


@pytest.mark.parametrize("temperature", [0.01, 1.0])
@pytest.mark.parametrize("name", SAMPLING)
def test_equal_laws_accept_everything(name: str, temperature: float) -> None:
    """p == q: 10,000 drafted tokens, all accepted, no NaN; k = 5, float32, V = 1,100."""
    generator = torch.Generator().manual_seed(5)
    rule, drafted = rule_named(name), 0
    for position in range(2000):
        if position % 20 == 0:
            logits = 4.0 * torch.randn(6, 1100, generator=generator)
            p = weight_laws(softmax_weights(logits, temperature))
            q = weight_laws(softmax_weights(logits.clone(), temperature))
        draws = KeyedDraws(3, position)
        tokens = tuple(q[i].sample(draws.draft(i)) for i in range(5))
        verdict = rule.accept(chain(0, tokens, q[:5]), p, draws)
        assert verdict.path == (1, 2, 3, 4, 5)
        assert verdict.origin is Origin.BONUS
        assert math.isfinite(p[5].probability(verdict.token))
        drafted += 5
    assert drafted == 10_000


@pytest.mark.parametrize("name", SAMPLING)
def test_a_token_that_the_target_removed_is_never_emitted(name: str) -> None:
    """The draft puts 0.9 on a token outside the target's support."""
    p: list[Law] = [WeightLaw(torch.tensor([0.0, 0.5, 0.5]))] * 3
    q = WeightLaw(torch.tensor([0.9, 0.05, 0.05]))
    rule = rule_named(name)
    for position in range(500):
        draws = KeyedDraws(1, position)
        tree = chain(0, tuple(q.sample(draws.draft(i)) for i in range(2)), (q, q))
        assert 0 not in rule.accept(tree, p, draws).emitted(tree)


@pytest.mark.parametrize("name", SAMPLING)
def test_hopeless_drafts_are_refused_without_nan(name: str) -> None:
    """Ratios of 1e-30 per token, eight in a row: weights of prefixes underflow."""
    rare, common = torch.ones(4), torch.ones(4)
    rare[0], common[1:] = 1e-30, 1e-30
    p: list[Law] = [WeightLaw(rare)] * 9
    q = WeightLaw(common)
    tree = chain(0, (0,) * 8, (q,) * 8)
    verdict = rule_named(name).accept(tree, p, KeyedDraws(1, 1))
    assert verdict.path == ()
    assert verdict.token in (1, 2, 3)


@pytest.mark.parametrize("name", RULES)
def test_nothing_proposed_is_plain_decoding(name: str) -> None:
    """k = 0: the token is the target's, from the same uniform that plain decoding uses."""
    law = WeightLaw(torch.tensor([0.2, 0.5, 0.3]))
    for position in range(100):
        draws = KeyedDraws(4, position)
        verdict = rule_named(name).accept(chain(7), [law], draws)
        token = 1 if name == "greedy" else draws.target(law, 0)
        assert verdict == Verdict((), token, Origin.PLAIN)


def test_the_walk_gives_plain_decodings_tokens_whatever_is_proposed() -> None:
    laws = weight_laws(torch.rand(50, 30, generator=torch.Generator().manual_seed(1)))
    plain = [KeyedDraws(9, i).target(laws[i], 0) for i in range(50)]
    rng = np.random.default_rng(2)
    at = 0
    while at < 40:
        good = rng.random() < 0.7
        k = int(rng.integers(0, 6))
        tokens = [plain[at + i] if good else int(rng.integers(30)) for i in range(k)]
        tree = chain(0, tuple(tokens))
        emitted = Walk().accept(tree, laws[at : at + k + 1], KeyedDraws(9, at)).emitted(tree)
        assert list(emitted) == plain[at : at + len(emitted)]
        at += len(emitted)


def test_greedy_descends_the_tree_and_breaks_ties_low() -> None:
    tie = WeightLaw(torch.tensor([0.1, 0.4, 0.4, 0.1]))
    last = PointLaw(3, 4)
    tree = TokenTree((0, 2, 1, 3), (-1, 0, 0, 2))
    verdict = GreedyMatch().accept(tree, [tie, tie, last, tie], KeyedDraws(1, 1))
    assert verdict == Verdict((2, 3), 1, Origin.BONUS)
    verdict = GreedyMatch().accept(tree, [last, tie, last, tie], KeyedDraws(1, 1))
    assert verdict == Verdict((), 3, Origin.REPLACEMENT)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_draft_law_that_was_not_drawn_from_is_refused(name: str) -> None:
    p = [WeightLaw(torch.tensor([0.5, 0.5]))] * 2
    tree = chain(0, (1,), (WeightLaw(torch.tensor([1.0, 0.0])),))
    with pytest.raises(ValueError, match="probability 0"):
        rule_named(name).accept(tree, p, KeyedDraws(1, 1))


def test_rules_refuse_what_they_cannot_judge() -> None:
    tree = TokenTree((0, 1, 2), (-1, 0, 0))
    for name in ("token", "block"):
        with pytest.raises(ValueError, match="chains only"):
            rule_named(name).check(tree, greedy=False)
        rule_named(name).check(chain(0, (1,)), greedy=False)
    with pytest.raises(ValueError, match="temperature > 0"):
        rule_named("greedy").check(tree, greedy=False)
    for name in ("walk", "recursive", "traversal", "typical"):
        rule_named(name).check(tree, greedy=False)


def test_names() -> None:
    assert {name: rule_named(name).name for name in RULES} == {name: name for name in RULES}
    with pytest.raises(ValueError, match=r"unknown acceptance rule 'blok'.*token, block"):
        rule_named("blok")


def test_defaults_are_exact_and_follow_the_table() -> None:
    law = WeightLaw(torch.ones(3))
    fan = TokenTree((0, 1, 2), (-1, 0, 0), Proposal.SAMPLED, (law, None, None))
    again = TokenTree((0, 1, 1), (-1, 0, 0), Proposal.REPLACED, (law, None, None))
    assert default_rule(chain(0), greedy=False) == Walk()
    assert default_rule(TokenTree((0, 1, 2), (-1, 0, 0)), greedy=False) == Walk()
    assert default_rule(chain(0, (1,), (law,)), greedy=False) == BlockVerification()
    assert default_rule(fan, greedy=False) == TraversalVerification()
    assert default_rule(again, greedy=False) == TraversalVerification()
    for tree in (chain(0), fan, again):
        assert default_rule(tree, greedy=True) == GreedyMatch()


def test_guarantees() -> None:
    approximate = [n for n in RULES if rule_named(n).guarantee is Guarantee.APPROXIMATE]
    assert approximate == ["typical"]
    assert (
        Guarantee.weakest([Guarantee.EXACT_SAMPLING, Guarantee.APPROXIMATE])
        is Guarantee.APPROXIMATE
    )


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.3), (1.5, 0.3), (0.1, 0.0), (0.1, math.inf), (math.nan, 0.3)]
)
def test_typical_refuses_parameters_out_of_range(epsilon: float, delta: float) -> None:
    with pytest.raises(ValueError, match=r"epsilon|delta"):
        Typical(epsilon=epsilon, delta=delta)


def test_typical_takes_the_deepest_then_the_likeliest_path() -> None:
    flat, sure = WeightLaw(torch.tensor([0.3, 0.5, 0.2])), WeightLaw(torch.tensor([0.0, 0.0, 1.0]))
    tree = TokenTree((0, 0, 1, 2, 2), (-1, 0, 0, 1, 2))
    verdict = Typical().accept(tree, [flat, sure, sure, sure, sure], KeyedDraws(1, 1))
    assert verdict == Verdict((2, 4), 2, Origin.BONUS)
    # epsilon = 0.4 leaves only the token with p = 0.5 at the root.
    strict = Typical(epsilon=0.4, delta=10.0)
    assert strict.accept(tree, [flat] * 5, KeyedDraws(1, 1)).path == (2,)


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_excess_is_computed_only_where_it_can_matter(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accepted block scans the vocabulary not once."""
    law = WeightLaw(torch.ones(1000))
    calls: list[float] = []
    original = WeightLaw.excess
    monkeypatch.setattr(
        WeightLaw, "excess", lambda p, q, s=1.0: (calls.append(s), original(p, q, s))[1]
    )
    verdict = rule_named(rule).accept(chain(0, (1, 2, 3), (law,) * 3), [law] * 4, KeyedDraws(1, 1))
    assert len(verdict.path) == 3
    assert calls == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLING)
def test_verdicts_on_a_device_equal_the_hosts(name: str) -> None:
    """Float64 weights, so that only the order of block sums may differ (odds under 1e-9)."""
    generator = torch.Generator().manual_seed(6)
    for position in range(100):
        logits = 3.0 * torch.randn(8, 5000, generator=generator, dtype=torch.float64)
        tables = [softmax_weights(logits[:4], 1.0), softmax_weights(logits[4:], 1.3)]
        verdicts = []
        for device in ("cpu", "cuda"):
            p, q = (weight_laws(table.to(device)) for table in tables)
            draws = KeyedDraws(5, position)
            tokens = tuple(q[i].sample(draws.draft(i)) for i in range(3))
            verdicts.append(rule_named(name).accept(chain(0, tokens, q[:3]), p, draws))
        assert verdicts[0] == verdicts[1]
