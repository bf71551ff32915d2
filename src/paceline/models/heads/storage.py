"""Tensors of a head's folder, and their 8-bit storage.

8-bit storage is ours, not part of any published layout: a matrix `X` [O, I] becomes `X` of
int8 and `X.scale` of fp16 [O, I / 32], w = scale * q for each 32 weights of a row.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import UserError

GROUP: Final = 32
SCALE: Final = ".scale"
#: Weight files of a head's folder, in the order in which they are looked for.
FILES: Final = (
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "pytorch_model.bin",
    "medusa_lm_head.pt",
)
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED: Final = (*_DTYPES, "int8")


def weight_file(folder: Path) -> Path:
    """UserError where a folder has no weight file of a head."""
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: has no weights of a head (looked for {', '.join(FILES)})")


def shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes, without reading safetensors' data."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as f:
                names = list(f.keys())
                return {name: tuple(f.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as e:
            raise _damaged(file, e) from None
    return {name: tuple(t.shape) for name, t in _unpickle(file).items()}


def read(file: Path) -> dict[str, torch.Tensor]:
    """All tensors; 8-bit matrices come back as float32."""
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt") as f:
                names = list(f.keys())
                tensors = {name: f.get_tensor(name).clone() for name in names}
        except (SafetensorError, OSError) as e:
            raise _damaged(file, e) from None
    else:
        tensors = _unpickle(file)
    for name in [n for n in tensors if n.endswith(SCALE)]:
        plain = name.removesuffix(SCALE)
        if plain not in tensors:
            raise UserError(f"{file}: holds {name} without {plain}")
        tensors[plain] = _expand(tensors[plain], tensors.pop(name))
    return tensors


def write(
    file: Path, tensors: Mapping[str, torch.Tensor], dtype: str, metadata: Mapping[str, str]
) -> None:
    """dtype: of float tensors: float32, bfloat16, float16, or int8 (matrices whose rows are
    whole groups; the rest in bfloat16)."""
    if dtype not in STORED:
        raise UserError(f"unknown dtype {dtype!r} for a head: use {', '.join(STORED)}")
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        t = tensor.detach().cpu()
        if not t.is_floating_point():
            out[name] = t.contiguous()
        elif dtype == "int8" and t.ndim == 2 and t.shape[1] % GROUP == 0:
            out[name], out[name + SCALE] = _shrink(t)
        else:
            out[name] = t.to(_DTYPES.get(dtype, torch.bfloat16)).contiguous()
    save_file(out, file, metadata={"format": "pt", **metadata})


def write_json(file: Path, value: Mapping[str, object]) -> None:
    file.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shrink(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight_OI.float().view(weight_OI.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 127).to(torch.float16)
    # Round with the scale that is stored; an all-zero (or underflown) group stays zero.
    step = scale.float().unsqueeze(-1)
    q = torch.where(step > 0, groups / step, torch.zeros_like(groups)).round().clamp(-127, 127)
    return q.flatten(1).to(torch.int8), scale


def _expand(q_OI: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    groups = q_OI.float().view(q_OI.shape[0], -1, GROUP)
    return (groups * scale.float().unsqueeze(-1)).flatten(1)


def _unpickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as e:
        raise _damaged(file, e) from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise UserError(f"{file}: must hold a table of tensors")
    return found


def _damaged(file: Path, e: BaseException) -> UserError:
    reason = str(e).splitlines()[0] if str(e) else type(e).__name__
    return UserError(f"{file}: not a usable weight file ({reason})")
