"""Seed prompts: where a capture's conversations begin.

Three sources, mixed by the caller: a JSONL file of turns, files of folders that the user
names (functions and passages cut from them, under varied instructions), and `invented`, which
combines templates and word lists of `seed_words.py`. All are endless or long, deterministic
(a function of their arguments), and yield `Seed`s one by one.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UserError
from paceline.train import seed_words as w
from paceline.train.overlap import Forbidden, Seen, text_key

#: Files that are read as code and as text.
CODE_SUFFIXES = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js",
                 ".ts", ".rb", ".sh", ".sql", ".lua", ".cs", ".kt", ".swift")  # fmt: skip
TEXT_SUFFIXES = (".md", ".rst", ".txt", ".tex", ".html", ".adoc")
#: Folders below a named one that are other people's work, of other licences.
_ELSEWHERE = ("site-packages", "dist-packages", "node_modules", "__pycache__")
_MAX_FILE_BYTES = 1_000_000
_WINDOW_CHARS = (300, 1400)


@dataclass(frozen=True, kw_only=True)
class Seed:
    """turns: what the user says, turn by turn; each is answered by the target before the
    next. raw: a text to go on with as it is, without a chat template (then the only turn)."""

    turns: tuple[str, ...]
    raw: bool = False

    @property
    def text(self) -> str:
        return "\n".join(self.turns)

    @property
    def key(self) -> str:
        return text_key(self.text)


def from_jsonl(path: Path) -> Iterator[Seed]:
    """Objects with `turns` (texts), or `prompt`. UserError names a line that has neither."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be read: {e}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        turns = _turns(value)
        if not turns:
            raise UserError(
                f'{path}, line {number}: not a prompt; write {{"turns": ["...", ...]}} or '
                '{"prompt": "..."}'
            )
        yield Seed(turns=turns)


def _turns(value: Any) -> tuple[str, ...]:
    if not isinstance(value, dict):
        return ()
    turns = value.get("turns", [value.get("prompt")])
    if not isinstance(turns, list) or not all(isinstance(t, str) and t.strip() for t in turns):
        return ()
    return tuple(turns)


def from_folders(folders: Iterable[Path], seed: int) -> Iterator[Seed]:
    """Endless prompts over the code and text files of the folders; each file lends a piece
    at a time, in an order drawn from `seed`. UserError where the folders hold no such file."""
    paths = [p for folder in folders for p in _files(folder)]
    rng = np.random.default_rng([seed, 1])
    found = False
    for _ in itertools.count():
        for i in rng.permutation(len(paths)).tolist():
            for made in _from_file(paths[i], rng):
                found = True
                yield made
        if not found:
            raise UserError("the --text folders hold no readable code or text file")


def _files(folder: Path) -> list[Path]:
    if not folder.exists():
        raise UserError(f"{folder}: no such folder; name one that holds texts or code")
    wanted = CODE_SUFFIXES + TEXT_SUFFIXES
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    return [
        f
        for f in files
        if f.suffix in wanted
        and f.is_file()
        and not any(p.startswith(".") or p in _ELSEWHERE for p in f.relative_to(folder).parts)
        and 200 < f.stat().st_size < _MAX_FILE_BYTES
    ]


def _from_file(path: Path, rng: np.random.Generator) -> list[Seed]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if path.suffix == ".py":
        functions = python_functions(text)
        if functions and rng.random() < 0.8:
            return [_about_function(functions[rng.integers(len(functions))], rng)]
    piece = _window(text, rng)
    if piece is None:
        return []
    code = path.suffix in CODE_SUFFIXES
    if rng.random() < 0.2:  # base-model continuation
        return [Seed(turns=(piece[: int(rng.integers(120, 500))],), raw=True)]
    templates = w.CODE_TASKS if code else w.PASSAGE_TASKS
    prompt = _pick(templates, rng).format(
        text=piece,
        lang=path.suffix[1:],
        other=_pick(w.PROGRAMMING_LANGUAGES, rng),
        language=_pick(w.LANGUAGES, rng),
        reader=_pick(w.READERS, rng),
        style=_pick(w.STYLES, rng),
        n=int(rng.integers(2, 7)),
    )
    return [Seed(turns=_with_follow_up(prompt, rng))]


@dataclass(frozen=True)
class Function:
    """A Python function: its first lines up to and with the docstring, and all of it."""

    stub: str
    source: str
    documented: bool


