"""From `--peer` options to running peers, and from a workload to their prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.api import LLM
from paceline.bench.peers.base import Peer, PeerPrompt
from paceline.bench.peers.environments import Say, find_llamacpp
from paceline.bench.peers.llamacpp import LlamaCpp
from paceline.bench.peers.server import Server
from paceline.bench.peers.transformers_peer import Transformers
from paceline.bench.workloads import Fit, load_workload
from paceline.errors import UserError
from paceline.models.catalog import resolve_model

#: Drafters of ours that no peer shares; a peer's own look-up stands beside them.
_OWN_DRAFTERS = ("none", "ngram")


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """specs: `transformers`, `llamacpp`, or a server's URL, `NAME=URL` to give it a name.
    python: of an environment with llama-cpp-python. model: what a server calls its model.
    key_env: variable that holds a server's key. dtype: of transformers."""

    specs: tuple[str, ...]
    model: str
    draft: str = "none"
    k: int = 4
    threads: int = 1
    python: str | None = None
    served_model: str | None = None
    key_env: str | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        """Refuse what can't be, before anything is loaded."""
        if not self.specs:
            raise UserError("no peer was given: use --peer transformers, llamacpp or a URL")
        urls = [s for s in self.specs if _url(s)]
        for spec in self.specs:
            if spec not in ("transformers", "llamacpp") and spec not in urls:
                raise UserError(
                    f"--peer {spec!r} is unknown: use transformers, llamacpp, http://HOST:PORT "
                    "or NAME=http://HOST:PORT"
                )
        if len(set(self.specs)) < len(self.specs):
            raise UserError("a --peer was given twice: name each once")
        if self.python is not None and "llamacpp" not in self.specs:
            raise UserError("--peer-python is llama.cpp's: give --peer llamacpp too")
        if not urls and (self.served_model is not None or self.key_env is not None):
            raise UserError("--peer-model and --peer-key-env are for servers: give a URL as --peer")
        if self.key_env is not None and not os.environ.get(self.key_env):
            raise UserError(f"--peer-key-env: the variable {self.key_env!r} is empty or not set")

    @property
    def draft_path(self) -> Path | None:
        """Weights of the draft for peers; None where ours is no model of its own."""
        if self.draft in _OWN_DRAFTERS:
            return None
        return resolve_model(self.draft).path


def _url(spec: str) -> bool:
    return spec.partition("://")[0].rpartition("=")[2] in ("http", "https") and "://" in spec


def open_peers(
    options: PeerOptions, stack: ExitStack, *, n_ctx: int, device: str, say: Say
) -> list[Peer]:
    """All peers, loaded; `stack` closes them. Raises PeerError for one that can't be had."""
    peers: list[Peer] = []
    for spec in options.specs:
        say(f"setting up {spec}")
        peer = _open(spec, options, n_ctx, device, say)
        stack.callback(peer.close)
        peers.append(peer)
    return peers


def _open(spec: str, o: PeerOptions, n_ctx: int, device: str, say: Say) -> Peer:
    if _url(spec):
        name, _, url = spec.rpartition("=") if not spec.startswith("http") else ("", "", spec)
        key = None if o.key_env is None else os.environ[o.key_env]
        return Server(url, model=o.served_model, name=name or None, key=key)
    path = resolve_model(o.model).path
    if spec == "transformers":
        return Transformers(
            path, threads=o.threads, dtype=o.dtype, draft=o.draft_path, k=o.k, device=device
        )
    python, how = find_llamacpp(path, o.python, say=say)
    return LlamaCpp(
        python, path, threads=o.threads, n_ctx=n_ctx, draft=o.draft_path, k=o.k, how=how
    )


def peer_prompts(
    llm: LLM, workload: str, *, prompts: int, max_tokens: int, seed: int = 0
) -> list[PeerPrompt]:
    """The first turns of a workload, as our tokenizer and chat template render them. Later
    turns would hold each system's own answers, so they are left out."""
    room = llm.engine.max_length - max_tokens
    tokenizer = llm.tokenizer
    fit = Fit(
        encode=lambda text: tokenizer.encode(text, add_special=False),
        limit=room,
        vocab_size=tokenizer.vocab_size,
        special_ids=frozenset(tokenizer.special_ids),
    )
    loaded = load_workload(workload, prompts=prompts, seed=seed, fit=fit)
    out = []
    for item in loaded.items:
        turns = item.turns[:1]
        tokens = item.tokens or llm.chat_tokens([{"role": "user", "content": turns[0]}])
        if len(tokens) > room:
            continue
        text = tokenizer.decode(list(tokens), skip_special=False)
        out.append(
            PeerPrompt(
                id=item.id, tokens=tuple(tokens), text=text, turns=turns, synthetic=item.synthetic
            )
        )
    if not out:
        raise UserError(
            f"workload {workload!r}: no prompt fits the context with {max_tokens} new tokens; "
            "lower --max-tokens or raise --kv-tokens"
        )
    return out


def context_of(prompts: Seq[PeerPrompt], max_tokens: int, k: int) -> int:
    """Context that a peer needs, in whole steps of 256 tokens."""
    need = max(len(p.tokens) for p in prompts) + max_tokens + k + 8
    return -(-need // 256) * 256
