"""From a trace and a profile to advice: predictions, one verdict, and the files of both."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from paceline.bench.predict import Prediction, Predictor
from paceline.bench.trace import DraftInfo, Setting, Trace
from paceline.core.latency import Profile
from paceline.errors import UserError

#: Draft tokens a round that are looked at, where the user names none.
BUDGETS = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """For one way to sample. kind: `use`, `unsure` (the interval holds 1) or `dont`; best: the
    most promising choice; text: one plain sentence."""

    setting: Setting
    kind: Literal["use", "unsure", "dont"]
    best: Prediction
    flags: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.setting.temperature,
            "seeded": self.setting.seeded,
            "kind": self.kind,
            "draft": self.best.draft,
            "k": self.best.k,
            "flags": self.flags,
            "text": self.text,
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    trace: Trace
    profile: Profile
    concurrency: int
    predictions: tuple[Prediction, ...]
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.trace.model,
            "workload": self.trace.workload,
            "synthetic": self.trace.synthetic,
            "requests": {s.label: len(r) for s, r in self.trace.requests.items()},
            "concurrency": self.concurrency,
            "predictions": [p.to_json() for p in self.predictions],
            "verdicts": [v.to_json() for v in self.verdicts],
            "memory_bytes": {n: sum(d.memory.values()) for n, d in self.trace.drafts.items()},
            "notes": list(self.notes),
            "profile": dict(self.profile.meta),
            "trace_seconds": round(self.trace.seconds, 3),
        }


def verdicts_on(
    trace: Trace, profile: Profile, *, budgets: Seq[int] = BUDGETS, concurrency: int = 1
) -> Advice:
    """Predictions and verdicts. UserError where the profile knows none of the drafters."""
    if concurrency < 1:
        raise UserError(f"concurrency = {concurrency} is out of range: use 1 or more")
    known = [label for label in trace.drafts if label in profile.drafts]
    if not known:
        raise UserError(
            f"the profile has no costs of {', '.join(trace.drafts)}, only of "
            f"{', '.join(profile.drafts) or 'no draft'}: measure one with the same drafts"
        )
    notes = [f"the profile has no costs of {n}: left out" for n in trace.drafts if n not in known]
    if trace.synthetic:
        notes.append("some prompts are synthetic: acceptance on real ones will differ")
    if profile.meta.get("model") not in (None, trace.model, Path(trace.model).stem):
        notes.append(
            f"the trace is of {trace.model}, the profile of {profile.meta['model']}: acceptance "
            "of one with costs of the other"
        )
    predictions: list[Prediction] = []
    verdicts = []
    for setting, traced in trace.requests.items():
        predictor = Predictor(profile, setting, traced)
        found = [
            predictor.predict(label, k, concurrency)
            for label in known
            for k in _budgets(trace.drafts[label], budgets)
        ]
        if not found:
            raise UserError(
                f"k = {', '.join(map(str, budgets))} is beyond what was traced: trace again"
            )
        predictions += found
        verdicts.append(judge(setting, found, trace.drafts))
    return Advice(
        trace=trace,
        profile=profile,
        concurrency=concurrency,
        predictions=tuple(predictions),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
    )


def _budgets(info: DraftInfo, wanted: Seq[int]) -> list[int]:
    """A tree of fewer nodes is another one, so trees have the size that was traced."""
    return [info.most] if info.tree else sorted({k for k in wanted if k <= info.most})


def judge(
    setting: Setting, predictions: Seq[Prediction], drafts: Mapping[str, DraftInfo]
) -> Verdict:
    """The verdict on the choice with the best speed-up: of throughput where several requests
    run at once."""
    best = max(predictions, key=lambda p: p.throughput.value)
    gain = best.throughput
    flags = f"{drafts[best.draft].flags} -k {best.k}"
    kind: Literal["use", "unsure", "dont"]
    if gain.low > 1.0:
        kind = "use"
        text = f"Use {best.draft}: {flags}; expect {gain}."
        if best.concurrency > 1:
            text += f" A request alone: {best.latency}."
    elif gain.value > 1.0:
        kind = "unsure"
        text = (
            f"Not clear: {flags} would give {gain}, which may be a loss; trace more prompts, or "
            "let --policy adaptive find out while it runs."
        )
    else:
        kind = "dont"
        text = f"Don't speculate: the best choice, {flags}, gives {gain}, because {_why(best)}."
    return Verdict(setting=setting, kind=kind, best=best, flags=flags, text=text)


def _why(p: Prediction) -> str:
    """What stands against a gain, in numbers."""
    drafting, checking = p.t_draft / p.t_plain, (p.t_round - p.t_draft) / p.t_plain
    tokens = "its token" if p.k == 1 else f"its {p.k} tokens"
    cost = (
        f"drafting {tokens} takes {drafting:.2f} of a plain step and checking them {checking:.2f}"
    )
    if p.proposing < 0.5:
        return f"it finds something to propose in {p.proposing:.0%} of rounds only"
    if p.break_even is None:
        return f"{cost}, more than even perfect drafts are worth"
    return f"{cost}, and {p.alpha:.0%} are accepted where {p.break_even:.0%} would break even"


# --- files -----------------------------------------------------------------------------------


def to_file(trace: Trace, profile: Profile) -> dict[str, Any]:
    """What `--save` writes: enough to advise again, on this machine or for another."""
    return {"trace": trace.to_json(), "profile": profile.to_json()}


def from_file(value: Any, path: str | Path) -> tuple[Trace, Profile]:
    """UserError where the file is no saved trace."""
    try:
        if not isinstance(value, dict) or "trace" not in value or "profile" not in value:
            raise ValueError("it has no 'trace' and 'profile'")
        return Trace.from_json(value["trace"]), Profile.from_json(value["profile"])
    except ValueError as e:
        raise UserError(
            f"'{path}' is no trace of this version ({e}); make one with `paceline advise --save`"
        ) from None


def restricted(trace: Trace, drafts: Seq[str]) -> Trace:
    """The trace with some of its drafters only. UserError where one was not traced."""
    missing = next((d for d in drafts if d not in trace.drafts), None)
    if missing is not None:
        raise UserError(
            f"draft {missing!r} is not in the trace, which has {', '.join(trace.drafts)}; trace "
            "again with it"
        )
    return replace(trace, drafts={d: trace.drafts[d] for d in drafts}) if drafts else trace
