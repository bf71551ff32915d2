"""The pure parts of a step: rows from trees, verdicts from logits, ends from verdicts.

Nothing here writes a Sequence, a cache or a drafter. Legend: R wanted rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.cache.paged import commit_moves
from paceline.core.draws import KeyedDraws
from paceline.core.law import Law
from paceline.core.rules import AcceptanceRule, Guarantee, Verdict
from paceline.core.tree import TokenTree
from paceline.engine.scheduler import Commit, Item, origins
from paceline.engine.text import Decode, advance, find_stop, held_back
from paceline.models.base import Int32, RowGroup
from paceline.sampling.context import tree_rows
from paceline.sampling.law import BadLogits, NoTokenLeft, build_laws
from paceline.types import FinishReason, Sequence, TextState, TokenOut


def row_groups(items: Seq[Item], trees: Seq[TokenTree | None]) -> list[RowGroup]:
    """Pending tokens first, then the proposal below the last of them; logits are wanted
    for the whole tree, and for nothing where a prompt is still being read."""
    groups = []
    for item, tree in zip(items, trees, strict=True):
        seq, n = item.seq, item.rows
        tokens = seq.tokens[seq.computed : seq.computed + n]
        parents = list(range(-1, n - 1))
        wanted = range(0)
        if tree is not None:
            assert tree.tokens[0] == tokens[-1], "a tree must hang below the last token"
            tokens = [*tokens, *tree.tokens[1:]]
            parents += [n - 1 + p for p in tree.parents[1:]]
            wanted = range(n - 1, n - 1 + len(tree))
        groups.append(
            RowGroup(
                tokens=np.array(tokens, np.int32),
                parents=np.array(parents, np.int32),
                context=seq.computed,
                table=np.array(seq.table, np.int32),
                wanted=np.array(wanted, np.int32),
            )
        )
    return groups


@dataclass(frozen=True)
class Judged:
    """A verdict, the guarantee under which it was reached, and the rows it looked at."""

    verdict: Verdict | None
    guarantee: Guarantee | None
    first_row: int
    error: str | None = None


def judge(
    items: Seq[Item],
    trees: Seq[TokenTree | None],
    logits_RV: torch.Tensor,
    rule_for: Callable[[Sequence, TokenTree], AcceptanceRule],
) -> list[Judged]:
    """A verdict for every sequence that decides; a request with unusable logits fails alone."""
    rows = [
        row
        for item, tree in zip(items, trees, strict=True)
        if tree is not None
        for row in tree_rows(item.seq, tree.tokens, tree.parents)
    ]
    laws = build_laws(logits_RV, rows)
    judged = []
    row = 0
    for item, tree in zip(items, trees, strict=True):
        if tree is None:
            judged.append(Judged(None, None, row))
            continue
        judged.append(_judge_one(item.seq, tree, laws[row : row + len(tree)], row, rule_for))
        row += len(tree)
    return judged


def _judge_one(
    seq: Sequence,
    tree: TokenTree,
    laws: Seq[Law],
    row: int,
    rule_for: Callable[[Sequence, TokenTree], AcceptanceRule],
) -> Judged:
    rule = rule_for(seq, tree)
    rule.check(tree, seq.params.greedy)
    try:
        verdict = rule.accept(tree, laws, KeyedDraws(seq.seed, len(seq.tokens)))
    except BadLogits:
        why = f"the model's logits are NaN or infinite at position {len(seq.tokens)}"
        return Judged(None, None, row, why)
    except NoTokenLeft:
        why = (
            f"no token may follow at position {len(seq.tokens)} or just behind: allowed and "
            "banned tokens, banned words and the grammar together leave none"
        )
        return Judged(None, None, row, why)
    return Judged(verdict, rule.guarantee, row)


@dataclass(frozen=True)
class Ends:
    """What ends a generation: the model's end-of-sequence ids and the length limit."""

    eos_ids: frozenset[int]
    max_length: int
    decode: Decode | None


