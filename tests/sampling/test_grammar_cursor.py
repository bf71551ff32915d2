"""The grammar cursor: a pure function of the output tokens, whatever was asked before."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from plain_law import plain_law
from toy_grammar import toy_grammars

from paceline.core.law import PointLaw
from paceline.errors import UserError
from paceline.sampling.context import tree_rows
from paceline.sampling.grammar import Grammars
from paceline.sampling.law import EmptyLaw, build_laws
from paceline.types import Request, SamplingParams, Sequence

TOKENS = [bytes([b]) for b in b"abcdefgh0123"] + [b"ab", b"cde", b"<eos>", b"", b"<end>"]
EOS = (14, 16)
REGEX = r"(ab|cd)*e?[0-3]{0,2}"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return toy_grammars(TOKENS, EOS)


def allowed(mask: np.ndarray | None) -> set[int]:
    assert mask is not None
    return set(mask.nonzero()[0].tolist())


def text(ids: list[int]) -> str:
    return b"".join(TOKENS[i] for i in ids).decode()


def test_masks_are_those_of_the_language(grammars: Grammars) -> None:
    """Every sequence of up to four tokens of a finite language, by enumeration."""
    cursor = grammars.cursor("regex", "(ab|cde?)[01]")
    language = {"ab0", "ab1", "cd0", "cd1", "cde0", "cde1"}
    todo: list[list[int]] = [[]]
    while todo:
        ids = todo.pop()
        ordinary = [i for i, t in enumerate(TOKENS) if t and i not in EOS]
        want = {i for i in ordinary if any(w.startswith(text([*ids, i])) for w in language)}
        todo += [[*ids, i] for i in want]
        want |= set(EOS) if text(ids) in language else set()
        assert allowed(cursor.mask(ids)) == want


def test_any_order_of_questions_gives_a_fresh_cursors_answers(grammars: Grammars) -> None:
    """Random jumps between paths, inside and outside the language and behind its end."""
    rng = np.random.default_rng(0)
    cursor = grammars.cursor("regex", REGEX)
    path: list[int] = []
    for _ in range(300):
        path = path[: rng.integers(0, len(path) + 1)]
        for _ in range(rng.integers(0, 5)):
            mask = grammars.cursor("regex", REGEX).mask(path)
            wild = mask is None or rng.random() < 0.1
            path.append(int(rng.integers(0, 17) if wild else rng.choice(np.flatnonzero(mask))))
        fresh = grammars.cursor("regex", REGEX).mask(path)
        got = cursor.mask(path)
        assert (got is None) == (fresh is None)
        if got is not None:
            assert allowed(got) == allowed(fresh)
            assert re.fullmatch(f"(?:{REGEX})", text(path)) is None or set(EOS) <= allowed(got)
            assert cursor.consumed == tuple(path)
        else:
            assert cursor.consumed == tuple(path)[: len(cursor.consumed)]


def test_outside_the_language_and_behind_its_end_there_is_no_mask(grammars: Grammars) -> None:
    cursor = grammars.cursor("regex", "ab?")
    assert cursor.mask([1]) is None
    assert cursor.mask([0, 0]) is None
    assert cursor.mask([99]) is None
    assert cursor.mask([0, 14]) is None  # 14 ends a text
    assert allowed(cursor.mask([0])) == {1, *EOS}
    assert allowed(cursor.mask([12])) == set(EOS)  # "ab", complete
    assert allowed(cursor.mask([])) == {0, 12}


def sequence(grammars: Grammars, output: list[int], **params) -> Sequence:
    request = Request(prompt=(7,), params=SamplingParams(**params))
    assert request.params.language is not None
    grammar = grammars.cursor(*request.params.language)
    seq = Sequence(0, request, seed=1, end_ids=frozenset(EOS), grammar=grammar)
    seq.tokens += output
    return seq


def test_every_node_of_a_tree_has_its_own_mask(grammars: Grammars) -> None:
    """Legal branches, one that leaves the language, and one behind the end. Logits are
    wider than the vocabulary, as padded matrices are."""
    seq = sequence(grammars, [0, 1], regex=REGEX, temperature=1.0)
    tokens = (1, 12, 2, 4, 3, 5, 4, 8, 14)
    parents = (-1, 0, 0, 0, 2, 3, 4, 6, 7)
    logits = torch.randn(len(tokens), 20, generator=torch.Generator().manual_seed(3))
    laws = build_laws(logits, tree_rows(seq, tokens, parents))
    for node, law in enumerate(laws):
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        mask = grammars.cursor("regex", REGEX).mask([0, 1, *path])
        if mask is None:
            assert node in (5, 8)
            assert isinstance(law, PointLaw)
            continue
        padded = np.pad(mask, (0, 20 - len(mask)))
        want = plain_law(logits[node].numpy(), seq.params, mask=padded)
        np.testing.assert_allclose(law.dense().numpy(), want, rtol=1e-5, atol=1e-8)
    assert laws[3].probability(5) == 0.0  # so node 5 is never reached
    draft = build_laws(logits, tree_rows(seq, tokens, parents), masked=True)
    assert [u for u, law in enumerate(draft) if isinstance(law, EmptyLaw)] == [5, 8]


def test_one_continuation_is_a_point(grammars: Grammars) -> None:
    seq = sequence(grammars, [2], regex="cd", temperature=1.0)
    assert build_laws(torch.randn(1, 20), tree_rows(seq, [2], [-1])) == [PointLaw(3, 20)]


def test_min_tokens_gives_way_where_a_complete_text_can_only_end(grammars: Grammars) -> None:
    for output, want in (([0], {1}), ([0, 1], set(EOS))):
        seq = sequence(grammars, output, regex="ab?", temperature=1.0, min_tokens=5)
        law = build_laws(torch.randn(1, 20), tree_rows(seq, [output[-1]], [-1]))[0]
        assert set(law.dense().nonzero().flatten().tolist()) == want


@pytest.mark.parametrize(
    ("kind", "source", "fault"),
    [
        ("regex", "ab{", "unclosed counted repetition"),
        ("regex", "(", "unclosed group"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", 'root ::= "a" foo', "not found"),
        ("grammar", "what is this", "invalid"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "unclosed group"),
    ],
)
def test_what_does_not_compile_is_refused_in_one_line(
    grammars: Grammars, kind: str, source: str, fault: str
) -> None:
    with pytest.raises(UserError, match=fault) as e:
        grammars.cursor(kind, source)
    assert str(e.value).startswith(f"{kind} is invalid: ")
    assert "\n" not in str(e.value)


def test_lark_and_ebnf_mean_the_same(grammars: Grammars) -> None:
    lark = grammars.cursor("grammar", 'start: ("ab" | "c")+ "0"')
    ebnf = grammars.cursor("grammar", 'root ::= ("ab" | "c")+ "0"')
    for path in ([], [0], [12], [12, 2], [2, 8]):
        assert allowed(lark.mask(path)) == allowed(ebnf.mask(path))


def test_without_an_end_token_no_grammar_can_end() -> None:
    with pytest.raises(UserError, match="end-of-sequence"):
        toy_grammars(TOKENS, ()).cursor("regex", "a")
