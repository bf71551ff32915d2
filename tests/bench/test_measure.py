"""Cells on simulated time: speed-ups that are known, the order of runs, verdicts, resumption."""

from __future__ import annotations

from pathlib import Path

import bench_devices as b
import devices as d
import pytest

from paceline.bench.folder import ResultFolder
from paceline.bench.measure import measure
from paceline.bench.prepare import Subject, prepare
from paceline.bench.results import CellConfig, CellResult, Protocol, cell_key, load_results
from paceline.bench.workloads import Item, Workload
from paceline.draft.none import NoDrafter
from paceline.errors import UserError
from paceline.types import SamplingParams


def run(
    subject: Subject,
    clock: b.FakeClock,
    cells: list[CellConfig],
    work: Workload | None = None,
    rules: Protocol | None = None,
) -> list[CellResult]:
    work, rules = work or b.workload(), rules or b.protocol()
    prepared = prepare(subject, work, rules, cells[0].temperature, 4)
    keyed = [(cell_key(rules, c, work.sha256), c) for c in cells]
    return measure(subject, keyed, prepared, b.context(clock, work, rules), lambda n: None)


def test_a_perfect_draft_that_costs_nothing_gains_its_tau() -> None:
    """12 tokens are 12 passes plainly. With k = 3 the first token comes alone and the other
    eleven in rounds of 4, 4 and 3: four passes."""
    clock = b.FakeClock()
    (r,) = run(b.subject("self", clock), clock, [b.cell(k=3)])
    assert r.speedup.value == pytest.approx(12 / 4)
    assert (r.speedup.low, r.speedup.high) == (pytest.approx(3), pytest.approx(3))
    assert r.decode_speedup is not None
    assert r.decode_speedup.value == pytest.approx(11 / 3)
    assert r.server_speedup == pytest.approx(3)
    assert (r.lossless.verdict, r.lossless.ok) == ("identical", True)
    assert r.plain.acceptance.tau_pooled == 1.0
    assert r.plain.acceptance.drafted == 0
    assert r.speculative.acceptance.conditional == (1.0, 1.0, 1.0)
    assert r.plain.latency.itl_token_s.p50 == pytest.approx(0.010)
    # Rounds of 4, 4 and 3 tokens share 10 ms each.
    assert r.speculative.latency.itl_token_s.min == pytest.approx(0.010 / 4)
    assert r.speculative.latency.itl_round_s.p50 == pytest.approx(0.010)
    assert r.plain.throughput.server_tok_s == pytest.approx(100)
    assert len(r.samples) == 3 * 4
    assert {(s.by, s.name) for s in r.slices} >= {("domain", "one"), ("tier", "mid")}
    assert any("too few" in note for note in r.notes)


def test_a_loss_is_a_loss() -> None:
    """Always wrong, and each row of a pass costs as much as the first."""
    clock = b.FakeClock()
    s = b.subject("anti", clock, cost=lambda rows: 0.01 * rows)
    (r,) = run(s, clock, [b.cell(k=3)])
    assert r.tau == pytest.approx(1.0)
    assert r.speedup.value < 0.6
    assert r.speedup.high < 1
    assert r.lossless.verdict == "identical"


def test_cells_of_a_group_share_plain_runs_and_are_interleaved() -> None:
    """Forwards and backwards in turn, prompt by prompt; A B B A where there are two ways."""
    clock = b.FakeClock()
    s = b.subject("self", clock)
    order: list[str] = []
    plain, use = s.plain, s.use
    s.plain = lambda: (order.append("A"), plain())[1]  # type: ignore[method-assign]
    s.use = lambda cell: (order.append(f"B{cell.k}"), use(cell))[1]  # type: ignore[method-assign]
    work, rules = b.workload(1), b.protocol(repeats=4)
    prepared = prepare(s, work, rules, 0.0, 1)
    order.clear()
    keyed = [(str(k), b.cell(k=k)) for k in (1, 3)]
    results = measure(s, keyed, prepared, b.context(clock, work, rules), lambda n: None)
    warm_up, runs = order[:3], order[3 : 3 + 12]
    assert warm_up == ["A", "B1", "B3"]
    assert runs == ["A", "B1", "B3", "B3", "B1", "A"] * 2
    assert [x.plain_first for x in results[0].samples] == [True, False, True, False]
    assert [r.config.k for r in results] == [1, 3]
    assert results[0].plain == results[1].plain


