"""The recursion over rounds is exact: against the rules themselves, and against the engine."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from devices import (
    CONFIG,
    DRAFTERS,
    PROMPTS,
    ids,
    make_engine,
    model_drafter,
    noisy,
    run,
    target,
)

from paceline.bench.predict import survival, tally
from paceline.bench.trace import Guesses, Setting, Traced, trace_requests
from paceline.core.law import WeightLaw
from paceline.core.rules import rule_named
from paceline.core.tree import chain
from paceline.errors import UserError

GREEDY, DRAWN = Setting(), Setting(temperature=1.0)
SEEDED = Setting(temperature=1.0, seeded=True)


class _Branch:
    """Draws that follow one branch and multiply up its probability."""

    def __init__(self, choices):
        self.choices, self.weight, self.asked = iter(choices), 1.0, []

    def flip(self, probability, index):
        if probability in (0.0, 1.0):
            return probability == 1.0
        yes = next(self.choices, None)
        if yes is None:
            raise _More
        self.weight *= probability if yes else 1.0 - probability
        return yes

    def residual(self, law, index=0):
        self.law = law
        return law.mode()

    def target(self, law, depth):
        self.law = law
        return law.mode()


class _More(Exception):
    pass


def branches(rule, tree, laws):
    """Every way in which the flips can come up: (probability, accepted, law of the next)."""
    open_ = [()]
    while open_:
        choices = open_.pop()
        draws = _Branch(choices)
        try:
            verdict = rule.accept(tree, laws, draws)
        except _More:
            open_ += [(*choices, True), (*choices, False)]
            continue
        yield draws.weight, len(verdict.path), draws.law


@pytest.mark.parametrize("name", ["token", "block"])
@pytest.mark.parametrize("seed", range(4))
def test_survival_against_the_rule_itself(name, seed):
    """Over every text of three tokens: the mass of rounds that accept i tokens of it and then
    emit its next one, divided by the text's probability, is R_i - R_(i+1)."""
    rng = np.random.default_rng(seed)
    size, k = 3, 2
    prefixes = [p for n in range(k + 1) for p in itertools.product(range(size), repeat=n)]
    p_of = {c: rng.dirichlet([0.7] * size) for c in prefixes}
    q_of = {c: rng.dirichlet([0.7] * size) for c in prefixes}

    def law(table, prefix):
        return WeightLaw(torch.tensor(table[prefix], dtype=torch.float64))

    mass: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(size), repeat=k):
        q = [q_of[drafted[:i]][drafted[i]] for i in range(k)]
        tree = chain(0, drafted, [law(q_of, drafted[:i]) for i in range(k)])
        laws = [law(p_of, drafted[:i]) for i in range(k + 1)]
        for weight, n, rest in branches(rule_named(name), tree, laws):
            for token in range(size):
                key = (*drafted[:n], token)
                mass[key] = mass.get(key, 0.0) + math.prod(q) * weight * rest.probability(token)
    for text in itertools.product(range(size), repeat=k + 1):
        p = [p_of[text[:i]][text[i]] for i in range(k + 1)]
        ratios = [q_of[text[:i]][text[i]] / p[i] for i in range(k)]
        reach = [*survival(ratios, name), 0.0]
        for n in range(k + 1):
            expected = mass.get(text[: n + 1], 0.0) / math.prod(p[: n + 1])
            assert reach[n] - reach[n + 1] == pytest.approx(expected, abs=1e-9)


def traced(drafters, setting, *, max_tokens=40, seed=5, prompts=PROMPTS, most=4):
    return trace_requests(
        target(), drafters, dict.fromkeys(drafters, most), prompts, setting, CONFIG,
        max_tokens=max_tokens, seed=seed,
    )  # fmt: skip


def drafter(name):
    return DRAFTERS[name](CONFIG)


@pytest.mark.parametrize("name", ["ngram", "noisy", "self", "anti"])
@pytest.mark.parametrize("setting", [GREEDY, SEEDED], ids=lambda s: s.label)
@pytest.mark.parametrize("k", [1, 2, 4])
def test_rounds_of_deterministic_proposals_are_exact(name, setting, k):
    """One trace tells every k's rounds to the round, with the cut at max_tokens."""
    for i, request in enumerate(traced({"x": drafter(name)}, setting)):
        found = tally(request, request.guesses["x"], k)
        params = setting.params(max_tokens=40, seed=5 + i, ignore_eos=False)
        stats = run(make_engine(drafter(name), k=k), [PROMPTS[i]], params)[0].stats
        assert found.rounds == pytest.approx(stats.rounds - 1)
        assert sum(found.accepted) == pytest.approx(stats.accepted)
        rows = sum(w * n for (_, n), w in found.weight.items())
        assert rows == pytest.approx(stats.drafted)


