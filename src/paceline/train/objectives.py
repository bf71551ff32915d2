"""What each kind of drafter learns from a pack of captured sequences.

An objective holds the module that is trained and the target's frozen tables. `loss` is
differentiable; `depths` says, for each draft step, how many rows were judged, on how many the
head's first choice was the target's, and the summed overlap sum_x min(p, q).

Legend: N packed rows, V vocabulary, U draft vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import UserError
from paceline.models.heads import EagleHead, MedusaHeads
from paceline.train.attention import attend
from paceline.train.data import FINAL_NAME, Pack, tap_name
from paceline.train.losses import (
    CHUNK,
    KINDS,
    HeadLosses,
    Kind,
    Laws,
    head_loss,
    laws_from_features,
    project,
)
from paceline.train.target import Tables


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Counts of one draft step over the judged rows of a pack."""

    rows: int
    agreed: float
    overlap: float


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """loss: a scalar; depths: one entry per draft step."""

    loss: torch.Tensor
    depths: tuple[Depth, ...]


@dataclass(frozen=True)
class Moment:
    """Where a run is. step: updates made before (noise and warm-ups are functions of it). done:
    share of its schedule that is behind it."""

    step: int
    done: float = 0.0


class Objective(Protocol):
    """steps: draft steps to unroll in an evaluation (None: training)."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def taps(self) -> tuple[str, ...]: ...

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        """What is trained, and the share of the learning rate that it gets."""
        ...

    def __call__(self, pack: Pack, now: Moment, steps: int | None = None) -> Outcome: ...


def one_group(module: nn.Module) -> list[tuple[list[nn.Parameter], float]]:
    return [([p for p in module.parameters() if p.requires_grad], 1.0)]


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """kind: ce or overlap. warmup: updates with ce before overlap takes over (overlap alone
    has no gradient worth the name while the head's law is far off). decay: weight of draft
    step i is decay ** i. prompts: learn from the rows of prompts too, not only where the
    target chose a token: what it would have said there follows from the captured final
    feature. dtype: of the matrix products with the output projection."""

    kind: Kind = "ce"
    warmup: int = 200
    decay: float = 0.5
    prompts: bool = True
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"unknown loss {self.kind!r}: use {' or '.join(KINDS)}")
        if not 0 < self.decay <= 1:
            raise UserError(f"decay = {self.decay} is out of range: use above 0, at most 1")

    def at(self, step: int) -> Kind:
        return "ce" if step < self.warmup else self.kind


class Judge:
    """The target's side of a loss: its laws of a pack's rows on the draft vocabulary."""

    def __init__(self, tables: Tables, target_ids_U: torch.Tensor, config: LossConfig):
        self.dtype, self._prompts = config.dtype, config.prompts
        self._head_VD = tables.head_VD.to(self.dtype)
        self.head_UD = self._head_VD[target_ids_U]
        self.index_V = torch.full((len(tables.head_VD),), -1, dtype=torch.int64)
        self.index_V[target_ids_U] = torch.arange(len(target_ids_U))
        self.index_V = self.index_V.to(self.head_UD.device)

    def lesson(self, pack: Pack, *, training: bool) -> Pack:
        """The rows to judge: in training, if prompts count, every row has a law."""
        return with_prompt_laws(pack, self._head_VD) if training and self._prompts else pack

    def laws(self, pack: Pack) -> tuple[Laws, torch.Tensor]:
        """Laws of the rows where the target chose, and for each pack row the law's row, -1
        where there is none or its most probable token can't be drafted."""
        chosen_R = pack.law_N.nonzero().squeeze(1)
        laws = laws_from_features(
            pack.taps[FINAL_NAME][chosen_R],
            self.head_UD,
            pack.logz_N[chosen_R],
            pack.top_N[chosen_R],
            self.index_V,
            dtype=self.dtype,
        )
        row_N = torch.full_like(pack.top_N, -1)
        row_N[chosen_R] = torch.arange(len(chosen_R), device=row_N.device)
        row_N[chosen_R[~laws.usable_R]] = -1
        return laws, row_N


@torch.no_grad()
def with_prompt_laws(pack: Pack, head_VD: torch.Tensor) -> Pack:
    """The pack with a law in every row: where the target had chosen nothing, from the final
    feature and the target's output projection."""
    law_N = torch.ones_like(pack.law_N)
    law_N[pack.n_rows - pack.filling :] = False
    rows_R = (law_N & ~pack.law_N).nonzero().squeeze(1)
    top_N, logz_N = pack.top_N.clone(), pack.logz_N.clone()
    for at in range(0, len(rows_R), CHUNK):
        part_R = rows_R[at : at + CHUNK]
        z = project(pack.taps[FINAL_NAME][part_R], head_VD)
        top_N[part_R], logz_N[part_R] = z.argmax(-1), z.logsumexp(-1).to(logz_N.dtype)
    return replace(pack, law_N=law_N, top_N=top_N, logz_N=logz_N)


def judged_rows(pack: Pack, law_row_N: torch.Tensor, ahead: int) -> tuple[torch.Tensor, ...]:
    """Pack rows t with a usable law at t + ahead in the same sequence, and the laws' rows."""
    rows, laws = [], []
    for first, last in pairwise(pack.starts_B1):
        if last - first > ahead:
            at = law_row_N[first + ahead : last]
            usable = (at >= 0).nonzero().squeeze(1)
            rows.append(first + usable)
            laws.append(at[usable])
    if not rows:
        empty = law_row_N[:0]
        return empty, empty
    return torch.cat(rows), torch.cat(laws)


def depths_of(losses: HeadLosses, rows: Seq[int]) -> tuple[Depth, ...]:
    """Of rows that were judged at once, so many of each draft step."""
    parts = zip(losses.agreed_N.split(list(rows)), losses.overlap_N.split(list(rows)), strict=True)
    return tuple(
        Depth(rows=len(agreed), agreed=float(agreed.sum()), overlap=float(overlap.sum()))
        for agreed, overlap in parts
    )


class Eagle3:
    """Training-time test over `steps` unrolled draft steps (Li et al. 2025, section 3.2).

    grow: share of the schedule over which they become so many, one by one from 1. The first
    step learns
    several times faster alone, on it all others stand, and it costs least. (Ours; the paper
    unrolls all from the start, with far more data.)
    """

    def __init__(
        self,
        head: EagleHead,
        tables: Tables,
        loss: LossConfig,
        *,
        steps: int = 5,
        grow: float = 0.0,
    ) -> None:
        if not 1 <= steps <= 16:
            raise UserError(f"steps = {steps} is out of range: use 1 to 16 (3 to 7 are usual)")
        if not 0 <= grow <= 1:
            raise UserError(f"grow = {grow} is out of range: use 0 (all steps at once) to 1")
        self.module, self.config, self.steps, self.grow = head, loss, steps, grow
        self.taps = tuple(dict.fromkeys([*map(tap_name, head.config.taps), FINAL_NAME]))
        self._embedding_VD = tables.embedding_VD
        self._judge = Judge(tables, head.target_ids, loss)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        return one_group(self.module)

    def __call__(self, pack: Pack, now: Moment, steps: int | None = None) -> Outcome:
        head = self.module
        fused = torch.cat([pack.taps[tap_name(i)] for i in head.config.taps], -1)
        pack = self._judge.lesson(pack, training=steps is None)
        laws, law_row_N = self._judge.laws(pack)
        # All draft steps are judged at once: the output projection is as much as the layer.
        hidden, law_rows, shares = [], [], []

        def judge(i: int, hidden_ND: torch.Tensor) -> None:
            rows, laws_of_rows = judged_rows(pack, law_row_N, 1 + i)
            hidden.append(hidden_ND[rows])
            law_rows.append(laws_of_rows)
            share = self.config.decay**i / max(len(rows), 1)
            shares.append(torch.full((len(rows),), share, device=fused.device))

        unroll(
            head,
            head.fuse(_like(fused, head)),
            pack,
            self._embedding_VD,
            judge,
            self.steps_at(now.done) if steps is None else steps,
        )
        losses = head_loss(
            head.norm(torch.cat(hidden)),
            head.lm_head.weight,
            laws,
            torch.cat(law_rows),
            self.config.at(now.step),
            share_N=torch.cat(shares),
            dtype=self.config.dtype,
        )
        return Outcome(loss=losses.loss, depths=depths_of(losses, [len(x) for x in hidden]))

    def steps_at(self, done: float) -> int:
        """Draft steps to unroll where such a share of the schedule is over."""
        if done >= self.grow:
            return self.steps
        return 1 + int(done / self.grow * (self.steps - 1))


class Eagle1:
    """Feature regression and 0.1 of soft cross-entropy against the target's frozen head
    (Li et al. 2024, section 4.2), with uniform noise on the features it reads.

    noise: width of the noise for a sequence of 512 rows; longer ones get less.
    """

    def __init__(
        self,
        head: EagleHead,
        tables: Tables,
        loss: LossConfig,
        *,
        ce_weight: float = 0.1,
        noise: float = 0.2,
        seed: int = 0,
    ) -> None:
        self.module, self.config = head, loss
        self.taps = (FINAL_NAME,)
        self._ce_weight, self._noise, self._seed = ce_weight, noise, seed
        self._embedding_VD = tables.embedding_VD
        self._judge = Judge(tables, head.target_ids, loss)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        return one_group(self.module)

    def __call__(self, pack: Pack, now: Moment, steps: int | None = None) -> Outcome:
        head = self.module
        final_ND = _like(pack.taps[FINAL_NAME], head)
        pack = self._judge.lesson(pack, training=steps is None)
        laws, law_row_N = self._judge.laws(pack)
        training = steps is None
        features_ND = final_ND + self._noise_for(pack, now.step, final_ND) if training else final_ND
        total = torch.zeros((), device=final_ND.device)
        depths: list[Depth] = []

        def judge(i: int, hidden_ND: torch.Tensor) -> None:
            nonlocal total
            rows, law_rows = judged_rows(pack, law_row_N, 1 + i)
            losses = head_loss(
                hidden_ND[rows], head.lm_head.weight, laws, law_rows, "ce", dtype=self.config.dtype
            )
            depths.extend(depths_of(losses, [len(rows)]))
            if i == 0:
                regression = (
                    F.smooth_l1_loss(hidden_ND[rows].to(final_ND.dtype), final_ND[rows + 1])
                    if len(rows)
                    else hidden_ND.sum() * 0
                )
                ce = losses.loss / max(len(rows), 1)
                total = total + regression + self._ce_weight * ce

        unroll(head, features_ND, pack, self._embedding_VD, judge, 1 if training else steps or 1)
        return Outcome(loss=total, depths=tuple(depths))

    def _noise_for(self, pack: Pack, step: int, like: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        noise = torch.rand(like.shape, generator=generator, dtype=torch.float32) - 0.5
        for first, last in pairwise(pack.starts_B1):
            noise[first:last] *= self._noise * 512 / (last - first)
        return noise.to(like)


class Medusa1:
    """Every head against the target's law further ahead (Cai et al. 2024, section 2.2.1).

    The paper's cross-entropy takes the text's token; its expectation over texts is the soft
    one used here, with less variance. The target is frozen.
    """

    def __init__(self, heads: MedusaHeads, tables: Tables, loss: LossConfig) -> None:
        self.module, self.config = heads, loss
        self.taps = (FINAL_NAME,)
        self._judge = Judge(tables, heads.target_ids, loss)

    def groups(self) -> list[tuple[list[nn.Parameter], float]]:
        return one_group(self.module)

    def __call__(self, pack: Pack, now: Moment, steps: int | None = None) -> Outcome:
        heads = self.module
        pack = self._judge.lesson(pack, training=steps is None)
        laws, law_row_N = self._judge.laws(pack)
        final_ND = _like(pack.taps[FINAL_NAME], heads)
        total = torch.zeros((), device=final_ND.device)
        depths: list[Depth] = []
        for i in range(heads.config.num_heads):
            rows, law_rows = judged_rows(pack, law_row_N, 1 + i)
            z = heads.features(final_ND[rows], i)
            projection = heads.lm_heads[0 if heads.config.shared_head else i]
            assert isinstance(projection, nn.Linear)
            weight = projection.weight
            kind = self.config.at(now.step)
            losses = head_loss(z, weight, laws, law_rows, kind, dtype=self.config.dtype)
            depths.extend(depths_of(losses, [len(rows)]))
            total = total + self.config.decay**i * losses.loss / max(len(rows), 1)
        return Outcome(loss=total, depths=tuple(depths))


def unroll(
    head: EagleHead,
    features_ND: torch.Tensor,
    pack: Pack,
    embedding_VD: torch.Tensor,
    judge: Callable[[int, torch.Tensor], None],
    steps: int,
) -> None:
    """Run the head `steps` times, its own output in the features' place from the second on,
    and hand each output to `judge`. Row t of step i reads the embedding of token t + 1 + i
    and sits at position t + i; rows past their sequence's end read its last token, and are
    judged by nobody."""
    starts, device = pack.starts_B1, features_ND.device
    row_N = torch.arange(pack.n_rows, device=device)
    first_N, last_N = (_spread(v, starts, device) for v in (starts[:-1], starts[1:]))
    later: list[tuple[torch.Tensor, torch.Tensor]] = []
    prefix = None
    g_ND = features_ND
    for i in range(steps):
        token_N = pack.next_N[torch.minimum(row_N + i, last_N - 1)]
        embedding_ND = embedding_VD[token_N].to(features_ND.dtype)
        q, k, v, residual = head.qkv(embedding_ND, g_ND, row_N - first_N + i)
        if prefix is None:
            prefix = (k, v)
        else:
            later.append((k, v))
        g_ND = head.finish(attend(q, prefix, later, starts), residual)
        judge(i, g_ND)


def _spread(values: Seq[int], starts: Seq[int], device: torch.device) -> torch.Tensor:
    """One value per sequence to one per row."""
    lengths = torch.tensor(starts).diff()
    return torch.tensor(values).repeat_interleave(lengths).to(device)


def _like(x: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """In the module's type: autocast narrows it where that is faster."""
    return x.to(next(module.parameters()).dtype)
