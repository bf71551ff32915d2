"""EAGLE heads on the native core: the numbers of the torch path, and drafts in one call.

Tight bounds are those of fp16 keys and values; weights that bfloat16 holds exactly are not
rounded. Quantised weights are compared with their own dequantised values, so that what is left
is the 8-bit rounding of activations.
"""

from __future__ import annotations

import logging
import math

import pytest
import torch
from head_devices import (
    PROMPTS,
    VOCAB,
    Recorder,
    eagle,
    eagle_config,
    engine,
    native_target,
    random_eagle,
    run,
)
from native_devices import same_bits

from paceline.core.shapes import Beam
from paceline.draft.none import NoDrafter
from paceline.models.heads import EagleHead
from paceline.models.heads.eagle_native import Ask, Grown, NativeEagle
from paceline.models.heads.eagle_torch import TorchEagle
from paceline.models.heads.kernels import Kernels
from paceline.models.heads.passes import EagleRunner, Part, Rows
from paceline.models.heads.ranking import best_tokens
from paceline.models.heads.runtime import eagle_runner
from paceline.models.native import NativeLinear, NativeModel, is_available
from paceline.types import SamplingParams

pytestmark = pytest.mark.skipif(not is_available()[0], reason="the native core was not built")

SHAPES = (
    ("eagle1", {}),
    ("eagle3", {}),
    ("eagle3", {"norm_before_fc": True}),
    ("eagle3", {"norm_before_residual": True, "intermediate": 176}),
)
EXACT = Kernels(threads=1, body=None, head=None)
#: More rows than go through the layer together, and more keys than one split of attention.
LONG = 300


@pytest.fixture(scope="module")
def target() -> NativeModel:
    return native_target()


def head_of(target: NativeModel, kind: str = "eagle3", **extra: object) -> EagleHead:
    """Random, with weights that bfloat16 holds."""
    head = random_eagle(eagle_config(kind, 90, **extra), target)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(p.bfloat16())
    return head


def taps_of(head: EagleHead, n: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 96 * len(head.config.taps), generator=g)


def tokens_of(n: int) -> list[int]:
    return [(7 * i + i * i) % VOCAB for i in range(n)]


def filled(
    runner: EagleRunner, head: EagleHead, n: int, seed: int = 1
) -> tuple[Rows, torch.Tensor]:
    """A cache of n committed rows and the last one's output [1, D]."""
    cache = runner.new_cache()
    taps = taps_of(head, n, seed)
    out = runner.feed([Part(cache, 0, n)], tokens_of(n), taps, range(n))
    cache.rows = n
    return cache, out


def step(runner: EagleRunner, cache: Rows, at: int, token: int, g: torch.Tensor) -> torch.Tensor:
    return runner.run([Part(cache, at, 1)], [token], g, [at])


def close(got: torch.Tensor, want: torch.Tensor, share: float) -> bool:
    return bool((got - want).abs().max() < share * want.std())


@pytest.mark.parametrize(("kind", "extra"), SHAPES)
def test_passes_are_those_of_torch(kind: str, extra: dict[str, object], target) -> None:
    """A long prompt, then a tree; two sequences in one pass."""
    head = head_of(target, kind, **extra)
    native, torch_ = NativeEagle(head, target, EXACT), TorchEagle(head, target)
    found = []
    for runner in (native, torch_):
        with torch.inference_mode():
            (a, _), (b, _) = filled(runner, head, LONG), filled(runner, head, 20, 2)
            more = taps_of(head, 14, 3)
            both = [Part(a, LONG, 5, 2), Part(b, 20, 9)]
            places = [*range(LONG, LONG + 5), *range(20, 29)]
            fed = runner.feed(both, tokens_of(14), more, places)
            a.rows, b.rows = LONG + 5, 29
            at = a.rows
            tree = Part(a, at, 4, 4, above=[[], [], [at], [at, at + 2]])
            g = torch.randn(5, 96, generator=torch.Generator().manual_seed(4))
            places = [at, at, at + 1, at + 2, 29]
            grown = runner.run([tree, Part(b, 29, 1)], tokens_of(5), g, places)
            found.append((fed, grown, runner.logits(grown)))
    for got, want in zip(*found, strict=True):
        assert close(got, want, 0.01)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("bits", ["q4", "q8"])
def test_quantised_weights_are_those_that_were_packed(bits, kind: str, target) -> None:
    head = head_of(target, kind)
    runner = NativeEagle(head, target, Kernels(threads=1, body=bits, head=bits))
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 2:
                packed = NativeLinear.from_float(p, quantize=bits)
                p.copy_(torch.stack([packed.row(i) for i in range(p.shape[0])]))
        reference = TorchEagle(head, target)
        (_, got), (_, want) = filled(runner, head, 40), filled(reference, head, 40)
        assert (got - want).std() < 0.08 * want.std()
        error = runner.logits(want) - reference.logits(want)
        assert error.std() < 0.02 * reference.logits(want).std()


