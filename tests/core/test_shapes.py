"""Tree shapes: widths, and the best shape against all shapes of its size."""

from __future__ import annotations

import itertools

import pytest

from paceline.core.shapes import TreeShape, best_shape, expected_accepted, level_widths


def test_widths() -> None:
    assert level_widths((2, 1)).parents == (-1, 0, 0, 1, 2)
    assert level_widths((1, 1, 1)).parents == (-1, 0, 1, 2)
    assert level_widths((3, 2)).nodes == 9
    assert level_widths((3, 2)).cut(4).parents == (-1, 0, 0, 0, 1)
    assert level_widths((2, 2, 1)).depth == 3


@pytest.mark.parametrize("rates", [(0.8, 0.1), (0.5, 0.3, 0.1), (0.9,), (0.4, 0.4, 0.2)])
@pytest.mark.parametrize("nodes", [1, 2, 4, 5])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_no_shape_of_that_size_is_better(rates: tuple[float, ...], nodes: int, depth: int) -> None:
    """Every parent vector of up to `nodes` nodes is tried."""
    best = 0.0
    for choice in itertools.product(*(range(i) for i in range(1, nodes + 1))):
        shape = TreeShape((-1, *choice))
        if shape.depth <= depth:
            best = max(best, expected_accepted(shape, rates))
    for fewer in range(1, nodes):
        best = max(best, expected_accepted(best_shape(rates, fewer, depth), rates))
    found = best_shape(rates, nodes, depth)
    assert found.nodes <= nodes
    assert found.depth <= depth
    assert expected_accepted(found, rates) == pytest.approx(best, abs=1e-12)


def test_a_sure_first_child_makes_a_chain() -> None:
    assert best_shape((0.99, 0.001), 6).parents == (-1, 0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("parents", [(), (0,), (-1, 1), (-1, 0, 5)])
def test_what_is_no_tree_is_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a tree"):
        TreeShape(parents)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="widths"):
        level_widths((2, 0))
    with pytest.raises(ValueError, match="rates"):
        best_shape((1.5,), 3)