@pytest.mark.parametrize("name", ["tree", "top-widths", "beam"])
def test_rounds_of_chosen_trees_are_exact(name):
    for i, request in enumerate(traced({"x": drafter(name)}, GREEDY, most=6)):
        found = tally(request, request.guesses["x"], 6)
        params = GREEDY.params(max_tokens=40, seed=5 + i, ignore_eos=False)
        stats = run(make_engine(drafter(name), k=6), [PROMPTS[i]], params)[0].stats
        # In the last rounds the engine's trees are smaller, and other ones.
        assert found.rounds == pytest.approx(stats.rounds - 1, abs=2.0)


@pytest.mark.parametrize("rule", ["block", "token"])
def test_rounds_of_drawn_proposals_have_the_right_mean(rule):
    """Means over 80 outputs each, of traced texts and of speculative runs with other seeds:
    a difference beyond 5 standard errors has odds below 1e-6."""
    prompts, n, k = [PROMPTS[3]], 80, 3
    expected = [
        tally(r, r.guesses["x"], k, rule).rounds
        for r in traced(
            {"x": model_drafter(noisy(0.7))}, DRAWN, prompts=prompts * n, seed=1000, max_tokens=24
        )
    ]
    engine = make_engine(model_drafter(noisy(0.7)), k=k)
    params = [DRAWN.params(max_tokens=24, seed=9000 + i, ignore_eos=False) for i in range(n)]
    if rule == "token":
        params = [type(p)(**{**vars_of(p), "rule": "token"}) for p in params]
    found = [o.stats.rounds - 1 for o in run(engine, prompts * n, params)]
    error = math.hypot(np.std(expected), np.std(found)) / math.sqrt(n)
    assert abs(np.mean(expected) - np.mean(found)) < 5 * error
    # The expectation given the text varies less than the count of rounds itself.
    assert np.std(expected) < np.std(found)


def vars_of(params):
    return {"temperature": params.temperature, "seed": params.seed, "max_tokens": params.max_tokens}


def test_drawn_trees_are_refused_by_name():
    with pytest.raises(UserError, match=r"draft 'x' draws trees.*--seeded"):
        traced({"x": drafter("widths")}, DRAWN)
    assert traced({"x": drafter("widths")}, SEEDED)[0].guesses["x"].kind == "match"


def test_tracing_several_at_once_changes_neither_text_nor_answers():
    names = ("ngram", "noisy", "tree")
    together = traced({n: drafter(n) for n in names}, GREEDY)
    for name in names:
        alone = traced({name: drafter(name)}, GREEDY)
        assert [t.guesses[name] for t in together] == [a.guesses[name] for a in alone]
    plain = run(make_engine("none"), PROMPTS, GREEDY.params(max_tokens=40, seed=0, ignore_eos=True))
    assert [t.output for t in together] == [len(i) for i in ids(plain)]
    assert all(t.cut for t in together)


def test_an_end_of_sequence_ends_the_rounds():
    """Two tokens after the first round's begin: a perfect draft needs one round for them."""
    g = Guesses(kind="ratio", value=(1.0, 1.0))
    ended = Traced(prompt=5, output=3, cut=False, guesses={"x": g})
    assert tally(ended, g, 4).weight == {(4, 4): 1.0}
    cut = Traced(prompt=5, output=3, cut=True, guesses={"x": g})
    assert tally(cut, g, 4).weight == {(1, 1): 1.0}


def test_no_proposal_is_a_plain_round():
    nan = math.nan
    g = Guesses(kind="ratio", value=(nan, 1.0, 1.0, nan))
    r = Traced(prompt=5, output=5, cut=False, guesses={"x": g})
    found = tally(r, g, 2)
    assert found.weight == {(2, 0): 1.0, (2, 2): 1.0}
    assert found.entries == {(2, 0): 5.0, (2, 2): 6.0}
    assert tally(r, g, 0).weight == {(0, 0): 4.0}


def test_json_keeps_a_trace():
    many = traced({"ngram": drafter("ngram"), "noisy": drafter("noisy")}, DRAWN)
    for t in many:
        again = Traced.from_json(t.to_json())
        assert again.guesses["ngram"] == t.guesses["ngram"]
        ours, theirs = again.guesses["noisy"].value, t.guesses["noisy"].value
        assert ours == pytest.approx(theirs, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    "guesses",
    [
        Guesses(kind="ratio", value=(1.0,)),
        Guesses(kind="match", value=(1.0, 0.0)),
        Guesses(kind="match", value=(1.0, 0.0), nodes=(1,)),
    ],
)
def test_guesses_must_fit_the_output(guesses):
    with pytest.raises(ValueError, match="'x'"):
        Traced(prompt=1, output=3, cut=True, guesses={"x": guesses})
