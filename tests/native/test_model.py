"""The forward pass against a plain float one, and row invariance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native_devices import Runner, same_bits, tiny_config, tiny_tensors

from paceline.errors import UserError
from paceline.models.base import FINAL, LayerMask, Numerics
from paceline.models.config import from_hf
from paceline.models.decoder import build_decoder
from paceline.models.native import NativeModel, kernel_paths

ARCHS = ["llama", "qwen2", "qwen3"]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def reference(config: dict, t: dict, tokens, mask: LayerMask | None = None):
    """(logits [N, V], hidden states entering each layer and leaving the last) of a chain."""
    E, eps = config["head_dim"], config["rms_norm_eps"]
    n = len(tokens)
    x = t["model.embed_tokens.weight"][tokens].double()
    angle = torch.outer(
        torch.arange(n).double(), config["rope_theta"] ** (-torch.arange(0, E, 2).double() / E)
    )
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    states = []

    def heads(y: torch.Tensor, prefix: str, which: str) -> torch.Tensor:
        y = F.linear(y, t[f"{prefix}self_attn.{which}_proj.weight"].double())
        if f"{prefix}self_attn.{which}_proj.bias" in t:
            y = y + t[f"{prefix}self_attn.{which}_proj.bias"]
        y = y.view(n, -1, E)
        if f"{prefix}self_attn.{which}_norm.weight" in t:
            y = norm(y, t[f"{prefix}self_attn.{which}_norm.weight"], eps)
        if which != "v":
            half = torch.cat([-y[..., E // 2 :], y[..., : E // 2]], -1)
            y = y * cos[:, None] + half * sin[:, None]
        return y.transpose(0, 1)

    for i in range(config["num_hidden_layers"]):
        states.append(x)
        p = f"model.layers.{i}."
        if mask is None or mask.attention_L[i]:
            y = norm(x, t[f"{p}input_layernorm.weight"], eps)
            q, k, v = (heads(y, p, w) for w in "qkv")
            k, v = (z.repeat_interleave(len(q) // len(z), 0) for z in (k, v))
            scores = q @ k.transpose(1, 2) / E**0.5
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
            y = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, -1)
            x = x + F.linear(y, t[f"{p}self_attn.o_proj.weight"].double())
        if mask is None or mask.mlp_L[i]:
            y = norm(x, t[f"{p}post_attention_layernorm.weight"], eps)
            gate = F.silu(F.linear(y, t[f"{p}mlp.gate_proj.weight"].double()))
            up = F.linear(y, t[f"{p}mlp.up_proj.weight"].double())
            x = x + F.linear(gate * up, t[f"{p}mlp.down_proj.weight"].double())
    states.append(x)
    final = norm(x, t["model.norm.weight"], eps)
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return F.linear(final, head.double()), states, final


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("path", kernel_paths())
def test_matches_the_float_reference(arch: str, path: str) -> None:
    config = tiny_config(arch, tie_word_embeddings=arch == "qwen3")
    tensors = tiny_tensors(config)
    model = NativeModel.from_state(config, tensors, kernel_path=path)
    assert model.info.numerics is Numerics.ROW_INVARIANT
    assert model.info.vocab_size == 150
    tokens = np.random.default_rng(0).integers(0, 150, 40)
    got = Runner(model).prefill(0, tokens)
    expected, _, _ = reference(config, tensors, tokens)
    # float32 weights; keys and values are fp16, which is what the tolerance allows for
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize(("how", "limit"), [("q8", 0.05), ("q4", 0.5)])
def test_quantised_weights_stay_close(how: str, limit: float) -> None:
    config = tiny_config("llama")
    tensors = tiny_tensors(config)
    model = NativeModel.from_state(config, tensors, quantize=how)  # type: ignore[arg-type]
    tokens = np.random.default_rng(0).integers(0, 150, 40)
    expected, _, _ = reference(config, tensors, tokens)
    got = Runner(model).prefill(0, tokens)
    assert (got - expected).norm() / expected.norm() < limit
    assert model.info.dtype.startswith(how)


def test_taps_and_layer_mask() -> None:
    config = tiny_config("qwen2")
    tensors = tiny_tensors(config)
    model = NativeModel.from_state(config, tensors)
    tokens = np.random.default_rng(1).integers(0, 150, 20)
    for mask in (
        None,
        LayerMask(attention_L=(True, False, True), mlp_L=(True, True, False)),
        LayerMask(attention_L=(False, False, False), mlp_L=(True, False, True)),
    ):
        run = Runner(model)
        taps = (0, 2, 3, FINAL)
        out = model.forward(run.batch(run.group(0, tokens, 0)), run.kv, taps=taps, layer_mask=mask)
        expected, states, final = reference(config, tensors, tokens, mask)
        torch.testing.assert_close(out.logits_RV.double(), expected, rtol=0, atol=0.03)
        for i in (0, 2, 3):
            torch.testing.assert_close(out.taps[i].double(), states[i], rtol=0, atol=0.03)
        torch.testing.assert_close(out.taps[FINAL].double(), final, rtol=0, atol=0.03)
    with pytest.raises(ValueError, match="tap 4"):
        model.forward(run.batch(run.group(0, tokens, 0)), run.kv, taps=(4,))
    with pytest.raises(ValueError, match="3 entries"):
        model.forward(
            run.batch(run.group(0, tokens, 0)),
            run.kv,
            layer_mask=LayerMask(attention_L=(True,), mlp_L=(True,)),
        )


def models(arch: str, how: str | None, path: str):
    config = tiny_config(arch)
    tensors = tiny_tensors(config, seed=7)
    for threads in (1, 2):
        yield NativeModel.from_state(
            config,
            tensors,
            quantize=how,  # type: ignore[arg-type]
            threads=threads,
            kernel_path=path,
        )


def random_tree(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.array([-1 if j == 0 else rng.integers(-1, j) for j in range(n)], np.int32)


def path_of(parents: np.ndarray, row: int) -> list[int]:
    out = [row]
    while parents[out[0]] >= 0:
        out.insert(0, int(parents[out[0]]))
    return out


FAST = [p for p in kernel_paths() if p != "portable"][:2] or ["portable"]


@pytest.mark.parametrize("path", FAST)
@pytest.mark.parametrize(("arch", "how"), [("llama", "q4"), ("qwen2", "q8"), ("qwen3", None)])
def test_row_invariance_over_random_shapes(arch: str, how: str | None, path: str) -> None:
    """A row's logits are the same bits when it is fed token by token, and when it is one of
    2-64 rows of chains and trees of several sequences, for 1 and 2 threads and any chunking.
    Contexts cross the attention split of 256 and the chunks of 128 and 256 rows."""
    rng = np.random.default_rng(11)
    one, two = models(arch, how, path)
    lengths = [3, 40, 255, 300]
    texts = [rng.integers(0, 150, n) for n in lengths]
    truth = []
    for text in texts:  # token by token, one thread
        run = Runner(one)
        truth.append(
            torch.cat([run.run(run.group(0, text[i : i + 1], i)) for i in range(len(text))])
        )
    for model in (one, two):
        for _ in range(3):
            run = Runner(model)
            for seq, text in enumerate(texts):
                cuts = np.sort(rng.integers(0, len(text) + 1, rng.integers(0, 5)))
                chunks = [int(c) for c in np.diff([0, *cuts, len(text)]) if c > 0]
                assert same_bits(run.prefill(seq, text, chunks), truth[seq])
            for _ in range(4):  # one pass with a tree on each sequence, in any order
                order = rng.permutation(len(texts))[: rng.integers(1, len(texts) + 1)]
                trees = {int(s): random_tree(rng, int(rng.integers(1, 17))) for s in order}
                tokens = {s: rng.integers(0, 150, len(t)) for s, t in trees.items()}
                groups = [run.group(s, tokens[s], lengths[s], parents=t) for s, t in trees.items()]
                out = run.run(*groups)
                at = 0
                for s, parents in trees.items():
                    row = int(rng.integers(0, len(parents)))
                    way = path_of(parents, row)
                    alone = run.run(run.group(s, tokens[s][way], lengths[s]))
                    assert same_bits(out[at + row : at + row + 1], alone[-1:])
                    at += len(parents)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_rows_dealt_out_to_threads_give_the_same_bits(threads: int) -> None:
    """Long passes go through a layer in lanes, one thread each: a prompt beside a short one and a
    tree, states and logits of all rows, with layers left out, and more rows than go through at
    once. What follows reads their keys."""
    rng = np.random.default_rng(threads)
    config = tiny_config("qwen3")
    tensors = tiny_tensors(config, seed=7)
    one, many = (
        NativeModel.from_state(config, tensors, threads=t, quantize="q4") for t in (1, threads)
    )
    taps = (0, 1, 3, FINAL)
    for mask in (None, LayerMask(attention_L=(True, False, True), mlp_L=(False, True, True))):
        for n in (24 * threads - 1, 24 * threads, 32 * threads + 1, 140 * threads):
            texts = [rng.integers(0, 150, m) for m in (n - 20, 1, 19)]
            tree = random_tree(rng, 19)
            found = []
            for model in (one, many):
                run = Runner(model)
                groups = [run.group(s, text, 0) for s, text in enumerate(texts[:2])]
                groups.append(run.group(2, texts[2], 0, parents=tree))
                out = model.forward(run.batch(*groups), run.kv, taps=taps, layer_mask=mask)
                later = run.run(run.group(0, [7, 8], n - 20), run.group(1, [9], 1))
                found.append([out.logits_RV, later, *(out.taps[i] for i in taps)])
            for a, b in zip(*found, strict=True):
                assert same_bits(a, b)


@pytest.mark.parametrize("path", kernel_paths())
def test_paths_give_the_same_bits(path: str) -> None:
    config = tiny_config("qwen3", hidden_size=64, intermediate_size=96)
    tensors = tiny_tensors(config, seed=3)
    tokens = np.random.default_rng(5).integers(0, 150, 280)
    for how in ("q4", "q8", None):
        fast, slow = (
            Runner(NativeModel.from_state(config, tensors, quantize=how, kernel_path=p))  # type: ignore[arg-type]
            for p in (path, "portable")
        )
        assert same_bits(fast.prefill(0, tokens, [7, 273]), slow.prefill(0, tokens))


def test_tree_rows_commit_like_a_chain() -> None:
    """Scratch rows that are moved into place read like rows that were always there."""
    (model, _) = models("llama", "q8", FAST[0])
    rng = np.random.default_rng(2)
    text = rng.integers(0, 150, 30)
    parents = np.array([-1, 0, 0, 2, 2, 4], np.int32)
    tokens = rng.integers(0, 150, 6)
    run = Runner(model)
    run.prefill(0, text)
    tree = run.run(run.group(0, tokens, 30, parents=parents))
    way = [0, 2, 4, 5]
    table = run.table(0, 40)
    slot = lambda p: table[np.asarray(p) // 16] * 16 + np.asarray(p) % 16  # noqa: E731
    run.kv.move(slot([30 + i for i in way]), slot([30, 31, 32, 33]))
    after = run.run(run.group(0, [9], 34))
    plain = Runner(model)
    whole = plain.prefill(0, np.concatenate([text, tokens[way], [9]]))
    assert same_bits(tree[way], whole[30:34])
    assert same_bits(after, whole[34:])


def test_head_subset() -> None:
    config = tiny_config("qwen2")
    tensors = tiny_tensors(config)
    ids = np.array([5, 0, 149, 70])
    whole = NativeModel.from_state(config, tensors, quantize="q8")
    some = NativeModel.from_state(config, tensors, quantize="q8", head_ids=ids)
    compact = NativeModel.from_state(
        config, tensors, quantize="q8", head_ids=ids, compact_logits=True
    )
    tokens = np.random.default_rng(0).integers(0, 150, 9)
    a, b, c = (Runner(m).prefill(0, tokens) for m in (whole, some, compact))
    assert compact.head_ids is not None
    assert compact.head_ids.tolist() == [0, 5, 70, 149]
    assert same_bits(a[:, [0, 5, 70, 149]], c)
    assert same_bits(b[:, [0, 5, 70, 149]], c)
    assert (b == -torch.inf).sum() == 9 * 146


def test_wrong_batches_are_value_errors() -> None:
    config = tiny_config()
    model = NativeModel.from_state(config, tiny_tensors(config))
    run = Runner(model, n_blocks=4)
    with pytest.raises(ValueError, match="token id 150"):
        run.run(run.group(0, [150], 0))
    with pytest.raises(ValueError, match="outside the cache"):
        run.run(run.group(1, np.zeros(100, int), 0))
    with pytest.raises(ValueError, match="blocks of"):
        model.forward(run.batch(run.group(0, [1], 0)), model.new_kv(2, 8))
    assert len(model.forward(run.batch(run.group(0, [1], 0, wanted=[])), run.kv).logits_RV) == 0
    for changes, match in (
        ({"model_type": "gpt2"}, "gpt2"),
        ({"head_dim": 20}, "head size divisible by 16"),
        ({"head_dim": 528}, "head size of at most 512, not 528"),
        ({"hidden_size": 72}, "hidden size divisible by 16"),
        ({"num_attention_heads": 65, "num_key_value_heads": 1}, "among 65 query heads"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ):
        wrong = {**config, **changes}
        with pytest.raises(UserError, match=match):
            NativeModel.from_state(wrong, tiny_tensors(wrong))
    with pytest.raises(UserError, match="is missing"):
        NativeModel.from_state(config, {})
    tensors = tiny_tensors(config)
    for name, tensor, match in (
        ("model.layers.0.self_attn.o_proj.bias", torch.zeros(96), "does not know tensor"),
        ("model.norm.weight", torch.zeros(95), r"is \[95\], not \[96\]"),
    ):
        with pytest.raises(UserError, match=match):
            NativeModel.from_state(config, {**tensors, name: tensor})


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7,
            "original_max_position_embeddings": 64,
        },
    ],
)  # fmt: skip
def test_scaled_positions_equal_the_torch_decoder(scaling: dict[str, object]) -> None:
    """The same scaled model in torch is near; the unscaled one is far."""
    config = tiny_config("qwen2", rope_scaling=scaling)
    tensors = tiny_tensors(config)
    tokens = np.random.default_rng(0).integers(0, 150, 200)
    got = Runner(NativeModel.from_state(config, tensors)).prefill(0, tokens)
    torch_logits = [
        Runner(
            build_decoder(from_hf(c), tensors.items(), name="tiny", dtype=torch.float32)
        ).prefill(0, tokens)
        for c in (config, tiny_config("qwen2"))
    ]
    near, far = ((got - other).norm() / other.norm() for other in torch_logits)
    assert near < 0.005
    assert far > 0.05
