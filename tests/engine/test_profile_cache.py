"""Profiles are kept between runs, by all that costs depend on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from simulated_machine import CONFIG, TARGET, Machine, SimulatedClock, machines

from paceline.core.latency import DraftCost, HostCost, Profile
from paceline.draft.ngram import NgramDrafter
from paceline.engine import profile as profiles
from paceline.engine.profile import (
    file_identity,
    load_profile,
    obtain_profile,
    profile_key,
    read_profile,
    save_profile,
)
from paceline.errors import UserError


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "profiles"


PROFILE = Profile(
    target=TARGET,
    drafts={"d": DraftCost(fixed=1e-3)},
    host={m: HostCost(step=1e-3, sequence=0.0, row=0.0) for m in ("greedy", "sampled")},
)


def test_profiles_are_kept(cache):
    assert load_profile("key") is None
    assert save_profile("key", PROFILE) == cache / "key.json"
    assert load_profile("key") == PROFILE
    assert [f.name for f in cache.iterdir()] == ["key.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 0}'])
def test_a_damaged_profile_is_measured_again(cache, caplog, text):
    save_profile("key", PROFILE)
    (cache / "key.json").write_text(text)
    assert load_profile("key") is None
    assert "measured again" in caplog.text


def test_a_cache_that_cant_be_written_is_no_error(monkeypatch, tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(file))
    assert save_profile("key", PROFILE) is None
    assert "can't be kept" in caplog.text


def test_the_key_names_all_that_costs_depend_on(monkeypatch):
    info = Machine(SimulatedClock(), TARGET).info
    key = profile_key(info, ["a", "b"], weights="w")
    assert key == profile_key(info, ["b", "a"], weights="w")
    others = [
        profile_key(info, ["a"], weights="w"),
        profile_key(info, ["a", "b"], weights="v"),
        profile_key(info, ["a", "b"], weights="w", depth="quick"),
        profile_key(replace(info, dtype="bfloat16"), ["a", "b"], weights="w"),
    ]
    monkeypatch.setenv("PACELINE_THREADS", "61")
    others.append(profile_key(info, ["a", "b"], weights="w"))
    assert len({key, *others}) == 6


def test_weights_are_told_apart(tmp_path):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"1")
    one = file_identity(file)
    assert one == file_identity(file)
    file.write_bytes(b"12")
    assert one != file_identity(file)
    assert "a.gguf" in file_identity(tmp_path)


def test_measured_once_then_known(cache):
    clock = SimulatedClock()
    target, drafter = machines(clock)
    said = []

    def get(**options):
        return obtain_profile(
            target, {"d": drafter}, CONFIG, clock=clock, on_measure=lambda: said.append(1),
            **options,
        )  # fmt: skip

    first = get(depth="quick")
    assert get(depth="quick") == first
    assert said == [1]
    full = get(depth="full")  # the quick one won't do
    assert full.meta["depth"] == "full"
    assert get(depth="quick") == full  # the better one will
    assert said == [1, 1]
    get(depth="quick", fresh=True)
    assert said == [1, 1, 1]
    assert profiles.hardware()["threads"] >= 1


def test_drafters_measured_together_are_known_alone(cache):
    clock = SimulatedClock()
    target, drafter = machines(clock)
    both = {"d": drafter, "ngram": NgramDrafter()}
    found = obtain_profile(target, both, CONFIG, clock=clock)

    def fail():
        raise AssertionError("measured again")

    for label in both:
        alone = obtain_profile(target, {label: both[label]}, CONFIG, clock=clock, on_measure=fail)
        assert alone.drafts == {label: found.drafts[label]}


def test_profiles_of_users(tmp_path):
    file = tmp_path / "p.json"
    with pytest.raises(UserError, match="can't be read"):
        read_profile(file)
    file.write_text("{}")
    with pytest.raises(UserError, match=r"p\.json.*--save-profile"):
        read_profile(file)
    file.write_text(json.dumps(PROFILE.to_json()))
    assert read_profile(file) == PROFILE
