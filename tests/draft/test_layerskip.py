"""The target as its own draft: parity, whose entries are in the cache, and when it stops."""

from __future__ import annotations

import json
from collections import Counter
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import CONFIG, PROMPTS, VOCAB, ScriptDrafter, ids, run, target
from scipy import stats
from skip_devices import KINDS, SkippingTable, tiny

from paceline import LLM
from paceline.core.tree import TokenTree
from paceline.draft.auto import AutoDrafter
from paceline.draft.layerskip import (
    MAX_DRAFT,
    ExitThreshold,
    LayerSkipDrafter,
    MaskFile,
    MaskTarget,
    Measured,
    SkipPlan,
    read_mask,
    skip_mask,
)
from paceline.draft.none import NoDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.errors import UserError
from paceline.models.base import LayerMask, TargetModel
from paceline.models.loading import open_checkpoint
from paceline.models.native import NativeKV, NativeModel
from paceline.registry import DraftSpec, plan_drafter
from paceline.sampling.law import build_laws
from paceline.types import Request, SamplingParams

GREEDY = SamplingParams(max_tokens=40)
#: By temperature; block verification asks for sampled chains, whose text depends on them.
RULES = {0.0: None, 1.0: "block"}
L = 3
EVERYTHING = skip_mask(L)


def engine(
    model: TargetModel | None = None,
    *,
    k: int = 4,
    mask: LayerMask | None = None,
    gamma: float = 0.3,
    config: EngineConfig = CONFIG,
) -> Engine:
    """Layer skipping on `model`, by default on a table that is right most of the time."""
    model = model or SkippingTable()
    mask = mask or skip_mask(model.info.n_layers, attention=[0])
    drafter = LayerSkipDrafter(SkipPlan(mask=mask, gamma=gamma))
    return Engine(model, drafter, FixedBudget(k), config, audit=True)


def plain(model: TargetModel | None = None, config: EngineConfig = CONFIG) -> Engine:
    return Engine(model or target(), NoDrafter(), FixedBudget(0), config, audit=True)


