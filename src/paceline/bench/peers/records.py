"""Results of a comparison with peers: `peers-WORKLOAD.json` in a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.bench.peers.base import Counted
from paceline.bench.results import Estimate, Provenance, Spread
from paceline.errors import UserError


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shot(_Record):
    """One generation of one arm. Seconds behind the first arrival have `rest` tokens."""

    prompt: str
    repeat: int
    tokens: int
    rest: int
    seconds: float
    first_s: float
    agreed: int | None = None


class Arm(_Record):
    """One way of one system to decode the workload.

    tok_s: tokens per second of whole requests; decode_tok_s: behind the first arrival.
    speedup: decoding rate over the same system's plain one. versus_ours: over our plain one.
    itl_token_s: inter-token times; None where tokens could not be told apart in the stream.
    itl_chunk_s: times between arrivals, as a reader sees them.
    same_text, compared: requests whose token ids equal our plain ones, of those that told
    ids. agreed: mean share of the text before the first difference.
    error: why it was not measured (all figures are then None).
    """

    system: str
    mode: str
    ours: bool
    version: str
    model: str
    precision: str
    options: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    counted: Counted | None = None
    requests: int = 0
    tokens: int = 0
    equal_lengths: bool | None = None
    tok_s: Estimate | None = None
    decode_tok_s: Estimate | None = None
    speedup: Estimate | None = None
    versus_ours: Estimate | None = None
    ttft_s: Spread | None = None
    itl_token_s: Spread | None = None
    itl_chunk_s: Spread | None = None
    tau: float | None = None
    acceptance_rate: float | None = None
    speculation_source: str | None = None
    same_text: int | None = None
    compared: int | None = None
    agreed: float | None = None
    error: str | None = None
    shots: tuple[Shot, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.system}, {self.mode}"


class PeerResult(_Record):
    """A comparison: the same prompts and output lengths, one request at a time, greedy, all
    arms in turn in one run (forwards and backwards), after a warm-up."""

    schema_version: Literal[1] = 1
    run: Provenance
    model: str
    draft: str
    k: int
    workload: str
    synthetic_items: int
    prompts: int
    max_tokens: int
    repeats: int
    arms: tuple[Arm, ...]

    @property
    def workload_label(self) -> str:
        if not self.synthetic_items:
            return self.workload
        share = "" if self.synthetic_items == self.prompts else "partly "
        return f"{self.workload} ({share}synthetic)"

    def save(self, folder: Path, tag: str = "") -> Path:
        """Write `peers-WORKLOAD.json`, or `peers-WORKLOAD-TAG.json`, all or nothing."""
        name = f"{self.workload}-{tag}" if tag else self.workload
        slug = "".join(c if c.isalnum() else "-" for c in name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"peers-{slug}.json"
        part = path.with_suffix(".part")
        part.write_text(self.model_dump_json(indent=1) + "\n", "utf-8")
        part.replace(path)
        return path


def load_peers(folder: Path) -> list[PeerResult]:
    """All comparisons in a folder of results. UserError where a file is of another version."""
    found = []
    for path in sorted(folder.glob("peers-*.json")):
        try:
            found.append(PeerResult.model_validate_json(path.read_text("utf-8")))
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"'{path}' is no comparison of this version: {where}: {first['msg']}; remove it "
                "and run `paceline peers` again"
            ) from None
    return found