def python_functions(text: str) -> list[Function]:
    """Functions of a module that are neither tiny nor long; [] where it can't be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = text.splitlines()
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        source = _dedent(lines[first:last])
        if not (3 <= last - first <= 45 and len(source) <= _WINDOW_CHARS[1]):
            continue
        documented = ast.get_docstring(node) is not None
        body = node.body[0].end_lineno if documented else node.body[0].lineno - 1
        stub = _dedent(lines[first:body])
        if stub.strip():
            found.append(Function(stub, source, documented))
    return found


def _about_function(function: Function, rng: np.random.Generator) -> Seed:
    if function.documented and rng.random() < 0.5:
        if rng.random() < 0.2:
            return Seed(turns=(function.stub + "\n",), raw=True)
        prompt = _pick(w.STUB_TASKS, rng).format(text=function.stub)
        return Seed(turns=_with_follow_up(prompt, rng))
    prompt = _pick(w.FUNCTION_TASKS, rng).format(
        text=function.source, other=_pick(w.PROGRAMMING_LANGUAGES, rng)
    )
    return Seed(turns=_with_follow_up(prompt, rng))


def _dedent(lines: list[str]) -> str:
    margin = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    return "\n".join(line[margin:] if line[:margin].isspace() or margin == 0 else line.lstrip()
                     for line in lines)  # fmt: skip


def _window(text: str, rng: np.random.Generator) -> str | None:
    """Whole paragraphs (or lines of code) around a random place."""
    blocks = [b.strip("\n") for b in re.split(r"\n\s*\n", text) if len(b.strip()) > 40]
    if not blocks:
        return None
    least = int(rng.integers(*_WINDOW_CHARS))
    at = int(rng.integers(len(blocks)))
    piece = ""
    for block in blocks[at:]:
        if piece and len(piece) + len(block) > _WINDOW_CHARS[1]:
            break
        piece += ("\n\n" if piece else "") + block[: _WINDOW_CHARS[1]]
        if len(piece) >= least:
            break
    return piece if len(piece) >= 120 else None


def invented(seed: int) -> Iterator[Seed]:
    """Endless prompts from templates: chat, questions, word problems, code, translation,
    summaries of nothing but a topic, writing, role play, lists, comparisons."""
    rng = np.random.default_rng([seed, 2])
    kinds = list(w.INVENTED)
    weights = np.array([w.INVENTED_WEIGHTS[k] for k in kinds], dtype=float)
    while True:
        kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))]
        if kind == "problem":
            prompt = word_problem(rng)
        else:
            prompt = _fill(_pick(w.INVENTED[kind], rng), rng)
        yield Seed(turns=_with_follow_up(prompt, rng))


def _fill(template: str, rng: np.random.Generator) -> str:
    """Every {slot} of a template gets a word of its list, independently."""

    def choose(match: re.Match[str]) -> str:
        name = match[1]
        if name == "n":
            return str(int(rng.integers(3, 10)))
        return _pick(w.SLOTS[name], rng)

    return re.sub(r"\{(\w+)\}", choose, template)


def word_problem(rng: np.random.Generator) -> str:
    """An arithmetic story of two to four steps, with numbers that work out, and one of
    several ways to ask for the steps."""
    name, other = (str(x) for x in rng.choice(w.NAMES, 2, replace=False))
    a, b, c = (int(x) for x in rng.integers(2, 25, 3))
    story = _pick(w.WORD_PROBLEMS, rng).format(
        name=name,
        other=other,
        thing=_pick(w.THINGS, rng),
        place=_pick(w.PLACES, rng),
        a=a,
        b=b,
        c=c,
        ab=a * b,
        more=a + b + c,
        pct=int(rng.choice([10, 20, 25, 50])),
        big=int(rng.integers(4, 40)) * 20,
    )
    return f"{story} {_pick(w.ASK_STEPS, rng)}".strip()


def _with_follow_up(prompt: str, rng: np.random.Generator) -> tuple[str, ...]:
    if rng.random() < 0.12:
        return prompt, _pick(w.FOLLOW_UPS, rng)
    return (prompt,)


def _pick(choices: tuple[str, ...], rng: np.random.Generator) -> str:
    return choices[int(rng.integers(len(choices)))]


def mixed(sources: list[Iterator[Seed]]) -> Iterator[Seed]:
    """One of each in turn, until all have ended."""
    live = list(sources)
    while live:
        for source in list(live):
            made = next(source, None)
            if made is None:
                live.remove(source)
            else:
                yield made


@dataclass
class SeedStats:
    """What a filter dropped, for the report."""

    taken: int = 0
    duplicates: int = 0
    forbidden: int = 0


def admissible(
    source: Iterator[Seed], forbidden: Forbidden, stats: SeedStats, *, patience: int = 20000
) -> Iterator[Seed]:
    """Seeds that overlap no benchmark and repeat none before them. An endless source that
    has had nothing new for `patience` seeds is taken to be used up."""
    seen = Seen()
    barren = 0
    for made in source:
        if any(forbidden.overlaps(turn) for turn in made.turns):
            stats.forbidden += 1
        elif not seen.is_new(made.text):
            stats.duplicates += 1
        else:
            stats.taken += 1
            barren = 0
            yield made
            continue
        barren += 1
        if barren >= patience:
            return
