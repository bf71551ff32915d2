"""The result schema of `paceline bench`, and its files.

    DIR/cells.jsonl      one `CellResult` a line, appended as each cell ends (this is what a
                         rerun resumes from)
    DIR/runs.jsonl       one `Provenance` a line, appended as each run begins
    DIR/results.json     a `BenchResult`: everything, written again after every cell
    DIR/cells.parquet    one row a cell, flattened (`plain.latency.ttft_s.p50`, ...)
    DIR/samples.parquet  one row a request and repeat

Units are in the names: `_s` seconds, `_tok_s` tokens per second, `_bytes`, `_slots` cache slots
(one token each), `_j` joules, `_w` watts. A value that could not be read is null, never zero.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.errors import UserError

SCHEMA_VERSION = 1

T = TypeVar("T", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Estimate(_Record):
    """A figure with the bounds of its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class Spread(_Record):
    """A sample in short. n: how many values; all others None where n is 0."""

    n: int
    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    min: float | None = None
    max: float | None = None


class ModelRecord(_Record):
    """Weights that took part. role: target or draft. sha256: of the file (of all files of a
    folder, in order of their names); None where there are none to hash."""

    role: Literal["target", "draft"]
    name: str
    source: str
    sha256: str | None
    weight_bytes: int
    dtype: str
    device: str
    numerics: str


class Provenance(_Record):
    """Where and how a run was made. run: its number in this folder, from 0."""

    run: int
    command: str
    date: str
    paceline: str
    git_revision: str | None
    git_dirty: bool | None
    python: str
    platform: str
    libraries: dict[str, str]
    cpu: str
    cpu_flags: tuple[str, ...]
    cores_physical: int | None
    cores_logical: int
    threads: int
    memory_bytes: int
    gpu: str | None
    read_bandwidth_bytes_s: float | None
    load_average: tuple[float, ...]


class Protocol(_Record):
    """What all cells of a folder share, so that they may stand in one table.

    lengths: `plain` (each output as long as the plain one, at most max_tokens) or `fixed`
    (max_tokens). seeded: temperature > 0 uses a seed for each request and repeat. prompts:
    items taken of a workload at most (None: all). arrivals: requests of an open loop.
    """

    model: str
    model_sha256: str | None
    dtype: str
    device: str
    repeats: int
    max_tokens: int
    lengths: Literal["plain", "fixed"]
    prompts: int | None
    seeded: bool
    seed: int
    rule: str | None
    chat: bool
    kv_tokens: int
    max_batch: int


class WorkloadRecord(_Record):
    """Prompts of a cell. source: `suite`, `code-edit`, `random` or the file's path. sha256: of
    the items as they were used. requests: turns of all items. synthetic_items: prompts whose
    text is composed or random (a table must say so)."""

    name: str
    source: str
    sha256: str
    items: int
    requests: int
    synthetic_items: int
    domains: dict[str, int]
    input_tokens: Spread
    output_tokens: Spread

    @property
    def label(self) -> str:
        """The name, marked where prompts are synthetic."""
        if not self.synthetic_items:
            return self.name
        share = "" if self.synthetic_items == self.items else "partly "
        return f"{self.name} ({share}synthetic)"


class CellConfig(_Record):
    """A cell of the matrix. drafter: none, ngram or a model. k: tokens (or nodes) to draft a
    round: exactly under policy `fixed`, at most under `adaptive`. concurrency: requests in flight
    (closed loop); rate: mean arrivals per second (open loop; concurrency is then the engine's
    limit).
    """

    workload: str
    drafter: str
    tree: str | None = None
    vocabulary: str = "same"
    weights: str = "fast"
    policy: str = "fixed"
    k: int
    temperature: float
    concurrency: int
    rate: float | None = None

    @property
    def label(self) -> str:
        tree = "" if self.tree is None else f" {self.tree}"
        return f"{self.drafter}{tree}, {self.policy}, k = {self.k}"


class Latency(_Record):
    """itl_token_s: inter-token times, every token of a burst carrying an equal share of its
    round's time. itl_round_s: times between bursts, as a reader of a stream sees them.
    ttft_s and request_s count from the arrival (waiting in the queue included)."""

    ttft_s: Spread
    itl_token_s: Spread
    itl_round_s: Spread
    request_s: Spread


class Throughput(_Record):
    """request_tok_s: a request's tokens over its whole time; decode_tok_s: tokens behind the
    first over the time behind it. server_tok_s: all tokens over the elapsed time."""

    request_tok_s: Spread
    decode_tok_s: Spread
    server_tok_s: float


class Acceptance(_Record):
    """tau: tokens a round. tau_request_mean: mean over requests; tau_pooled: over all rounds.
    conditional[i]: share of rounds that accepted position i + 1 among those that proposed it
    and accepted all before; joint[i]: among those that proposed it. drafted_per_token,
    target_calls_per_token: per committed token."""

    rounds: int
    drafted: int
    accepted: int
    tau_request_mean: float | None
    tau_pooled: float | None
    histogram: dict[str, int]
    conditional: tuple[float | None, ...]
    joint: tuple[float | None, ...]
    drafted_per_token: float
    target_calls_per_token: float


class KvUse(_Record):
    """Cache slots in use, sampled after every step. scratch_peak_slots: most slots that
    proposals held in one step."""

    capacity_slots: int
    mean_slots: float
    peak_slots: int
    scratch_peak_slots: int
    draft_capacity_slots: int
    draft_mean_slots: float
    draft_peak_slots: int