def test_prompts_are_interleaved_too() -> None:
    clock = b.FakeClock()
    (r,) = run(b.subject("self", clock), clock, [b.cell()], b.workload(2), b.protocol(repeats=2))
    assert [(x.item, x.repeat, x.plain_first) for x in r.samples] == [
        ("item-0", 0, True),
        ("item-0", 1, False),
        ("item-1", 0, False),
        ("item-1", 1, True),
    ]


@pytest.mark.parametrize("drafter", ["ngram", "self", "noisy", "widths"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seeded", [True, False])
def test_every_drafter_is_lossless(drafter: str, temperature: float, seeded: bool) -> None:
    """Law tests have false-alarm odds of 1e-6; unseeded texts differ from run to run."""
    clock = b.FakeClock()
    s = b.subject(drafter, clock)
    (r,) = run(s, clock, [b.cell(temperature=temperature)], rules=b.protocol(seeded=seeded))
    assert r.lossless.ok, r.lossless.detail
    if temperature == 0 or (seeded and s.deterministic):
        assert r.lossless.verdict == "identical"
    elif not seeded:
        assert r.lossless.verdict == "law"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lossy_engine_is_found_out(temperature: float) -> None:
    clock = b.FakeClock()
    s = b.subject(d.model_drafter(d.anti(), b.CONFIG), clock, engine=b.LossyEngine)
    (r,) = run(s, clock, [b.cell(temperature=temperature)], b.workload(6))
    assert (r.lossless.verdict, r.lossless.ok) == ("different", False)
    assert r.summary()["lossless"] is False


def test_concurrency_and_open_loop() -> None:
    clock = b.FakeClock()
    s = b.subject("self", clock)
    (closed,) = run(s, clock, [b.cell(concurrency=3)])
    assert closed.plain.throughput.server_tok_s == pytest.approx(300)
    assert closed.speedup.value == pytest.approx(3)
    assert closed.plain.kv.peak_slots > 2 * closed.plain.kv.mean_slots / 3
    (open_,) = run(s, clock, [b.cell(concurrency=2, rate=10.0)], b.workload(6))
    assert open_.plain.latency.ttft_s.p99 > open_.speculative.latency.ttft_s.p99  # it queues
    assert open_.speedup.value > 3  # waiting shrinks faster than service
    assert open_.lossless.verdict == "identical"


def test_a_conversation_gets_the_plain_answers_and_is_one_unit() -> None:
    clock = b.FakeClock()
    s = b.subject("ngram", clock)
    work, rules = b.workload(2, turns=3), b.protocol(repeats=2)
    prepared = prepare(s, work, rules, 0.0, 4)
    assert [(p.item.id, p.turn) for p in prepared.prompts] == [
        (f"item-{i}", t) for i in range(2) for t in range(3)
    ]
    first, second = prepared.prompts[:2]
    (out,) = d.run(s.engine, [first.tokens], SamplingParams(max_tokens=12))
    assert second.tokens[: len(first.tokens)] == first.tokens
    answer = b.render([{"role": "assistant", "content": out.text}])
    assert second.tokens[len(first.tokens) : len(first.tokens) + 12] == answer
    (r,) = run(s, clock, [b.cell()], work, rules)
    assert r.workload.items == 2
    assert r.workload.requests == 6
    assert len(r.samples) == 12


def test_lengths_are_those_of_plain_decoding() -> None:
    """With an end-of-sequence token, answers end early; `fixed` goes on."""
    clock = b.FakeClock()
    s = b.subject("self", clock)
    s.engine._ends = s.engine._ends.__class__(frozenset({3}), s.engine.max_length, None)
    natural = prepare(s, b.workload(6), b.protocol(max_tokens=40), 0.0, 4)
    assert min(p.length for p in natural.prompts) < 40
    fixed = prepare(s, b.workload(6), b.protocol(max_tokens=40, lengths="fixed"), 0.0, 4)
    assert {p.length for p in fixed.prompts} == {40}
    (r,) = run(s, clock, [b.cell()], b.workload(6), b.protocol(max_tokens=40))
    assert r.plain.tokens == r.speculative.tokens == 4 * sum(p.length for p in natural.prompts)


def test_prompts_that_do_not_fit_are_left_out_aloud() -> None:
    s = b.subject("none", b.FakeClock())
    short = b.workload(2).items
    long = Item(id="long", domain="one", turns=("x" * 2040,))
    both = Workload(name="toy", source="toy", items=(*short, long))
    prepared = prepare(s, both, b.protocol(), 0.0, 1)
    assert {p.item.id for p in prepared.prompts} == {"item-0", "item-1"}
    assert "long" in prepared.notes[0]
    assert len(prepare(s, both, b.protocol(max_tokens=8), 0.0, 1).prompts) == 3
    with pytest.raises(UserError, match="no prompt fits"):
        prepare(s, Workload(name="toy", source="toy", items=(long,)), b.protocol(), 0.0, 1)


# --- files ---------------------------------------------------------------------------------


def result(k: int = 3) -> CellResult:
    clock = b.FakeClock()
    (r,) = run(b.subject("self", clock), clock, [b.cell(k=k)], b.workload(2))
    return r


def test_results_are_kept_read_again_and_tabulated(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    from paceline.bench.provenance import provenance

    rules = b.protocol()
    folder = ResultFolder.open(tmp_path / "out")
    origin = provenance(0, threads=1, bandwidth=None, argv=["/x/paceline", "bench", "a b"])
    assert origin.command == "paceline bench 'a b'"
    folder.begin(rules, origin)
    first, second = result(1), result(3)
    folder.add(first)
    folder.add(second)
    folder.write_parquet()
    assert load_results(tmp_path / "out").cells == (first, second)
    table = pq.read_table(tmp_path / "out" / "cells.parquet").to_pylist()
    assert [row["config.k"] for row in table] == [1, 3]
    assert table[1]["speedup.value"] == second.speedup.value
    assert pq.read_table(tmp_path / "out" / "samples.parquet").num_rows == 2 * len(first.samples)

    # A crash in the middle of a line loses that cell alone.
    with open(tmp_path / "out" / "cells.jsonl", "a") as f:
        f.write('{"key": "cut off')
    again = ResultFolder.open(tmp_path / "out")
    assert again.cells == [first, second]
    assert again.finished(second.key) == second
    assert again.finished("other") is None
    again.add(result(2))
    assert len(ResultFolder.open(tmp_path / "out").cells) == 3


def test_another_protocol_or_a_damaged_file_is_refused(tmp_path: Path) -> None:
    from paceline.bench.provenance import provenance

    origin = provenance(0, threads=1, bandwidth=None)
    folder = ResultFolder.open(tmp_path)
    folder.begin(b.protocol(), origin)
    folder.add(result())
    with pytest.raises(UserError, match="repeats was 4 and is now 9"):
        ResultFolder.open(tmp_path).check(b.protocol(repeats=9))
    (tmp_path / "cells.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(UserError, match="line 1"):
        ResultFolder.open(tmp_path)
    assert ResultFolder.open(tmp_path, resume=False).cells == []
    with pytest.raises(UserError, match="no results"):
        load_results(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="can't be made"):
        ResultFolder.open(file)


def test_a_key_tells_measurements_apart() -> None:
    rules, work = b.protocol(), b.workload()
    keys = {
        cell_key(rules, b.cell(), work.sha256),
        cell_key(rules, b.cell(k=4), work.sha256),
        cell_key(rules, b.cell(), b.workload(4).sha256),
        cell_key(b.protocol(seed=1), b.cell(), work.sha256),
    }
    assert len(keys) == 4
    assert cell_key(rules, b.cell(), work.sha256) in keys


def test_plain_is_a_drafter_that_does_nothing() -> None:
    s = b.subject("self", b.FakeClock())
    s.plain()
    assert isinstance(s.engine.drafter, NoDrafter)
    s.use(b.cell(k=5))
    assert s.engine.drafter is s.drafter
