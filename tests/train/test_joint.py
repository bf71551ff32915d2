"""Medusa-2: the adapted target starts as the target, is held near it, and is written whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train_devices import write_capture, write_target

from paceline.errors import UserError
from paceline.models.base import FINAL, RowGroup, pack
from paceline.models.heads.formats import open_head
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.models.safetensors_weights import iter_tensors
from paceline.train.data import Corpus
from paceline.train.joint import ADAPTED, AdaptedDecoder, Adapter
from paceline.train.loop import TrainConfig
from paceline.train.objectives import Moment
from paceline.train.runs import HeadOptions, make_objective, train_head
from paceline.train.target import read_tables, target_sha256

OPTIONS = HeadOptions(objective="medusa2", vocabulary=120, heads=2, rank=4, heads_first=3)


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder), dtype="float32")


def decoder_of(target: Checkpoint) -> AdaptedDecoder:
    tensors = dict(iter_tensors(target.source.path, target.config, torch.float32))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AdaptedDecoder(target.config, tensors, rank=4)


def final_of(target: Checkpoint, tokens: list[int]) -> torch.Tensor:
    model, n = target.load(), len(tokens)
    rows = RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, n - 1, dtype=np.int32),
        context=0,
        table=np.arange(n // 16 + 1, dtype=np.int32),
        wanted=np.zeros(0, np.int32),
    )
    return model.forward(pack([rows], 16), model.new_kv(n // 16 + 1, 16), taps=(FINAL,)).taps[FINAL]


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
                {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}],
    ids=["llama", "qwen2", "qwen3"],
)  # fmt: skip
def test_without_updates_it_is_the_target(changes: dict[str, object], tmp_path: Path) -> None:
    target = opened(write_target(tmp_path / "t", **changes))
    corpus = Corpus(write_capture(tmp_path / "c", tmp_path / "t", 150, max_tokens=8), held_out=0)
    packed = corpus.read(corpus.training[:3], ["final"])
    found = decoder_of(target)(packed)
    for first, last in zip(packed.starts_B1, packed.starts_B1[1:], strict=False):
        expected = final_of(target, packed.tokens_N[first:last].tolist())
        torch.testing.assert_close(found[first:last], expected, rtol=1e-4, atol=1e-4)


def test_merging_adds_what_the_adapters_do(tiny_target: Path, tiny_capture: Path) -> None:
    target = opened(tiny_target)
    decoder = decoder_of(target)
    with torch.no_grad():
        for adapter in decoder.adapters.values():
            assert isinstance(adapter, Adapter)
            adapter.b_OR.normal_(std=0.1, generator=torch.Generator().manual_seed(2))
    corpus = Corpus(tiny_capture)
    packed = corpus.read(corpus.training[:2], ["final"])
    merged = AdaptedDecoder(target.config, decoder.merged(), rank=4)
    torch.testing.assert_close(merged(packed), decoder(packed), rtol=1e-4, atol=1e-4)
    plain = decoder_of(target)(packed)
    assert float((plain - decoder(packed)).detach().abs().max()) > 0.05
    assert len(decoder.adapters) == 8 * len(ADAPTED)


def test_a_run_writes_a_target_and_heads_that_fit_it(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    config = TrainConfig(
        lr=1e-2, steps=60, pack_tokens=256, clip=5.0, eval_every=10**6, autocast=False
    )
    result = train_head(opened(tiny_target), [tiny_capture], tmp_path, OPTIONS, config)
    assert result.finished
    losses = [entry["loss"] for entry in result.log]
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    written = opened(tmp_path / "target")
    source = open_head(tmp_path / "head", n_layers=8, vocab_size=260)
    assert source.about.target_hash == target_sha256(written)
    assert source.about.target_hash != target_sha256(opened(tiny_target))
    assert 0.5 < float(source.about.provenance["target_agrees_with_old"]) <= 1.0
    assert written.tokenizer.encode("abc") == opened(tiny_target).tokenizer.encode("abc")
    tokens = [1, 2, 3, 4, 5]
    moved = final_of(written, tokens) - final_of(opened(tiny_target), tokens)
    assert float(moved.abs().max()) > 1e-4


@pytest.mark.parametrize("prompts", [False, True])
def test_rows_that_fill_a_pack_up_teach_nothing(
    prompts: bool, tiny_target: Path, tiny_capture: Path
) -> None:
    target, corpus = opened(tiny_target), Corpus(tiny_capture)
    options = replace(OPTIONS, prompts=prompts, heads_first=0)
    tables = read_tables(target, torch.float32)
    packed = corpus.read(corpus.training[:2], ["final"])
    found = []
    for rows in (packed, packed.filled_up(64)):
        objective = make_objective(options, corpus, target, tables, seed=0, dtype=torch.float32)
        outcome = objective(rows, Moment(1))
        parameters = [p for p in objective.module.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(outcome.loss, parameters, allow_unused=True)
        found.append([outcome.loss, *(g for g in gradients if g is not None)])
        rows_of = [d.rows for d in outcome.depths]
    assert rows.filling > 0
    assert min(rows_of) > 0
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_a_gguf_target_is_refused(smollm_path: Path, tiny_capture: Path, tmp_path: Path) -> None:
    target = open_checkpoint("smollm2-135m")
    with pytest.raises(UserError, match=r"\.gguf file.*safetensors folder"):
        train_head(target, [tiny_capture], tmp_path, OPTIONS, TrainConfig())
