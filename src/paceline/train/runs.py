"""From a captured folder and a target to a trained head on disk.

Legend: V vocabulary, U draft vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paceline.errors import UserError
from paceline.models import safetensors_weights
from paceline.models.base import FINAL
from paceline.models.config import DecoderConfig
from paceline.models.heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from paceline.models.heads.calibration import Accuracy, rank_accuracy
from paceline.models.heads.config import EagleKind
from paceline.models.heads.formats import HeadNotes, open_head, save_head
from paceline.models.heads.storage import STORED
from paceline.models.loading import Checkpoint, open_checkpoint
from paceline.train.data import FINAL_NAME, Corpus, Record, draft_vocabulary
from paceline.train.joint import AdaptedDecoder, Medusa2, write_target
from paceline.train.loop import Result, Snapshot, TrainConfig, Trainer
from paceline.train.losses import Kind
from paceline.train.objectives import Eagle1, Eagle3, LossConfig, Medusa1, Objective
from paceline.train.target import Tables, read_tables, target_sha256

OBJECTIVES = ("medusa", "medusa2", "eagle1", "eagle3")
INITS = ("target", "random")
#: Ranks whose accuracy is measured for Medusa's tree.
RANKS = 10


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """objective: medusa, medusa2, eagle1 or eagle3. vocabulary: tokens that the head can
    propose, the most frequent of the capture (None: all). loss, loss_warmup, decay, prompts:
    see `LossConfig`. steps: draft steps that EAGLE-3 unrolls, grown to over the share
    `grow` of the schedule.
    heads, shared_head: Medusa's, see `MedusaConfig`. init: an EAGLE-3 layer starts from the
    target's last one, at random, or as the trained head in a folder (with its draft
    vocabulary). rank, alpha, heads_first: of Medusa-2's adapters, see `paceline.train.joint`."""

    objective: str
    vocabulary: int | None = 8192
    loss: Kind = "ce"
    loss_warmup: int = 200
    decay: float = 0.5
    prompts: bool = True
    steps: int = 5
    grow: float = 0.3
    heads: int = 4
    shared_head: bool = False
    init: str = "target"
    rank: int = 8
    alpha: float = 16.0
    heads_first: int = 50

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UserError(f"unknown objective {self.objective!r}: use {', '.join(OBJECTIVES)}")
        if self.init not in INITS and not Path(self.init).is_dir():
            raise UserError(
                f"unknown init {self.init!r}: use {' or '.join(INITS)}, or the folder of a head"
            )
        if not 0 <= self.grow <= 1:
            raise UserError(f"grow = {self.grow} is out of range: use 0 (all at once) to 1")
        if not 1 <= self.heads <= 16:
            raise UserError(f"heads = {self.heads} is out of range: use 1 to 16")


def check_target(corpus: Corpus, target: Checkpoint) -> None:
    """UserError where the capture is another model's."""
    if target_sha256(target) != corpus.info.target_sha256:
        raise UserError(
            f"{corpus.folders[0]} was captured from {corpus.info.model!r} with other weights than "
            f"{target.source.name!r}: name that model, or capture anew"
        )


