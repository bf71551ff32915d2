"""`paceline pull`: fetch a catalog model."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.common import Json, console, print_json
from paceline.models import catalog


def pull(
    name: Annotated[str, typer.Argument(help="Catalog name, as smollm2-135m.")],
    as_json: Json = False,
) -> None:
    """Fetch a model of the catalog into the cache, once, with its checksum verified."""
    path = catalog.pull(name)
    size = path.stat().st_size
    console.print(f"{name}: {path} ({size / 1e6:.1f} MB, checksum verified)", soft_wrap=True)
    if as_json:
        print_json({"name": name, "path": str(path), "bytes": size})