# On a table: text, cache, scheduling.


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_text_is_plain_text(k: int, block_size: int) -> None:
    """Greedy, and sampled with a seed under the walk, mixed in one batch; every pass checks
    whose entries it reads."""
    config = EngineConfig(kv_tokens=960, block_size=block_size, prefill_chunk=7, max_batch=8)
    params = [
        SamplingParams(max_tokens=40, temperature=t, seed=i, rule="walk" if i == 2 else None)
        for i, t in enumerate((0.0, 1.0, 0.7, 0.0, 1.3))
    ]
    outputs = run(engine(k=k, config=config), PROMPTS, params)
    assert ids(outputs) == ids(run(plain(), PROMPTS, params))
    assert all(o.stats.drafted > o.stats.accepted > 0 for o in outputs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_neither_text_nor_drafts(temperature: float) -> None:
    """A pool for two of five sequences. A resumed sequence keeps its threshold and sees the
    target's entries, not its own idea of them."""
    params = [
        SamplingParams(max_tokens=30, temperature=temperature, seed=i, rule=RULES[temperature])
        for i in range(len(PROMPTS))
    ]
    roomy = run(engine(gamma=0.4), PROMPTS, params)
    small = EngineConfig(kv_tokens=84, block_size=4, prefill_chunk=7, max_batch=8)
    tight = run(engine(gamma=0.4, config=small), PROMPTS, params)
    assert sum(o.stats.preemptions for o in tight) > 0
    assert ids(tight) == ids(roomy)
    assert [o.stats.drafted for o in tight] == [o.stats.drafted for o in roomy]
    assert [o.stats.proposed_at for o in tight] == [o.stats.proposed_at for o in roomy]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_company_does_not_matter(temperature: float) -> None:
    params = [
        SamplingParams(
            max_tokens=20 + i, temperature=temperature, seed=i, k=8 - i, rule=RULES[temperature]
        )
        for i in range(len(PROMPTS))
    ]

    def key(outputs):
        return [(o.token_ids, o.stats.drafted, o.stats.accepted) for o in outputs]

    solo = [key(run(engine(), [p], s))[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert key(run(engine(), PROMPTS, params)) == solo


def test_sampled_chains_keep_the_targets_law() -> None:
    """The joint of three tokens (the first is never drafted for) of 2000 samples, thresholds
    in effect; false alarm below 1e-9."""
    config = EngineConfig(kv_tokens=4096, block_size=4, prefill_chunk=128, max_batch=128)
    e = engine(gamma=0.35, config=config)
    prompt = (3, 1, 4)
    counts: Counter[tuple[int, ...]] = Counter()
    stops = 0
    for seed in range(2):
        params = SamplingParams(
            max_tokens=4, temperature=1.0, top_k=3, seed=seed, n=1000, rule="block"
        )
        for output in run(e, [prompt], params):
            counts[output.token_ids[:3]] += 1
            stops += output.stats.drafted < 2
    assert stops > 100  # else the threshold was not tried
    exact = dict(joint(prompt, 3, 3))
    assert set(counts) <= set(exact)
    expected = np.array(list(exact.values()))
    observed = np.array([counts[key] for key in exact])
    assert stats.chisquare(observed, 2000 * expected / expected.sum()).pvalue > 1e-9


def joint(prompt: tuple[int, ...], depth: int, top_k: int):
    """(tokens, probability) of all continuations under the target, by the plain law."""
    if depth == 0:
        yield (), 1.0
        return
    params = SamplingParams(temperature=1.0, top_k=top_k)
    logits = torch.from_numpy(target().logits(prompt)).unsqueeze(0)
    law = build_laws(logits, [params])[0]
    for token in range(VOCAB):
        p = law.probability(token)
        if p > 0:
            for rest, q in joint((*prompt, token), depth - 1, top_k):
                yield (token, *rest), p * q


def test_a_grammar_and_bans_bind_the_draft() -> None:
    """A banned favourite of the draft is never proposed, so it costs no acceptance."""
    favourite = int(np.argmax(target().logits((1, 2, 3))))
    params = SamplingParams(max_tokens=30, banned_tokens=(favourite,))
    output = run(engine(SkippingTable(target())), [(1, 2, 3)], params)[0]
    assert favourite not in output.token_ids
    assert output.stats.accepted == output.stats.drafted > 0


# When to stop.


def test_the_threshold_moves_as_published() -> None:
    t = ExitThreshold(0.5)
    t.update(8, 8)  # match rate 0.95: the threshold falls
    assert t.match_rate == pytest.approx(0.95)
    assert t.gamma == pytest.approx(0.9 * 0.5 + 0.1 * 0.49)
    t.update(0, 4)  # match rate 0.475: it rises
    assert t.match_rate == pytest.approx(0.475)
    assert t.gamma == pytest.approx(0.9 * 0.499 + 0.1 * 0.509)
    low, high = ExitThreshold(0.0), ExitThreshold(1.0)
    low.update(1, 1)
    high.update(0, 1)
    assert (low.gamma, high.gamma) == (0.0, 1.0)


def test_thresholds_are_each_sequences_own() -> None:
    """A perfect draft's threshold falls by a thousandth a round, another's is not touched."""
    e = engine(SkippingTable(target()), gamma=0.2)
    assert isinstance(e.drafter, LayerSkipDrafter)
    busy, plain_id = (
        e.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=60, k=k)))[0]
        for k in (4, 0)
    )
    for _ in range(6):
        e.step()
    first, second = e.scheduler.running
    assert (first.id, second.id) == (busy, plain_id)
    assert first.stats.accepted == first.stats.drafted
    assert e.drafter.gamma(first) == pytest.approx(0.2 - 0.001 * 5)
    assert e.drafter.gamma(second) == 0.2


