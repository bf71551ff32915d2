"""A `tokenizers.Tokenizer` from the vocabulary that a GGUF file carries.

Two kinds: byte-level BPE ("gpt2"), whose splitting rule the file names in
`tokenizer.ggml.pre`, and SentencePiece BPE ("llama"), which has scores instead of merges.
A wrong splitting rule gives wrong tokens without a sign, so a name that is missing or not
in the table below is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from paceline.errors import UserError
from paceline.models.gguf_file import (
    TYPE_CONTROL,
    TYPE_NORMAL,
    TYPE_UNUSED,
    TYPE_USER,
    GGUFFile,
)

_GPT2: Final = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Contractions, then words with one leading character, digits up to a limit, marks, breaks.
_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """Patterns are applied one after the other, each inside the pieces of the last.

    whole_words: a piece that is itself a token is not built from merges.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    bos: bool = False


_DIGITS_THEN_GPT2: Final = _Rule(patterns=(r"\p{N}", _GPT2))
_LLAMA3: Final = _Rule(patterns=(_WORDS % 3,), whole_words=True, bos=True)
_QWEN2: Final = _Rule(patterns=(_WORDS.replace("{1,%d}", ""),), nfc=True)
#: Hiragana and katakana have no part in it, unlike the rule of DeepSeek-V3.
_DEEPSEEK_CODER: Final = _Rule(
    patterns=(
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    )
)
_RULES: Final[dict[str, _Rule]] = {
    "gpt-2": _Rule(patterns=(_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _Rule(patterns=(_TEKKEN,), whole_words=True, bos=True),
    "deepseek-coder": _DEEPSEEK_CODER,
}
PRE_TOKENIZERS: Final = tuple(sorted(_RULES))


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary:
    """What a GGUF file says about its tokenizer; `backend` has the defined tokens only."""

    backend: Tokenizer
    add_bos: bool
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None


def read_vocabulary(file: GGUFFile) -> GGUFVocabulary:
    """Build the tokenizer of a GGUF file.

    Tokens of the type "unused" (padding of the matrix) are left out.

    Raises:
        UserError: keys are missing or contradict each other; the model or the
        pre-tokenizer is not one of those supported.
    """
    model = file.need("tokenizer.ggml.model", str)
    if model == "gpt2":
        backend, default_bos = _byte_level(file)
    elif model == "llama":
        backend, default_bos = _sentencepiece(file), True
    else:
        raise UserError(
            f"{file.path}: tokenizer model {model!r} is not supported; supported: gpt2, llama"
        )
    tokens, _ = _tokens(file)
    bos = file.get("tokenizer.ggml.bos_token_id", int)
    eos = file.get("tokenizer.ggml.eos_token_id", int)
    for name, i in (("bos", bos), ("eos", eos)):
        if i is not None and not 0 <= i < len(tokens):
            raise UserError(f"{file.path}: {name}_token_id {i} is outside the vocabulary")
    add_bos = file.get("tokenizer.ggml.add_bos_token", bool, default_bos and bos is not None)
    if add_bos and bos is None:
        raise UserError(f"{file.path}: add_bos_token is true but there is no bos_token_id")
    return GGUFVocabulary(
        backend=backend,
        add_bos=add_bos,
        bos_id=bos,
        eos_id=eos,
        chat_template=file.get("tokenizer.chat_template", str),
    )


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    tokens = file.need("tokenizer.ggml.tokens", list)
    kinds = file.get("tokenizer.ggml.token_type", list, [TYPE_NORMAL] * len(tokens))
    if not tokens or not all(isinstance(t, str) for t in tokens):
        raise UserError(f"{file.path}: tokenizer.ggml.tokens must be a list of texts")
    if len(kinds) != len(tokens):
        raise UserError(f"{file.path}: {len(tokens)} tokens but {len(kinds)} token types")
    return tokens, kinds


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    """Text to id of every defined token."""
    tokens, kinds = _tokens(file)
    vocabulary: dict[str, int] = {}
    for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind == TYPE_UNUSED:
            continue
        if text in vocabulary or not text:
            what = f"repeats token {vocabulary[text]}" if text else "is empty"
            raise UserError(f"{file.path}: token {i} {text!r} {what}; the file is damaged")
        vocabulary[text] = i
    return vocabulary


def _bpe(file: GGUFFile, **arguments: Any) -> BPE:
    try:
        return BPE(**arguments)
    except Exception as e:  # the library raises bare Exception for inconsistent merges
        raise UserError(f"{file.path}: the merges do not fit the vocabulary ({e})") from None


def _add_marked(file: GGUFFile, backend: Tokenizer) -> None:
    """Make control and user-defined tokens match in text as they stand."""
    tokens, kinds = _tokens(file)
    marked = [
        AddedToken(text, special=kind == TYPE_CONTROL, normalized=False)
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (TYPE_CONTROL, TYPE_USER)
    ]
    backend.add_tokens(marked)


def _byte_level(file: GGUFFile) -> tuple[Tokenizer, bool]:
    """The backend, and whether files of this kind want a BOS if they do not say."""
    pre = file.get("tokenizer.ggml.pre", str)
    if pre not in _RULES:
        what = "is missing" if pre is None else f"is {pre!r}, which is unknown"
        raise UserError(
            f"{file.path}: tokenizer.ggml.pre {what}; the text would be split wrongly; "
            f"known: {', '.join(PRE_TOKENIZERS)}"
        )
    rule = _RULES[pre]
    merges = file.need("tokenizer.ggml.merges", list)
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else () for m in merges]
    bad = next((m for m, pair in zip(merges, pairs, strict=True) if len(pair) != 2), None)
    if bad is not None:
        raise UserError(f"{file.path}: the merge {bad!r} is not two tokens; the file is damaged")
    backend = Tokenizer(
        _bpe(file, vocab=_vocabulary(file), merges=pairs, ignore_merges=rule.whole_words)
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    _add_marked(file, backend)
    return backend, rule.bos


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """BPE whose merges are ranked by the score of the token that they make.

    Spaces become U+2581, one is put in front unless `add_space_prefix` is false, and
    characters outside the vocabulary become `<0x..>` byte tokens.
    """
    vocabulary = _vocabulary(file)
    tokens, kinds = _tokens(file)
    scores = file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise UserError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores")
    normal = {t: i for t, i in vocabulary.items() if kinds[i] in (TYPE_NORMAL, TYPE_USER)}
    merges = _merges_by_score(normal, scores)
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise UserError(f"{file.path}: unknown_token_id {unknown} is outside the vocabulary")
    backend = Tokenizer(
        _bpe(
            file,
            vocab=vocabulary,
            merges=merges,
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    to_marks: list[Any] = [normalizers.Replace(" ", "\u2581")]
    to_text: list[Any] = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if prefix:
        to_marks.insert(0, normalizers.Prepend("\u2581"))
        to_text.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(to_marks)
    backend.decoder = decoders.Sequence(to_text)
    _add_marked(file, backend)
    return backend


def _merges_by_score(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, best score of the whole first; ties by ids."""
    ranked = []
    for text, i in vocabulary.items():
        for cut in range(1, len(text)):
            left, right = vocabulary.get(text[:cut]), vocabulary.get(text[cut:])
            if left is not None and right is not None:
                ranked.append((-float(scores[i]), i, left, right, (text[:cut], text[cut:])))
    return [pair for *_, pair in sorted(ranked)]
