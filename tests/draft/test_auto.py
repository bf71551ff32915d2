"""The combined drafter: who proposes, who is told, what it promises to rules; its name."""

from __future__ import annotations

import pytest
from devices import CONFIG, PROMPTS, ids, make_engine, model_drafter, noisy, run, target

from paceline.core.shapes import level_widths
from paceline.core.tree import Proposal
from paceline.draft.auto import AutoDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.errors import UserError
from paceline.registry import DraftSpec, drafters_of
from paceline.types import Request, SamplingParams, Sequence

LOOP = (7, 8, 9, 7, 8, 9, 7, 8)
FRESH = (1, 2, 3, 4, 5, 6)


def combined(model=None) -> AutoDrafter:
    return AutoDrafter(
        {"ngram": NgramDrafter(longest=3, shortest=2), "m": model_drafter(model or noisy(0.7))}
    )


def sequence(prompt: tuple[int, ...], number: int = 0, **params) -> Sequence:
    return Sequence(number, Request(prompt=prompt, params=SamplingParams(**params)), 5)


def test_ngrams_propose_where_they_match_and_the_model_elsewhere() -> None:
    drafter = combined()
    loop, fresh = sequence(LOOP, 0), sequence(FRESH, 1)
    trees = drafter.propose([loop, fresh], [4, 2])
    assert trees[0].tokens[1:] == (9, 7, 8, 9)
    alone = model_drafter(noisy(0.7)).propose([fresh], [2])[0]
    assert trees[1].tokens == alone.tokens
    assert drafter.drafters["m"].cache.usage().blocks_used > 0


def test_arms_say_who_could_and_what_it_would_have_to_read() -> None:
    drafter = combined()
    loop = sequence(LOOP)
    ngram, model = drafter.arms(loop)
    assert (ngram.drafter, ngram.bucket) == ("ngram", 3)  # a match of 5: 4 to 7
    assert (model.drafter, model.lag) == ("m", len(LOOP))
    assert [a.drafter for a in drafter.arms(sequence(FRESH, 1))] == ["m"]
    drafter.route = lambda seq: "m"
    drafter.propose([loop], [3])
    assert drafter.arms(loop)[1].lag == 1


def test_a_route_decides() -> None:
    drafter = combined()
    drafter.route = lambda seq: "m"
    expected = model_drafter(noisy(0.7)).propose([sequence(LOOP)], [3])[0]
    assert drafter.propose([sequence(LOOP)], [3])[0].tokens == expected.tokens


def test_the_model_keeps_up_over_rounds_of_ngrams() -> None:
    """A draft that is the target stays perfect while n-grams take rounds in between."""
    outputs = run(make_engine(combined(target())), [LOOP, FRESH], SamplingParams(max_tokens=200))
    assert ids(outputs) == ids(run(make_engine(), [LOOP, FRESH], SamplingParams(max_tokens=200)))
    engine = make_engine(combined(target()))
    engine.drafter.route = lambda seq: "m" if seq.n_output % 3 else "ngram"
    output = run(engine, [FRESH], SamplingParams(max_tokens=200))[0]
    model_only = run(make_engine("self"), [FRESH], SamplingParams(max_tokens=200))[0]
    assert output.token_ids == model_only.token_ids
    assert output.stats.accepted > 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_proposal_has_its_own_rule(temperature: float) -> None:
    """Unseeded: n-grams under `walk`, the model's chain under `block`; both exact."""
    params = SamplingParams(max_tokens=40, temperature=temperature)
    engine = make_engine(combined())
    outputs = run(engine, PROMPTS, params)
    greedy = temperature == 0.0
    assert {o.guarantee.value for o in outputs} == {"exact_greedy" if greedy else "exact_sampling"}
    example = engine.drafter.example(greedy)
    assert example.proposal is (Proposal.DELTA if greedy else Proposal.SAMPLED)


def test_a_rule_that_one_of_them_can_not_serve_is_refused() -> None:
    from devices import tree_drafter

    tree = tree_drafter(noisy(0.7), level_widths((2, 2)), CONFIG)
    drafter = AutoDrafter({"ngram": NgramDrafter(), "tree": tree})
    with pytest.raises(UserError, match="block"):
        make_engine(drafter).check(
            Request(prompt=FRESH, params=SamplingParams(temperature=1.0, rule="block"))
        )


def test_names_of_combinations() -> None:
    spec = DraftSpec(name="ngram+qwen2.5-coder-0.5b", tree="paths:8")
    assert spec.second == DraftSpec(name="qwen2.5-coder-0.5b", tree="paths:8")
    labels = drafters_of(
        DraftSpec(name="ngram+m"), AutoDrafter({"ngram": NoDrafter(), "m": NoDrafter()})
    )
    assert {name: label for name, (label, _) in labels.items()} == {
        "ngram": "ngram",
        "m": "m same fast",
    }
    for bad in ("ngram+none", "ngram+ngram", "ngram+ngram+m"):
        with pytest.raises(UserError, match="combines"):
            DraftSpec(name=bad)
    with pytest.raises(UserError, match="tree"):
        DraftSpec(name="ngram+m", tree="nonsense")
