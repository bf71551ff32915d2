"""Made-up results for the report's tests: plausible shapes, every field filled."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.bench.results import (
    Acceptance,
    BenchResult,
    CellConfig,
    CellResult,
    Estimate,
    KvUse,
    Latency,
    Lossless,
    MachineUse,
    ModelRecord,
    Protocol,
    Provenance,
    Side,
    Slice,
    Spread,
    Throughput,
    TimeSplit,
    WorkloadRecord,
)

ALPHA = {"ngram": 0.45, "small-draft": 0.8}
COST = {"ngram": 0.01, "small-draft": 0.09}


def provenance(run: int = 0, command: str = "paceline bench --quick") -> Provenance:
    return Provenance(
        run=run, command=command, date="2026-11-30T12:00:00+00:00", paceline="0.1.0",
        git_revision="0123abcd", git_dirty=False, python="3.11.7", platform="Linux",
        libraries={"torch": "2.13.0"}, cpu="A made-up CPU", cpu_flags=("avx2",),
        cores_physical=2, cores_logical=2, threads=2, memory_bytes=8 << 30, gpu=None,
        read_bandwidth_bytes_s=30e9, load_average=(0.1, 0.1, 0.1),
    )  # fmt: skip


def protocol() -> Protocol:
    return Protocol(
        model="target-1b", model_sha256="ab" * 32, dtype="q4", device="cpu", repeats=5,
        max_tokens=64, lengths="plain", prompts=10, seeded=True, seed=0, rule=None, chat=True,
        kv_tokens=16384, max_batch=16,
    )  # fmt: skip


def spread(value: float) -> Spread:
    return Spread(
        n=100, mean=value, p50=value, p95=1.3 * value, p99=1.6 * value, min=0.8 * value,
        max=2 * value,
    )  # fmt: skip


def side(tok_s: float, acceptance: Acceptance, batch: int) -> Side:
    return Side(
        requests=50, tokens=3200, elapsed_s=3200 / tok_s,
        latency=Latency(
            ttft_s=spread(0.2), itl_token_s=spread(batch / tok_s), itl_round_s=spread(2 / tok_s),
            request_s=spread(64 * batch / tok_s),
        ),
        throughput=Throughput(
            request_tok_s=spread(tok_s / batch), decode_tok_s=spread(1.1 * tok_s / batch),
            server_tok_s=tok_s,
        ),
        acceptance=acceptance,
        kv=KvUse(
            capacity_slots=16384, mean_slots=500, peak_slots=900, scratch_peak_slots=9,
            draft_capacity_slots=0, draft_mean_slots=0, draft_peak_slots=0,
        ),
        machine=MachineUse(cpu_cores=1.9, weight_read_bytes_s=24e9, read_share=0.8),
        times=TimeSplit(T_p_s=0.03 * 3200, T_q_s=1.0, T_o_s=2.0, steps=3200, rows=6400),
        preemptions=0,
    )  # fmt: skip


def acceptance(alpha: float, k: int) -> Acceptance:
    tau = sum(alpha**i for i in range(k + 1))
    return Acceptance(
        rounds=1000, drafted=1000 * k, accepted=int(1000 * (tau - 1)), tau_request_mean=tau,
        tau_pooled=tau, histogram={str(i): 100 for i in range(1, k + 2)},
        conditional=tuple(alpha * 0.98**i for i in range(k)),
        joint=tuple(alpha ** (i + 1) for i in range(k)),
        drafted_per_token=k / tau, target_calls_per_token=1 / tau,
    )  # fmt: skip


def workload(name: str, synthetic: int = 0) -> WorkloadRecord:
    return WorkloadRecord(
        name=name, source=name, sha256="cd" * 32, items=10, requests=10,
        synthetic_items=synthetic, domains={"coding": 10}, input_tokens=spread(200.0),
        output_tokens=spread(64.0),
    )  # fmt: skip


def lossless(verdict: str = "identical") -> Lossless:
    return Lossless(
        verdict=verdict, ok=verdict != "different", compared=50,  # type: ignore[arg-type]
        differing=0 if verdict == "identical" else 2, detail=f"made up: {verdict}",
        largest_margin=0.004 if verdict == "near_tie" else None,
        tolerance=0.05 if verdict == "near_tie" else None,
    )  # fmt: skip


def cell(
    name: str = "suite", drafter: str = "ngram", k: int = 4, *, policy: str = "fixed",
    temperature: float = 0.0, concurrency: int = 1, synthetic: int = 0, predicted: bool = True,
    verdict: str = "identical", rng: np.random.Generator | None = None, **config: Any,
) -> CellResult:  # fmt: skip
    """A cell whose speed-up follows from a made-up acceptance and cost."""
    noise = 1.0 if rng is None else float(rng.normal(1, 0.02))
    alpha = ALPHA.get(drafter, 0.7) * (0.85 if temperature else 1.0)
    alpha *= 1.15 if name == "code-edit" else 1.0
    acc = acceptance(min(alpha, 0.97), k)
    assert acc.tau_pooled is not None
    drafting = COST.get(drafter, 0.05) * k
    speed = acc.tau_pooled / (drafting + 1.0 + 0.03 * (k + 1) * concurrency) * noise
    if policy == "adaptive":
        speed = max(speed, 1.0)
    plain_tok_s = 30.0 * concurrency**0.7
    estimate = Estimate(value=speed, low=0.96 * speed, high=1.05 * speed)
    one = acceptance(0.0, 0)
    return CellResult(
        key=f"{name}-{drafter}-{policy}-{k}-{temperature}-{concurrency}", run=0,
        config=CellConfig(
            workload=name, drafter=drafter, policy=policy, k=k, temperature=temperature,
            concurrency=concurrency, **config,
        ),
        workload=workload(name, synthetic),
        models=(
            ModelRecord(
                role="target", name="target-1b", source="target.gguf", sha256="ab" * 32,
                weight_bytes=900_000_000, dtype="q4", device="cpu", numerics="row_invariant",
            ),
        ),
        speedup=estimate, decode_speedup=estimate, server_speedup=speed, tau=acc.tau_pooled,
        lossless=lossless(verdict), plain=side(plain_tok_s, one, concurrency),
        speculative=side(plain_tok_s * speed, acc, concurrency),
        slices=(
            Slice(
                by="domain", name="coding", synthetic=synthetic > 0, requests=10,
                speedup=estimate, tau=acc.tau_pooled,
            ),
        ),
        samples=(), seconds=60.0,
        predicted=Estimate(value=speed * 1.04, low=speed * 0.95, high=speed * 1.15)
        if predicted else None,
    )  # fmt: skip


def profile() -> dict[str, Any]:
    """As `core.latency.Profile.to_json` writes it."""
    from paceline.core.latency import Curve, DraftCost, HostCost, Profile, TargetCost

    ns = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    flat = Curve(xs=(1.0, 16.0), ys=(0.004, 0.006))
    return Profile(
        target=TargetCost(
            rows=Curve(xs=ns, ys=(0.030, 0.031, 0.034, 0.046, 0.075, 0.14)),
            per_entry=Curve(xs=ns, ys=(1e-6, 1e-6, 1.2e-6, 1.5e-6, 2e-6, 4e-6)),
        ),
        drafts={
            "small-draft": DraftCost(
                fixed=1e-4, idle=0.0, first=flat, step=flat, per_entry=1e-7, sampling=0.0,
                feed=flat,
            )
        },
        host={m: HostCost(step=1e-4, sequence=1e-5, row=1e-6) for m in ("greedy", "sampled")},
    ).to_json()  # fmt: skip


def result(*cells: CellResult, with_profile: bool = True) -> BenchResult:
    return BenchResult(
        runs=(provenance(),), protocol=protocol(), cells=cells,
        profile=profile() if with_profile else None,
    )  # fmt: skip


def matrix(rng: np.random.Generator) -> list[CellResult]:
    """216 cells: three workloads (one synthetic), three drafters, fixed and adaptive, two
    temperatures, three levels of concurrency."""
    out = []
    for name, synthetic in (("suite", 0), ("code-edit", 0), ("random:512", 10)):
        for drafter in ("ngram", "small-draft", "qwen2.5-coder-0.5b"):
            for temperature in (0.0, 1.0):
                for concurrency in (1, 4, 16):
                    for policy, k in (("fixed", 2), ("fixed", 4), ("fixed", 8), ("adaptive", 8)):
                        out.append(
                            cell(
                                name, drafter, k, policy=policy, temperature=temperature,
                                concurrency=concurrency, synthetic=synthetic, rng=rng,
                                verdict="law" if temperature else "identical",
                            )
                        )  # fmt: skip
    return out