def truncate(
    items: Seq[Item],
    trees: Seq[TokenTree | None],
    judged: Seq[Judged],
    logits_RV: torch.Tensor,
    ends: Ends,
) -> list[Commit]:
    """Cut each verdict behind its first end: end-of-sequence or stop token, stop string,
    max_tokens, context limit."""
    commits = []
    for item, tree, j in zip(items, trees, judged, strict=True):
        seq = item.seq
        if j.error is not None:
            commits.append(
                Commit(text=_flush(seq.text), finish_reason=FinishReason.ERROR, error=j.error)
            )
        elif tree is None or j.verdict is None:
            commits.append(Commit(text=seq.text))
        else:
            commits.append(_cut(seq, tree, j, logits_RV, ends))
    return commits


def _cut(seq: Sequence, tree: TokenTree, j: Judged, logits_RV: torch.Tensor, ends: Ends) -> Commit:
    assert j.verdict is not None
    ids = j.verdict.emitted(tree)
    output = seq.tokens[seq.n_prompt :]
    text, reason = seq.text, None
    count = 0
    for token in ids:
        output.append(token)
        count += 1
        text, reason = _after_token(seq, output, text, ends)
        if reason is not None:
            break
    nodes = (0, *j.verdict.path)[:count]
    tokens = _report(seq, ids[:count], [j.first_row + u for u in nodes], j.verdict, logits_RV)
    return Commit(
        tokens=tokens,
        kept=j.verdict.path[: count - 1],
        discarded=len(ids) - count,
        text=text,
        finish_reason=reason,
        guarantee=j.guarantee,
    )


def _after_token(
    seq: Sequence, output: list[int], text: TextState, ends: Ends
) -> tuple[TextState, FinishReason | None]:
    """Text and end after the last token of `output`."""
    params, token = seq.params, output[-1]
    reason = None
    if token in ends.eos_ids and not params.ignore_eos:
        reason = FinishReason.EOS
    elif token in params.stop_token_ids:
        reason = FinishReason.STOP
    if reason is not None:  # the ending token is no part of the text
        if ends.decode is not None:
            text = advance(text, output[:-1], ends.decode, last=True)
        return _flush(text), reason
    if len(output) >= params.max_tokens:
        reason = FinishReason.LENGTH
    elif seq.n_prompt + len(output) >= ends.max_length:
        reason = FinishReason.CONTEXT
    if ends.decode is None:
        return text, reason
    searched = len(text.text)
    text = advance(text, output, ends.decode, last=reason is not None)
    stop = find_stop(text.text, searched, params.stop) if params.stop else None
    if stop is not None:
        return _flush(replace(text, text=text.text[:stop])), FinishReason.STOP
    if reason is not None:
        return _flush(text), reason
    return replace(text, sent=len(text.text) - held_back(text.text, params.stop)), None


def _flush(text: TextState) -> TextState:
    return replace(text, sent=len(text.text))


def _report(
    seq: Sequence, ids: Seq[int], rows: Seq[int], verdict: Verdict, logits_RV: torch.Tensor
) -> tuple[TokenOut, ...]:
    """Emitted tokens with their origin and, where asked for, log-probabilities."""
    who = origins(verdict)
    wanted = seq.params.logprobs
    if wanted is None:
        return tuple(TokenOut(id=i, origin=o) for i, o in zip(ids, who, strict=False))
    logprobs_nV = logits_RV[list(rows)].log_softmax(-1)
    out = []
    for token, origin, logprobs_V in zip(ids, who, logprobs_nV, strict=False):
        top: tuple[tuple[int, float], ...] = ()
        if wanted:
            best = logprobs_V.topk(wanted)
            top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        out.append(
            TokenOut(id=token, origin=origin, logprob=float(logprobs_V[token]), top_logprobs=top)
        )
    return tuple(out)


def kv_moves(items: Seq[Item], commits: Seq[Commit], block_size: int) -> tuple[Int32, Int32] | None:
    """Slots to copy so that accepted paths follow the committed entries; None for none."""
    sources, targets = [], []
    for item, commit in zip(items, commits, strict=True):
        chain = range(1, len(commit.kept) + 1)
        if all(u == i for u, i in zip(commit.kept, chain, strict=True)):
            continue  # already in place
        rows = [*range(item.rows), *(item.rows - 1 + u for u in commit.kept)]
        seq = item.seq
        source, target = commit_moves(seq.table, seq.computed, rows, block_size)
        sources.append(source)
        targets.append(target)
    if not sources:
        return None
    return np.concatenate(sources), np.concatenate(targets)
