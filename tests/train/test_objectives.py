"""Fast losses against the readable float64 ones: values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from paceline.errors import UserError
from paceline.models.base import FINAL
from paceline.models.heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from paceline.train import losses, reference
from paceline.train.attention import attend, attend_plain
from paceline.train.data import Pack, tap_name
from paceline.train.losses import Laws, head_loss, laws_from_features
from paceline.train.objectives import Eagle1, Eagle3, LossConfig, Medusa1, Moment, Objective
from paceline.train.target import Tables

D, V, U, TAPS = 16, 40, 25, (1, 3, 5)
LENGTHS = (9, 1, 14, 3)
IDS = torch.randperm(V, generator=torch.Generator().manual_seed(5))[:U].sort().values


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


@pytest.fixture
def tables() -> Tables:
    return Tables(
        embedding_VD=random(V, D, seed=1),
        head_VD=random(V, D, seed=2),
        norm_D=torch.ones(D, dtype=torch.float64),
        layer={},
    )


@pytest.fixture
def pack(tables: Tables) -> Pack:
    n = sum(LENGTHS)
    starts = (0, *itertools.accumulate(LENGTHS))
    g = torch.Generator().manual_seed(3)
    final = random(n, D, seed=4)
    logits = final @ tables.head_VD.T
    law = torch.rand(n, generator=g) < 0.8
    return Pack(
        starts_B1=starts,
        tokens_N=torch.randint(0, V, (n,), generator=g),
        next_N=torch.randint(0, V, (n,), generator=g),
        law_N=law,
        top_N=logits.argmax(-1),
        logz_N=logits.logsumexp(-1),
        taps={"final": final, **{tap_name(t): random(n, D, seed=10 + t) for t in TAPS}},
    )


def answers(**fields: object) -> LossConfig:
    """A loss in float64 over the rows where the target chose."""
    given = {"warmup": 0, "prompts": False, "dtype": torch.float64, **fields}
    return LossConfig(**given)  # type: ignore[arg-type]


def head(kind: str) -> EagleHead:
    config = EagleConfig(
        kind=kind,  # type: ignore[arg-type]
        hidden=D,
        intermediate=24,
        n_heads=4,
        n_kv_heads=2,
        head_size=6,
        vocab_size=V,
        draft_vocab_size=U,
        taps=TAPS if kind == "eagle3" else (FINAL,),
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return EagleHead(config, IDS).double()


def by_sequence(pack: Pack, tables: Tables):
    """Each sequence's rows, exact laws on the draft vocabulary, and which may be judged."""
    p_NV = (pack.taps["final"] @ tables.head_VD.T).softmax(-1)
    drafted = torch.isin(pack.top_N, IDS)
    for first, last in itertools.pairwise(pack.starts_B1):
        rows = slice(first, last)
        yield rows, p_NV[rows][:, IDS], (pack.law_N & drafted)[rows]


def check(objective: Objective, pack: Pack, expected: torch.Tensor, step: int = 0) -> None:
    module = objective.module
    parameters = [p for p in module.parameters() if p.requires_grad]
    want = torch.autograd.grad(expected, parameters, allow_unused=True)
    outcome = objective(pack, Moment(step))
    torch.testing.assert_close(outcome.loss.detach(), expected.detach(), rtol=1e-6, atol=1e-9)
    got = torch.autograd.grad(outcome.loss, parameters, allow_unused=True)
    for a, b in zip(got, want, strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if a is None else a, zero if b is None else b, rtol=1e-5, atol=1e-8
        )


