"""The training loop: updates, evaluation, checkpoints, and an exact way back after a kill.

A run is a function of its settings and data: packs come in an order drawn from the seed,
noise is a function of the step, and a checkpoint holds weights, optimiser state and position.
A run that was killed and resumed therefore ends with the bits of one that was not (on the
same machine, with the same number of threads, and without a time limit, which makes the
learning rate depend on the clock).
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UserError
from paceline.train.data import Corpus, Pack, replace_synced
from paceline.train.interrupts import interrupts
from paceline.train.losses import ROWS
from paceline.train.objectives import Depth, Moment, Objective

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """steps: updates (None: `epochs` of the data). minutes: end the schedule by then, however
    far it is. warmup: share of the schedule with a rising learning rate; a cosine to a tenth
    follows. pack_tokens: rows of a pack; accumulate: packs of an update. clip: largest norm of
    the gradient. eval_every, save_every: updates between evaluations and checkpoints.
    eval_packs: held-out packs of an evaluation; eval_steps: draft steps unrolled in it.
    autocast: matrix products in bfloat16."""

    lr: float = 1e-3
    epochs: float = 2.0
    steps: int | None = None
    minutes: float | None = None
    warmup: float = 0.03
    pack_tokens: int = 1024
    accumulate: int = 1
    clip: float = 0.5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    seed: int = 0
    eval_every: int = 100
    eval_packs: int = 8
    eval_steps: int = 5
    save_every: int = 100
    autocast: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "pack_tokens", "accumulate", "clip", "eval_every",
                     "eval_packs", "eval_steps", "save_every"):  # fmt: skip
            if not getattr(self, name) > 0:
                raise UserError(f"{name} = {getattr(self, name)} is out of range: use above 0")
        if not 0 <= self.warmup < 1:
            raise UserError(f"warmup = {self.warmup} is out of range: use 0 to below 1")
        for name in ("steps", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} = {value} is out of range: use above 0")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Acceptance by draft step. agree: share of rows where the first choice is the target's.
    overlap: mean of sum_x min(p, q). tau: tokens per round of a greedy chain as deep, if
    draft steps were independent: 1 + sum of running products of `agree`."""

    agree: tuple[float, ...]
    overlap: tuple[float, ...]

    @property
    def tau(self) -> float:
        total, product = 1.0, 1.0
        for rate in self.agree:
            product *= rate
            total += product
        return total

    @staticmethod
    def of(many: list[tuple[Depth, ...]]) -> Rates:
        by_depth = list(zip(*many, strict=True))
        rows = [max(sum(d.rows for d in ds), 1) for ds in by_depth]
        return Rates(
            agree=tuple(
                sum(d.agreed for d in ds) / n for ds, n in zip(by_depth, rows, strict=True)
            ),
            overlap=tuple(
                sum(d.overlap for d in ds) / n for ds, n in zip(by_depth, rows, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a progress line shows after an update. left_s: estimated seconds to the end."""

    step: int
    total: int
    loss: float
    lr: float
    rates: Rates
    held_out: Rates | None
    tokens: int
    tokens_per_s: float
    left_s: float


@dataclass
class _State:
    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    elapsed: float = 0.0


@dataclass
class Result:
    """finished: False where it was interrupted; held_out: of the last evaluation."""

    finished: bool
    step: int
    tokens: int
    elapsed: float
    held_out: Rates | None
    log: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """One run in the folder `out`. `run` may be called again after an interruption, by this
    process or another one, with the same arguments."""

    def __init__(
        self,
        objective: Objective,
        corpus: Corpus,
        config: TrainConfig,
        out: Path,
        *,
        device: torch.device | None = None,
        identity: dict[str, str] | None = None,
    ) -> None:
        """identity: what else makes this run what it is (objective, sizes); a checkpoint of
        another one is refused."""
        self.objective, self.corpus, self.config, self.out = objective, corpus, config, out
        self.device = device or torch.device("cpu")
        self.identity = {
            **(identity or {}),
            "data_sha256": corpus.sha256,
            "target_sha256": corpus.info.target_sha256,
            "config": json.dumps(asdict(config)),
        }
        out.mkdir(parents=True, exist_ok=True)
        groups = objective.groups()
        self._parameters = [p for parameters, _ in groups for p in parameters]
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters, "share": share} for parameters, share in groups],
            lr=config.lr,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._state = _State()
        self._log: list[dict[str, Any]] = []
        self._epoch: tuple[int, list[list[int]]] = (-1, [])
        per_epoch = len(self._packs(0)) / config.accumulate
        self.total = config.steps or max(1, math.ceil(per_epoch * config.epochs))
        self._held_out = corpus.packs(corpus.held_out, config.pack_tokens)[: config.eval_packs]
        self._last: Rates | None = None
        self.resumed = self._restore()
        self.step = self._state.step

    def run(
        self,
        report: Callable[[Snapshot], None] = lambda _: None,
        *,
        stop: Callable[[int], bool] = lambda _: False,
    ) -> Result:
        """Train to the end, or until Ctrl-C or `stop(step)`: then a checkpoint is written
        behind the update under way."""
        c, state = self.config, self._state
        with _quiet(), interrupts() as interrupted:
            while state.step < self.total and not self._out_of_time():
                began = time.perf_counter()
                tokens = state.tokens
                loss, lr, rates = self._update()
                seconds = time.perf_counter() - began
                state.elapsed += seconds
                last = state.step == self.total or self._out_of_time()
                if self._held_out and (last or state.step % c.eval_every == 0):
                    self._last = self.evaluate()
                    state.elapsed += time.perf_counter() - began - seconds
                self._note(loss, lr, rates, last or state.step % c.eval_every == 0)
                speed = (state.tokens - tokens) / max(seconds, 1e-9)
                report(self._snapshot(loss, lr, rates, speed))
                ending = bool(interrupted) or stop(state.step)
                if last or ending or state.step % c.save_every == 0:
                    self.save()
                if ending and not last:
                    return self._result(finished=False)
        return self._result(finished=True)

    @torch.no_grad()
    def evaluate(self) -> Rates:
        """Acceptance on the held-out packs, unrolled `eval_steps` deep."""
        self.objective.module.eval()
        found = []
        for group in self._held_out:
            with self._narrow():
                outcome = self.objective(self._read(group), self._now(), self.config.eval_steps)
            found.append(outcome.depths)
        self.objective.module.train()
        return Rates.of(found)

    def _update(self) -> tuple[float, float, Rates]:
        c, state = self.config, self._state
        now = self._now()
        lr = self._lr(now.done)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["share"]
        self._optimizer.zero_grad(set_to_none=True)
        total, depths = 0.0, []
        for _ in range(c.accumulate):
            pack = self._next_pack()
            with self._narrow():
                outcome = self.objective(pack, now)
            (outcome.loss / c.accumulate).backward()  # type: ignore[no-untyped-call]
            total += float(outcome.loss.detach()) / c.accumulate
            depths.append(outcome.depths)
            state.tokens += pack.n_rows - pack.filling
        if not math.isfinite(total):
            raise UserError(
                f"the loss became {total} at update {state.step + 1}: lower --lr (it was "
                f"{lr:.2g}); the last checkpoint in {self.out} is sound"
            )
        torch.nn.utils.clip_grad_norm_(self._parameters, c.clip)
        self._optimizer.step()
        state.step += 1
        return total, lr, Rates.of(depths)

    def _now(self) -> Moment:
        """By updates or by the clock, whichever is further on."""
        minutes, state = self.config.minutes, self._state
        by_clock = 0.0 if minutes is None else state.elapsed / (60 * minutes)
        return Moment(state.step, max(state.step / self.total, by_clock))

    def _lr(self, done: float) -> float:
        """Linear rise, then a cosine to a tenth."""
        c = self.config
        rise = max(c.warmup, 1 / self.total)
        if done < rise:
            return c.lr * min(1.0, (done + 1 / self.total) / rise)
        wave = 0.5 * (1 + math.cos(math.pi * min(1.0, (done - rise) / max(1 - rise, 1e-9))))
        return c.lr * (0.1 + 0.9 * wave)

    def _out_of_time(self) -> bool:
        minutes = self.config.minutes
        return minutes is not None and self._state.elapsed >= 60 * minutes

    def _packs(self, epoch: int) -> list[list[int]]:
        if self._epoch[0] != epoch:
            groups = self.corpus.epoch(self.config.seed, epoch, self.config.pack_tokens)
            self._epoch = (epoch, groups)
        return self._epoch[1]

    def _next_pack(self) -> Pack:
        state = self._state
        if state.index >= len(self._packs(state.epoch)):
            state.epoch, state.index = state.epoch + 1, 0
        group = self._packs(state.epoch)[state.index]
        state.index += 1
        return self._read(group)

    def _read(self, group: list[int]) -> Pack:
        pack = self.corpus.read(group, self.objective.taps).filled_up(ROWS)
        return pack if self.device.type == "cpu" else pack.to(self.device)

    def _narrow(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.autocast)

    def save(self) -> None:
        """Write the checkpoint; a kill leaves the old one or the new one, whole."""
        value = {
            "identity": self.identity,
            "state": asdict(self._state),
            "module": self.objective.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "held_out": None if self._last is None else asdict(self._last),
        }
        path = self.out / CHECKPOINT
        temporary = path.with_suffix(".tmp")
        torch.save(value, temporary)
        replace_synced(temporary, path)
        lines = "".join(json.dumps(entry) + "\n" for entry in self._log)
        (self.out / LOG).write_text(lines, encoding="utf-8")

    def _restore(self) -> bool:
        path = self.out / CHECKPOINT
        if not path.is_file():
            return False
        try:
            value = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as e:  # torch raises many kinds for a damaged file
            raise UserError(f"{path} can't be read ({e}): delete it to begin anew") from None
        if value["identity"] != self.identity:
            differs = [k for k, v in self.identity.items() if value["identity"].get(k) != v]
            raise UserError(
                f"{self.out} holds a run with another {differs[0]}: choose another --out, give the "
                "settings that it was begun with, or delete its checkpoint"
            )
        self.objective.module.load_state_dict(value["module"])
        self._optimizer.load_state_dict(value["optimizer"])
        self._state = _State(**value["state"])
        if value["held_out"] is not None:
            held_out = value["held_out"]
            self._last = Rates(agree=tuple(held_out["agree"]), overlap=tuple(held_out["overlap"]))
        log = self.out / LOG
        if log.is_file():
            entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
            self._log = [e for e in entries if e["step"] <= self._state.step]
        return True

    def _note(self, loss: float, lr: float, rates: Rates, evaluated: bool) -> None:
        entry: dict[str, Any] = {
            "step": self._state.step,
            "tokens": self._state.tokens,
            "seconds": round(self._state.elapsed, 2),
            "loss": loss,
            "lr": lr,
            "agree": [round(a, 4) for a in rates.agree],
            "overlap": [round(a, 4) for a in rates.overlap],
        }
        if evaluated and self._last is not None:
            entry["held_out"] = {
                "agree": [round(a, 4) for a in self._last.agree],
                "overlap": [round(a, 4) for a in self._last.overlap],
                "tau": round(self._last.tau, 3),
            }
        self._log.append(entry)

    def _snapshot(self, loss: float, lr: float, rates: Rates, speed: float) -> Snapshot:
        state = self._state
        left = (self.total - state.step) * state.elapsed / state.step
        if self.config.minutes is not None:
            left = min(left, max(0.0, 60 * self.config.minutes - state.elapsed))
        return Snapshot(
            step=state.step,
            total=self.total,
            loss=loss,
            lr=lr,
            rates=rates,
            held_out=self._last,
            tokens=state.tokens,
            tokens_per_s=speed,
            left_s=left,
        )

    def _result(self, *, finished: bool) -> Result:
        state = self._state
        return Result(
            finished=finished,
            step=state.step,
            tokens=state.tokens,
            elapsed=state.elapsed,
            held_out=self._last,
            log=self._log,
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Under autocast a norm's weights stay float32, which torch remarks on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
        yield
