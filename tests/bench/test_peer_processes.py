"""Peers in processes of their own: the greedy loops, and processes that die or stay silent."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.bench.peers import LlamaCpp, PeerError, PeerPrompt, Transformers, process
from paceline.bench.peers.environments import (
    Recipe,
    command,
    explicit_flags,
    find_llamacpp,
    llamacpp_recipes,
    prepare,
    probe_llamacpp,
)
from paceline.bench.peers.process import Worker, died

PROMPT = PeerPrompt(id="a", tokens=(1, 4, 2, 9, 1, 4), text="")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's Python finds a stand-in for llama-cpp-python."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("fake_llama")))


def llamacpp(model: str = "m.gguf", draft: str | None = None, **options: int) -> LlamaCpp:
    path = None if draft is None else Path(draft)
    return LlamaCpp(sys.executable, Path(model), threads=1, draft=path, **options)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("k", [1, 4, 7])
def test_llamacpp_loops_give_one_text(k: int) -> None:
    peer = llamacpp(draft="draft.gguf", k=k)
    try:
        runs = {mode: peer.generate(mode, PROMPT, 23) for mode in peer.info.modes}
        again = peer.generate("draft", PROMPT, 23)
    finally:
        peer.close()
    assert set(runs) == {"plain", "lookup", "draft"}
    assert len({r.tokens for r in (*runs.values(), again)}) == 1
    for mode, run in runs.items():
        assert run.n_tokens == 23
        assert list(run.arrivals) == sorted(run.arrivals)
        if mode == "plain":
            assert run.speculation is None
        else:
            told = run.speculation
            assert told is not None
            assert told.rounds is not None
            assert told.accepted is not None
            assert told.drafted is not None
            assert told.rounds + told.accepted == 22  # prefill brought one
            assert 0 < told.accepted <= told.drafted <= k * told.rounds
            assert len(set(run.arrivals)) == told.rounds + 1
    assert runs["draft"].speculation == again.speculation


@pytest.mark.usefixtures("fake")
def test_llamacpp_refusals() -> None:
    with pytest.raises(PeerError, match="failed to load model"):
        llamacpp("broken.gguf")
    with pytest.raises(PeerError, match="vocabulary"):
        llamacpp(draft="other.gguf")
    with pytest.raises(PeerError, match="died of SIGILL"):
        llamacpp("sigill.gguf")
    with pytest.raises(PeerError, match=r"reads \.gguf files"):
        llamacpp("folder")


@pytest.mark.usefixtures("fake")
def test_a_probe_sees_an_illegal_instruction_and_the_next_build_is_taken() -> None:
    assert probe_llamacpp(sys.executable, Path("sigill.gguf")) == -4
    assert probe_llamacpp(sys.executable, Path("fine.gguf")) == 0
    said: list[str] = []
    made: list[Recipe] = []

    def make(recipe: Recipe, say: object) -> Path:
        made.append(recipe)
        return Path(recipe.name)

    flags = {"avx", "avx2", "avx512f", "amx_int8"}
    python, how = find_llamacpp(
        Path("m"), say=said.append, make=make, flags=flags,
        probe=lambda python, model: 0 if "without-amx" in python else -4,
    )  # fmt: skip
    assert "without-amx" in python
    assert how.startswith("-DGGML_NATIVE=OFF")
    assert [r.env["CMAKE_ARGS"] for r in made] == ["-DGGML_NATIVE=ON", how]
    assert "died of SIGILL" in said[0]
    with pytest.raises(PeerError, match=r"no build of llama\.cpp works"):
        find_llamacpp(Path("m"), say=said.append, make=make, flags=flags, probe=lambda *_: -4)
    with pytest.raises(PeerError, match="ended with status 1"):
        find_llamacpp(Path("m"), "given", probe=lambda *_: 1)


def test_build_flags_name_every_instruction_set_but_amx() -> None:
    amx = {"amx_tile", "amx_int8", "amx_bf16"}
    full = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx2"}
    assert explicit_flags(full | amx) == (
        "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON"
    )
    # Parts of AVX-512 alone are not what llama.cpp's option stands for.
    assert explicit_flags({"avx2", "avx512f", "avx512_vnni"}) == "-DGGML_NATIVE=OFF -DGGML_AVX2=ON"
    assert len(llamacpp_recipes({"avx2"})) == 1
    assert len(llamacpp_recipes({"avx2", "amx_int8"})) == 2


def test_an_environment_is_made_once_and_again_when_its_recipe_changes(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(args: Seq[str], env: object) -> None:
        ran.append(" ".join(args[1:4]))
        if "venv" in args:
            Path(args[-1]).mkdir(exist_ok=True)
        if "broken" in args:
            raise PeerError("pip said no")

    def make(recipe: Recipe) -> Path:
        ran.clear()
        return prepare(recipe, lambda text: None, tmp_path, run)

    recipe = Recipe(name="peer", install=("thing",), remove=("other",))
    assert make(recipe) == tmp_path / "peer" / "bin" / "python"
    assert ran == ["-m venv --clear", "-m pip install", "-m pip uninstall"]
    make(recipe)
    assert ran == []
    with pytest.raises(PeerError, match="pip said no"):
        make(Recipe(name="peer", install=("broken",)))
    make(recipe)  # the failed one left nothing that counts as ready
    assert len(ran) == 3
    with pytest.raises(PeerError, match=r"ended with status 3: .*words"):
        command([sys.executable, "-c", "print('last words'); raise SystemExit(3)"])


def test_processes_that_die_or_stay_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    monkeypatch.setattr(process, "WORKER", script)
    script.write_text("import sys\nsys.stderr.write('first\\nlast words\\n')\nsys.exit(3)")
    worker = Worker(sys.executable, "x")
    with pytest.raises(PeerError, match=r"ended with status 3.*last words"):
        worker.ask("load")
    worker.close()
    script.write_text("import time\ntime.sleep(60)")
    worker = Worker(sys.executable, "x", timeout=0.2)
    with pytest.raises(PeerError, match="no answer to 'load' in 0 s"):
        worker.ask("load")
    worker.close()
    worker.close()
    with pytest.raises(PeerError, match="can't be run"):
        Worker(str(tmp_path / "none"), "x")
    assert died(-9) == "died of SIGKILL"
    assert died(-99) == "died of signal 99"


def test_transformers_on_a_tiny_model(tmp_path: Path) -> None:
    """Plain, look-up and draft give one text in float32, past the end-of-sequence."""
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
            eos_token_id=list(range(13)),
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    peer = Transformers(
        tmp_path / "target", threads=1, dtype="float32", draft=tmp_path / "draft", k=3
    )
    try:
        runs = {mode: peer.generate(mode, PROMPT, 12) for mode in peer.info.modes}
    finally:
        peer.close()
    assert peer.info.precision == "float32"
    assert {r.n_tokens for r in runs.values()} == {12}
    assert len({r.tokens for r in runs.values()}) == 1
    assert runs["plain"].speculation is None
    for run in runs.values():
        assert list(run.arrivals) == sorted(run.arrivals)
    for mode in ("lookup", "draft"):
        told = runs[mode].speculation
        assert told is not None
        assert told.rounds is not None
        assert told.accepted is not None
        assert told.rounds + told.accepted == 12
        assert len(set(runs[mode].arrivals)) == told.rounds
