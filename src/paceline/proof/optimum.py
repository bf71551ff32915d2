"""The most tokens per round that any exact rule can commit, by linear programming."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

from paceline.core.tree import TokenTree
from paceline.proof.worlds import Prefix, World, prefixes

#: HiGHS drops coefficients under 1e-9 and takes much smaller ones than one for noise in its
#: infeasibility tests; worlds with smaller path probabilities are skipped.
SMALLEST = 1e-7


def optimal_tau(drafts: list[tuple[float, TokenTree]], world: World, depth: int) -> float | None:
    """Largest E[tau] over all exact rules without memory between rounds; None where a path
    is too improbable for the solver, or it gives up.

    Variables: m(S, v), the mass of draft S that is accepted down to its node v, and
    e(v, y), the mass that then adds token y, in units of p(v y). Constraints: the m of a
    draft sum to its probability; what is added at v is what was accepted there; and for
    every string s of depth + 1 tokens, the sum of e(v, y) p(v y) p(rest of s) over its
    prefixes v y is p(s), that is, these e(v, y) sum to one. Maximised: sum m(S, v) (|v| + 1).
    On chains this is what block verification attains (Sun et al. 2024, theorem 2).
    """
    chance: defaultdict[frozenset[Prefix], float] = defaultdict(float)
    for part, tree in drafts:  # the order of siblings can't matter to the optimum
        chance[_nodes(tree, world)] += part
    joint: dict[Prefix, float] = {(): 1.0}
    for s in prefixes(world.size, depth):
        for x in range(world.size):
            joint[(*s, x)] = joint[s] * world.p[s].probability(x)
    if min(v for v in (*joint.values(), *chance.values()) if v > 0.0) < SMALLEST:
        return None

    accepted = [(d, v) for d, nodes in enumerate(chance) for v in sorted(nodes) if joint[v] > 0.0]
    nodes = sorted({v for _, v in accepted})
    added = [(*v, y) for v in nodes for y in range(world.size) if joint[(*v, y)] > 0.0]
    place = {s: len(accepted) + i for i, s in enumerate(added)}

    entries: list[tuple[int, int, float]] = []  # (constraint, variable, coefficient)
    sums = list(chance.values())
    entries += [(d, i, 1.0) for i, (d, _) in enumerate(accepted)]
    row_of = {v: len(sums) + i for i, v in enumerate(nodes)}
    sums += [0.0] * len(nodes)
    entries += [(row_of[v], i, -1.0) for i, (_, v) in enumerate(accepted)]
    entries += [(row_of[s[:-1]], place[s], joint[s]) for s in added]
    for s in itertools.product(range(world.size), repeat=depth + 1):
        if joint[s] > 0.0:
            parts = [s[: n + 1] for n in range(depth + 1)]
            entries += [(len(sums), place[v], 1.0) for v in parts if v in place]
            sums.append(1.0)

    rows, columns, values = zip(*entries, strict=True)
    count = len(accepted) + len(added)
    reward = np.zeros(count)
    reward[: len(accepted)] = [-(len(v) + 1.0) for _, v in accepted]
    matrix = coo_array((values, (rows, columns)), shape=(len(sums), count)).tocsr()
    for presolve in (True, False):  # presolve can take rounding for infeasibility
        options = {
            "primal_feasibility_tolerance": 1e-10,
            "dual_feasibility_tolerance": 1e-10,
            "presolve": presolve,
        }
        found = linprog(
            reward, A_eq=matrix, b_eq=np.array(sums), method="highs-ds", options=options
        )
        if found.status == 0:
            return float(-found.fun)
    return None


def _nodes(tree: TokenTree, world: World) -> frozenset[Prefix]:
    """Paths of the tree's nodes, without those that leave the target's vocabulary."""
    paths: list[Prefix] = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return frozenset(s for s in paths if all(x < world.size for x in s))