def pooled(per_sequence: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """A mean over all judged rows from means per sequence."""
    total = sum(n for _, n in per_sequence)
    return sum((m * n for m, n in per_sequence), torch.zeros(())) / total


@pytest.mark.parametrize("kind", ["ce", "overlap"])
def test_eagle3_equals_the_reference(kind: losses.Kind, pack: Pack, tables: Tables) -> None:
    module, steps, decay = head("eagle3"), 4, 0.8
    config = answers(kind=kind, decay=decay)
    parts: list[list[tuple[torch.Tensor, int]]] = [[] for _ in range(steps)]
    for rows, p_TU, usable_T in by_sequence(pack, tables):
        taps = torch.cat([pack.taps[tap_name(t)][rows] for t in TAPS], -1)
        embedding = tables.embedding_VD[pack.next_N[rows]]
        # the reference's weights single out one step at a time
        for i in range(steps):
            n = int(usable_T[1 + i :].sum())
            if n:
                upto = reference.eagle3_loss(
                    module, taps, embedding, p_TU, usable_T, steps=i + 1, decay=1.0, kind=kind
                )
                before = 0.0 if i == 0 else reference.eagle3_loss(
                    module, taps, embedding, p_TU, usable_T, steps=i, decay=1.0, kind=kind
                )  # fmt: skip
                parts[i].append((upto - before, n))
    expected = sum((decay**i * pooled(p) for i, p in enumerate(parts)), torch.zeros(()))
    check(Eagle3(module, tables, config, steps=steps), pack, expected)


def test_prompt_rows_teach_what_the_target_would_have_said(pack: Pack, tables: Tables) -> None:
    """The captured columns hold nothing for a prompt's row; the law follows from the feature.
    Evaluation is over answers alone."""
    blank = replace(
        pack,
        top_N=torch.where(pack.law_N, pack.top_N, 0),
        logz_N=torch.where(pack.law_N, pack.logz_N, torch.zeros_like(pack.logz_N)),
    )
    whole = replace(pack, law_N=torch.ones_like(pack.law_N))
    assert not torch.equal(whole.law_N, pack.law_N)
    module = head("eagle3")
    with_prompts = Eagle3(module, tables, answers(prompts=True), steps=2)
    plain = Eagle3(module, tables, answers(), steps=2)
    found, expected = with_prompts(blank, Moment(0)), plain(whole, Moment(0))
    torch.testing.assert_close(found.loss, expected.loss)
    assert found.depths == expected.depths
    assert found.depths != plain(pack, Moment(0)).depths
    assert with_prompts(blank, Moment(0), 2).depths == plain(pack, Moment(0), 2).depths


def test_unrolled_steps_grow_one_by_one(pack: Pack, tables: Tables) -> None:
    growing = Eagle3(head("eagle3"), tables, answers(), steps=4, grow=0.3)
    shares = (0, 0.09, 0.11, 0.19, 0.21, 0.29, 0.31, 0.4, 1)
    assert [growing.steps_at(s) for s in shares] == [1, 1, 2, 2, 3, 3, 4, 4, 4]
    assert [len(growing(pack, Moment(0, s)).depths) for s in (0, 0.11, 1)] == [1, 2, 4]
    assert len(growing(pack, Moment(0), 3).depths) == 3  # an evaluation is as deep as it wants
    at_once = Eagle3(head("eagle3"), tables, answers(), steps=4, grow=0)
    assert at_once.steps_at(0.0) == 4


def test_overlap_begins_behind_its_warm_up(pack: Pack, tables: Tables) -> None:
    module = head("eagle3")
    late = answers(kind="overlap", warmup=10)

    def value(config: LossConfig, step: int) -> float:
        return float(Eagle3(module, tables, config, steps=2)(pack, Moment(step)).loss.detach())

    at = {s: value(late, s) for s in (9, 10)}
    for step, kind in ((9, "ce"), (10, "overlap")):
        plain = answers(kind=kind)
        assert at[step] == value(plain, 0)
    assert at[9] != at[10]


def test_eagle1_equals_the_reference(pack: Pack, tables: Tables) -> None:
    module = head("eagle1")
    module.borrow_head(tables.head_VD[IDS])
    config = answers()
    objective = Eagle1(module, tables, config, noise=0.3, seed=11)
    noise = objective._noise_for(pack, 0, pack.taps["final"])
    assert not torch.equal(noise, objective._noise_for(pack, 1, pack.taps["final"]))
    assert float(noise[: LENGTHS[0]].abs().max()) <= 0.5 * 0.3 * 512 / LENGTHS[0]
    parts = []
    for rows, p_TU, usable_T in by_sequence(pack, tables):
        n = int(usable_T[1:].sum())
        if n:
            one = reference.eagle1_loss(
                module,
                pack.taps["final"][rows],
                tables.embedding_VD[pack.next_N[rows]],
                p_TU,
                usable_T,
                ce_weight=0.1,
                noise_TD=noise[rows],
            )
            parts.append((one, n))
    check(objective, pack, pooled(parts))
    assert module.lm_head.weight.grad is None


@pytest.mark.parametrize("kind", ["ce", "overlap"])
@pytest.mark.parametrize("shared", [False, True])
def test_medusa_equals_the_reference(
    kind: losses.Kind, shared: bool, pack: Pack, tables: Tables
) -> None:
    config = MedusaConfig(
        num_heads=3, hidden=D, vocab_size=V, draft_vocab_size=U, shared_head=shared
    )
    heads = MedusaHeads(config, IDS).double()
    heads.borrow_head(tables.head_VD[IDS])
    with torch.no_grad():
        for p in heads.blocks.parameters():
            p.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(())
    for i in range(3):
        parts = []
        for rows, p_TU, usable_T in by_sequence(pack, tables):
            n = int(usable_T[1 + i :].sum())
            if n:
                logits = heads.logits(pack.taps["final"][rows], i)
                judged = [t for t in range(len(p_TU) - 1 - i) if usable_T[t + 1 + i]]
                loss = [reference.law_loss(logits[t], p_TU[t + 1 + i], kind) for t in judged]
                parts.append((torch.stack(loss).mean(), n))
        expected = expected + 0.8**i * pooled(parts)
    loss_config = answers(kind=kind, decay=0.8)
    check(Medusa1(heads, tables, loss_config), pack, expected)
    # and the reference's own sum over heads, on one sequence
    rows, p_TU, usable_T = next(by_sequence(pack, tables))
    one = Pack(
        starts_B1=(0, LENGTHS[0]),
        **{
            name: getattr(pack, name)[rows]
            for name in ("tokens_N", "next_N", "law_N", "top_N", "logz_N")
        },
        taps={name: t[rows] for name, t in pack.taps.items()},
    )
    whole = reference.medusa_loss(
        heads, pack.taps["final"][rows], p_TU, usable_T, decay=0.8, kind=kind
    )
    check(Medusa1(heads, tables, loss_config), one, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n_later", [0, 1, 3])
def test_joined_attention_equals_the_plain_one(dtype: torch.dtype, n_later: int) -> None:
    starts = (0, 5, 6, 20, 37)
    tensors = [
        random(37, 6 if i == 0 else 2, 8, seed=i).to(dtype).requires_grad_()
        for i in range(3 + 2 * n_later)
    ]
    later = list(zip(tensors[3::2], tensors[4::2], strict=True))
    weight = random(37, 48, seed=99).to(dtype)
    found = []
    for function in (attend, attend_plain):
        out = function(tensors[0], (tensors[1], tensors[2]), later, starts)
        found.append((out, torch.autograd.grad((out * weight).sum(), tensors)))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(found[0], found[1], rtol=tolerance, atol=tolerance)


def eagle3_of(tables: Tables, config: LossConfig) -> Objective:
    return Eagle3(head("eagle3"), tables, config, steps=3)


def medusa_of(tables: Tables, config: LossConfig) -> Objective:
    medusa = MedusaConfig(num_heads=2, hidden=D, vocab_size=V, draft_vocab_size=U)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Medusa1(MedusaHeads(medusa, IDS).double(), tables, config)


def lesson_of(objective: Objective, pack: Pack) -> tuple[torch.Tensor, ...]:
    """Loss, counts by draft step, and gradients."""
    outcome = objective(pack, Moment(0))
    parameters = [p for p in objective.module.parameters() if p.requires_grad]
    depths = torch.tensor([[d.rows, d.agreed, d.overlap] for d in outcome.depths])
    return outcome.loss.detach(), depths, *torch.autograd.grad(outcome.loss, parameters)


@pytest.mark.parametrize("make", [eagle3_of, medusa_of])
@pytest.mark.parametrize("prompts", [False, True])
def test_rows_that_fill_a_pack_up_teach_nothing(
    prompts: bool, make: Callable[[Tables, LossConfig], Objective], pack: Pack, tables: Tables
) -> None:
    filled = pack.filled_up(16)
    assert (pack.n_rows, filled.n_rows, filled.filling) == (27, 32, 5)
    assert filled.filled_up(16) is filled
    found = [lesson_of(make(tables, answers(prompts=prompts)), p) for p in (pack, filled)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [eagle3_of, medusa_of])
def test_a_pack_without_anything_to_learn(
    make: Callable[[Tables, LossConfig], Objective], pack: Pack, tables: Tables
) -> None:
    nothing = replace(pack, law_N=torch.zeros_like(pack.law_N))
    loss, depths, *gradients = lesson_of(make(tables, answers()), nothing)
    assert float(loss) == 0.0
    assert not depths.any()
    assert not any(g.any() for g in gradients)


@pytest.mark.parametrize("kind", ["ce", "overlap"])
def test_gradient_of_the_fused_loss_by_differences(
    kind: losses.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # several chunks and blocks, the last ones short
    monkeypatch.setattr(losses, "CHUNK", 2)
    monkeypatch.setattr(losses, "BLOCK", 5)
    monkeypatch.setattr(losses, "ROWS", 4)
    n, rows = 7, torch.tensor([2, 0, 1, 1, 3, 2, 0])
    share = torch.tensor([1.0, 0.5, 0.25, 2.0, 1.0, 0.0, 1.0])
    p = random(4, U, seed=3).softmax(-1) * torch.tensor([[1.0], [0.9], [0.5], [0.99]])
    laws = Laws(p_RU=p, mass_R=p.sum(-1), top_R=p.argmax(-1), usable_R=torch.ones(4).bool())
    x = random(n, D, seed=1).requires_grad_()
    weight = (random(U, D, seed=2) * 0.3).requires_grad_()

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = head_loss(x, weight, laws, rows, kind, share_N=share, dtype=torch.float64)
        return found.loss

    assert torch.autograd.gradcheck(loss, (x, weight))
    found = head_loss(x, weight, laws, rows, kind, dtype=torch.float64)
    q = (x @ weight.T).softmax(-1)
    shared_N = torch.minimum(p[rows], q.detach()).sum(-1)
    torch.testing.assert_close(found.overlap_N, shared_N)
    assert torch.equal(found.agreed_N, q.argmax(-1) == laws.top_R[rows])
    logits = (x @ weight.T).detach()
    of_rows = [reference.law_loss(z, p[r], kind) for z, r in zip(logits, rows, strict=True)]
    assert loss(x, weight).item() == pytest.approx(float(torch.stack(of_rows) @ share.double()))


def test_a_head_that_is_the_target_overlaps_wholly(tables: Tables, pack: Pack) -> None:
    index = torch.full((V,), -1)
    index[IDS] = torch.arange(U)
    final, head_UD = pack.taps["final"], tables.head_VD[IDS]
    laws = laws_from_features(final, head_UD, pack.logz_N, pack.top_N, index, dtype=torch.float64)
    p_NV = (final @ tables.head_VD.T).softmax(-1)
    torch.testing.assert_close(laws.p_RU, p_NV[:, IDS])
    assert torch.equal(laws.usable_R, torch.isin(pack.top_N, IDS))
    rows = laws.usable_R.nonzero().squeeze(1)
    found = head_loss(final[rows], head_UD, laws, rows, "overlap", dtype=torch.float64)
    # q is p renormalised, so min(p, q) is p and the overlap its mass
    total = float(found.overlap_N.sum())
    assert total == pytest.approx(float(laws.mass_R.double()[rows].sum()), rel=1e-6)
    assert bool(found.agreed_N.all())


def test_settings_are_checked(tables: Tables) -> None:
    with pytest.raises(UserError, match="steps = 0"):
        Eagle3(head("eagle3"), tables, LossConfig(), steps=0)
    with pytest.raises(UserError, match="grow = -1"):
        Eagle3(head("eagle3"), tables, LossConfig(), grow=-1)
    with pytest.raises(UserError, match="unknown loss"):
        LossConfig(kind="mse")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="decay"):
        LossConfig(decay=0.0)
