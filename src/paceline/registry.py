"""The one place that turns names into drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.draft.base import Drafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.models.tokenizer import first_mismatch

#: Drafters without a model of their own.
LIGHT = ("none", "ngram")


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """A drafter that is known to fit its target, before its weights are loaded.

    memory: bytes it will take, by what they are for.
    """

    build: Callable[[], Drafter]
    memory: dict[str, int]


def plan_drafter(spec: str, target: Checkpoint, config: EngineConfig) -> DraftPlan:
    """`none`, `ngram`, or a model (catalog name, path or Hub id) with the target's
    vocabulary. UserError where it does not fit the target."""
    if spec == "none":
        return DraftPlan(build=NoDrafter, memory={})
    if spec == "ngram":
        return DraftPlan(build=NgramDrafter, memory={})
    dtype = str(target.dtype).removeprefix("torch.")
    try:
        draft = open_checkpoint(spec, dtype=dtype, device=str(target.device))
    except UserError as e:
        raise UserError(f"draft {spec!r} ({', '.join(LIGHT)} or a model): {e}") from None
    mismatch = first_mismatch(target.tokenizer, draft.tokenizer)
    if mismatch is not None:
        token, ours, theirs = mismatch
        raise UserError(
            f"draft {spec!r} has another vocabulary than {target.source.name!r}: token {token} "
            f"is {ours!r} for the target and {theirs!r} for the draft; choose a draft of the "
            "target's family"
        )
    block = config.block_size
    return DraftPlan(
        build=lambda: ModelDrafter(
            draft.load(),
            vocab_size=min(target.config.vocab_size, target.tokenizer.vocab_size),
            n_blocks=config.n_blocks,
            block_size=block,
            prefill_chunk=config.prefill_chunk,
        ),
        memory={
            f"draft weights ({draft.source.name})": draft.weight_bytes,
            "draft cache": draft.kv_slot_bytes * config.n_blocks * block,
        },
    )
