"""What a benchmark decodes: the packaged suite, files of prompts, composed and random ones.

| spec | prompts |
|---|---|
| `suite`, `suite:DOMAIN` | original ones in eleven domains, the structure of SPEED-Bench |
| `code-edit` | rewrite a given function with a small change |
| `throughput`, `throughput:LENGTH` | three entropy tiers, inputs of 128 to 8192 tokens, composed |
| `random:LENGTH` | random tokens: measures cost, says nothing of acceptance |
| a path | JSON lines with `turns`, `prompt`, `messages`, `input` or `question`: the shapes of \
Spec-Bench, SPEED-Bench and HumanEval |

Composed and random prompts are `synthetic`, and every table says so.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from paceline.errors import UserError

DOMAINS = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
    "summarization",
    "writing",
)
#: Entropy of the expected output: copying, explaining, inventing.
TIERS = ("low", "mid", "high")
#: Input lengths of `throughput`, tokens.
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
#: What a file's prompts are called where it does not say.
UNSAID = "none"
_RANDOM_PROMPTS = 10

Encode = Callable[[str], Seq[int]]


@dataclass(frozen=True, kw_only=True)
class Item:
    """One prompt. turns: what the user says, in order (a model answers in between). tokens:
    a prompt that is given as ids instead (then `turns` is empty). synthetic: composed of
    unrelated text, or random."""

    id: str
    domain: str
    tier: str = UNSAID
    turns: tuple[str, ...] = ()
    tokens: tuple[int, ...] | None = None
    synthetic: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts in the order in which they are sent. notes: what was left out, and why."""

    name: str
    source: str
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        value = [(i.id, i.domain, i.tier, i.turns, i.tokens, i.synthetic) for i in self.items]
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What composed and random prompts must know of the model. encode: text to ids;
    limit: most prompt tokens that leave room for the output; vocab_size, special_ids:
    random prompts hold ordinary tokens only."""

    encode: Encode
    limit: int
    vocab_size: int
    special_ids: frozenset[int] = frozenset()


def load_workload(
    spec: str, *, prompts: int | None = None, seed: int = 0, fit: Fit | None = None
) -> Workload:
    """The prompts that `spec` names, `prompts` of them at most, spread evenly over domains.
    fit: needed by `throughput` and `random`. UserError where the spec or a file is wrong."""
    if prompts is not None and prompts < 1:
        raise UserError(f"prompts = {prompts} is out of range: use 1 or more")
    kind, _, argument = spec.partition(":")
    if kind == "random" and argument:
        return random_workload(
            _length(spec, argument), prompts or _RANDOM_PROMPTS, seed, _need(fit)
        )
    if kind == "throughput":
        return _throughput(spec, argument, prompts, _need(fit))
    if kind == "suite":
        items, source = _suite_items(spec, argument), "suite"
    elif spec == "code-edit":
        items, source = _packaged("code_edit"), "code-edit"
    else:
        items, source = read_jsonl(spec), spec
        spec = Path(spec).stem
    return Workload(name=spec, source=source, items=spread(items, prompts))


def _need(fit: Fit | None) -> Fit:
    assert fit is not None, "composed and random prompts need the model's tokenizer"
    return fit


def _length(spec: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"workload {spec!r}: {text!r} is no input length; write it like random:512")
    return int(text)


def spread(items: Seq[Item], n: int | None) -> tuple[Item, ...]:
    """n items, one of each domain in turn, in the file's order within a domain."""
    if n is None or n >= len(items):
        return tuple(items)
    queues: dict[str, list[Item]] = {}
    for item in items:
        queues.setdefault(item.domain, []).append(item)
    order = [
        queue[i]
        for i in range(max(map(len, queues.values())))
        for queue in queues.values()
        if i < len(queue)
    ]
    return tuple(order[:n])


def _suite_items(spec: str, domain: str) -> tuple[Item, ...]:
    if domain and domain not in DOMAINS:
        raise UserError(f"workload {spec!r}: no such domain; use one of {', '.join(DOMAINS)}")
    return tuple(i for d in DOMAINS if domain in ("", d) for i in _packaged(d))


@cache
def _packaged(name: str) -> tuple[Item, ...]:
    """Items of a packaged file, which has every field."""
    text = files("paceline.bench").joinpath("suite", f"{name}.jsonl").read_text("utf-8")
    return tuple(
        Item(**{**json.loads(line), "turns": tuple(json.loads(line)["turns"])})
        for line in text.splitlines()
    )


def documents() -> tuple[str, ...]:
    """The original texts that long prompts are composed of."""
    own = [i.turns[0] for i in _packaged("documents")]
    # The question is the last paragraph of the prompts that carry passages.
    prompts = [i.turns[0] for d in ("rag", "summarization") for i in _packaged(d)]
    return (*own, *(p.rpartition("\n\n")[0] for p in prompts))


# --- files ---------------------------------------------------------------------------------


