"""Which sub-layers a target should skip to draft for itself (Draft & Verify, Zhang et al.
2023, section 3.2): Bayesian optimisation over 2L switches, then measurement.

The optimiser (`layerskip_search`) sees predicted speeds (`layerskip_screen`), which cost a
second or less each; the best few masks are measured end to end. Every trial is kept in a
journal beside the result, so a search that was ended or killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import optuna

from paceline.api import LLM
from paceline.draft.layerskip import (
    GAMMA,
    MAX_DRAFT,
    LayerSkipDrafter,
    MaskFile,
    MaskTarget,
    Measured,
    SkipPlan,
    weight_file_bytes,
)
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.base import LayerMask
from paceline.models.loading import Checkpoint, OnPack
from paceline.train.layerskip_screen import Costs, Screen, Text, measure_costs
from paceline.train.layerskip_search import (
    Progress,
    Step,
    complete_trials,
    open_study,
    ranked,
    search,
)
from paceline.train.target import target_sha256
from paceline.types import RequestOutput, SamplingParams

#: Thresholds that are tried with the best mask, beside the usual one.
_GAMMAS = (0.3, 0.8)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """trials: masks to predict. max_tokens: of each sample answer. max_draft: tokens drafted
    a round at most. finalists: masks measured end to end. repeats: of the last measurement."""

    trials: int = 300
    seed: int = 0
    max_tokens: int = 64
    max_draft: int = MAX_DRAFT
    finalists: int = 4
    repeats: int = 2

    def __post_init__(self) -> None:
        limits = {"trials": 10**6, "max_tokens": 4096, "max_draft": 64, "finalists": 64}
        for name, high in (limits | {"repeats": 100}).items():
            value = getattr(self, name)
            if not 1 <= value <= high:
                raise UserError(f"{name} = {value} is out of range: use 1 to {high}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed = {self.seed} is out of range: use 0 to 2**32 - 1")


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """file: what was written. predicted: its speed against plain decoding, as predicted;
    trials: how many there are; interrupted: whether the search was ended early."""

    file: MaskFile
    predicted: float
    trials: int
    interrupted: bool


def journal_path(out: Path) -> Path:
    """Where the trials of a search with this result are kept."""
    return out.with_name(out.name + ".trials.log")


def find_mask(
    target: Checkpoint,
    llm: LLM,
    prompts: Seq[tuple[int, ...]],
    out: Path,
    settings: SearchSettings,
    *,
    command: str = "",
    progress: Progress = lambda step: None,
) -> SearchResult:
    """Search, measure, write `out`. `llm`: of `open_self`. Ctrl-C ends the search and keeps
    its best mask, which is then measured; again, and it is written unmeasured.

    UserError where `out` can't be written, or its journal is of another search.
    """
    info = llm.engine.model.info
    about = MaskTarget(
        name=target.source.name,
        n_layers=info.n_layers,
        size=weight_file_bytes(target.source),
        sha256=target_sha256(target),
    )
    study = open_study(journal_path(out), _identity(about, prompts, settings))
    texts, costs = _answers(study, llm, prompts, settings, progress)
    screen = Screen(llm.engine.model, texts, max_draft=settings.max_draft)
    interrupted = False
    try:
        search(
            study,
            info.n_layers,
            lambda mask: costs.best(mask, screen.reach(mask))[0],
            trials=settings.trials,
            seed=settings.seed,
            progress=progress,
        )
    except KeyboardInterrupt:
        interrupted = True
    candidates = ranked(study, info.n_layers)
    if not candidates:
        raise UserError("the search was ended before it had tried any mask; nothing was written")
    plan, measured = SkipPlan(mask=candidates[0][0], max_draft=settings.max_draft), None
    try:
        masks = [mask for mask, _ in candidates[: settings.finalists]]
        likely = {m: costs.best(m, screen.reach(m))[1] for m in masks}
        plan, measured = _finals(llm, prompts, likely, settings, progress)
    except KeyboardInterrupt:
        interrupted = True
    predicted = dict(candidates)[plan.mask]
    file = MaskFile(
        target=about,
        skip_attention=tuple(i for i, on in enumerate(plan.mask.attention_L) if not on),
        skip_mlp=tuple(i for i, on in enumerate(plan.mask.mlp_L) if not on),
        gamma=plan.gamma,
        max_draft=plan.max_draft,
        measured=measured,
        search={
            **asdict(settings),
            "trials": len(complete_trials(study)),
            "prompts": len(prompts),
            "prompts_sha256": _digest(prompts),
            "predicted": round(predicted, 4),
            "costs": costs.to_json(),
            "numerics": info.numerics.value,
            "dtype": info.dtype,
            "device": info.device,
        },
        command=command,
    )
    file.write(out)
    return SearchResult(
        file=file,
        predicted=predicted,
        trials=len(complete_trials(study)),
        interrupted=interrupted,
    )


def open_self(
    model: str,
    *,
    n_layers: int,
    kv_tokens: int,
    dtype: str = "auto",
    device: str = "auto",
    on_pack: OnPack | None = None,
) -> LLM:
    """A model with a layer-skip drafter, whose mask skips nothing yet. on_pack: as of `LLM`."""
    nothing = MaskFile(
        target=MaskTarget(name=model, n_layers=n_layers, size=0, sha256=""),
        skip_attention=(),
        skip_mlp=(),
    )
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        path = Path(folder) / "mask.json"
        nothing.write(path)
        return LLM(
            model,
            draft=f"layerskip:{path}",
            policy="fixed",
            dtype=dtype,
            device=device,
            engine=EngineConfig(kv_tokens=kv_tokens, prefix_cache=False),
            on_pack=on_pack,
        )


def _answers(
    study: optuna.Study,
    llm: LLM,
    prompts: Seq[tuple[int, ...]],
    settings: SearchSettings,
    progress: Progress,
) -> tuple[list[Text], Costs]:
    """The target's answers and the costs of passes, kept with the trials: all of a search
    are then predicted alike, though the machine may run faster tomorrow."""
    known = study.user_attrs
    if "costs" in known:
        texts = [Text(tuple(tokens), n) for tokens, n in known["texts"]]
        return texts, Costs.from_json(known["costs"])
    stats = llm.engine.stats
    before = (stats.time_other, stats.steps)
    texts = []
    for output in _each(llm, prompts, settings, k=0):
        tokens = (*output.prompt_tokens, *output.token_ids)
        texts.append(Text(tokens, len(output.prompt_tokens)))
        progress(Step(phase="answers", done=len(texts), total=len(prompts)))
    host = (stats.time_other - before[0]) / max(1, stats.steps - before[1])
    costs = measure_costs(
        llm.engine.model,
        context=int(statistics.mean(len(t.tokens) for t in texts)),
        max_draft=settings.max_draft,
        host=host,
    )
    study.set_user_attr("texts", [(t.tokens, t.n_prompt) for t in texts])
    study.set_user_attr("costs", costs.to_json())
    return texts, costs


def _each(
    llm: LLM, prompts: Seq[tuple[int, ...]], settings: SearchSettings, *, k: int
) -> Iterator[RequestOutput]:
    """Answers at temperature 0, one by one: at batch 1."""
    params = SamplingParams(max_tokens=settings.max_tokens, k=k)
    for prompt in prompts:
        yield llm.generate(prompt, params)[0]


@dataclass(frozen=True)
class Run:
    """Output tokens per second behind the first, tokens per round, accepted of drafted."""

    tok_s: float
    tau: float
    acceptance: float


def run_once(
    llm: LLM, prompts: Seq[tuple[int, ...]], settings: SearchSettings, plan: SkipPlan | None
) -> Run:
    """All prompts end to end with a mask, or by plain decoding."""
    if plan is not None:
        drafter = llm.engine.drafter
        assert isinstance(drafter, LayerSkipDrafter)
        drafter.plan = plan
    tokens, seconds = 0, 0.0
    rounds, accepted, drafted = 0, 0, 0
    for output in _each(llm, prompts, settings, k=0 if plan is None else plan.max_draft):
        s = output.stats
        assert s.finished is not None and s.first_token is not None  # noqa: PT018
        tokens += len(output.tokens) - 1
        seconds += s.finished - s.first_token
        rounds, accepted, drafted = rounds + s.rounds, accepted + s.accepted, drafted + s.drafted
    if tokens == 0:
        raise UserError("the answers have one token each, so nothing can be timed: give others")
    return Run(tokens / seconds, 1 + accepted / rounds, accepted / max(1, drafted))


def _finals(
    llm: LLM,
    prompts: Seq[tuple[int, ...]],
    likely: dict[LayerMask, int],
    settings: SearchSettings,
    progress: Progress,
) -> tuple[SkipPlan, Measured]:
    """The fastest of some masks; of the best, other thresholds and the predicted draft length
    are tried; then it and plain decoding are measured anew, in turns, for what is reported
    (the best of many runs was also lucky)."""
    total = len(likely) + len(_GAMMAS) + 1 + 2 * settings.repeats
    done = 0

    def run(plan: SkipPlan | None) -> Run:
        nonlocal done
        found = run_once(llm, prompts, settings, plan)
        done += 1
        progress(Step(phase="runs", done=done, total=total))
        return found

    speeds: dict[SkipPlan, float] = {}
    for mask in likely:
        plan = SkipPlan(mask=mask, gamma=GAMMA, max_draft=settings.max_draft)
        speeds[plan] = run(plan).tok_s
    first = max(speeds, key=lambda p: speeds[p])
    for plan in (
        *(replace(first, gamma=g) for g in _GAMMAS),
        replace(first, gamma=0.0, max_draft=max(1, likely[first.mask])),
    ):
        speeds[plan] = run(plan).tok_s
    best = max(speeds, key=lambda p: speeds[p])
    pairs = [(run(None), run(best)) for _ in range(settings.repeats)]
    last = pairs[-1][1]
    return best, Measured(
        tok_s=statistics.median(r.tok_s for _, r in pairs),
        plain_tok_s=statistics.median(p.tok_s for p, _ in pairs),
        tau=last.tau,
        acceptance=last.acceptance,
    )


def _identity(
    about: MaskTarget, prompts: Seq[tuple[int, ...]], settings: SearchSettings
) -> dict[str, Any]:
    """What the trials of one search have in common."""
    return {
        "target": about.sha256,
        "prompts": _digest(prompts),
        "max_tokens": settings.max_tokens,
        "max_draft": settings.max_draft,
        "seed": settings.seed,
    }


def _digest(prompts: Seq[tuple[int, ...]]) -> str:
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()