def make_objective(
    options: HeadOptions,
    corpus: Corpus,
    target: Checkpoint,
    tables: Tables,
    *,
    seed: int,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Objective:
    """The head, seeded, with the target's rows, and what it learns."""
    loss = LossConfig(
        kind=options.loss, warmup=options.loss_warmup, decay=options.decay,
        prompts=options.prompts, dtype=dtype,
    )  # fmt: skip
    config, ids_U = target.config, _vocabulary(options, corpus)
    where = device or torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.objective in ("medusa", "medusa2"):
            heads = MedusaHeads(_medusa_config(options, config, len(ids_U)), ids_U)
            heads.borrow_head(tables.head_VD[ids_U].float())
            if options.objective == "medusa":
                return Medusa1(heads.to(where), tables.to(where), loss)
            return _joint(options, heads, target, tables, loss, where)
        kind: EagleKind = "eagle1" if options.objective == "eagle1" else "eagle3"
        taps = tuple(t for t in corpus.info.taps if t != FINAL) if kind == "eagle3" else (FINAL,)
        if not taps:
            raise UserError(f"{corpus.folders[0]} has no layer's states: capture them with --taps")
        wanted = _eagle_config(kind, config, len(ids_U), taps)
        if options.init not in INITS:
            head = _trained(options.init, wanted, corpus)
        else:
            head = EagleHead(wanted, ids_U)
            head.borrow_head(tables.head_VD[ids_U].float())
        if kind == "eagle1":
            return Eagle1(head.to(where), tables.to(where), loss, seed=seed)
        if options.init == "target":
            start_from_target(head, tables)
        return Eagle3(
            head.to(where), tables.to(where), loss, steps=options.steps, grow=options.grow
        )


def _trained(folder: str, wanted: EagleConfig, corpus: Corpus) -> EagleHead:
    """The EAGLE head in `folder`, to be trained further; UserError where its shape or its
    target is another one."""
    source = open_head(folder, n_layers=corpus.info.n_layers, vocab_size=wanted.vocab_size)
    found = source.config
    if not isinstance(found, EagleConfig) or found.kind != wanted.kind:
        raise UserError(f"{folder} holds {source.kind}: --init takes a head of {wanted.kind}")
    if source.about.target_hash not in ("", corpus.info.target_sha256):
        raise UserError(
            f"{folder} was trained for another target than this capture's: use --init target"
        )
    if found.draft_vocab_size != wanted.draft_vocab_size:
        raise UserError(
            f"{folder} proposes {found.draft_vocab_size} tokens, not "
            f"{wanted.draft_vocab_size}: give --vocabulary {found.draft_vocab_size}"
        )
    differs = [name for name, value in asdict(wanted).items() if asdict(found)[name] != value]
    if differs:
        name = differs[0]
        raise UserError(
            f"{folder} has {name} = {getattr(found, name)}, and a head of this target on these "
            f"taps {getattr(wanted, name)}: use --init target"
        )
    loaded = source.load()
    if loaded.embedding_VD is not None:
        raise UserError(
            f"{folder} has embeddings of its own, which are not trained: use --init target"
        )
    assert isinstance(loaded.module, EagleHead)
    return loaded.module.train()


def _joint(
    options: HeadOptions,
    heads: MedusaHeads,
    target: Checkpoint,
    tables: Tables,
    loss: LossConfig,
    device: torch.device,
) -> Medusa2:
    path, config = target.source.path, target.config
    frozen = {
        name: t.to(device) for name, t in safetensors_weights.iter_tensors(path, config, loss.dtype)
    }
    decoder = AdaptedDecoder(config, frozen, rank=options.rank, alpha=options.alpha)
    return Medusa2(
        decoder.to(device), heads.to(device), tables.to(device), loss,
        heads_first=options.heads_first,
    )  # fmt: skip


@torch.no_grad()
def start_from_target(head: EagleHead, tables: Tables) -> None:
    """Begin an EAGLE-3 head as the target's last layer on the deepest tap: norms, MLP and the
    hidden half of the projections are copied, `fc` passes that tap on, and what reads the
    embedding and the other taps starts small. (Ours; the paper starts at random, with far
    more data.)"""
    D, layer, source = head.config.hidden, head.midlayer, tables.layer
    for name, linear in (("q", layer.self_attn.q_proj), ("k", layer.self_attn.k_proj),
                         ("v", layer.self_attn.v_proj)):  # fmt: skip
        linear.weight[:, :D].normal_(std=0.02)
        linear.weight[:, D:].copy_(source[f"self_attn.{name}_proj.weight"])
    layer.self_attn.o_proj.weight.copy_(source["self_attn.o_proj.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(source[f"mlp.{name}.weight"])
    layer.hidden_norm.weight.copy_(source["input_layernorm.weight"])
    layer.post_attention_layernorm.weight.copy_(source["post_attention_layernorm.weight"])
    head.norm.weight.copy_(tables.norm_D)
    head.fc.weight.normal_(std=0.002)
    head.fc.weight[:, -D:].add_(torch.eye(D))


def _vocabulary(options: HeadOptions, corpus: Corpus) -> torch.Tensor:
    V = corpus.info.vocab_size
    if options.vocabulary is None or options.vocabulary == V:
        return torch.arange(V)
    return draft_vocabulary(corpus.frequencies(), options.vocabulary)


def _eagle_config(
    kind: EagleKind, c: DecoderConfig, draft_vocab: int, taps: tuple[int, ...]
) -> EagleConfig:
    return EagleConfig(
        kind=kind,
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        n_heads=c.n_heads,
        n_kv_heads=c.n_kv_heads,
        head_size=c.head_dim,
        eps=c.rms_eps,
        rope_theta=c.rope_theta,
        rope_scaling=c.rope_scaling,
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab,
        taps=taps,
        max_context=c.max_context,
    )


def _medusa_config(options: HeadOptions, c: DecoderConfig, draft_vocab: int) -> MedusaConfig:
    return MedusaConfig(
        num_heads=options.heads,
        hidden=c.hidden_size,
        vocab_size=c.vocab_size,
        draft_vocab_size=draft_vocab,
        shared_head=options.shared_head,
    )


def train_head(
    target: Checkpoint,
    data: Seq[Path],
    out: Path,
    options: HeadOptions,
    config: TrainConfig,
    *,
    command: str = "",
    save_dtype: str = "bfloat16",
    report: Callable[[Snapshot], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Result:
    """Train (or go on) in `out`, and write the head there: `out/head`, official layout.

    After an interruption only the checkpoint is written. UserError before any training where
    target, data and options do not fit each other.
    """
    if save_dtype not in STORED:
        raise UserError(f"unknown dtype {save_dtype!r} for a head: use {', '.join(STORED)}")
    if options.objective == "medusa2" and target.source.kind == "gguf":
        raise UserError(
            f"Medusa-2 changes the target, and {target.source.name!r} is a .gguf file, which is "
            "not written: give a safetensors folder, or train heads alone"
        )
    corpus = Corpus(*data)
    check_target(corpus, target)
    note("reading the target's embeddings and output rows")
    tables = read_tables(target)
    dtype = torch.bfloat16 if config.autocast else torch.float32
    objective = make_objective(
        options, corpus, target, tables, seed=config.seed, device=target.device, dtype=dtype
    )
    identity = {"options": repr(asdict(options))}
    trainer = Trainer(objective, corpus, config, out, device=target.device, identity=identity)
    if trainer.resumed:
        note(f"going on behind update {trainer.step} of {trainer.total}")
    result = trainer.run(report)
    if result.finished:
        facts = _provenance(options, config, corpus, result, command)
        _write(objective, target, corpus, out, facts, save_dtype)
    return result


def _write(
    objective: Objective,
    target: Checkpoint,
    corpus: Corpus,
    out: Path,
    facts: dict[str, str],
    dtype: str,
) -> None:
    """The head, and for Medusa-2 the target that it belongs to."""
    objective.module.cpu()
    name, sha256 = corpus.info.model, corpus.info.target_sha256
    features: Features = captured_features
    if isinstance(objective, Medusa2):
        write_target(objective.module.decoder, target, out / "target")
        written = open_checkpoint(str(out / "target"), device="cpu")
        name, sha256 = written.source.name, target_sha256(written)
        features = objective.features
        module: nn.Module = objective.module.heads
        group = corpus.held_out or corpus.training[:8]
        moved = objective.own(corpus.read(group, objective.taps))
        facts["target_agrees_with_old"] = f"{moved.agreed / max(moved.rows, 1):.4f}"
    else:
        module = objective.module
    assert isinstance(module, EagleHead | MedusaHeads)
    accuracy = calibrate(module, corpus, features) if isinstance(module, MedusaHeads) else ()
    notes = HeadNotes(
        target=name,
        target_hash=sha256,
        architecture=_ARCHITECTURES[target.config.architecture],
        provenance=facts,
        accuracy_MJ=accuracy,
    )
    save_head(module, out / "head", dtype=dtype, notes=notes)


Features = Callable[[Record], torch.Tensor]


def captured_features(record: Record) -> torch.Tensor:
    """float32 [T, D]: the target's final features."""
    return record.taps[FINAL_NAME].float()


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def calibrate(
    heads: MedusaHeads,
    corpus: Corpus,
    features: Features = captured_features,
    *,
    least: int = 2000,
    most: int = 20000,
) -> Accuracy:
    """How often each head's j-th guess is right on `most` held-out tokens, and on training
    ones too where there are less than `least`; () where every answer is too short. An answer
    counts by its length."""
    total = torch.zeros(heads.config.num_heads, min(RANKS, heads.config.draft_vocab_size))
    rows = 0
    for i in [*corpus.held_out, *corpus.training]:
        if rows >= (most if i in corpus.held_out else least):
            break
        record = corpus.sequence(i, (FINAL_NAME,))
        answer = record.law_T.nonzero().squeeze(1)
        if len(answer) < heads.config.num_heads + 2:
            continue
        part = slice(int(answer[0]), int(answer[-1]) + 1)
        states = features(record)[part]
        accuracy = rank_accuracy(heads, states, record.tokens_T[part], total.shape[1])
        total += torch.tensor(accuracy) * len(states)
        rows += len(states)
    if rows == 0:
        return ()
    return tuple(tuple(row) for row in (total / rows).tolist())


def _provenance(
    options: HeadOptions, config: TrainConfig, corpus: Corpus, result: Result, command: str
) -> dict[str, str]:
    init = options.init if options.init in INITS else Path(options.init).name
    facts = {
        "objective": options.objective,
        "options": repr(asdict(replace(options, init=init))),
        "training": repr(asdict(config)),
        "data_sha256": corpus.sha256,
        "data_seeds": corpus.info.seeds,
        "data_tokens": str(corpus.tokens(corpus.training)),
        "tokens_seen": str(result.tokens),
        "updates": str(result.step),
        "target_sha256": corpus.info.target_sha256,
        "command": command,
    }
    if result.held_out is not None:
        facts["held_out_agree"] = " ".join(f"{a:.4f}" for a in result.held_out.agree)
        facts["held_out_overlap"] = " ".join(f"{a:.4f}" for a in result.held_out.overlap)
    return facts
