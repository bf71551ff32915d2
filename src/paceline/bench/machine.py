"""What the machine did meanwhile: processor, GPU, energy, memory bandwidth. A value that can't
be read here is None."""

from __future__ import annotations

import importlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from paceline.bench.results import MachineUse
from paceline.models.base import TargetModel
from paceline.models.native import NativeModel

RAPL = Path("/sys/class/powercap")
_GPU_PERIOD = 0.2


@dataclass(frozen=True)
class Counters:
    """Totals over one or more runs; None where unreadable."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    gpu_percent: float | None = None
    gpu_power_w: float | None = None
    energy_j: float | None = None
    energy_source: str | None = None


def rapl_joules(root: Path = RAPL) -> dict[str, tuple[float, float]] | None:
    """Counter and its range, joules, of each processor package; None where not readable (most
    systems let root alone read them, virtual machines have none)."""
    zones: dict[str, tuple[float, float]] = {}
    try:
        for zone in sorted(root.glob("intel-rapl:*")):
            if zone.name.count(":") == 1:  # a package; its parts are counted in it
                now = int((zone / "energy_uj").read_text()) / 1e6
                top = int((zone / "max_energy_range_uj").read_text()) / 1e6
                zones[zone.name] = (now, top)
    except (OSError, ValueError):
        return None
    return zones or None


def rapl_spent(
    before: dict[str, tuple[float, float]] | None, after: dict[str, tuple[float, float]] | None
) -> float | None:
    """Joules between two readings, of counters that begin again at their range."""
    if before is None or after is None or before.keys() != after.keys():
        return None
    total = 0.0
    for name, (end, top) in after.items():
        used = end - before[name][0]
        total += used if used >= 0 else used + top
    return total


class _Gpu:
    """NVML through its Python binding where that is installed."""

    def __init__(self) -> None:
        self._nvml: Any = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    @classmethod
    def find(cls, device: str) -> _Gpu | None:
        if not device.startswith("cuda"):
            return None
        try:
            return cls()
        except Exception:  # not installed, no driver, no permission: all mean "not readable"
            return None

    def percent(self) -> float:
        return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)

    def watts(self) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3


class Meter:
    """Counts from `start` to `stop`, any number of times; `total` is the sum.

    On a CPU it only reads counters at both ends. With a GPU a thread asks it five times a
    second.
    """

    def __init__(self, device: str) -> None:
        self._gpu = _Gpu.find(device)
        self._process = psutil.Process()
        self._readings: list[tuple[float, float]] = []
        self._wall = self._cpu = 0.0
        self._joules: float | None = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._begin = (time.perf_counter(), self._cpu_now(), self._energy_now())
        if self._gpu is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._poll, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        wall, cpu, energy = self._begin
        self._wall += time.perf_counter() - wall
        self._cpu += self._cpu_now() - cpu
        spent = self._spent(energy, self._energy_now())
        self._joules = None if spent is None or self._joules is None else self._joules + spent
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None

    @property
    def total(self) -> Counters:
        mean = None if not self._readings else np.mean(self._readings, axis=0)
        source = None if self._joules is None else "nvml" if self._gpu else "rapl"
        return Counters(
            wall_s=self._wall,
            cpu_s=self._cpu,
            gpu_percent=None if mean is None else float(mean[0]),
            gpu_power_w=None if mean is None else float(mean[1]),
            energy_j=self._joules,
            energy_source=source,
        )

    def _cpu_now(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def _energy_now(self) -> Any:
        return rapl_joules() if self._gpu is None else self._gpu.joules()

    def _spent(self, before: Any, after: Any) -> float | None:
        if self._gpu is not None:
            return float(after - before)
        return rapl_spent(before, after)

    def _poll(self) -> None:
        assert self._gpu is not None
        while not self._stop.wait(_GPU_PERIOD):
            self._readings.append((self._gpu.percent(), self._gpu.watts()))


def read_bandwidth(model: TargetModel, size: int = 1 << 29) -> float | None:
    """Bytes per second at which the native core's threads read memory that no cache holds
    (best of three passes); None for other models."""
    if not isinstance(model, NativeModel):
        return None
    from paceline import _native  # type: ignore[attr-defined]
    from paceline.models.native_weights import anonymous_memory

    data = np.frombuffer(anonymous_memory(size), np.uint8)
    data[:] = 1
    return float(max(size / _native.read_seconds(data, model.threads, "") for _ in range(3)))


def machine_use(
    c: Counters,
    *,
    tokens: int,
    model: TargetModel,
    passes: int,
    T_p_s: float,
    bandwidth: float | None,
) -> MachineUse:
    """passes, T_p_s: target passes and their seconds. bandwidth: as of `read_bandwidth`."""
    read = None
    if isinstance(model, NativeModel) and T_p_s > 0:
        read = model.bytes_per_pass * passes / T_p_s
    return MachineUse(
        cpu_cores=c.cpu_s / c.wall_s if c.wall_s > 0 else None,
        gpu_percent=c.gpu_percent,
        gpu_power_w=c.gpu_power_w,
        weight_read_bytes_s=read,
        read_share=None if read is None or bandwidth is None else read / bandwidth,
        energy_j=c.energy_j,
        energy_j_per_token=None if c.energy_j is None else c.energy_j / max(tokens, 1),
        energy_source=c.energy_source,
    )
