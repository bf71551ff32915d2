"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Annotated

import typer
from rich.console import Console

from paceline.cli import common as c
from paceline.errors import UserError
from paceline.registry import parse_tree
from paceline.types import SamplingParams


def chat(
    model: c.Model = c.DEFAULT_MODEL,
    draft: c.Draft = "ngram",
    policy: c.Policy = "adaptive",
    k: c.K = None,
    profile: c.CostProfile = None,
    tree: c.Tree = None,
    draft_vocab: c.DraftVocab = "same",
    draft_weights: c.DraftWeights = "fast",
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: c.MaxTokens = 512,
    temperature: c.Temperature = 0.7,
    top_k: c.TopK = 0,
    top_p: c.TopP = 0.95,
    min_p: c.MinP = 0.0,
    seed: c.Seed = None,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 16384,
    memory_limit: c.MemoryLimit = None,
    show: c.Show = False,
) -> None:
    """Talk to a model. /clear starts anew, /exit (or Ctrl-D) leaves, Ctrl-C ends an answer."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
    )
    plan = parse_tree(tree)
    if plan is not None and plan.fit is not None:
        raise UserError(
            f"tree {tree!r} is fitted to a prompt: use it with generate, or give widths like 3x2x1"
        )
    llm = c.load(
        model,
        draft=draft,
        policy=policy,
        k=k,
        profile=profile,
        tree=tree,
        draft_vocab=draft_vocab,
        draft_weights=draft_weights,
        dtype=dtype,
        device=device,
        kv_tokens=kv_tokens,
        memory_limit=memory_limit,
    )
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    out = Console()
    while True:
        try:
            line = c.console.input("[bold]> [/bold]").strip()
        except EOFError:
            c.console.print()
            return
        if not line:
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            messages = list(first)
            continue
        if line.startswith("/"):
            c.console.print(f"unknown command {line}: use /clear or /exit", style="yellow")
            continue
        messages.append({"role": "user", "content": line})
        answer, painter = "", c.Painter(llm)
        try:
            # Closing ends the request: its cache blocks are free again, what was said stays.
            with closing(llm.stream(llm.chat_tokens(messages), params)) as stream:
                for step in stream:
                    answer += step.text
                    if not show:
                        sys.stdout.write(step.text)
                        sys.stdout.flush()
                        continue
                    out.print(painter.paint(step.tokens), end="", soft_wrap=True)
        except KeyboardInterrupt:
            pass  # ends this answer only
        except UserError as e:
            messages.pop()
            c.console.print(f"error: {e}", style="red", markup=False)
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})
