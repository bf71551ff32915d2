"""EAGLE-2's dynamic trees against an expansion that computes every path from scratch."""

from __future__ import annotations

import pytest
from head_devices import (
    PROMPTS,
    Alternate,
    Recorder,
    eagle,
    engine,
    perfect_eagle,
    run,
    scratch_logits,
    shaken,
    successor_target,
)

from paceline.core.shapes import Beam
from paceline.core.tree import TokenTree
from paceline.draft.none import NoDrafter
from paceline.errors import UserError
from paceline.types import SamplingParams

Path = tuple[int, ...]


def paths_of(tree: TokenTree) -> set[Path]:
    return {tuple(tree.tokens[u] for u in tree.path(node)) for node in range(1, len(tree))}


def expansion(head, target, tokens, shape: Beam, budget: int, heat: float) -> set[Path]:  # type: ignore[no-untyped-def]
    """Li et al. 2024, section 4, word for word: expand the best nodes of a level, keep the best
    of the next, then rank all of them."""
    scores: dict[Path, float] = {}
    kept: list[Path] = [()]
    for _ in range(min(shape.depth, budget)):
        level: dict[Path, float] = {}
        for path in kept:
            law = (scratch_logits(head, target, tokens, path) / heat).double().log_softmax(-1)
            best = law.topk(shape.width)
            for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                level[(*path, token)] = scores.get(path, 0.0) + p
        scores |= level
        kept = sorted(level, key=lambda path: -level[path])[: shape.width]
    ranked = sorted(scores, key=lambda path: -scores[path])
    return set(ranked[: min(shape.nodes, budget)])


@pytest.mark.parametrize(
    ("kind", "shape", "temperature"),
    [
        ("eagle3", Beam(nodes=9, width=3, depth=3), 0.0),
        ("eagle1", Beam(nodes=6, width=2, depth=4), 0.0),
        ("eagle3", Beam(nodes=9, width=3, depth=3), 0.7),
    ],
)
def test_trees_are_the_most_probable_paths(kind: str, shape: Beam, temperature) -> None:
    target = successor_target()
    head = shaken(perfect_eagle(kind, target))
    drafter = eagle(target, kind, head=head, shape=shape)
    recorder = Recorder(drafter)
    e = engine(target, drafter)
    e.policy = Alternate(shape.nodes)
    params = SamplingParams(max_tokens=9, temperature=temperature, seed=4)
    outputs = run(e, PROMPTS[:4], params)
    assert sum(o.stats.accepted for o in outputs) > 1
    assert len(recorder.seen) > 5
    for tokens, budget, tree in recorder.seen[::2]:
        want = expansion(head, target, tokens, shape, budget, temperature or 1.0)
        assert paths_of(tree) == want


def test_accepted_paths_beside_the_first_child_are_gathered() -> None:
    """A head whose best guess is always wrong and whose second is right: every round accepts a
    path of second children, whose rows lie scattered; text and acceptance hold to the end."""
    target = successor_target()
    head = perfect_eagle("eagle3", target)
    drafter = eagle(target, head=head, shape=Beam(nodes=12, width=2, depth=3))
    e = engine(target, drafter, 12)
    original = drafter._vocabulary.ranked

    def swapped(logits, rows, count):  # type: ignore[no-untyped-def]
        out = original(logits, rows, count)
        return [[(b[0], a[1]), (a[0], a[1] - 0.01)] for a, b in out]

    drafter._vocabulary.ranked = swapped  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=200)
    (output,) = run(e, [(5,)], params)
    (plain,) = run(engine(target, NoDrafter()), [(5,)], params)
    assert output.token_ids == plain.token_ids
    assert output.stats.accepted_rank[0] == 0
    assert output.stats.tau_histogram[4] >= 199 // 4 - 1


def test_a_seeded_text_does_not_depend_on_the_trees_size() -> None:
    target = successor_target()
    params = SamplingParams(max_tokens=25, temperature=1.3, seed=9)
    texts = set()
    for nodes in (1, 9):
        head = shaken(perfect_eagle("eagle3", target))
        drafter = eagle(target, head=head, shape=Beam(nodes=nodes))
        texts.add(tuple(o.token_ids for o in run(engine(target, drafter, nodes), PROMPTS, params)))
    assert len(texts) == 1


def test_trees_out_of_range_are_refused() -> None:
    for name in ("nodes", "width", "depth"):
        with pytest.raises(UserError, match=name):
            Beam(**{"nodes": 4, name: 0})
