"""Tiny targets and heads for the drafters that are trained for their target."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
from native_devices import tiny_config, tiny_tensors

from paceline.core.shapes import Beam
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.draft.eagle import EagleDrafter
from paceline.draft.medusa import MedusaDrafter
from paceline.engine.engine import Engine, EngineConfig
from paceline.engine.policy import FixedBudget
from paceline.models.base import FINAL, RowGroup, TargetModel, TargetOutput, pack
from paceline.models.config import from_hf
from paceline.models.decoder import TorchDecoder, build_decoder
from paceline.models.heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads
from paceline.models.heads.calibration import Accuracy
from paceline.models.heads.runtime import Kernels, MedusaRunner, eagle_runner
from paceline.models.native import NativeModel
from paceline.types import Request, RequestOutput, SamplingParams, Sequence

VOCAB = 150
LAYERS = 3
CONFIG = EngineConfig(kv_tokens=2048, block_size=4, prefill_chunk=7, max_batch=8)
PROMPTS = ((5,), (1, 2), (3, 1, 4), tuple(range(1, 25)), (7, 8, 9) * 3)
TORCH = Kernels()


def torch_target(changes: dict[str, torch.Tensor] | None = None, seed: int = 0) -> TorchDecoder:
    config = tiny_config()
    tensors = tiny_tensors(config, seed) | (changes or {})
    return build_decoder(
        from_hf({**config, "eos_token_id": None}),
        tensors.items(),
        name="tiny",
        dtype=torch.float32,
    )


def native_target(seed: int = 0) -> NativeModel:
    config = tiny_config()
    return NativeModel.from_state(config, tiny_tensors(config, seed), threads=1)


def successor_target() -> TorchDecoder:
    """A target whose next token is a function of the last one: its layers add nothing."""
    config = tiny_config()
    tensors = tiny_tensors(config)
    silent = {
        name: torch.zeros_like(t)
        for name, t in tensors.items()
        if name.endswith(("o_proj.weight", "down_proj.weight"))
    }
    return torch_target({**silent, "model.norm.weight": torch.ones(96)})


def eagle_config(kind: str = "eagle3", draft: int = VOCAB, **changes: object) -> EagleConfig:
    base: dict[str, object] = {
        "kind": kind,
        "hidden": 96,
        "intermediate": 160,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_size": 32,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft,
        "taps": (0, 1, 3) if kind == "eagle3" else (FINAL,),
    }
    return EagleConfig(**{**base, **changes})  # type: ignore[arg-type]


def draft_ids(size: int) -> torch.Tensor:
    """Every other token first, then the rest: `size` ascending ids."""
    order = [*range(0, VOCAB, 2), *range(1, VOCAB, 2)]
    return torch.tensor(sorted(order[:size]))


def random_eagle(config: EagleConfig, target: TargetModel, seed: int = 1) -> EagleHead:
    """Random weights, strong enough that attention decides which token comes first."""
    torch.manual_seed(seed)
    head = EagleHead(config, draft_ids(config.draft_vocab_size))
    with torch.no_grad():
        for name, p in head.named_parameters():
            if p.ndim == 2:
                p.normal_(0, 1.5 * p.shape[1] ** -0.5)
            elif name.endswith("norm.weight"):
                p.normal_(1, 0.1)
    if config.kind == "eagle1":
        head.borrow_head(target.head_rows(head.target_ids.tolist()))  # type: ignore[attr-defined]
    return head


def perfect_eagle(kind: str, target: TorchDecoder) -> EagleHead:
    """Always right about `successor_target`, because the last embedding goes unchanged to the
    target's own output projection: through `fc` (EAGLE-1), or through sharp attention to rows
    of the same token (EAGLE-3, whose residual stream is switched off)."""
    wide = {"n_heads": 1, "n_kv_heads": 1, "head_size": 96, "rope_theta": 1e30}
    extra = {"norm_before_residual": True} if kind == "eagle3" else {}
    head = EagleHead(eagle_config(kind, **wide, **extra))
    with torch.no_grad():
        for name, p in head.named_parameters():
            p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        if kind == "eagle1":
            head.fc.weight[:, :96] = torch.eye(96)
        else:
            head.midlayer.hidden_norm.weight.zero_()
            a = head.midlayer.self_attn
            still = torch.ones(96)  # dimensions that rotary embedding leaves alone
            still[[*range(8), *range(48, 56)]] = 0
            a.q_proj.weight[:, :96] = 2 * torch.diag(still)
            a.k_proj.weight[:, :96] = torch.diag(still)
            a.v_proj.weight[:, :96] = torch.eye(96)
            a.o_proj.weight.copy_(torch.eye(96))
        head.borrow_head(target.head_rows(list(range(VOCAB))))
    return head


def perfect_medusa(target: TorchDecoder, heads: int = 3) -> MedusaHeads:
    """Always right about `successor_target`: head i maps a token's feature to the token
    i + 2 places on, by least squares."""
    module = MedusaHeads(
        MedusaConfig(num_heads=heads, hidden=96, vocab_size=VOCAB, draft_vocab_size=VOCAB)
    )
    everything = list(range(VOCAB))
    h_VD = torch.nn.functional.rms_norm(target.embedding_rows(everything), (96,), eps=1e-5)
    follows = (h_VD @ target.head_rows(everything).T).argmax(-1)
    goal = follows
    with torch.no_grad():
        for i, linear in enumerate(module.lm_heads):
            goal = follows[goal]
            right = torch.nn.functional.one_hot(goal, VOCAB).float()
            linear.weight.copy_(right.T @ torch.linalg.pinv(h_VD).T)
            assert (module.logits(h_VD, i).argmax(-1) == goal).all()
    return module


def random_medusa(target: TargetModel, *, draft: int = VOCAB, shared: bool = False) -> MedusaHeads:
    torch.manual_seed(2)
    config = MedusaConfig(
        num_heads=3,
        num_layers=2,
        hidden=96,
        vocab_size=VOCAB,
        draft_vocab_size=draft,
        shared_head=shared,
    )
    module = MedusaHeads(config, draft_ids(draft))
    module.borrow_head(target.head_rows(module.target_ids.tolist()))  # type: ignore[attr-defined]
    with torch.no_grad():
        for p in module.blocks.parameters():
            p.normal_(0, 0.1)
    return module


#: Accuracies under which the best trees are bushy.
ACCURACY = ((0.5, 0.3, 0.1), (0.4, 0.2, 0.1), (0.3, 0.2, 0.05))


def medusa(
    target: TargetModel,
    heads: MedusaHeads | None = None,
    *,
    accuracy: Accuracy = ACCURACY,
    kernels: Kernels = TORCH,
) -> MedusaDrafter:
    heads = heads or random_medusa(target, draft=90)
    return MedusaDrafter(heads.config, lambda _: MedusaRunner(heads, kernels), accuracy)


def eagle(
    target: TargetModel,
    kind: str = "eagle3",
    *,
    shape: Beam | None = None,
    sampled: bool = False,
    head: EagleHead | None = None,
    kernels: Kernels = TORCH,
    draft: int = 90,
) -> EagleDrafter:
    head = head or random_eagle(eagle_config(kind, draft), target)
    return EagleDrafter(
        head.config,
        lambda model: eagle_runner(head, model, kernels),  # type: ignore[arg-type]
        shape=shape,
        sampled=sampled,
        block_size=4,
    )


def engine(
    target: TargetModel, drafter: Drafter, k: int = 4, config: EngineConfig = CONFIG
) -> Engine:
    return Engine(target, drafter, FixedBudget(k), config, audit=True)


def run(
    e: Engine, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams]
) -> list[RequestOutput]:
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    ids = [
        i
        for prompt, p in zip(prompts, many, strict=True)
        for i in e.submit(Request(prompt=tuple(prompt), params=p))
    ]
    for _ in e.stream():
        pass
    cache = e.scheduler.prefix_cache
    assert e.scheduler.allocator.n_used == (len(cache.table) if cache else 0)
    assert e.drafter.usage().blocks_used == 0
    return [e.result(i) for i in ids]


class Recorder:
    """Keeps what a drafter proposed: (tokens of the sequence, budget, tree)."""

    def __init__(self, drafter: Drafter) -> None:
        self.seen: list[tuple[tuple[int, ...], int, TokenTree]] = []
        propose = drafter.propose

        def record(seqs: Seq[Sequence], budgets: Seq[int]) -> list[TokenTree]:
            trees = propose(seqs, budgets)
            for seq, budget, tree in zip(seqs, budgets, trees, strict=True):
                if budget:
                    self.seen.append((tuple(seq.tokens), budget, tree))
            return trees

        drafter.propose = record  # type: ignore[method-assign]


class Alternate(FixedBudget):
    """Budgets of 0 and k in turn, the zeros more often, by how long a sequence is."""

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [0 if len(s.tokens) % 3 else self.k for s in seqs]


class Seldom(FixedBudget):
    """Budgets of k for a few rounds, then none for longer, by how long a sequence is."""

    def budgets(self, seqs: Seq[Sequence]) -> list[int]:
        return [self.k if len(s.tokens) % 16 < 4 else 0 for s in seqs]


def features(target: TargetModel, tokens: Seq[int], taps: Seq[int]) -> torch.Tensor:
    """[n, taps * D]: the target's states of all tokens, in one pass over an empty cache."""
    out = one_pass(target, tokens, tuple(taps))
    return torch.cat([out.taps[t] for t in taps], -1)


