"""Folders of trained heads: written, read back, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from head_devices import (
    VOCAB,
    draft_ids,
    eagle_config,
    random_eagle,
    random_medusa,
    torch_target,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from paceline.errors import UserError
from paceline.models.config import from_hf
from paceline.models.heads import EagleHead, MedusaConfig, MedusaHeads
from paceline.models.heads.config import eagle3_taps
from paceline.models.heads.formats import HeadNotes, open_head, save_head
from paceline.models.heads.shipped import Target, find_head, is_head_folder
from paceline.models.rope import RopeScaling

TARGET = torch_target()
OFFICIAL = {
    "fc.weight": (96, 288),
    "midlayer.self_attn.q_proj.weight": (192, 192),
    "midlayer.self_attn.k_proj.weight": (64, 192),
    "midlayer.self_attn.v_proj.weight": (64, 192),
    "midlayer.self_attn.o_proj.weight": (96, 192),
    "midlayer.mlp.gate_proj.weight": (160, 96),
    "midlayer.mlp.up_proj.weight": (160, 96),
    "midlayer.mlp.down_proj.weight": (96, 160),
    "midlayer.input_layernorm.weight": (96,),
    "midlayer.hidden_norm.weight": (96,),
    "midlayer.post_attention_layernorm.weight": (96,),
    "norm.weight": (96,),
    "lm_head.weight": (90, 96),
    "d2t": (90,),
    "t2d": (150,),
}


def eagle3(**changes: object) -> EagleHead:
    return random_eagle(eagle_config("eagle3", 90, **changes), TARGET)


def outputs(head: EagleHead) -> torch.Tensor:
    """Logits of a few rows: every tensor of the head takes part."""
    g = torch.Generator().manual_seed(0)
    taps = torch.randn(7, 96 * len(head.config.taps), generator=g)
    embedding = torch.randn(7, 96, generator=g)
    hidden, _ = head.layer(embedding, head.fuse(taps), torch.arange(7))
    return head.logits(hidden).detach()


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change) -> None:  # type: ignore[no-untyped-def]
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_head(eagle3(), tmp_path / "head", dtype="float32")


def test_official_eagle3_has_the_published_names_and_offsets(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as f:
        shapes = {n: tuple(f.get_slice(n).get_shape()) for n in f.keys()}  # noqa: SIM118
        d2t, t2d = f.get_tensor("d2t"), f.get_tensor("t2d")
    assert shapes == OFFICIAL
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    ids = draft_ids(90)
    assert (torch.arange(90) + d2t == ids).all()
    assert t2d.nonzero().flatten().tolist() == ids.tolist()
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 90
    assert config["num_hidden_layers"] == 1
    assert config["norm_before_residual"] is False


@pytest.mark.parametrize("layout", ["official", "speculators"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_before_residual": True},
        {"norm_before_fc": True, "taps": (0, 2)},
        {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, original_max_position=64)},
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0), "rope_theta": 5e5},
    ],
)
def test_eagle3_survives_a_round_trip(layout: str, changes: dict, tmp_path: Path) -> None:
    head = eagle3(**changes)
    notes = HeadNotes(target="tiny", provenance={"command": "paceline train eagle3"})
    save_head(head, tmp_path, layout=layout, dtype="float32", notes=notes)
    source = open_head(tmp_path)
    assert source.kind == "eagle3"
    assert source.config == head.config
    assert source.about == notes
    loaded = source.load(TARGET)
    assert loaded.notes == ("the head's embeddings are the target's",)
    assert isinstance(loaded.module, EagleHead)
    assert torch.equal(outputs(loaded.module), outputs(head))


def test_speculators_folder_has_what_its_readers_ask_for(tmp_path: Path) -> None:
    notes = HeadNotes(target="org/model", architecture="LlamaForCausalLM")
    save_head(eagle3(), tmp_path, layout="speculators", notes=notes, k=5)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert (layer["hidden_size"], layer["vocab_size"]) == (96, VOCAB)
    for key in ("norm_before_residual", "norm_before_fc", "target_hidden_size", "algorithm"):
        assert key in config
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    method = config["speculators_config"]["proposal_methods"][0]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 5)
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/model",
        "architectures": ["LlamaForCausalLM"],
    }
    with safe_open(tmp_path / "model.safetensors", framework="pt") as f:
        names = set(f.keys())
    assert names == {n.replace("midlayer.", "layers.0.") for n in OFFICIAL}


def test_eagle1_borrows_the_targets_head(tmp_path: Path) -> None:
    head = random_eagle(eagle_config("eagle1", 90), TARGET)
    save_head(head, tmp_path, dtype="float32")
    source = open_head(tmp_path)
    assert source.kind == "eagle1"
    assert "lm_head.weight" not in source.shapes
    assert source.shapes["fc.weight"] == (96, 192)
    loaded = source.load(TARGET)
    assert "the head's output projection is the target's" in loaded.notes
    assert torch.equal(outputs(loaded.module), outputs(head))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"lacks lm_head\.weight, and there is no target"):
        source.load()


def test_eagle1_without_a_bias_is_read(tmp_path: Path) -> None:
    save_head(random_eagle(eagle_config("eagle1", 90), TARGET), tmp_path)
    edit_tensors(tmp_path, lambda t: t.pop("fc.bias"))
    head = open_head(tmp_path).load(TARGET).module
    assert isinstance(head, EagleHead)
    assert (head.fc.bias == 0).all()


@pytest.mark.parametrize(("draft", "shared"), [(VOCAB, False), (90, False), (90, True)])
def test_medusa_survives_a_round_trip(draft: int, shared: bool, tmp_path: Path) -> None:
    heads = random_medusa(TARGET, draft=draft, shared=shared)
    notes = HeadNotes(target="tiny", accuracy_MJ=((0.5, 0.25), (0.25, 0.125), (0.125, 0.0)))
    save_head(heads, tmp_path, dtype="float32", notes=notes)
    source = open_head(tmp_path, vocab_size=VOCAB)
    assert (source.kind, source.config, source.about) == ("medusa", heads.config, notes)
    loaded = source.load(TARGET).module
    assert isinstance(loaded, MedusaHeads)
    h = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(h), heads(h))
    assert torch.equal(loaded.target_ids, draft_ids(draft))
    if draft == VOCAB:  # nothing in it but what the published layout has
        assert set(source.shapes) == {
            *(
                f"{i}.{b}.linear.{p}"
                for i in range(3)
                for b in range(2)
                for p in ("weight", "bias")
            ),
            *(f"{i}.2.weight" for i in range(3)),
        }


def test_pickled_medusa_heads_are_read(tmp_path: Path) -> None:
    """The file of the first Medusa checkpoints; other objects than tensors are refused."""
    config = MedusaConfig(num_heads=2, hidden=96, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    heads = MedusaHeads(config)
    heads.borrow_head(TARGET.head_rows(list(range(VOCAB))))
    save_head(heads, tmp_path)
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    loaded = open_head(tmp_path, vocab_size=VOCAB).load().module
    assert isinstance(loaded, MedusaHeads)
    torch.save({"a": print}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match="not a usable weight file"):
        open_head(tmp_path, vocab_size=VOCAB)


def test_eight_bits_lose_little(tmp_path: Path) -> None:
    head = eagle3()
    save_head(head, tmp_path, dtype="int8")
    loaded = open_head(tmp_path).load(TARGET).module
    assert isinstance(loaded, EagleHead)
    for name, p in head.state_dict().items():
        if p.ndim == 2:
            step = p.view(p.shape[0], -1, 32).abs().amax(-1, keepdim=True) / 127
            off = (loaded.state_dict()[name] - p).view(p.shape[0], -1, 32).abs()
            assert (off <= 0.51 * step + 1e-6).all(), name
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size < 1.15 * sum(p.numel() for p in head.parameters()) + 8192


def test_a_missing_map_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: (t.pop("d2t"), t.pop("t2d")))
    with pytest.raises(UserError, match="lacks d2t"):
        open_head(folder).load(TARGET)


@pytest.mark.parametrize("with_t2d", [True, False])
def test_a_map_of_ids_is_not_taken_for_offsets(with_t2d: bool, folder: Path) -> None:
    """Ids where offsets belong: other tokens would be drafted, silently."""

    def absolute(t: dict[str, torch.Tensor]) -> None:
        t["d2t"] = t["d2t"] + torch.arange(90)
        if not with_t2d:
            t.pop("t2d")

    edit_tensors(folder, absolute)
    with pytest.raises(UserError, match="must hold offsets"):
        open_head(folder).load(TARGET)


def test_offsets_without_t2d_are_read(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("t2d"))
    head = open_head(folder).load(TARGET).module
    assert torch.equal(head.target_ids, draft_ids(90))


def test_a_map_to_nowhere_is_refused(folder: Path) -> None:
    def repeat(t: dict[str, torch.Tensor]) -> None:
        t["d2t"][5] = t["d2t"][4] - 1  # token 5 and token 4 are one

    edit_tensors(folder, repeat)
    with pytest.raises(UserError, match="does not map to different tokens"):
        open_head(folder).load(TARGET)


def test_a_missing_output_projection_is_borrowed_and_said(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop("lm_head.weight"))
    loaded = open_head(folder).load(TARGET)
    assert "the head's output projection is the target's" in loaded.notes
    assert isinstance(loaded.module, EagleHead)
    assert torch.equal(loaded.module.lm_head.weight, TARGET.head_rows(draft_ids(90).tolist()))
    with pytest.raises(UserError, match="no target to take it from"):
        open_head(folder).load()


def test_own_embeddings_are_used(tmp_path: Path) -> None:
    own = torch.randn(VOCAB, 96)
    save_head(eagle3(), tmp_path, dtype="float32", embedding_VD=own)
    loaded = open_head(tmp_path).load(TARGET)
    assert loaded.notes == ()
    assert loaded.embedding_VD is not None
    assert torch.equal(loaded.embedding_VD, own)


@pytest.mark.parametrize("name", ["midlayer.mlp.up_proj.weight", "norm.weight", "fc.weight"])
def test_missing_tensors_are_named(name: str, folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(name))
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        open_head(folder).load(TARGET)


def test_unknown_and_misshapen_tensors_are_named(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)}))
    with pytest.raises(UserError, match=r"not part of such a head.*q_norm"):
        open_head(folder).load(TARGET)
    edit_tensors(folder, lambda t: t.pop("midlayer.self_attn.q_norm.weight"))
    edit_tensors(folder, lambda t: t.update({"norm.weight": torch.ones(95)}))
    with pytest.raises(UserError, match=r"norm\.weight has shape \[95\]"):
        open_head(folder).load(TARGET)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 2}, "one decoder layer"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"target_hidden_size": 128}, "another width"),
        ({"draft_vocab_size": 151}, "exceeds the target's 150"),
        ({"hidden_size": "96"}, "'hidden_size' is '96'"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "does not read"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_unsupported_configs_are_refused(change: dict, message: str, folder: Path) -> None:
    edit_config(folder, **change)
    with pytest.raises(UserError, match=message):
        open_head(folder)


@pytest.mark.parametrize("key", ["fc_norm", "norm_output"])
def test_newer_speculators_are_refused_by_name(key: str, tmp_path: Path) -> None:
    save_head(eagle3(), tmp_path, layout="speculators")
    edit_config(tmp_path, **{key: True})
    with pytest.raises(UserError, match=key):
        open_head(tmp_path)
    edit_config(tmp_path, speculators_model_type="mlp")
    with pytest.raises(UserError, match="'mlp'"):
        open_head(tmp_path)


def test_taps_are_written_as_other_readers_join_them(tmp_path: Path) -> None:
    head = eagle3(taps=(0, 2))
    save_head(head, tmp_path / "official")
    save_head(head, tmp_path / "speculators", layout="speculators")
    official = json.loads((tmp_path / "official" / "config.json").read_text())
    assert official["num_aux_hidden_states"] == 2
    other = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert other["transformer_layer_config"]["num_aux_hidden_states"] == 2
    with pytest.raises(UserError, match="ascending order"):
        eagle_config("eagle3", taps=(2, 0))
    edit_config(tmp_path / "official", eagle_aux_hidden_state_layer_ids=[2, 0])
    with pytest.raises(UserError, match="ascending order"):
        open_head(tmp_path / "official")


def test_unsaid_taps_are_those_of_the_paper(tmp_path: Path) -> None:
    save_head(eagle3(taps=(2, 15, 27)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_head(tmp_path, n_layers=30).config.taps == (2, 15, 27)
    with pytest.raises(UserError, match="which target layers"):
        open_head(tmp_path)
    with pytest.raises(UserError, match="no three different"):
        open_head(tmp_path, n_layers=3)
    assert eagle3_taps(24) == (2, 12, 21)


def test_writing_what_others_cannot_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="int8"):
        save_head(eagle3(), tmp_path, layout="speculators", dtype="int8")
    with pytest.raises(UserError, match="no speculators layout"):
        save_head(random_medusa(TARGET), tmp_path, layout="speculators")
    with pytest.raises(UserError, match="EAGLE-3"):
        save_head(random_eagle(eagle_config("eagle1"), TARGET), tmp_path, layout="speculators")
    with pytest.raises(UserError, match="float8"):
        save_head(eagle3(), tmp_path, dtype="float8")
    with pytest.raises(UserError, match="'gguf'"):
        save_head(eagle3(), tmp_path, layout="gguf")


def config_of(**changes: object):  # type: ignore[no-untyped-def]
    base = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "head_dim": 32,
    }
    return from_hf({**base, **changes})


def test_shipped_heads_are_found_by_name_then_by_shape(tmp_path: Path) -> None:
    save_head(eagle3(), tmp_path / "tiny" / "eagle3", notes=HeadNotes(target="tiny"))
    source, notes = find_head("eagle3", Target(name="tiny", config=config_of()), tmp_path)
    assert (source.kind, notes) == ("eagle3", ())
    _, notes = find_head("eagle3", Target(name="my.gguf", config=config_of()), tmp_path)
    assert "trained for tiny" in notes[0]
    with pytest.raises(UserError, match=r"no medusa head for 'tiny'.*eagle3 for tiny"):
        find_head("medusa", Target(name="tiny", config=config_of()), tmp_path)
    other = Target(name="other", config=config_of(hidden_size=128))
    with pytest.raises(UserError, match="no eagle3 head for 'other'"):
        find_head("eagle3", other, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128}, "the head is 96 wide and 'm' is 128"),
        ({"vocab_size": 151}, "150 tokens and 'm' has 151"),
        ({"num_hidden_layers": 2}, "reads layer 3 and 'm' has 2"),
    ],
)
def test_a_head_of_another_target_is_refused(change: dict, message: str, folder: Path) -> None:
    target = Target(name="m", config=config_of(**change))
    with pytest.raises(UserError, match=message):
        find_head(str(folder), target)


def test_heads_are_told_from_models(folder: Path, tmp_path: Path) -> None:
    assert is_head_folder(folder)
    model = tmp_path / "model"
    model.mkdir()
    assert not is_head_folder(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    save_file({"model.norm.weight": torch.ones(4)}, model / "model.safetensors")
    assert not is_head_folder(model)


def test_damaged_files_are_one_line(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="not a usable weight file"):
        open_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights of a head"):
        open_head(folder)
    with pytest.raises(UserError, match="no such folder"):
        open_head(folder / "nowhere")
