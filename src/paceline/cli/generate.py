"""`paceline generate`: text from a prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paceline.api import LLM
from paceline.cli import common as c
from paceline.errors import UserError
from paceline.types import FinishReason, RequestOutput, SamplingParams


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    model: c.Model = c.DEFAULT_MODEL,
    draft: c.Draft = "ngram",
    policy: c.Policy = "adaptive",
    k: c.K = None,
    profile: c.CostProfile = None,
    tree: c.Tree = None,
    draft_vocab: c.DraftVocab = "same",
    draft_weights: c.DraftWeights = "fast",
    max_tokens: c.MaxTokens = 256,
    temperature: c.Temperature = 0.0,
    top_k: c.TopK = 0,
    top_p: c.TopP = 1.0,
    min_p: c.MinP = 0.0,
    typical_p: c.TypicalP = 1.0,
    repetition_penalty: c.RepetitionPenalty = 1.0,
    presence_penalty: c.PresencePenalty = 0.0,
    frequency_penalty: c.FrequencyPenalty = 0.0,
    logit_bias: c.LogitBias = None,
    allow_token: c.AllowToken = None,
    ban_token: c.BanToken = None,
    ban_word: c.BanWord = None,
    json_schema: c.JsonSchema = None,
    regex: c.Regex = None,
    grammar: c.Grammar = None,
    seed: c.Seed = None,
    n: Annotated[int, typer.Option("--samples", help="Independent samples.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")
    ] = None,
    stop_token: c.StopToken = None,
    min_tokens: c.MinTokens = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")
    ] = False,
    logprobs: Annotated[
        int | None, typer.Option(help="Report log-probabilities of so many tokens (--json).")
    ] = None,
    rule: Annotated[
        str | None, typer.Option(help="Acceptance rule (default: the best exact one).")
    ] = None,
    dtype: c.Dtype = "auto",
    device: c.Device = "auto",
    kv_tokens: c.KvTokens = 16384,
    memory_limit: c.MemoryLimit = None,
    show: c.Show = False,
    as_json: c.Json = False,
) -> None:
    """Continue a prompt; the output follows exactly the target's distribution."""
    if system is not None and not chat:
        raise UserError("--system needs --chat: a plain prompt has no system message")
    text = _read_prompt(prompt, file)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=c.logit_bias(logit_bias),
        allowed_tokens=None if allow_token is None else tuple(allow_token),
        banned_tokens=tuple(ban_token or ()),
        banned_words=tuple(ban_word or ()),
        min_tokens=min_tokens,
        json_schema=c.text_or_file(json_schema),
        regex=c.text_or_file(regex),
        grammar=c.text_or_file(grammar),
        seed=seed,
        n=n,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token or ()),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        rule=rule,
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
    if chat:
        first = [] if system is None else [{"role": "system", "content": system}]
        tokens = llm.chat_tokens([*first, {"role": "user", "content": text}])
    else:
        tokens = llm.tokens(text)
    if llm.wants_fit:
        with c.status("measuring acceptance for the Sequoia tree"):
            shape = llm.fit_tree(tokens, replace(params, n=1, max_tokens=min(max_tokens, 64)))
        c.console.print(f"note: tree of {shape.nodes} nodes, {shape.depth} deep", highlight=False)
    outputs = (
        llm.generate(tokens, params) if as_json or n > 1 else [_live(llm, tokens, params, show)]
    )
    for output in outputs if n > 1 and not as_json else ():
        c.console.print(f"[dim]sample {output.index}[/dim]")
        if show:
            Console().print(c.Painter(llm).paint(output.tokens), soft_wrap=True)
        else:
            print(output.text)
    _summary(llm, outputs, draft)
    if as_json:
        c.print_json(
            {
                "model": llm.engine.model.info.name,
                "draft": draft,
                "k": llm.k,
                "outputs": [c.output_dict(llm, o) for o in outputs],
                "engine": llm.engine.usage(),
            }
        )
    failed = next((o for o in outputs if o.finish_reason is FinishReason.ERROR), None)
    if failed is not None:
        raise UserError(f"generation failed: {failed.error}")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise UserError("give the prompt as an argument or with --file, not both")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"prompt file '{file}' can't be read: {e}") from None
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        text = sys.stdin.read()
    elif prompt is not None:
        text = prompt
    else:
        raise UserError("no prompt was given: write it as an argument, with --file or on stdin")
    if not text.strip():
        raise UserError("the prompt is empty: give at least one character")
    return text


def _live(llm: LLM, tokens: tuple[int, ...], params: SamplingParams, show: bool) -> RequestOutput:
    """Print text as it comes."""
    out, painter = Console(), c.Painter(llm)
    stream = llm.stream(tokens, params)
    for step in stream:
        if show:
            out.print(painter.paint(step.tokens), end="", soft_wrap=True)
        else:
            sys.stdout.write(step.text)
            sys.stdout.flush()
        if step.finish_reason is not None:
            result = llm.result(step.request_id)
    stream.close()
    print(flush=True)
    return result


def _summary(llm: LLM, outputs: list[RequestOutput], draft: str) -> None:
    for o in outputs:
        stats = c.output_dict(llm, o)
        speed = stats["decode_tok_s"]
        c.console.print(
            f"[dim]{len(o.tokens)} tokens"
            + (f", {speed:.1f} tok/s" if speed else "")
            + f", draft {draft}, tau {o.stats.tau:.2f}, ended by {o.finish_reason.value}, "
            f"{o.guarantee.value}[/dim]",
            highlight=False,
            soft_wrap=True,
        )
