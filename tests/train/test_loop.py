"""The loop: learns, resumes to the bit, ends cleanly, and writes what drafters read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_devices import write_target

from paceline import LLM, SamplingParams
from paceline.errors import UserError
from paceline.models.heads import EagleHead, MedusaHeads
from paceline.models.heads.formats import HeadNotes, open_head, save_head
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.train.data import Corpus
from paceline.train.loop import CHECKPOINT, LOG, TrainConfig, Trainer
from paceline.train.runs import HeadOptions, calibrate, make_objective, train_head
from paceline.train.target import read_tables


def opened(target: Path) -> Checkpoint:
    return open_checkpoint(str(target), dtype="float32")


def settings(**changes: object) -> TrainConfig:
    fields: dict[str, object] = {
        "lr": 3e-3, "steps": 8, "pack_tokens": 128, "eval_every": 4, "eval_packs": 2,
        "eval_steps": 3, "save_every": 3, "autocast": False,
    }  # fmt: skip
    return TrainConfig(**{**fields, **changes})  # type: ignore[arg-type]


def trainer(
    target: Path,
    data: Path,
    out: Path,
    config: TrainConfig,
    objective: str = "eagle3",
    *,
    prompts: bool = True,
) -> Trainer:
    options = HeadOptions(
        objective=objective, vocabulary=120, steps=3, heads=2, loss_warmup=4, prompts=prompts
    )
    corpus = Corpus(data, held_out=8)
    checkpoint = opened(target)
    made = make_objective(
        options, corpus, checkpoint, read_tables(checkpoint, torch.float32),
        seed=config.seed, dtype=torch.float32,
    )  # fmt: skip
    return Trainer(made, corpus, config, out)


def weights(t: Trainer) -> dict[str, torch.Tensor]:
    return {name: w.clone() for name, w in t.objective.module.state_dict().items()}


@pytest.mark.parametrize("objective", ["eagle3", "eagle1", "medusa"])
def test_a_killed_run_ends_with_the_same_bits(
    objective: str, tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    config = settings(accumulate=2)
    whole = trainer(tiny_target, tiny_capture, tmp_path / "a", config, objective)
    assert whole.run().finished

    class Kill(Exception):
        pass

    def kill(snapshot) -> None:
        if snapshot.step == 5:
            raise Kill  # the last checkpoint is that of update 3

    killed = trainer(tiny_target, tiny_capture, tmp_path / "b", config, objective)
    with pytest.raises(Kill):
        killed.run(kill)
    again = trainer(tiny_target, tiny_capture, tmp_path / "b", config, objective)
    assert again.resumed
    assert again.step == 3
    result = again.run()
    assert result.finished
    for name, w in weights(whole).items():
        assert torch.equal(w, weights(again)[name]), name
    logs = [(tmp_path / d / LOG).read_text().splitlines() for d in "ab"]
    losses = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


def test_a_stopped_run_is_whole_and_other_settings_are_refused(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    run = trainer(tiny_target, tiny_capture, tmp_path, settings())
    result = run.run(stop=lambda step: step == 2)
    assert not result.finished
    assert result.step == 2
    with pytest.raises(UserError, match="another config"):
        trainer(tiny_target, tiny_capture, tmp_path, settings(lr=1e-3))
    (tmp_path / CHECKPOINT).write_bytes(b"no checkpoint")
    with pytest.raises(UserError, match="delete it to begin anew"):
        trainer(tiny_target, tiny_capture, tmp_path, settings())


def test_ctrl_c_checkpoints_behind_the_update_under_way(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    run = trainer(tiny_target, tiny_capture, tmp_path, settings(save_every=100))

    def interrupt(snapshot) -> None:
        if snapshot.step == 2:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = run.run(interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    assert not result.finished
    assert 2 <= result.step <= 3
    assert trainer(
        tiny_target, tiny_capture, tmp_path, settings(save_every=100)
    ).step == result.step  # fmt: skip


def test_a_time_limit_ends_the_schedule(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    config = settings(steps=100000, minutes=0.02, eval_every=10**6)
    seen = []
    result = trainer(tiny_target, tiny_capture, tmp_path, config).run(seen.append)
    assert result.finished
    assert result.step < 100000
    assert seen[-1].lr < 0.4 * config.lr
    assert len(seen[0].rates.agree) == 1
    assert len(seen[-1].rates.agree) == 3  # unrolled steps grow by the clock, too
    assert result.held_out is not None


@pytest.mark.parametrize(
    ("objective", "updates", "least"),
    [("eagle3", 150, (0.8, 0.7)), ("eagle1", 200, (0.75, 0.6)), ("medusa", 200, (0.8, 0.75))],
)
def test_a_head_learns_its_target(
    objective: str,
    updates: int,
    least: tuple[float, ...],
    tiny_target: Path,
    tiny_capture: Path,
    tmp_path: Path,
) -> None:
    """Eight answers by heart; seeded, so no false alarm by chance."""
    config = settings(
        steps=updates, pack_tokens=256, lr=1e-2, clip=5.0, eval_every=10**6, save_every=10**6
    )
    run = trainer(tiny_target, tiny_capture, tmp_path, config, objective, prompts=False)
    run.corpus.training = run.corpus.training[:8]
    run._held_out = run.corpus.packs(run.corpus.training, 512)
    before = run.evaluate()
    result = run.run()
    assert result.held_out is not None
    agree = result.held_out.agree
    assert all(a >= b for a, b in zip(agree, least, strict=False)), agree
    assert agree[0] > before.agree[0] + 0.2
    assert result.held_out.overlap[0] > before.overlap[0]
    assert result.held_out.tau > 1 + least[0]
    check_drafts(run, tiny_target, tmp_path / "head")


def check_drafts(run: Trainer, target: Path, folder: Path) -> None:
    """The written head drafts in the engine: the plain text, in fewer rounds."""
    module = run.objective.module
    assert isinstance(module, EagleHead | MedusaHeads)
    run.corpus.held_out = []
    accuracy = calibrate(module, run.corpus) if isinstance(module, MedusaHeads) else ()
    save_head(module, folder, dtype="float32", notes=HeadNotes(accuracy_MJ=accuracy))
    prompts = []
    for i in run.corpus.training:
        record = run.corpus.sequence(i, ())
        first_law = int(record.law_T.nonzero()[0])  # behind the prompt's last token
        prompts.append(record.tokens_T[: first_law + 1].tolist())
    params = SamplingParams(max_tokens=20)
    found = {}
    for draft in ("none", str(folder)):
        llm = LLM(str(target), dtype="float32", draft=draft, policy="fixed", k=4)
        outputs = llm.generate(prompts, params)
        rounds = sum(o.stats.rounds for o in outputs)
        tau = (sum(o.stats.accepted for o in outputs) + rounds) / rounds
        found[draft] = ([o.token_ids for o in outputs], tau)
    assert found["none"][0] == found[str(folder)][0]
    assert found[str(folder)][1] > 1.5


def test_the_written_head_is_found_with_its_provenance(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    options = HeadOptions(objective="medusa", vocabulary=120, heads=2)
    result = train_head(
        opened(tiny_target), [tiny_capture], tmp_path, options, settings(), command="paceline x"
    )
    assert result.finished
    source = open_head(tmp_path / "head", n_layers=8, vocab_size=260)
    assert source.kind == "medusa"
    facts = source.about.provenance
    assert facts["command"] == "paceline x"
    assert facts["data_sha256"] == Corpus(tiny_capture).sha256
    assert facts["target_sha256"] == Corpus(tiny_capture).info.target_sha256
    assert len(source.about.accuracy_MJ) == 2
    assert all(0 <= a <= 1 for row in source.about.accuracy_MJ for a in row)


def test_a_trained_head_is_trained_on(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    """The second run begins with the first one's weights and vocabulary."""
    target, corpus = opened(tiny_target), Corpus(tiny_capture)
    tables = read_tables(target, torch.float32)
    first = HeadOptions(objective="eagle3", vocabulary=120, steps=1)
    train_head(target, [tiny_capture], tmp_path, first, settings(), save_dtype="float32")
    folder = str(tmp_path / "head")

    def made(**fields: object) -> EagleHead:
        given = {"init": folder, "steps": 3, **fields}
        options = replace(first, **given)  # type: ignore[arg-type]
        objective = make_objective(options, corpus, target, tables, seed=5, dtype=torch.float32)
        assert isinstance(objective.module, EagleHead)
        return objective.module

    written = open_head(folder, n_layers=8, vocab_size=260).load().module.state_dict()
    begun = made()
    assert begun.training
    assert begun.state_dict().keys() == written.keys()
    assert all(torch.equal(w, written[name]) for name, w in begun.state_dict().items())
    with pytest.raises(UserError, match="--vocabulary 120"):
        made(vocabulary=100)
    with pytest.raises(UserError, match="unknown init 'nowhere'"):
        replace(first, init="nowhere")
    medusa = HeadOptions(objective="medusa", vocabulary=120, heads=2)
    train_head(target, [tiny_capture], tmp_path / "m", medusa, settings())
    with pytest.raises(UserError, match="holds medusa"):
        made(init=str(tmp_path / "m" / "head"))


