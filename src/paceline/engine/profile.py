"""Measured costs of a machine, kept between runs.

    CACHE/profiles/KEY.json      a `core.latency.Profile`

KEY stands for everything that a cost depends on: hardware, versions, threads, weights, and
which drafters were measured. A file that can't be read is measured again, never an error.
`paceline.engine.measure` does the measuring.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.latency import FORMAT, Profile
from paceline.draft.base import Drafter
from paceline.engine.engine import EngineConfig
from paceline.engine.measure import DEPTHS, METHOD, Depth, Progress, default_clock, measure
from paceline.engine.sessions import Clock
from paceline.errors import UserError
from paceline.models.base import ModelInfo, TargetModel
from paceline.models.catalog import cache_dir
from paceline.models.native import default_threads

__all__ = [
    "DEPTHS", "Depth", "file_identity", "load_profile", "measure", "obtain_profile",
    "profile_key", "read_profile", "save_profile",
]  # fmt: skip

log = logging.getLogger(__name__)


def profile_dir() -> Path:
    """Where profiles are kept; not created here."""
    return cache_dir() / "profiles"


def file_identity(path: str | Path) -> str:
    """What changes when a model's files do: their names, sizes and times of change."""
    path = Path(path)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(f.name, f.stat()) for f in files if f.is_file()]
    return ";".join(f"{name}:{s.st_size}:{s.st_mtime_ns}" for name, s in stats)


def hardware() -> dict[str, object]:
    """What costs depend on besides the models."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "machine": platform.machine(),
        "threads": default_threads(),
        "torch_threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
        "paceline": importlib.metadata.version("paceline"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def profile_key(
    info: ModelInfo, drafts: Iterable[str], *, weights: str = "", depth: str = "full"
) -> str:
    """info: of the target. drafts: labels of the drafters measured with it, which must say
    all that their cost depends on. weights: identity of the files (`file_identity`)."""
    value = {
        "format": FORMAT,
        "method": METHOD,
        "hardware": hardware(),
        "target": [info.name, info.dtype, info.device, info.weight_bytes, info.n_layers],
        "drafts": sorted(drafts),
        "weights": weights,
        "depth": depth,
    }
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def load_profile(key: str) -> Profile | None:
    """The profile of a key; None where there is none, or none that can be read."""
    path = profile_dir() / f"{key}.json"
    if not path.exists():
        return None
    try:
        return Profile.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        log.warning("the cost profile %s can't be used (%s); it is measured again", path, e)
        return None


def save_profile(key: str, profile: Profile) -> Path | None:
    """Write a profile whole or not at all; None (and a warning) where the cache can't be
    written, since a profile is only a saving of time."""
    path = profile_dir() / f"{key}.json"
    try:
        write_profile(path, profile)
    except OSError as e:
        log.warning("the cost profile can't be kept in %s: %s", path, e)
        return None
    return path


def write_profile(path: Path, profile: Profile) -> None:
    """Atomic: a reader sees the old file or the new one. OSError where that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".profile-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(profile.to_json(), file)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_profile(path: str | Path) -> Profile:
    """A profile that the user names. UserError where it is none."""
    try:
        return Profile.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"profile '{path}' can't be read: {e}") from None
    except ValueError as e:
        raise UserError(
            f"'{path}' is {e}; write one with `paceline advise --save-profile FILE` there"
        ) from None


def obtain_profile(
    model: TargetModel,
    drafters: Mapping[str, Drafter],
    config: EngineConfig,
    *,
    weights: str = "",
    depth: str = "quick",
    vocab_size: int | None = None,
    fresh: bool = False,
    clock: Clock = default_clock,
    progress: Progress | None = None,
    on_measure: Callable[[], None] | None = None,
) -> Profile:
    """The cached profile of target and drafters, of this depth or the deeper one; else
    measured now and kept.

    drafters: by label. They must be idle; what they hold of the measuring is forgotten.
    fresh: measure in any case. on_measure: called before measuring (to tell the user).
    """
    deeper = [name for name in DEPTHS if DEPTHS[name].sweeps >= DEPTHS[depth].sweeps]
    keys = {d: profile_key(model.info, drafters, weights=weights, depth=d) for d in deeper}
    if not fresh:
        for name in sorted(deeper, key=lambda d: -DEPTHS[d].sweeps):
            known = load_profile(keys[name])
            if known is not None:
                return known
    if on_measure is not None:
        on_measure()
    profile = measure(
        model, drafters, config, depth=DEPTHS[depth], vocab_size=vocab_size, clock=clock,
        progress=progress,
    )  # fmt: skip
    meta = {**profile.meta, "depth": depth, "hardware": hardware(), "weights": weights}
    profile = replace(profile, meta=meta)
    save_profile(keys[depth], profile)
    if len(profile.drafts) > 1:  # each alone, too, as an engine with one of them will ask
        for label, cost in profile.drafts.items():
            key = profile_key(model.info, [label], weights=weights, depth=depth)
            save_profile(key, replace(profile, drafts={label: cost}))
    return profile
