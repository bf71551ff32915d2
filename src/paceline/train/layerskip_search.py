"""Bayesian optimisation over the 2L switches of a layer mask (Draft & Verify, Zhang et al.
2023, section 3.2). Legend: L layers; switch i < L is layer i's attention, L + i its MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from paceline.draft.layerskip import skip_mask
from paceline.errors import UserError
from paceline.models.base import LayerMask

_SWITCH = CategoricalDistribution([False, True])


@dataclass(frozen=True, kw_only=True)
class Step:
    """Progress. phase: `answers`, `trials` or `runs`, of which `done` of `total` are done;
    best: the highest predicted speed against plain decoding so far."""

    phase: str
    done: int
    total: int
    best: float | None = None


Progress = Callable[[Step], None]


def search(
    study: optuna.Study,
    n_layers: int,
    evaluate: Callable[[LayerMask], float],
    *,
    trials: int,
    seed: int,
    progress: Progress = lambda step: None,
) -> None:
    """Add trials to `study` until it has `trials` of them.

    It begins with masks that are known beforehand: nothing skipped, each sub-layer alone,
    then the least harmful ones together, more and more of them. A random mask of half the
    layers matches nothing and would teach nothing. The rest is the optimiser's (TPE, Bergstra
    et al. 2011), seeded by the number of trials so far: a search that is resumed is the
    search that was not interrupted.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)  # a killed process was at it
    known = {_key(t.params): t.value for t in complete_trials(study)}
    done = len(complete_trials(study))
    while done < trials:
        mask = _planned(study, n_layers, done)
        asked = None
        if mask is None:
            # The sampler's state is not in the journal, hence a fresh one for each trial.
            study.sampler = optuna.samplers.TPESampler(
                seed=(seed * 1_000_003 + done) % 2**32, multivariate=True, n_startup_trials=0
            )
            asked = study.ask(_switches(n_layers))
            mask = _from_key(_key(asked.params), n_layers)
        params = _params(mask)
        value = known.get(_key(params))
        if value is None:
            value = known[_key(params)] = evaluate(mask)
        if asked is not None:
            study.tell(asked, value)
        else:
            study.add_trial(
                optuna.trial.create_trial(
                    params=params, distributions=_switches(n_layers), value=value
                )
            )
        done += 1
        progress(Step(phase="trials", done=done, total=trials, best=study.best_value))


def design_size(n_layers: int) -> int:
    """Trials before the optimiser's first."""
    return 1 + 2 * n_layers + max(0, 3 * n_layers // 2 - 1)


def _planned(study: optuna.Study, n_layers: int, number: int) -> LayerMask | None:
    """The number-th mask of the design; None behind its end."""
    n = 2 * n_layers
    if number == 0:
        return _skipping(n_layers, [])
    if number <= n:
        return _skipping(n_layers, [number - 1])
    if number >= design_size(n_layers):
        return None
    alone = [t.value or 0.0 for t in complete_trials(study)[1 : n + 1]]
    order = sorted(range(n), key=lambda i: (-alone[i], i))
    return _skipping(n_layers, order[: number - n + 1])


def ranked(study: optuna.Study, n_layers: int) -> list[tuple[LayerMask, float]]:
    """Distinct masks that skip anything and their predicted speeds, the best first."""
    found: dict[tuple[bool, ...], float] = {}
    for t in complete_trials(study):
        key = _key(t.params)
        if not all(key):
            found.setdefault(key, t.value or 0.0)
    best = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    return [(_from_key(key, n_layers), value) for key, value in best]


def complete_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _names(n_layers: int) -> list[str]:
    return [f"{part}.{i}" for part in ("attention", "mlp") for i in range(n_layers)]


def _switches(n_layers: int) -> dict[str, BaseDistribution]:
    return dict.fromkeys(_names(n_layers), _SWITCH)


def _params(mask: LayerMask) -> dict[str, bool]:
    names = _names(len(mask.attention_L))
    return dict(zip(names, (*mask.attention_L, *mask.mlp_L), strict=True))


def _key(params: dict[str, Any]) -> tuple[bool, ...]:
    return tuple(params[name] for name in _names(len(params) // 2))


def _from_key(key: tuple[bool, ...], n_layers: int) -> LayerMask:
    return LayerMask(attention_L=key[:n_layers], mlp_L=key[n_layers:])


def _skipping(n_layers: int, switches: Seq[int]) -> LayerMask:
    """The first L switches are attentions, the others MLPs."""
    return skip_mask(
        n_layers,
        attention=[i for i in switches if i < n_layers],
        mlp=[i - n_layers for i in switches if i >= n_layers],
    )


def open_study(path: Path, identity: dict[str, Any]) -> optuna.Study:
    """The study in this journal, new or resumed; UserError where it is of a search with
    another `identity`."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage = JournalStorage(JournalFileBackend(str(path)))
    except OSError as e:
        raise UserError(f"search journal '{path}' can't be written: {e.strerror or e}") from None
    study = optuna.create_study(
        study_name="layerskip", storage=storage, direction="maximize", load_if_exists=True
    )
    known = study.user_attrs.get("identity")
    if known is None:
        study.set_user_attr("identity", identity)
    elif known != identity:
        other = ", ".join(k for k in identity if identity[k] != known.get(k))
        raise UserError(
            f"'{path}' holds the trials of another search (its {other} differ): delete it, or "
            "give another --out"
        )
    return study