def test_what_does_not_fit_is_refused_before_training(
    tiny_target: Path, tiny_capture: Path, tmp_path: Path
) -> None:
    other = opened(write_target(tmp_path / "other", seed=1))
    eagle = HeadOptions(objective="eagle3", vocabulary=120)
    with pytest.raises(UserError, match="captured from"):
        train_head(other, [tiny_capture], tmp_path / "out", eagle, settings())
    with pytest.raises(UserError, match="unknown dtype"):
        train_head(
            opened(tiny_target),
            [tiny_capture],
            tmp_path / "out",
            eagle,
            settings(),
            save_dtype="int3",
        )
    with pytest.raises(UserError, match=r"no capture\.json"):
        train_head(opened(tiny_target), [tmp_path], tmp_path / "out", eagle, settings())
    with pytest.raises(UserError, match="unknown objective"):
        HeadOptions(objective="eagle9")
    with pytest.raises(UserError, match="grow = 2"):
        HeadOptions(objective="eagle3", grow=2)
    with pytest.raises(UserError, match="lr = 0"):
        settings(lr=0)
    assert not (tmp_path / "out").exists()


def test_the_command_survives_a_kill(tiny_target: Path, tiny_capture: Path, tmp_path: Path) -> None:
    """`kill -9` in the middle; the same command goes on and ends."""
    command = [
        sys.executable, "-m", "paceline", "train", "eagle3", "--model", str(tiny_target),
        "--data", str(tiny_capture), "--out", str(tmp_path), "--vocabulary", "120",
        "--epochs", "3", "--pack-tokens", "128", "--save-every", "1", "--threads", "1",
        "--f32", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / CHECKPOINT).exists() and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.kill()
    process.wait()
    corpus = Corpus(tiny_capture)
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)["state"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout.splitlines()[-1])
    assert value["finished"]
    assert 0 < state["step"] < value["updates"]
    assert "going on behind update" in done.stderr
    # packs differ a little between epochs
    assert value["tokens"] == pytest.approx(3 * corpus.tokens(corpus.training), rel=0.1)
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert open_head(tmp_path / "head", n_layers=8, vocab_size=260).kind == "eagle3"