def one_pass(target: TargetModel, tokens: Seq[int], taps: tuple[int, ...] = ()) -> TargetOutput:
    n = len(tokens)
    group = RowGroup(
        tokens=np.array(tokens, np.int32),
        parents=np.arange(-1, n - 1, dtype=np.int32),
        context=0,
        table=np.arange(n, dtype=np.int32),
        wanted=np.array([n - 1], np.int32),
    )
    return target.forward(pack([group], 1), target.new_kv(n, 1), taps=taps)


def target_logits(target: TargetModel, tokens: Seq[int]) -> torch.Tensor:
    """[1, V] logits after `tokens`."""
    return one_pass(target, tokens).logits_RV


@torch.inference_mode()
def scratch_logits(
    head: EagleHead, target: TargetModel, tokens: Seq[int], path: Seq[int], start: int = 0
) -> torch.Tensor:
    """[V] logits of the token after `tokens` and the drafted `path`, everything computed anew by
    the plain module: -inf for tokens that the head does not have. start: features before it are
    unknown to the head."""
    g = head.fuse(features(target, tokens[:-1], head.config.taps)[start:])
    drafted = [*tokens[start + 1 :], *path]
    embedding = target.embedding_rows(drafted)  # type: ignore[attr-defined]
    for i in range(len(path) + 1):
        n = len(tokens) - 1 - start + i
        hidden, _ = head.layer(embedding[:n], g[:n], torch.arange(n))
        g = torch.cat([g, hidden[-1:]])
    logits = torch.full((VOCAB,), -torch.inf)
    logits[head.target_ids] = head.logits(hidden[-1])
    return logits


def shaken(head: EagleHead, amount: float = 0.02, seed: int = 0) -> EagleHead:
    """The head with noise on every weight: features and attention count, and a head that was
    always right is so now and then."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in head.parameters():
            p += amount * torch.randn(p.shape, generator=g)
    return head