def test_another_drafters_rounds_leave_the_threshold_alone() -> None:
    """In a combination, every second round is another's, and always wrong."""
    skipping = LayerSkipDrafter(SkipPlan(mask=skip_mask(1, attention=[0]), gamma=0.2))
    wrong = ScriptDrafter(lambda tokens: [int(np.argmin(target().logits(tuple(tokens))))])
    auto = AutoDrafter({"wrong": wrong, "layerskip": skipping})
    turns = cycle(auto.drafters)
    auto.route = lambda seq: next(turns)
    e = Engine(SkippingTable(target()), auto, FixedBudget(3), CONFIG, audit=True)
    e.submit(Request(prompt=(1, 2), params=SamplingParams(max_tokens=60)))
    for _ in range(11):
        e.step()
    (seq,) = e.scheduler.running
    assert seq.stats.accepted == 3 * 5
    assert seq.stats.drafted == 3 * 5 + 5
    assert skipping.gamma(seq) == pytest.approx(0.2 - 0.001 * 5)


class Recording(LayerSkipDrafter):
    """Keeps what was proposed, and for which text."""

    def __init__(self, plan: SkipPlan) -> None:
        super().__init__(plan)
        self.seen: list[tuple[tuple[int, ...], float, TokenTree]] = []

    def propose(self, seqs, budgets):
        known = [(tuple(s.tokens), self.gamma(s)) for s in seqs]
        trees = super().propose(seqs, budgets)
        self.seen += [(*k, t) for k, t, b in zip(known, trees, budgets, strict=True) if b]
        return trees


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_stops_behind_the_first_improbable_token(temperature: float) -> None:
    """Recomputed from the draft's logits: all tokens but the last reach the threshold, and
    the last one does not, where there was room for more; it is in the proposal all the same."""
    model = SkippingTable()
    drafter = Recording(SkipPlan(mask=skip_mask(1, attention=[0]), gamma=0.5))
    e = Engine(model, drafter, FixedBudget(16), CONFIG)
    rule = "block" if temperature else None
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=2, rule=rule)
    run(e, PROMPTS[:3], params)
    assert all(len(t) - 1 <= MAX_DRAFT for _, _, t in drafter.seen)
    early = 0
    for text, gamma, tree in drafter.seen:
        logits = [model.skipped.logits((*text, *tree.tokens[1:i])) for i in range(1, len(tree))]
        laws = [np.exp(x / (temperature or 1.0)) for x in logits]
        probs = [w[t] / w.sum() for w, t in zip(laws, tree.tokens[1:], strict=True)]
        assert all(p > gamma - 1e-5 for p in probs[:-1])
        if len(tree) - 1 < MAX_DRAFT and len(text) < 190:
            assert probs[-1] < gamma + 1e-5
            early += 1
    assert early > 50
    assert any(len(t) > 2 for _, _, t in drafter.seen)


@pytest.mark.parametrize(("gamma", "drafted"), [(0.0, 6), (1.0, 1)])
def test_extreme_thresholds(gamma: float, drafted: int) -> None:
    """A perfect draft that never stops, or behind every token; 29 = 1 + 4 * 7 = 1 + 14 * 2."""
    e = engine(SkippingTable(target()), gamma=gamma, k=6)
    stats = run(e, [(1, 2, 3)], SamplingParams(max_tokens=29))[0].stats
    assert stats.drafted == drafted * (stats.rounds - 1) == 28 * drafted / (drafted + 1)


# On real decoders.


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_that_skips_nothing_stays_perfect(kind: str, k: int) -> None:
    """300 tokens at temperature 0: one wrong cache entry would end it."""
    config = EngineConfig(kv_tokens=1024, block_size=16)
    e = engine(tiny(kind), k=k, mask=EVERYTHING, gamma=0.0, config=config)
    stats = run(e, [(1, 2, 3)], SamplingParams(max_tokens=300))[0].stats
    assert stats.accepted == stats.drafted > 0
    assert stats.rounds <= 2 + 300 / (k + 1)


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> TargetModel:
    return tiny(request.param)


SEEDED = SamplingParams(max_tokens=40, temperature=0.9, seed=5, rule="walk")


