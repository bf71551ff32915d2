"""Counters: what is readable is read, what is not is None."""

from __future__ import annotations

import time
from pathlib import Path

import bench_devices as b
import devices as d
import pytest

from paceline.bench.machine import (
    Meter,
    machine_use,
    rapl_joules,
    rapl_spent,
    read_bandwidth,
)
from paceline.bench.provenance import provenance


def zone(root: Path, name: str, joules: float, top: float = 1000.0) -> None:
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text(f"{int(top * 1e6)}\n")


def test_energy_counters_of_packages_wrap(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", 990)
    zone(tmp_path, "intel-rapl:1", 5)
    zone(tmp_path, "intel-rapl:0:0", 77)  # a part of package 0
    before = rapl_joules(tmp_path)
    zone(tmp_path, "intel-rapl:0", 10)
    zone(tmp_path, "intel-rapl:1", 8)
    assert rapl_spent(before, rapl_joules(tmp_path)) == pytest.approx(20 + 3)


def test_energy_that_is_not_readable_is_none(tmp_path: Path) -> None:
    assert rapl_joules(tmp_path) is None
    assert rapl_joules(tmp_path / "missing") is None
    zone(tmp_path, "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("what")
    assert rapl_joules(tmp_path) is None
    assert rapl_spent(None, {"intel-rapl:0": (1.0, 2.0)}) is None


def test_the_meter_sums_what_this_process_used() -> None:
    meter = Meter("cpu")
    for _ in range(2):
        meter.start()
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        meter.stop()
        time.sleep(0.05)  # outside: not counted
    total = meter.total
    assert total.cpu_s == pytest.approx(0.1, abs=0.05)
    assert total.wall_s >= 0.09
    assert total.gpu_percent is None
    use = machine_use(total, tokens=10, model=d.target(), passes=5, T_p_s=1.0, bandwidth=None)
    assert use.cpu_cores is not None
    assert 0 < use.cpu_cores < 2
    assert use.weight_read_bytes_s is None
    assert read_bandwidth(d.target()) is None


def test_provenance_names_command_machine_and_versions() -> None:
    p = provenance(3, threads=2, bandwidth=1e9, argv=["paceline", "bench", "--out", "my results"])
    assert p.run == 3
    assert p.command == "paceline bench --out 'my results'"
    assert p.libraries["torch"].startswith("2.")
    assert p.cpu
    assert p.memory_bytes > 10**8
    assert len(b.protocol().model_dump()) == 14