class MachineUse(_Record):
    """cpu_cores: processor seconds of this process per second. weight_read_bytes_s: bytes of
    weights that a target pass reads, times passes, over T_p; read_share: against the
    bandwidth that the same threads measure. energy_source: rapl, nvml or None."""

    cpu_cores: float | None = None
    gpu_percent: float | None = None
    gpu_power_w: float | None = None
    weight_read_bytes_s: float | None = None
    read_share: float | None = None
    energy_j: float | None = None
    energy_j_per_token: float | None = None
    energy_source: str | None = None


class TimeSplit(_Record):
    """Seconds of all steps: target passes, drafting, everything else; steps and packed rows."""

    T_p_s: float
    T_q_s: float
    T_o_s: float
    steps: int
    rows: int


class Side(_Record):
    """All repeats of one way to decode, plain or speculative."""

    requests: int
    tokens: int
    elapsed_s: float
    latency: Latency
    throughput: Throughput
    acceptance: Acceptance
    kv: KvUse
    machine: MachineUse
    times: TimeSplit
    preemptions: int


class Lossless(_Record):
    """Whether the speculative text is what plain decoding gives.

    identical: token ids equal in all `compared` requests. near_tie: the first difference of
        each differing text is between two tokens closer than `tolerance` (numerics that are
        not row-invariant). law: texts are other samples; their law was tested against the
        target's (`test`, `p_value`, `false_alarm`). different: a failure.
    ok: everything but different.
    """

    verdict: Literal["identical", "near_tie", "law", "different"]
    ok: bool
    compared: int
    differing: int
    detail: str
    largest_margin: float | None = None
    tolerance: float | None = None
    test: str | None = None
    p_value: float | None = None
    false_alarm: float | None = None


class Slice(_Record):
    """A part of a cell. by: domain, tier or input (length class in tokens)."""

    by: Literal["domain", "tier", "input"]
    name: str
    synthetic: bool
    requests: int
    speedup: Estimate
    tau: float | None


class Sample(_Record):
    """One request in one repeat, plain and speculative. order: whether the plain run came
    before the speculative one."""

    item: str
    turn: int
    domain: str
    tier: str
    synthetic: bool
    repeat: int
    plain_first: bool
    input_tokens: int
    plain_tokens: int
    speculative_tokens: int
    plain_s: float
    speculative_s: float
    plain_ttft_s: float
    speculative_ttft_s: float
    tau: float | None
    identical: bool


class CellResult(_Record):
    """A finished cell.

    speedup: plain seconds over speculative seconds of whole requests, per token, summed over
        all prompts and repeats. In a closed loop with all places taken this is the ratio of
        throughputs (Little's law). Above 1 is a gain, below a loss. decode_speedup: the same
        behind the first token (None: no output has a second one). server_speedup: the ratio
        of server tokens per second.
    run: the `Provenance` under which it was measured. models: target and draft.
    predicted: what the advisor said beforehand, where it was asked.
    """

    key: str
    run: int
    config: CellConfig
    workload: WorkloadRecord
    models: tuple[ModelRecord, ...]
    speedup: Estimate
    decode_speedup: Estimate | None
    server_speedup: float
    tau: float
    lossless: Lossless
    plain: Side
    speculative: Side
    slices: tuple[Slice, ...]
    samples: tuple[Sample, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    predicted: Estimate | None = None

    def summary(self) -> dict[str, Any]:
        """The entry of the JSON line of `paceline bench`."""
        c = self.config
        return {
            "workload": self.workload.name,
            "synthetic": self.workload.synthetic_items > 0,
            "drafter": c.drafter,
            "tree": c.tree,
            "policy": c.policy,
            "k": c.k,
            "temperature": c.temperature,
            "concurrency": c.concurrency,
            "rate": c.rate,
            "speedup": round(self.speedup.value, 4),
            "speedup_low": round(self.speedup.low, 4),
            "speedup_high": round(self.speedup.high, 4),
            "tau": round(self.tau, 4),
            "lossless": self.lossless.ok,
            "verdict": self.lossless.verdict,
        }


class BenchResult(_Record):
    """A folder of results. profile: a measured cost profile (`core/latency.py`), if any."""

    schema_version: int = SCHEMA_VERSION
    runs: tuple[Provenance, ...]
    protocol: Protocol
    cells: tuple[CellResult, ...]
    profile: dict[str, Any] | None = None


def cell_key(protocol: Protocol, config: CellConfig, workload_sha256: str) -> str:
    """What makes two cells the same measurement."""
    value = [protocol.model_dump(), config.model_dump(), workload_sha256, SCHEMA_VERSION]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def flatten(record: BaseModel, prefix: str = "") -> dict[str, Any]:
    """Nested records as dotted columns; tuples and mappings as JSON text."""
    row: dict[str, Any] = {}
    for name in type(record).model_fields:
        value = getattr(record, name)
        if isinstance(value, BaseModel):
            row.update(flatten(value, f"{prefix}{name}."))
        elif isinstance(value, tuple | list | dict):
            row[prefix + name] = json.dumps(value, default=lambda r: r.model_dump())
        else:
            row[prefix + name] = value
    return row


def load_results(path: str | Path) -> BenchResult:
    """The results of a folder, or of its `results.json`. UserError where there are none."""
    path = Path(path)
    file = path / "results.json" if path.is_dir() else path
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"no results in '{path}': {e}") from None
    return parse(BenchResult, file, text, 1)


def parse(kind: type[T], file: Path, text: str, line: int) -> T:
    """A record of JSON text; UserError naming file, line and field where it is none."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"'{file}' line {line} is no {kind.__name__} of this version: {where}: {first['msg']}; "
            "choose another --out, or begin anew with --no-resume"
        ) from None
