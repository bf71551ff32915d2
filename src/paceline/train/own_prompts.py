"""Prompts that the target writes itself (Magpie, Xu et al. 2024).

A chat model that is given its template up to where a user begins goes on as the users of its
own training data did. So its prompts are as varied as what it was trained for, and nobody's
text is needed. They are drawn at random from the target's law, a batch at a time; batch b of a
seed is always the same, so a file goes on where it ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.api import LLM
from paceline.errors import UserError
from paceline.train.overlap import Forbidden, Seen, words
from paceline.types import MAX_N, FinishReason, SamplingParams

#: Batches in a row that brought nothing new, after which a target has no more to say.
PATIENCE = 50
#: Words of the shortest prompt that is kept.
SHORTEST = 3
#: Seeds of one file's batches lie this far from those of the next seed.
_STRIDE = 1_000_003
#: How every line begins.
_BEGINS = b'{"prompt": "'


@dataclass(frozen=True, kw_only=True)
class PromptPlan:
    """count: prompts that the file shall hold. batch: drawn at once. max_tokens: of one."""

    count: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int = 256
    batch: int = 32

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"count = {self.count} is out of range: use 1 or more")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed = {self.seed} is out of range: use 0 to 2**32 - 1")
        if not 1 <= self.batch <= MAX_N:
            raise UserError(f"batch (n = {self.batch}) is out of range: use 1 to {MAX_N}")
        if self.params(0).greedy:
            raise UserError("temperature = 0 writes one prompt again and again: use 1, or 0.7")

    def params(self, number: int) -> SamplingParams:
        """Of batch `number`; UserError where a value is out of range."""
        return SamplingParams(
            n=self.batch,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            seed=self.seed * _STRIDE + number,
        )


@dataclass
class Written:
    """Counts. unfinished: did not end within the limit, or is too short or no text."""

    prompts: int = 0
    unfinished: int = 0
    duplicates: int = 0
    forbidden: int = 0


def opening(llm: LLM) -> tuple[int, ...]:
    """The tokens of a chat before its user's first word. UserError without a chat template."""
    if llm.tokenizer.chat_template is None:
        raise UserError(
            "this model has no chat template, so it can't write a user's prompts: give --prompts "
            "or --text to 'paceline train capture'"
        )
    one, other = (llm.chat_tokens([{"role": "user", "content": text}]) for text in ("A", "Z"))
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    if n == 0:
        raise UserError("this model's chat template does not begin a user's turn by itself")
    return one[:n]


def write_prompts(
    llm: LLM,
    out: Path,
    plan: PromptPlan,
    forbidden: Forbidden,
    report: Callable[[Written], None] = lambda _: None,
) -> Written:
    """Add prompts to the JSON lines of `out` until it holds as many as planned, or the target
    has no new ones. What an interruption leaves is whole lines, behind which the same call
    goes on. `report` is called before the first batch and behind each."""
    begin = opening(llm)
    lines = _kept(out, plan.seed)
    seen, written = Seen(), Written(prompts=len(lines))
    for line in lines:
        seen.is_new(line["prompt"])
    number = max((line["batch"] for line in lines), default=-1) + 1
    barren = 0
    report(written)
    while written.prompts < plan.count and barren < PATIENCE:
        fresh = []
        for output in llm.generate([begin], plan.params(number)):
            text = output.text.strip()
            if output.finish_reason is not FinishReason.EOS or not _is_prompt(text):
                written.unfinished += 1
            elif forbidden.overlaps(text):
                written.forbidden += 1
            elif not seen.is_new(text):
                written.duplicates += 1
            else:
                fresh.append({"prompt": text, "batch": number, "seed": plan.seed})
        with out.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in fresh))
        written.prompts += len(fresh)
        barren = 0 if fresh else barren + 1
        number += 1
        report(written)
    return written


def _is_prompt(text: str) -> bool:
    return len(words(text)) >= SHORTEST and "\ufffd" not in text


def _kept(out: Path, seed: int) -> list[dict[str, Any]]:
    """The file's lines; one that a kill cut off is dropped. UserError, and nothing touched,
    where they are not this command's, or another seed's."""
    if not out.exists():
        return []
    try:
        data = out.read_bytes()
        end = data.rfind(b"\n") + 1
        lines = [json.loads(line) for line in data[:end].splitlines()]
        ours = all(isinstance(line["prompt"], str) and line["batch"] >= 0 for line in lines)
        seeds = {line["seed"] for line in lines}
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours or not (data[end:].startswith(_BEGINS) or _BEGINS.startswith(data[end:])):
        raise UserError(f"{out} holds something else than prompts of this command: choose another "
                        "--out")  # fmt: skip
    if seeds - {seed}:
        raise UserError(f"{out} was begun with --seed {seeds.pop()}: give it, or another --out")
    if end < len(data):
        out.write_bytes(data[:end])
    return lines
