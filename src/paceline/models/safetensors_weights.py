"""Weights of a local safetensors folder, one tensor at a time, under the standard names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import UserError
from paceline.models.config import DecoderConfig, load_json, tensor_shapes

INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = ("F32", "F16", "BF16", "F64")


def shards(folder: str | Path) -> tuple[Path, ...]:
    """The weight files of a folder: those that the index names, else every *.safetensors.

    Raises:
        UserError: there is none, or the index names a file that is not there.
    """
    folder = Path(folder)
    if (folder / INDEX).is_file():
        table = load_json(folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(v, str) for v in table.values()):
            raise UserError(f"{folder / INDEX}: 'weight_map' must map tensor names to files")
        names = sorted(set(table.values()))
        for name in names:
            # A downloaded index must not be able to name files elsewhere.
            if Path(name).name != name:
                raise UserError(f"{folder / INDEX}: {name!r} is not a file name in this folder")
            if not (folder / name).is_file():
                raise UserError(f"{folder}: the weight file {name} is missing; fetch it again")
        return tuple(folder / name for name in names)
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",)
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise UserError(f"{folder}: has no *.safetensors file; other weight files are not read")
    return files


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor lies, and its stored type ("F32", "F16", "BF16" or "F64")."""

    file: Path
    kind: str


def iter_tensors(
    folder: str | Path, config: DecoderConfig, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight that `config` needs, cast to `dtype`, file by file.

    One tensor is read at a time. With tied embeddings a stored `lm_head.weight` is left out,
    as is any `rotary_emb.inv_freq`, which `rope_inv_freq` computes.

    Raises:
        UserError: before the first tensor, as `check_tensors`.
    """
    return _read_all(check_tensors(folder, config), dtype)


def check_tensors(folder: str | Path, config: DecoderConfig) -> dict[str, Place]:
    """Name to place, file by file, for exactly the tensors that `config` needs.

    Raises:
        UserError: a file is damaged, or a tensor is missing, extra, double, misshapen or not
        of a float type; named.
    """
    folder = Path(folder)
    wanted = tensor_shapes(config)
    places: dict[str, Place] = {}
    for file in shards(folder):
        for name, shape, kind in _headers(file):
            if is_ignored(name, config):
                continue
            if name not in wanted:
                raise UserError(
                    f"{file}: the tensor {name} is not part of a {config.architecture} "
                    "decoder that is supported"
                )
            if name in places:
                first = places[name].file.name
                raise UserError(f"{folder}: {name} is in both {first} and {file.name}")
            if shape != wanted[name]:
                raise UserError(
                    f"{file}: {name} has shape {list(shape)}, "
                    f"config.json asks for {list(wanted[name])}"
                )
            if kind not in _DTYPES:
                raise UserError(
                    f"{file}: {name} is stored as {kind}, which is not supported; "
                    f"supported: {', '.join(_DTYPES)}"
                )
            places[name] = Place(file=file, kind=kind)
    missing = [name for name in wanted if name not in places]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(f"{folder}: lacks {', '.join(missing[:3])}{more}")
    return places


def is_ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a checkpoint may hold this tensor though nothing reads it."""
    tied_copy = config.tied and name == "lm_head.weight"
    return tied_copy or name.endswith("rotary_emb.inv_freq")


def _headers(file: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and stored type of each tensor of one file; reads no weights."""
    try:
        with safe_open(file, framework="pt") as f:
            slices = ((name, f.get_slice(name)) for name in f.keys())  # noqa: SIM118
            return [(name, tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices]
    except (SafetensorError, OSError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(f"{file}: not a usable safetensors file ({reason})") from None


def _read_all(places: dict[str, Place], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    by_file: dict[Path, list[str]] = {}
    for name, place in places.items():
        by_file.setdefault(place.file, []).append(name)
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as f:
            for name in names:
                # The stored tensor lies in the file's map; a copy in any case keeps the
                # result alive, and private, once the map is gone.
                yield name, f.get_tensor(name).to(dtype, copy=True)
