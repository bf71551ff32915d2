"""The torch decoder against transformers, on tiny random checkpoints in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from paceline.errors import UserError
from paceline.models.base import FINAL, Batch, LayerMask, RowGroup, pack
from paceline.models.config import from_hf
from paceline.models.decoder import TorchDecoder, build_decoder
from paceline.models.safetensors_weights import iter_tensors

VOCAB = 199
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

#: name: (transformers model, config, changes)
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 16}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def checkpoint(folder: Path, case: str) -> tuple[transformers.PreTrainedModel, TorchDecoder]:
    """The same random weights in transformers and, through a folder, in ours."""
    family, changes = CASES[case]
    torch.manual_seed(list(CASES).index(case))
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(folder)
    ours_config = from_hf(folder)
    tensors = iter_tensors(folder, ours_config, torch.float32)
    return theirs, build_decoder(ours_config, tensors, name=case, dtype=torch.float32)


def group(
    tokens: list[int],
    context: int = 0,
    parents: list[int] | None = None,
    table: list[int] | None = None,
) -> RowGroup:
    n = len(tokens)
    return RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.array(range(-1, n - 1) if parents is None else parents, np.int32),
        context=context,
        table=np.array(range(24) if table is None else table, np.int32),
        wanted=np.arange(n, dtype=np.int32),
    )


def batch(*groups: RowGroup) -> Batch:
    return pack(groups, 16)


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> TorchDecoder:
    return checkpoint(tmp_path_factory.mktemp("llama"), "llama")[1]


def tokens_of(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_logits_and_taps_equal_transformers(pair) -> None:
    """In one pass, in chunks, and a token at a time; taps are the states between layers."""
    theirs, ours = pair
    tokens = tokens_of(0, 150)
    with torch.inference_mode():
        reference = theirs(torch.tensor([tokens]), output_hidden_states=True)
    logits = reference.logits[0]
    kv = ours.new_kv(24, 16)
    whole = ours.forward(batch(group(tokens)), kv, taps=(0, 2, 4, FINAL))
    close(whole.logits_RV, logits)
    for layer in (0, 2):
        close(whole.taps[layer], reference.hidden_states[layer][0])
    close(whole.taps[FINAL], reference.hidden_states[4][0])  # transformers' last is normed
    assert whole.taps[4].shape == (150, 48)
    for size in (64, 7):
        kv = ours.new_kv(24, 16)
        parts = [
            ours.forward(batch(group(tokens[i : i + size], i)), kv).logits_RV
            for i in range(0, 150, size)
        ]
        close(torch.cat(parts), logits)


def test_greedy_tokens_equal_transformers(pair) -> None:
    theirs, ours = pair
    prompt = tokens_of(1, 20)
    generated = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()
    kv, tokens = ours.new_kv(24, 16), list(prompt)
    logits = ours.forward(batch(group(prompt)), kv).logits_RV[-1]
    for _ in range(40):
        tokens.append(int(logits.argmax()))
        logits = ours.forward(batch(group(tokens[-1:], len(tokens) - 1)), kv).logits_RV[0]
    assert tokens == generated


def test_a_tree_row_sees_its_own_path_only(llama: TorchDecoder) -> None:
    prompt, nodes = tokens_of(2, 33), tokens_of(3, 9)
    parents = [-1, 0, 0, 1, 1, 2, 5, -1, 7]
    kv = llama.new_kv(24, 16)
    llama.forward(batch(group(prompt)), kv)
    tree = llama.forward(batch(group(nodes, 33, parents)), kv).logits_RV
    for node in range(9):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        alone = llama.forward(batch(group([*prompt, *path])), llama.new_kv(24, 16)).logits_RV[-1]
        close(tree[node], alone)


def test_committed_path_reads_as_if_it_had_come_alone(llama: TorchDecoder) -> None:
    """Scattered rows of an accepted path are moved behind the prefix."""
    prompt, nodes = tokens_of(4, 17), tokens_of(5, 5)
    kv = llama.new_kv(24, 16)
    llama.forward(batch(group(prompt)), kv)
    llama.forward(batch(group(nodes, 17, [-1, 0, 0, 1, 2])), kv)
    kv.move(np.array([19, 21], np.int32), np.array([18, 19], np.int32))  # path 0, 2, 4
    after = llama.forward(batch(group([11], 20)), kv).logits_RV
    path = [*prompt, nodes[0], nodes[2], nodes[4], 11]
    alone = llama.forward(batch(group(path)), llama.new_kv(24, 16)).logits_RV[-1:]
    close(after, alone)


def test_ragged_batches_over_scattered_blocks_equal_solo_passes(llama: TorchDecoder) -> None:
    rng = np.random.default_rng(6)
    blocks = rng.permutation(64)
    tables = [blocks[i * 8 : (i + 1) * 8].tolist() for i in range(6)]
    contexts, sizes = [0, 5, 40, 16, 31, 100], [12, 1, 3, 5, 3, 1]
    histories = [tokens_of(10 + i, c) for i, c in enumerate(contexts)]
    news = [tokens_of(20 + i, n) for i, n in enumerate(sizes)]
    kv = llama.new_kv(64, 16)
    for history, table in zip(histories, tables, strict=True):
        if history:
            llama.forward(batch(group(history, 0, table=table)), kv)
    groups = [
        group(new, context, table=table)
        for new, context, table in zip(news, contexts, tables, strict=True)
    ]
    together = llama.forward(batch(*groups), kv).logits_RV
    start = 0
    for history, new in zip(histories, news, strict=True):
        alone = llama.forward(batch(group([*history, *new])), llama.new_kv(24, 16)).logits_RV
        close(together[start : start + len(new)], alone[len(history) :])
        start += len(new)


def test_wanted_rows_choose_the_logits(llama: TorchDecoder) -> None:
    tokens = tokens_of(7, 10)
    full = llama.forward(batch(group(tokens)), llama.new_kv(24, 16)).logits_RV
    some = group(tokens)
    for wanted in ([9], [2, 3, 8], []):
        part = RowGroup(**{**vars(some), "wanted": np.array(wanted, np.int32)})
        out = llama.forward(batch(part), llama.new_kv(24, 16)).logits_RV
        assert out.shape == (len(wanted), VOCAB)
        if wanted:
            close(out, full[wanted])


def test_layer_mask_leaves_the_stream_as_it_is(llama: TorchDecoder) -> None:
    """Skipping everything gives the head on embeddings; skipping nothing changes nothing;
    a skipped attention writes no keys."""
    tokens = tokens_of(8, 12)
    kv = llama.new_kv(24, 16)
    full = llama.forward(batch(group(tokens)), kv).logits_RV
    all_on = LayerMask(attention_L=(True,) * 4, mlp_L=(True,) * 4)
    kept = llama.forward(batch(group(tokens)), llama.new_kv(24, 16), layer_mask=all_on).logits_RV
    assert torch.equal(full, kept)
    none = LayerMask(attention_L=(False,) * 4, mlp_L=(False,) * 4)
    kv = llama.new_kv(24, 16)
    bare = llama.forward(batch(group(tokens)), kv, layer_mask=none, taps=(0, 4))
    assert torch.equal(bare.taps[0], bare.taps[4])
    assert not kv.keys_L.any()
    some = LayerMask(attention_L=(True, False, True, True), mlp_L=(False, True, True, True))
    out = llama.forward(batch(group(tokens)), kv, layer_mask=some, taps=(1, 2))
    assert not kv.keys_L[1].any()
    assert kv.keys_L[0].any()
    assert not torch.allclose(out.logits_RV, full)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    _, ours = checkpoint(tmp_path, "llama")
    tensors = dict(iter_tensors(tmp_path, ours.config, torch.float32))

    def build(named: dict[str, torch.Tensor]) -> None:
        build_decoder(ours.config, named.items(), name="x", dtype=torch.float32)

    lacking = {k: v for k, v in tensors.items() if k != "model.layers.2.mlp.up_proj.weight"}
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.up_proj"):
        build(lacking)
    with pytest.raises(UserError, match="stray"):
        build({**tensors, "stray.weight": torch.zeros(1)})


def test_bfloat16_rows_do_not_depend_on_their_number(tmp_path: Path) -> None:
    """Not promised (the label is TOLERANT), but what makes greedy bfloat16 text equal; on
    other processors near-ties may flip, so a small difference is allowed there."""
    _, ours32 = checkpoint(tmp_path, "llama")
    tensors = iter_tensors(tmp_path, ours32.config, torch.bfloat16)
    ours = build_decoder(ours32.config, tensors, name="x", dtype=torch.bfloat16)
    tokens = tokens_of(9, 60)
    kv = ours.new_kv(24, 16)
    ours.forward(batch(group(tokens[:40])), kv)
    many = ours.forward(batch(group(tokens[40:], 40)), kv).logits_RV
    for i in range(20):
        one = ours.forward(batch(group(tokens[40 + i : 41 + i], 40 + i)), kv).logits_RV[0]
        torch.testing.assert_close(one, many[i], rtol=0.05, atol=0.25)
