"""The comparison itself: order, intervals, agreement, failures; and our own engine as an arm."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_data import provenance

from paceline.api import LLM
from paceline.bench.peers.base import PeerError, PeerInfo, PeerPrompt, PeerRun, Speculation
from paceline.bench.peers.choose import PeerOptions, context_of, peer_prompts
from paceline.bench.peers.compare import agreement, compare, order, rest, token_gaps
from paceline.bench.peers.ours import Ours
from paceline.bench.peers.records import PeerResult, load_peers
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError

PROMPTS = [
    PeerPrompt(id=f"p{i}", tokens=(1, 2, 3), text="a b c", synthetic=i == 0) for i in range(3)
]


class Scripted:
    """A peer whose times are given: first token at 1 s, then `rounds` of equal bursts."""

    def __init__(self, name: str, step_s: dict[str, float], **options: object) -> None:
        self.info = PeerInfo(
            name=name, version="1", model="m", precision="exact", modes=tuple(step_s)
        )
        self.step_s, self.log = step_s, []
        self.fails_at = options.get("fails_at")
        self.twist = options.get("twist")

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        self.log.append((mode, prompt.id, n))
        if self.fails_at is not None and len(self.log) > self.fails_at:
            raise PeerError("it fell over")
        burst = 1 if mode == "plain" else 2
        times = [1.0] + [1.0 + self.step_s[mode] * (1 + i // burst) for i in range(n - 1)]
        tokens = [7] * n
        if self.twist is not None:
            tokens[self.twist] = 8
        rounds = -(-(n - 1) // burst)
        told = Speculation.of_counts(rounds, 4 * rounds, n - 1 - rounds, "script")
        return PeerRun(
            n_tokens=n, seconds=times[-1], first=1.0, arrivals=tuple(times), tokens=tuple(tokens),
            speculation=told if mode != "plain" else None, prompt_tokens=len(prompt.tokens) + 1,
        )  # fmt: skip

    def close(self) -> None:
        pass


def measure(*peers: Scripted, repeats: int = 2):
    return compare(peers, PROMPTS, max_tokens=9, repeats=repeats, pause=lambda s: None)


def test_rates_and_ratios_follow_from_the_times() -> None:
    ours = Scripted("paceline", {"plain": 0.1, "speculative": 0.15})
    other = Scripted("other", {"plain": 0.2, "draft": 0.5}, twist=4)
    a, b, c, d = measure(ours, other)
    assert [x.label for x in (a, b, c, d)] == [
        "paceline, plain", "paceline, speculative", "other, plain", "other, draft",
    ]  # fmt: skip
    assert a.ours
    assert not c.ours
    assert a.decode_tok_s is not None
    assert a.decode_tok_s.value == pytest.approx(10.0)
    assert a.tok_s is not None
    assert a.tok_s.value == pytest.approx(9 / 1.8)
    assert (a.versus_ours, a.speedup, a.tau) == (None, None, None)
    assert b.speedup is not None
    assert b.speedup.value == pytest.approx(2 * 0.1 / 0.15)
    assert (b.speedup.low, b.speedup.high) == pytest.approx((4 / 3, 4 / 3))
    assert b.tau == pytest.approx(2.0)
    assert b.acceptance_rate == pytest.approx(0.25)
    assert c.versus_ours is not None
    assert c.versus_ours.value == pytest.approx(0.5)
    assert d.speedup is not None
    assert d.speedup.value == pytest.approx(2 * 0.2 / 0.5)  # a loss, shown as one
    assert d.versus_ours is not None
    assert d.versus_ours.value == pytest.approx(0.4)
    assert (b.same_text, b.compared, b.agreed) == (6, 6, 1.0)
    assert (d.same_text, d.compared) == (0, 6)
    assert d.agreed == pytest.approx(4 / 9)
    assert d.equal_lengths
    assert d.itl_token_s is not None
    assert d.itl_token_s.p50 == pytest.approx(0.25)
    assert d.itl_chunk_s is not None
    assert d.itl_chunk_s.p50 == pytest.approx(0.5)
    assert d.notes == ("a prompt of 3 tokens had 4 there",)
    assert len(d.shots) == 6


def test_arms_run_forwards_and_backwards_after_a_warm_up() -> None:
    assert order(3, 0, 0) == [0, 1, 2]
    assert order(3, 1, 0) == [2, 1, 0]
    assert order(3, 1, 1) == [0, 1, 2]
    log: list[tuple[str, str, int]] = []
    first, second = Scripted("paceline", {"plain": 0.1}), Scripted("b", {"plain": 0.1})
    first.log = second.log = log
    measure(first, second)
    assert [n for _, _, n in log[:2]] == [8, 8]
    assert len(log) == 2 + 2 * 3 * 2


def test_an_arm_that_fails_says_why_and_the_others_go_on() -> None:
    ours = Scripted("paceline", {"plain": 0.1})
    a, b, c = measure(ours, Scripted("b", {"plain": 1.0}, fails_at=3), Scripted("c", {"plain": 1}))
    assert b.error == "it fell over"
    assert b.decode_tok_s is None
    assert a.error is None
    assert c.error is None
    assert c.requests == 6
    with pytest.raises(PeerError):  # without the reference there is nothing to compare with
        measure(Scripted("paceline", {"plain": 0.1}, fails_at=2), ours)


def test_intervals_cover_the_ratio_of_noisy_times() -> None:
    """100 comparisons of 8 prompts, 5 repeats, true ratio 1.25. The 95 % interval misses in at
    most 20: more have probability below 1e-7 for an interval of that rate (binomial)."""
    rng = np.random.default_rng(3)

    class Noisy(Scripted):
        def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
            scale = 1 + 0.2 * int(prompt.id[1:])
            s = self.step_s[mode] * scale * float(rng.lognormal(0, 0.1))
            times = tuple(1.0 + s * i for i in range(n))
            return PeerRun(n_tokens=n, seconds=times[-1], first=1.0, arrivals=times)

    prompts = [PeerPrompt(id=f"p{i}", tokens=(1,), text="") for i in range(8)]
    missed = 0
    for seed in range(100):
        peers = [Noisy("paceline", {"plain": 0.10}), Noisy("b", {"plain": 0.08})]
        arm = compare(peers, prompts, max_tokens=5, repeats=5, seed=seed, pause=lambda s: None)[1]
        assert arm.versus_ours is not None
        missed += not arm.versus_ours.low <= 1.25 <= arm.versus_ours.high
    assert missed <= 20


def test_bursts_and_agreement() -> None:
    run = PeerRun(
        n_tokens=5, seconds=3.0, first=1.0, arrivals=(1.0, 1.0, 2.0, 3.0, 3.0), tokens=(1,) * 5
    )
    assert rest(run) == 3
    assert token_gaps(run) == [1.0, 0.5, 0.5]
    other = PeerRun(n_tokens=3, seconds=1.0, first=1.0, tokens=(1, 1, 1))
    assert agreement(run, other) == 3
    assert agreement(PeerRun(n_tokens=3, seconds=1.0, first=1.0), other) is None


def test_saved_and_read_again(tmp_path: Path) -> None:
    arms = measure(Scripted("paceline", {"plain": 0.1}))
    result = PeerResult(
        run=provenance(), model="m", draft="none", k=4, workload="random:16", synthetic_items=1,
        prompts=3, max_tokens=9, repeats=2, arms=arms,
    )  # fmt: skip
    path = result.save(tmp_path / "new")
    assert path.name == "peers-random-16.json"
    assert load_peers(tmp_path / "new") == [result]
    assert result.workload_label == "random:16 (partly synthetic)"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(UserError, match="no comparison of this version"):
        load_peers(tmp_path / "new")


def test_our_engine_as_an_arm() -> None:
    """Plain and speculative give one text, and what is counted adds up."""
    config = EngineConfig(kv_tokens=1024, prefix_cache=False)
    llm = LLM("smollm2-135m", draft="ngram", policy="fixed", k=4, engine=config)
    prompts = peer_prompts(llm, "code-edit", prompts=1, max_tokens=24)
    assert prompts[0].tokens == llm.chat_tokens([{"role": "user", "content": prompts[0].turns[0]}])
    assert "<|im_start|>" in prompts[0].text
    assert context_of(prompts, 24, 4) % 256 == 0
    plain, fast = compare([Ours(llm, "0", "ngram")], prompts, max_tokens=24, repeats=1)
    assert (fast.same_text, fast.compared, fast.equal_lengths) == (1, 1, True)
    assert plain.tau is None
    assert fast.tau is not None
    assert fast.tau > 1.2
    with pytest.raises(UserError, match="no prompt fits"):
        peer_prompts(llm, "code-edit", prompts=1, max_tokens=1020)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"specs": ()}, "no peer"),
        ({"specs": ("vllm",)}, "unknown"),
        ({"specs": ("llamacpp", "llamacpp")}, "twice"),
        ({"specs": ("transformers",), "python": "p"}, "--peer-python"),
        ({"specs": ("transformers",), "served_model": "m"}, "--peer-model"),
        ({"specs": ("http://h:1",), "key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE"),
    ],
)
def test_options_that_can_not_be(change: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        PeerOptions(model="m", **change)  # type: ignore[arg-type]


def test_options_that_can_be() -> None:
    PeerOptions(specs=("transformers", "llamacpp", "http://h:1", "vllm=https://h/v1"), model="m")