def read_jsonl(path: str | Path) -> tuple[Item, ...]:
    """Prompts of a file with one JSON object a line. UserError naming file and line."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(
            f"workload '{path}' is none of suite, code-edit, throughput, random:LENGTH, and "
            f"can't be read as a file: {e}"
        ) from None
    items = [
        _parse_line(line, f"'{path}' line {number}", Path(path).stem, number)
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip()
    ]
    if not items:
        raise UserError(f"workload '{path}' holds no prompt: give one JSON object a line")
    seen: dict[str, int] = {}
    for item in items:
        seen[item.id] = seen.get(item.id, 0) + 1
    double = next((i for i, n in seen.items() if n > 1), None)
    if double is not None:
        raise UserError(f"workload '{path}' has the id {double!r} twice: ids must be unique")
    return tuple(items)


def _parse_line(line: str, where: str, stem: str, number: int) -> Item:
    try:
        value = json.loads(line)
    except ValueError as e:
        raise UserError(f"workload {where} is no JSON: {e}") from None
    if not isinstance(value, dict):
        raise UserError(f"workload {where}: expected an object like {{'turns': ['...']}}")
    turns = _turns(value, where)
    name = next((value[k] for k in ("id", "question_id", "task_id") if k in value), number)
    domain = next((value[k] for k in ("domain", "category") if value.get(k)), stem)
    tier = str(value.get("tier", UNSAID))
    return Item(
        id=str(name),
        domain=str(domain),
        tier=tier,
        turns=turns,
        synthetic=bool(value.get("synthetic", False)),
    )


def _turns(value: dict[str, Any], where: str) -> tuple[str, ...]:
    """The user's turns of any known shape."""
    turns: object
    if "turns" in value:
        turns = value["turns"]
    elif "messages" in value:
        turns = _user_turns(value["messages"], where)
    else:
        turns = next(([value[k]] for k in ("prompt", "input", "question") if k in value), None)
        if turns is None:
            keys = ", ".join(map(str, value)) or "none"
            raise UserError(
                f"workload {where} has no 'turns', 'prompt', 'messages', 'input' or 'question' "
                f"(its fields: {keys})"
            )
    if isinstance(turns, str):
        turns = [turns]
    ok = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
    if not ok or not turns:
        raise UserError(f"workload {where}: the turns must be non-empty texts, at least one")
    assert isinstance(turns, list)
    return tuple(turns)


def _user_turns(messages: object, where: str) -> list[object]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(f"workload {where}: 'messages' must be a list of objects")
    other = next(
        (m.get("role") for m in messages if m.get("role") not in ("user", "assistant")), ""
    )
    if other != "":
        raise UserError(
            f"workload {where}: a message has the role {other!r}, which can't be replayed; use "
            "'turns', or 'messages' of user and assistant"
        )
    return [m.get("content") for m in messages if m.get("role") == "user"]


# --- composed and random -------------------------------------------------------------------

#: Per tier, questions that stand behind the documents.
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "low": (
        "Copy the last two paragraphs of the text above word for word.",
        "Repeat the first passage above exactly as it stands, then stop.",
        "Write out every sentence above that holds a number, unchanged.",
    ),
    "mid": (
        "Summarise the passages above for a reader who has one minute.",
        "What are the three most important facts above, and why do they matter?",
        "Compare the last two subjects of the text above.",
    ),
    "high": (
        "Write a short story whose hero meets every subject named above.",
        "Invent a dialogue between two strangers who disagree about the text above.",
        "Write a poem inspired by the passages above.",
    ),
}


def _throughput(spec: str, argument: str, prompts: int | None, fit: Fit) -> Workload:
    lengths = LENGTHS if not argument else (_length(spec, argument),)
    items, notes = [], []
    for length in lengths:
        wanted = min(length, fit.limit)
        if wanted < 0.9 * length:
            notes.append(
                f"inputs of {length} tokens are left out: the context leaves room for {fit.limit}"
            )
            continue
        for tier in TIERS:
            for number, question in enumerate(_QUESTIONS[tier]):
                text = compose(wanted, question, f"{tier}:{length}:{number}", fit.encode)
                items.append(
                    Item(
                        id=f"{tier}-{length}-{number}",
                        domain=f"input {length}",
                        tier=tier,
                        turns=(text,),
                        synthetic=True,
                    )
                )
    if not items:
        raise UserError(f"workload {spec!r}: {notes[0]}; raise --kv-tokens or choose less")
    # All tiers of a length come before its second questions, so that few prompts are balanced.
    items.sort(key=lambda i: int(i.id.rsplit("-", 1)[1]))
    return Workload(name=spec, source=spec, items=spread(items, prompts), notes=tuple(notes))


def compose(length: int, question: str, key: str, encode: Encode) -> str:
    """Original documents in an order drawn from `key`, cut at a word so that text and
    question together have `length` tokens at most (and within a word of that)."""
    order = list(documents())
    random.Random(key).shuffle(order)
    words: list[str] = []
    tokens, budget = 0, length - len(encode("\n\n" + question))
    for word in _words(order):
        # Counted apart, pieces have at least as many tokens as joined: the sum is safe.
        tokens += len(encode(word))
        if tokens > budget:
            break
        words.append(word)
    return "".join(words).rstrip() + "\n\n" + question


def _words(texts: list[str]) -> Iterator[str]:
    """Words with the space before them, round and round."""
    while True:
        for text in texts:
            for i, word in enumerate(text.split(" ")):
                yield word if i == 0 else " " + word
            yield "\n\n"


def random_workload(length: int, n: int, seed: int, fit: Fit) -> Workload:
    """Prompts of `length` random ordinary tokens."""
    name = f"random:{length}"
    if length > fit.limit:
        raise UserError(
            f"workload {name!r} does not fit: the context leaves room for {fit.limit} prompt "
            "tokens; choose less, lower --max-tokens or raise --kv-tokens"
        )
    ordinary = [i for i in range(fit.vocab_size) if i not in fit.special_ids]
    items = []
    for number in range(n):
        rng = random.Random(f"{seed}:{length}:{number}")
        tokens = tuple(rng.choice(ordinary) for _ in range(length))
        items.append(Item(id=f"{name}-{number}", domain="random", tokens=tokens, synthetic=True))
    return Workload(name=name, source=name, items=tuple(items))