@pytest.mark.parametrize(("kind", "extra"), SHAPES)
def test_a_row_does_not_depend_on_the_others(kind: str, extra: dict[str, object], target) -> None:
    """Alone or in a pass of many, in chunks of any size, with one thread or three."""
    head = head_of(target, kind, **extra)
    runners = [NativeEagle(head, target, Kernels(threads=t)) for t in (1, 3)]
    taps, tokens = taps_of(head, LONG), tokens_of(LONG)
    outputs = []
    for runner, sizes in (
        (runners[0], [LONG]),
        (runners[1], [1, 7, 130, 162]),
        (runners[1], [LONG]),
    ):
        cache, at, parts = runner.new_cache(), 0, []
        for n in sizes:
            part = Part(cache, at, n, n)
            out = runner.feed([part], tokens[at : at + n], taps[at : at + n], range(at, at + n))
            parts.append(out)
            at += n
            cache.rows = at
        outputs.append(torch.cat(parts))
    assert same_bits(outputs[0], outputs[1])
    assert same_bits(outputs[0], outputs[2])
    logits = runners[0].logits(outputs[0])
    assert same_bits(runners[1].logits(outputs[0][70:71]), logits[70:71])


def by_steps(runner: NativeEagle, cache: Rows, hidden: torch.Tensor, ask: Ask) -> Grown:
    """The chain that one-row passes give."""
    tokens, scores = [-1], [0.0]
    for depth in range(ask.depth):
        ids, found = best_tokens(runner.logits(hidden), [ask.heat], 1)
        tokens.append(int(runner.target_ids[ids[0][0]]))
        scores.append(scores[-1] + found[0][0])
        if tokens[-1] in ask.end_ids:
            break
        hidden = step(runner, cache, cache.rows + depth, tokens[-1], hidden)
    return Grown(hidden, tokens, list(range(-1, len(tokens) - 1)), scores, True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("kind", "extra"), SHAPES)
def test_a_chain_is_its_steps(kind: str, extra: dict[str, object], threads: int, target) -> None:
    """Bit for bit, across the border of a split of attention, several sequences at once; up to
    a token that ends it."""
    head = head_of(target, kind, **extra)
    runner = NativeEagle(head, target, Kernels(threads=threads))
    asks, want = [], []
    for n, depth, heat in ((252, 8, 1.0), (20, 3, 0.7), (1, 1, 1.0)):
        cache, hidden = filled(runner, head, n, n)
        asks.append(Ask(cache=cache, hidden_D=hidden[0], depth=depth, heat=heat))
        want.append(by_steps(runner, cache, hidden, asks[-1]))
    assert runner.grow(asks, 1) == want
    assert runner.grow(asks[:1], 1) == want[:1]
    end = want[0].tokens[3]
    ask = Ask(
        cache=asks[0].cache, hidden_D=asks[0].hidden_D, depth=8, end_ids=frozenset({end, VOCAB + 1})
    )
    (stopped,) = runner.grow([ask], 1)
    assert stopped.tokens == want[0].tokens[: want[0].tokens.index(end) + 1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_rows_come_with_the_draft(kind: str, threads: int, target) -> None:
    """Fed in the same call, or before it: the same bits; beside a draft that brings none. Rows of
    a whole prompt, and a few that come in pieces."""
    head = head_of(target, kind)
    runner = NativeEagle(head, target, Kernels(threads=threads))
    want, asks = [], []
    for n, new in ((LONG, LONG), (260, 5), (20, 0), (9, 2)):
        whole, _ = filled(runner, head, n, n)
        (grown,) = runner.grow([Ask(cache=whole, hidden_D=_output(runner, head, n), depth=4)], 3)
        want.append((grown, _output(runner, head, n)))
        cache, hidden = runner.new_cache(), None
        if n > new:
            at = n - new
            part = [Part(cache, 0, at)]
            hidden = runner.feed(part, tokens_of(n)[:at], taps_of(head, n, n)[:at], range(at))[0]
            cache.rows = at
        taps = taps_of(head, n, n)[n - new :] if new else None
        tokens = tokens_of(n)[n - new :]
        asks.append(Ask(cache=cache, hidden_D=hidden, tokens=tokens, taps_NT=taps, depth=4))
    found = runner.grow(asks, 3)
    assert [a.cache.rows for a in asks] == [LONG, 260, 20, 9]
    for got, (grown, hidden_D) in zip(found, want, strict=True):
        assert got == grown
        assert same_bits(got.hidden_D, hidden_D)


def _output(runner: EagleRunner, head: EagleHead, n: int) -> torch.Tensor:
    """Of the last of n rows."""
    return filled(runner, head, n, n)[1][0]


PLAIN = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=0.8, seed=3),
)