@pytest.fixture(scope="module")
def text(model: TargetModel) -> list[list[tuple[int, ...]]]:
    return [ids(run(plain(model), PROMPTS, p)) for p in (GREEDY, SEEDED)]


def masks() -> list[LayerMask]:
    """Every exit depth, and switches at random."""
    exits = [skip_mask(L, attention=range(i, L), mlp=range(i, L)) for i in range(L + 1)]
    rng = np.random.default_rng(7)
    return exits + [
        LayerMask(attention_L=tuple(map(bool, a)), mlp_L=tuple(map(bool, m)))
        for a, m in rng.integers(0, 2, (4, 2, L))
    ]


@pytest.mark.parametrize("mask", masks(), ids=lambda m: f"{sum(m.attention_L)}+{sum(m.mlp_L)}")
def test_every_mask_gives_plain_text(model: TargetModel, text, mask: LayerMask) -> None:
    e = engine(model, mask=mask, gamma=0.05)
    assert [ids(run(e, PROMPTS, p)) for p in (GREEDY, SEEDED)] == text
    assert e.stats.totals.drafted > 0


@pytest.mark.parametrize("block_size", [1, 16])
def test_the_cache_holds_what_plain_decoding_computes(model: TargetModel, block_size: int) -> None:
    """Entries of all committed positions while the sequence runs: bit for bit on the native
    core; in the torch decoder's float32 to rounding, which no draft's entry comes near."""
    config = EngineConfig(kv_tokens=256, block_size=block_size, prefill_chunk=8)
    mask = skip_mask(L, attention=[1], mlp=[0])
    engines = [plain(model, config), engine(model, mask=mask, gamma=0.0, config=config)]
    found = []
    for e in engines:
        e.submit(Request(prompt=PROMPTS[3], params=SamplingParams(max_tokens=60)))
        seq = e.scheduler.waiting[0]
        while seq.n_output < 40:
            e.step()
        at = np.arange(len(PROMPTS[3]) + 38)
        assert seq.computed >= len(at)
        slots = np.array(seq.table)[at // block_size] * block_size + at % block_size
        found.append((seq, slots, entries(e._kv, slots)))
    assert found[0][0].tokens[: len(at)] == found[1][0].tokens[: len(at)]
    assert found[1][0].stats.accepted < found[1][0].stats.drafted
    if isinstance(model, NativeModel):
        assert (found[0][2] == found[1][2]).all()
    else:
        assert np.abs(found[0][2] - found[1][2]).max() < 1e-4

    # The draft's own entries are far away: one of them would have shown.
    e, (seq, slots, before) = engines[1], found[1]
    assert isinstance(e.drafter, LayerSkipDrafter)
    e.drafter._forward([one_row(seq, len(at) - 1)], mask)
    change = np.abs(entries(e._kv, slots).astype(np.float32) - before.astype(np.float32))
    assert change[..., :-1, :].max() == 0.0
    assert change[..., -1, :].max() > 1e-2


def entries(kv, slots: np.ndarray) -> np.ndarray:
    """[..., S, E] keys and values of all layers."""
    if isinstance(kv, NativeKV):
        return kv.read(slots)
    both = torch.stack([kv.keys_L, kv.values_L])[:, :, torch.from_numpy(slots).long()]
    return both.transpose(2, 3).numpy().copy()


def one_row(seq, position: int):
    from paceline.draft.layerskip import _rows

    return _rows(seq, [seq.tokens[position]], position, wanted=1)


# Files and names.

TARGET = MaskTarget(name="tiny", n_layers=4, size=7, sha256="00")
FILE = MaskFile(
    target=TARGET,
    skip_attention=(1, 2),
    skip_mlp=(3,),
    gamma=0.4,
    max_draft=5,
    measured=Measured(tok_s=90.0, plain_tok_s=100.0, tau=1.9, acceptance=0.6),
    search={"trials": 12},
    command="paceline train layerskip",
)


def test_a_mask_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mask.json"
    FILE.write(path)
    assert read_mask(path) == FILE
    assert [p.name for p in path.parent.iterdir()] == ["mask.json"]
    plan = read_mask(path).plan
    assert plan.mask.attention_L == (True, False, False, True)
    assert plan.mask.mlp_L == (True, True, True, False)
    assert (plan.gamma, plan.max_draft) == (0.4, 5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"skip_mlp": [4]}, "layer 4 can't be skipped: there are 4"),
        ({"skip_attention": [-1]}, "skip_attention"),
        ({"gamma": 1.5}, "gamma"),
        ({"kind": "eagle"}, "kind"),
        ({"version": 2}, "version"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_damaged_mask_file_is_refused(tmp_path: Path, change: dict, why: str) -> None:
    path = tmp_path / "mask.json"
    path.write_text(json.dumps(FILE.model_dump(mode="json") | change))
    with pytest.raises(UserError, match=why):
        read_mask(path)


def test_what_is_no_json_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mask.json").write_text("weights")
    for path in (tmp_path / "mask.json", tmp_path / "none.json"):
        with pytest.raises(UserError, match=path.name):
            read_mask(path)


def test_a_mask_for_another_depth_is_refused() -> None:
    with pytest.raises(UserError, match=r"for 5 layers, but .* has 3"):
        engine(tiny("torch"), mask=skip_mask(5))
    with pytest.raises(UserError, match="gamma = 2"):
        SkipPlan(mask=EVERYTHING, gamma=2)
    with pytest.raises(UserError, match="max_draft = 0"):
        SkipPlan(mask=EVERYTHING, max_draft=0)


def test_by_name_on_real_weights(
    smollm_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 without some attentions, by file: the very text of plain decoding, and what
    the user should know is said. By bare name: the mask that was searched for this target
    here, else the one that comes with the package."""
    path = tmp_path / "mask.json"
    about = MaskTarget(name="smollm2-135m", n_layers=30, size=1, sha256="00")
    mask = FILE.model_copy(update={"target": about, "skip_attention": tuple(range(8, 20))})
    mask.write(path)
    config = EngineConfig(kv_tokens=512)
    llm = LLM("smollm2-135m", draft=f"layerskip:{path}", policy="fixed", engine=config)
    assert any("not for these weights" in note for note in llm.notes)
    assert any("0.90 times" in note for note in llm.notes)
    prompt = "def fibonacci(n):\n    "
    outputs = [
        llm.generate(prompt, SamplingParams(max_tokens=24, k=k, ignore_eos=True))[0] for k in (4, 0)
    ]
    assert outputs[0].token_ids == outputs[1].token_ids
    assert outputs[0].stats.drafted > 0 == outputs[1].stats.drafted

    target = open_checkpoint("smollm2-135m")

    def planned(name: str = "layerskip") -> SkipPlan:
        drafter = plan_drafter(DraftSpec(name=name), target, config).build()
        assert isinstance(drafter, LayerSkipDrafter)
        return drafter.plan

    monkeypatch.setattr("paceline.registry.mask_path", lambda name: tmp_path / f"{name}.json")
    monkeypatch.setattr("paceline.registry.shipped_folder", lambda: tmp_path / "heads")
    with pytest.raises(UserError, match="no mask of 'smollm2-135m' is known; search one with"):
        planned()
    mask.model_copy(update={"gamma": 0.1}).write(
        tmp_path / "heads" / "smollm2-135m" / "layerskip.json"
    )
    assert planned().gamma == 0.1
    mask.model_copy(update={"gamma": 0.2}).write(tmp_path / "smollm2-135m.json")
    assert planned().gamma == 0.2
    assert planned(f"layerskip:{path}") == mask.plan
    with pytest.raises(UserError, match=r"nowhere\.json' is not there"):
        planned("layerskip:nowhere.json")
    with pytest.raises(UserError, match="no tree"):
        DraftSpec(name="layerskip", tree="2x2")
    FILE.write(path)
    with pytest.raises(UserError, match="for 4 layers of 'tiny'"):
        planned(f"layerskip:{path}")
