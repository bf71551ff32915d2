"""`--dtype q4` and `q8`: weights quantised for the native core, from folders and files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from native_devices import Runner
from train_devices import write_target

from paceline import LLM, EngineConfig, Numerics, SamplingParams, UserError
from paceline.models import loading, native_config
from paceline.models.decoder import TorchDecoder
from paceline.models.loading import open_checkpoint
from paceline.models.native import NativeModel, is_available

native = pytest.mark.skipif(not is_available()[0], reason=is_available()[1])
ENGINE = EngineConfig(kv_tokens=1024, prefill_chunk=16)
#: What the native core runs, with rows of whole groups of 32.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 3}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "tiny", **SHAPE)


@native
@pytest.mark.parametrize(("dtype", "limit"), [("q8", 0.05), ("q4", 0.5)])
def test_a_folder_runs_in_few_bits(folder: Path, dtype: str, limit: float) -> None:
    """Its logits are near the float model's, and are not the same."""
    model = open_checkpoint(str(folder), dtype=dtype).load()
    assert isinstance(model, NativeModel)
    assert model.info.numerics is Numerics.ROW_INVARIANT
    assert model.info.dtype == dtype
    exact = open_checkpoint(str(folder), dtype="float32").load()
    tokens = np.random.default_rng(0).integers(0, 260, 50)
    got, wanted = (Runner(m).prefill(0, tokens) for m in (model, exact))
    assert 0 < (got - wanted).norm() / wanted.norm() < limit


@native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_text_is_plain_text(folder: Path, temperature: float) -> None:
    prompts = ["one two one two one two", "abc"]
    params = SamplingParams(
        max_tokens=40, temperature=temperature, seed=1, rule="walk", ignore_eos=True
    )
    texts = []
    for draft in ("none", "ngram", str(folder)):
        llm = LLM(str(folder), dtype="q8", draft=draft, policy="fixed", engine=ENGINE)
        texts.append([o.token_ids for o in llm.generate(prompts, params)])
    assert texts[0] == texts[1] == texts[2]
    assert llm.engine.stats.totals.accepted > 0
    assert llm.engine.drafter.cache.model.info.dtype == "q4"  # type: ignore[attr-defined]
    assert any("4 bits" in note for note in llm.notes)


@native
def test_packed_weights_are_kept_until_the_folder_changes(folder: Path) -> None:
    said: list[tuple[str, float]] = []

    def load() -> torch.Tensor:
        said.clear()
        llm = LLM(
            str(folder), dtype="q4", engine=ENGINE, on_pack=lambda name, x: said.append((name, x))
        )
        return Runner(llm.engine.model).prefill(0, np.arange(9))

    first = load()
    assert said[-1] == ("tiny", 1.0)
    assert torch.equal(load(), first)
    assert not said
    write_target(folder, seed=1, **SHAPE)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert not torch.equal(load(), first)
    assert said


@native
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["q4", "q8"])
def test_memory_is_known_before_it_is_taken(folder: Path, dtype: str, tied: bool) -> None:
    if tied:
        write_target(folder, **SHAPE)
        text = (folder / "config.json").read_text(encoding="utf-8")
        (folder / "config.json").write_text(text.replace('embeddings": false', 'embeddings": true'))
    checkpoint = open_checkpoint(str(folder), dtype=dtype)
    assert checkpoint.config.tied is tied
    model = checkpoint.load()
    assert isinstance(model, NativeModel)
    assert checkpoint.kv_slot_bytes == model.info.kv_slot_bytes
    packed = model._packed.keep[0]
    assert checkpoint.weight_bytes == len(packed) >= model.info.weight_bytes
    fast = replace(checkpoint, fast=True)
    assert fast.weight_bytes <= checkpoint.weight_bytes
    with pytest.raises(UserError, match=r"weights \(tiny\)"):
        LLM(str(folder), dtype=dtype, memory_limit=checkpoint.weight_bytes)


@native
@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [("F32", "q8", 0.2), ("F16", "q8", 0.2), ("BF16", "q8", 0.2), ("Q8_0", "q4", 0.8)],
)
def test_files_that_are_stored_in_more_bits(make_gguf, kind: str, dtype: str, limit: float) -> None:
    """Near the float model, though these random weights amplify errors (another model's
    logits would be 1.4 away)."""
    path = str(make_gguf(kind=kind, tied=False).path)
    model = open_checkpoint(path, dtype=dtype).load()
    assert isinstance(model, NativeModel)
    assert model.info.dtype == dtype
    assert open_checkpoint(path).native is (kind == "Q8_0")  # what auto is has not changed
    exact = open_checkpoint(path, dtype="float32").load()
    tokens = np.arange(30)
    got, wanted = (Runner(m).prefill(0, tokens) for m in (model, exact))
    assert (got - wanted).norm() / wanted.norm() < limit


@native
def test_nothing_to_quantise_is_said(make_gguf) -> None:
    four = str(make_gguf(kind="Q4_0").path)
    for dtype in ("q4", "q8"):
        with pytest.raises(UserError, match=f"'{dtype}' would change nothing in tiny"):
            open_checkpoint(four, dtype=dtype)
    eight = str(make_gguf(kind="Q8_0").path)
    with pytest.raises(UserError, match="would change nothing"):
        open_checkpoint(eight, dtype="q8")


def test_refusals_name_the_reason(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"unknown dtype 'q5': use auto, .*q4 or q8"):
        open_checkpoint(str(folder), dtype="q5")
    if is_available()[0]:
        odd = write_target(tmp_path / "odd")
        with pytest.raises(UserError, match=r"'q4' can't be had for odd: .* head size divisible"):
            open_checkpoint(str(odd), dtype="q4")
    monkeypatch.setattr(loading, "is_available", lambda: (False, "it was not built"))
    with pytest.raises(UserError, match="'q8' needs the native CPU core, but it was not built"):
        open_checkpoint("no/such-model", dtype="q8")


@native
def test_few_bits_are_for_the_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match=r"'q4' is for the native CPU core, not for device 'cuda'"):
        open_checkpoint(str(folder), dtype="q4", device="cuda")
    assert open_checkpoint(str(folder), dtype="q4", device="auto").device.type == "cpu"


@native
def test_auto_falls_back_to_torch_and_says_so(
    make_gguf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(make_gguf(kind="Q8_0").path)
    monkeypatch.setattr(native_config, "_LANES", 48)
    checkpoint = open_checkpoint(path)
    assert not checkpoint.native
    assert "can't run tiny (the native core needs a hidden size divisible by 48" in caplog.text
    assert isinstance(checkpoint.load(), TorchDecoder)


@native
def test_a_float_draft_beside_a_native_target(folder: Path, tmp_path: Path) -> None:
    odd = write_target(tmp_path / "odd")
    llm = LLM(str(folder), dtype="q8", draft=str(odd), policy="fixed", engine=ENGINE)
    assert any("runs in torch" in note and "head size" in note for note in llm.notes)
    stored = LLM(
        str(folder), dtype="q8", draft=str(folder), draft_weights="stored", policy="fixed",
        engine=ENGINE,
    )  # fmt: skip
    assert isinstance(stored.engine.drafter.cache.model, TorchDecoder)  # type: ignore[attr-defined]