@pytest.mark.parametrize(
    "shape",
    [
        None,
        Beam(nodes=9, width=3, depth=4),
        Beam(nodes=3, width=1),
        Beam(nodes=60, width=10, depth=3),
    ],
)
@pytest.mark.parametrize(("kind", "window"), [("eagle1", 256), ("eagle3", 256), ("eagle3", 5)])
def test_proposals_at_once_are_those_level_by_level(
    kind: str, window: int, shape, target, monkeypatch
) -> None:
    """Batches of requests, some of which need all logits; stop tokens; texts of plain decoding."""
    monkeypatch.setattr("paceline.draft.eagle_state.WINDOW", window)
    head = head_of(target, kind)
    params = [
        *PLAIN,
        SamplingParams(max_tokens=12, banned_tokens=(5, 6)),
        SamplingParams(max_tokens=12, stop_token_ids=tuple(range(0, VOCAB, 7))),
        SamplingParams(max_tokens=9),
    ]
    plain = run(engine(target, NoDrafter()), PROMPTS, params)
    seen = []
    for at_once in (True, False):
        drafter = eagle(target, kind, head=head, shape=shape, kernels=Kernels.of(target))
        if not at_once:
            monkeypatch.setattr(drafter, "_grow_at_once", lambda growing: growing)
        recorder = Recorder(drafter)
        outputs = run(engine(target, drafter, 5), PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
        seen.append(recorder.seen)
    assert len(seen[0]) > 20
    assert seen[0] == seen[1]
    assert any(not tree.is_chain for _, _, tree in seen[0]) == (
        shape is not None and shape.width > 1
    )


def test_plain_requests_take_one_call(target, monkeypatch) -> None:
    """Python sees no logits for them."""
    drafter = eagle(target, kernels=Kernels.of(target))
    e = engine(target, drafter)
    monkeypatch.setattr(drafter._runner, "logits", None)
    for params in PLAIN:
        assert sum(o.stats.drafted for o in run(e, PROMPTS, params)) > 0


def test_a_broken_head_proposes_nothing_and_says_so(target, caplog) -> None:
    head = head_of(target)
    with torch.no_grad():
        head.norm.weight.fill_(torch.nan)
    for shape in (None, Beam(nodes=4)):
        drafter = eagle(target, head=head, shape=shape, kernels=Kernels.of(target))
        with caplog.at_level(logging.WARNING):
            outputs = run(engine(target, drafter), PROMPTS, PLAIN[0])
        assert sum(o.stats.drafted for o in outputs) == 0
        assert "NaN" in caplog.text
        caplog.clear()


def test_a_head_with_its_own_embeddings(target) -> None:
    head = head_of(target)
    own = torch.randn(VOCAB, 96, generator=torch.Generator().manual_seed(8))
    native = NativeEagle(head, target, EXACT, own)
    (_, got), (_, want) = filled(native, head, 9), filled(TorchEagle(head, target, own), head, 9)
    assert close(got, want, 0.01)
    assert not close(got, filled(NativeEagle(head, target, EXACT), head, 9)[1], 0.1)


def test_shapes_without_kernels_run_on_torch(target) -> None:
    head = random_eagle(eagle_config("eagle3", 90, intermediate=100), target)
    assert isinstance(eagle_runner(head, target, Kernels.of(target)), TorchEagle)
    assert isinstance(eagle_runner(head_of(target), target, Kernels.of(target)), NativeEagle)


def test_what_does_not_fit_is_refused(target) -> None:
    head = head_of(target)
    runner = NativeEagle(head, target, EXACT)
    cache, hidden = filled(runner, head, 5)
    with pytest.raises(ValueError, match="token or position"):
        step(runner, cache, 5, VOCAB, hidden)
    with pytest.raises(ValueError, match="earlier rows only"):
        runner.run([Part(cache, 5, 1, 1, above=[[6]])], [1], hidden, [5])
    with pytest.raises(ValueError, match="row arrays"):
        runner.feed([Part(cache, 5, 1)], [1], hidden, [5])
    with pytest.raises(ValueError, match="fewer rows"):
        cache.rows = 1 << 20
    other = NativeEagle(head_of(target, n_kv_heads=1), target, EXACT)
    with pytest.raises(ValueError, match="another head"):
        step(other, cache, 5, 1, hidden)


@pytest.mark.parametrize("size", [1, 16, 90, 1000])
def test_the_best_of_many_logits(size: int) -> None:
    g = torch.Generator().manual_seed(size)
    logits = torch.randn(3, size, generator=g)
    heats, count = [1.0, 0.3, 2.0], min(size, 7)
    ids, scores = best_tokens(logits, heats, 7)
    law = (logits / torch.tensor(heats).unsqueeze(-1)).double().log_softmax(-1)
    want = law.topk(count)
    assert ids == want.indices.tolist()
    assert torch.allclose(torch.tensor(scores).double(), want.values, atol=1e-5)
    logits[1, size // 2] = math.nan
    assert [math.isfinite(s[0]) for s in best_tokens(logits, heats, 7)[1]] == [True, False, True]
