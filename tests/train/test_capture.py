"""Captured sequences: equal to a fresh pass, whole after a kill, never twice, never a
benchmark's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from train_devices import ENGINE, info_of, short, write_capture

from paceline import LLM, UserError
from paceline.engine.engine import EngineConfig
from paceline.models.base import FINAL, RowGroup, pack
from paceline.models.loading import open_checkpoint
from paceline.train.capture import CapturePlan, capture, check_taps, default_taps
from paceline.train.data import Corpus, ShardWriter, draft_vocabulary, shard_paths, tap_name
from paceline.train.seeds import Seed, invented

TAPS = default_taps(8)
PLAN = CapturePlan(tokens=600, temperatures=(0.0, 0.8), max_tokens=20, max_prompt=100)


def engine_for(target: Path, **changes: object) -> LLM:
    config = {**vars(ENGINE), **changes}
    return LLM(str(target), dtype="float32", engine=EngineConfig(**config))


def run(target: Path, out: Path, *, preempted: bool = False, **changes: object) -> Corpus:
    checkpoint = open_checkpoint(str(target), dtype="float32")
    info = info_of(checkpoint, TAPS, temperatures=PLAN.temperatures, max_tokens=PLAN.max_tokens)
    writer = ShardWriter(out, info, shard_tokens=200)
    llm = engine_for(target, **changes)
    capture(llm, short(invented(1)), writer, PLAN, TAPS)
    assert preempted == (llm.engine.stats.totals.preemptions > 0)
    return Corpus(out, held_out=0)


def test_states_and_laws_equal_a_fresh_pass(tiny_target: Path, tmp_path: Path) -> None:
    corpus = run(tiny_target, tmp_path)
    model = open_checkpoint(str(tiny_target), dtype="float32").load()
    names = [tap_name(t) for t in TAPS]
    for i in corpus.training[::5]:
        record = corpus.sequence(i, names)
        n = len(record)
        rows = RowGroup(
            tokens=record.tokens_T.numpy().astype(np.int32),
            parents=np.arange(-1, n - 1, dtype=np.int32),
            context=0,
            table=np.arange(n // 16 + 1, dtype=np.int32),
            wanted=np.arange(n, dtype=np.int32),
        )
        output = model.forward(pack([rows], 16), model.new_kv(n // 16 + 1, 16), taps=TAPS)
        for tap in TAPS:
            # bfloat16 keeps 8 bits: half a unit in the last place is 2 ** -9
            torch.testing.assert_close(
                record.taps[tap_name(tap)].float(), output.taps[tap].float(), rtol=4e-3, atol=1e-3
            )
        law = record.law_T
        assert torch.equal(record.top_T[law], output.logits_RV.argmax(-1)[law])
        torch.testing.assert_close(
            record.logz_T[law], output.logits_RV.logsumexp(-1)[law], rtol=1e-5, atol=1e-4
        )
        assert torch.equal(record.tokens_T[1:], record.next_T[:-1])
        # laws are those of the answer: a run to the sequence's end, behind a prompt
        at = law.nonzero().squeeze(1)
        assert at.tolist() == list(range(n - len(at), n))
        assert 1 < len(at) <= PLAN.max_tokens


def test_chunks_and_preemption_change_nothing(tiny_target: Path, tmp_path: Path) -> None:
    usual = run(tiny_target, tmp_path / "a")
    # too small a cache for four sequences, and prompts in chunks of three
    tight = run(
        tiny_target, tmp_path / "b", kv_tokens=96, block_size=8, prefill_chunk=3, preempted=True
    )
    by_key = {tight.sequence(i, ()).key: i for i in tight.training}
    compared = 0
    for i in usual.training:
        a = usual.sequence(i, ["final"])
        if a.key in by_key:
            b = tight.sequence(by_key[a.key], ["final"])
            if torch.equal(a.tokens_T, b.tokens_T):  # float32 rows agree to rounding only
                compared += 1
                assert torch.equal(a.law_T, b.law_T)
                assert torch.equal(a.top_T, b.top_T)
                torch.testing.assert_close(
                    a.taps["final"].float(), b.taps["final"].float(), rtol=2e-2, atol=2e-2
                )
    assert compared > 5


def test_goes_on_behind_the_last_whole_shard(tiny_target: Path, tmp_path: Path) -> None:
    class Kill(Exception):
        pass

    checkpoint = open_checkpoint(str(tiny_target), dtype="float32")
    info = info_of(checkpoint, TAPS)

    def killed(progress) -> None:
        if progress.tokens > 350:
            raise Kill

    writer = ShardWriter(tmp_path, info, shard_tokens=150)
    with pytest.raises(Kill):
        capture(engine_for(tiny_target), short(invented(1)), writer, PLAN, TAPS, killed)
    (tmp_path / "shard-00099.tmp").write_bytes(b"half a shard")
    before = {p.name: p.read_bytes() for p in shard_paths(tmp_path)}
    assert before

    writer = ShardWriter(tmp_path, info, shard_tokens=150)
    found = writer.tokens
    assert 0 < found < 600
    llm = engine_for(tiny_target)
    capture(llm, short(invented(1)), writer, PLAN, TAPS)
    assert not list(tmp_path.glob("*.tmp"))
    for name, content in before.items():
        assert (tmp_path / name).read_bytes() == content
    corpus = Corpus(tmp_path, held_out=0)
    keys = [corpus.sequence(i, ()).key for i in corpus.training]
    assert len(keys) == len(set(keys))
    assert corpus.tokens(corpus.training) >= 600
    # a third start finds everything there and runs nothing
    steps = llm.engine.stats.steps
    capture(llm, short(invented(1)), ShardWriter(tmp_path, info), PLAN, TAPS)
    assert llm.engine.stats.steps == steps


def test_later_turns_see_the_answers(tiny_target: Path, tmp_path: Path) -> None:
    info = info_of(open_checkpoint(str(tiny_target), dtype="float32"), TAPS)
    writer = ShardWriter(tmp_path, info)
    seeds = iter([Seed(turns=("one", "two")), Seed(turns=("plain text",), raw=True)])
    llm = engine_for(tiny_target)
    done = capture(llm, seeds, writer, CapturePlan(tokens=10**6, max_tokens=8), TAPS)
    assert done.answers == 3
    corpus = Corpus(tmp_path, held_out=0)
    records = {r.key[-2:] + str(len(r)): r for r in (corpus.sequence(i, ()) for i in range(3))}
    texts = [llm.tokenizer.decode(r.tokens_T.tolist()) for r in records.values()]
    second = next(r for r in records.values() if r.key.endswith("-1"))
    first = next(
        r for r in records.values()
        if r.key.endswith("-0") and r.key[:24] == second.key[:24]
    )  # fmt: skip
    assert any(t.startswith("plain text") for t in texts)
    question = llm.tokenizer.decode(first.tokens_T[~first.law_T].tolist())
    assert "one" in question
    assert "two" not in question
    assert "one" in llm.tokenizer.decode(second.tokens_T.tolist())
    assert len(second) > len(first)


def test_another_capture_is_not_mixed_in(tiny_target: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_target), dtype="float32")
    ShardWriter(tmp_path, info_of(checkpoint, TAPS))
    with pytest.raises(UserError, match=r"taps = .*choose another --out"):
        ShardWriter(tmp_path, info_of(checkpoint, (1, FINAL)))
    with pytest.raises(UserError, match="no whole shard"):
        Corpus(tmp_path)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"not a shard")
    with pytest.raises(UserError, match="damaged"):
        ShardWriter(tmp_path, info_of(checkpoint, TAPS))
    (tmp_path / "capture.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(UserError, match="can't be read"):
        Corpus(tmp_path)


def test_captures_of_one_kind_are_read_together(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    more = write_capture(tmp_path / "more", tiny_target, 300, max_tokens=8, unlike="other ")
    one, other = Corpus(tiny_capture, held_out=0), Corpus(more, held_out=0)
    both = Corpus(tiny_capture, more, held_out=0)
    assert both.tokens(both.training) == one.tokens(one.training) + other.tokens(other.training)
    last = both.sequence(both.training[-1], ["final"])
    assert torch.equal(last.tokens_T, other.sequence(other.training[-1], ["final"]).tokens_T)
    assert len({one.sha256, other.sha256, both.sha256}) == 3
    assert torch.equal(both.frequencies(), one.frequencies() + other.frequencies())
    again = write_capture(tmp_path / "again", tiny_target, 300)  # the same seeds
    assert Corpus(tiny_capture, again, held_out=0).training == one.training
    with pytest.raises(UserError, match="named twice"):
        Corpus(more, more)
    path = more / "capture.json"
    path.write_text(path.read_text().replace('"target_sha256": "', '"target_sha256": "0'))
    with pytest.raises(UserError, match="captures of one kind"):
        Corpus(tiny_capture, more)


def test_prefix_cache_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    info = info_of(open_checkpoint(str(tiny_target), dtype="float32"), TAPS)
    with pytest.raises(ValueError, match="prefix_cache"):
        capture(
            engine_for(tiny_target, prefix_cache=True),
            invented(0),
            ShardWriter(tmp_path, info),
            PLAN,
            TAPS,
        )


def test_packs_hold_each_training_sequence_once(tiny_capture: Path) -> None:
    corpus = Corpus(tiny_capture, held_out=8)
    groups = corpus.epoch(seed=3, epoch=1, pack_tokens=200)
    assert sorted(i for g in groups for i in g) == corpus.training
    assert groups != corpus.epoch(seed=3, epoch=2, pack_tokens=200)
    assert groups == Corpus(tiny_capture, held_out=8).epoch(3, 1, 200)
    for group in groups:
        read = corpus.read(group, ["final"])
        assert read.n_rows <= 200 or len(group) == 1
        assert read.starts_B1[-1] == len(read.tokens_N) == len(read.taps["final"])
    with pytest.raises(UserError, match="capture them with --taps"):
        corpus.sequence(0, ["tap7"])


def test_draft_vocabulary_is_the_frequent_tokens() -> None:
    counts = torch.tensor([5, 0, 7, 7, 0, 1])
    assert draft_vocabulary(counts, 2).tolist() == [2, 3]
    assert draft_vocabulary(counts, 5).tolist() == [0, 1, 2, 3, 5]
    with pytest.raises(UserError, match="1 to 6"):
        draft_vocabulary(counts, 7)


def test_taps_are_checked() -> None:
    assert check_taps([3, 1], 8) == (1, 3, FINAL)
    with pytest.raises(UserError, match="tap 9 is no layer"):
        check_taps([9], 8)
    with pytest.raises(UserError, match="tokens = 0"):
        CapturePlan(tokens=0)
    with pytest.raises(UserError, match="temperature"):
        CapturePlan(tokens=1, temperatures=(-1.0,))
