"""Tokenizers: GGUF vocabularies against slow implementations written here, templates, BOS."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers

from paceline.errors import UserError
from paceline.models import catalog
from paceline.models.gguf_file import GGUFFile, open_gguf
from paceline.models.tokenizer import Tokenizer, first_mismatch

GPT2 = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
QWEN2 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

POOL = [
    *("hello", " world", " the", "Don't", "WE'LL", "i'm", " it's", "'s", "'", "naïve", " Straße"),
    *("def f(x):\n", "    return x**2\n", "\tif a != b:\n", "#include <vector>\n", "->"),
    *("print(f'{x:>10}')", "https://a.b/c?d=e&f=%20", "snake_case_name", "CamelCaseName", "</tag>"),
    *("0", "12", "1234567", "3.14159", " 42", "1e-10", "0xFF", "٣٤٥", "½", "Ⅷ", "²", "१२३"),
    *("漢字", "かな", "カタカナ", "한국어", "Привет", " мир", "مرحبا", "हिन्दी", "ไทย"),
    *("ἄλφα", "e\u0301", "n\u0303", "::", "!=="),
    *("😀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", " 🎉🎉", "❤️", "♥", "→", "“quoted”", "—", "…", "€5"),
    *(" ", "  ", "   ", "        ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n"),
    *(" \n", "\n ", "\u00a0", "\u3000", "\x1c", "\x85", "\u180e"),
    *(".", ",", "...", "!?", "(", ")", "[]", "{}", "<", ">", "@", "#", "$", "%", "^"),
    *("&", "*", "`", "~", "\\"),
    *("\x00", "\x07", "\x7f", "\u200b", "\ufeff", "\ufffd", "\U0001f9ff", "\U00020000"),
]  # fmt: skip


def mixed_strings(count: int, seed: int) -> list[str]:
    """Joined pool pieces, with a random character now and then."""
    rng = random.Random(seed)
    out = ["", " ", "\n"]
    while len(out) < count:
        pieces = rng.choices(POOL, k=rng.randint(1, 12))
        if rng.random() < 0.3:
            c = chr(rng.randint(0x20, 0x2FFFF))
            if unicodedata.category(c) not in ("Cs", "Cn"):
                pieces.insert(rng.randrange(len(pieces)), c)
        out.append("".join(pieces))
    return out


class SlowBPE:
    """Byte-level BPE as its paper tells it: the best-ranked pair, everywhere, until none."""

    def __init__(self, file: GGUFFile, split: Callable[[str], list[str]]) -> None:
        self.ids = {t: i for i, t in enumerate(file.metadata["tokenizer.ggml.tokens"])}
        merges = file.metadata["tokenizer.ggml.merges"]
        self.rank = {tuple(m.split(" ")): r for r, m in enumerate(merges)}
        self.split = split
        self.byte: dict[int, str] = {}
        spare = 256
        for b in range(256):
            if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174:
                self.byte[b] = chr(b)
            else:
                self.byte[b] = chr(spare)
                spare += 1

    def word(self, text: str) -> list[int]:
        parts = [self.byte[b] for b in text.encode()]
        parts = [p for p in parts if p in self.ids]  # bytes that the vocabulary lacks vanish
        while len(parts) > 1:
            pairs = set(pairwise(parts)) & self.rank.keys()
            if not pairs:
                break
            best = min(pairs, key=self.rank.__getitem__)
            merged, i = [], 0
            while i < len(parts):
                if i + 1 < len(parts) and (parts[i], parts[i + 1]) == best:
                    merged.append(parts[i] + parts[i + 1])
                    i += 2
                else:
                    merged.append(parts[i])
                    i += 1
            parts = merged
        return [self.ids[p] for p in parts]

    def encode(self, text: str) -> list[int]:
        return [i for word in self.split(text) for i in self.word(word)]


def split_smollm(text: str) -> list[str]:
    """Every digit alone, then GPT-2's words inside what lies between."""
    out = []
    for piece in regex.split(r"(\p{N})", text):
        out += [m.group() for m in regex.finditer(GPT2, piece)]
    return out


def split_qwen2(text: str) -> list[str]:
    return [m.group() for m in regex.finditer(QWEN2, unicodedata.normalize("NFC", text))]


@pytest.fixture(scope="module")
def smollm2() -> GGUFFile:
    return open_gguf(catalog.pull("smollm2-135m", progress=False))


def test_smollm2_tokenises_a_thousand_mixed_strings_as_slow_bpe_does(smollm2: GGUFFile) -> None:
    tokenizer, slow = Tokenizer.from_gguf(smollm2), SlowBPE(smollm2, split_smollm)
    for text in mixed_strings(1000, seed=0):
        ids = tokenizer.encode(text)
        assert ids == slow.encode(text), repr(text)
        lacking = {b for b in text.encode() if slow.byte[b] not in slow.ids}
        if not lacking:
            assert tokenizer.decode(ids) == text
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_smollm2_facts(smollm2: GGUFFile) -> None:
    t = Tokenizer.from_gguf(smollm2)
    assert (t.vocab_size, t.eos_ids, t.bos_id, t.add_bos) == (49152, (0, 2), 1, False)
    assert [t.token_text(i) for i in t.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]
    assert t.encode("<|im_end|>") == [2]
    assert t.decode([1, *t.encode("hi"), 2]) == "hi"
    assert t.decode([1, *t.encode("hi"), 2], skip_special=False) == "<|im_start|>hi<|im_end|>"
    text = t.render_chat([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert t.chat([{"role": "user", "content": "U"}])[:2] == [1, 9690]


@pytest.mark.slow
def test_qwen_tokenises_as_transformers_and_slow_bpe_do() -> None:
    from transformers import Qwen2Tokenizer

    file = open_gguf(catalog.pull("qwen2.5-coder-0.5b"))
    tokenizer, slow = Tokenizer.from_gguf(file), SlowBPE(file, split_qwen2)
    merges = [tuple(m.split(" ")) for m in file.metadata["tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(vocab=dict(slow.ids), merges=merges)
    for text in mixed_strings(1000, seed=1):
        ids = tokenizer.encode(text)
        assert ids == reference.encode(text), repr(text)
        assert ids == slow.encode(text), repr(text)
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    assert tokenizer.vocab_size == 151665
    assert tokenizer.eos_ids == (151643, 151645)
    other = Tokenizer.from_gguf(catalog.pull("qwen2.5-coder-1.5b"))
    assert first_mismatch(tokenizer, other) is None


def test_llama3_rule_keeps_whole_words_and_groups_of_three_digits(make_gguf) -> None:
    tokens = make_gguf(pre="llama-bpe", name="a.gguf")
    t = Tokenizer.from_gguf(tokens.path)
    pieces = t.backend.pre_tokenizer.pre_tokenize_str("Hello  it'S 12345\n\n x")
    assert [p for p, _ in pieces] == ["Hello", "Ġ", "Ġit", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["Hello", "Ġ", "Ġit", "'", "S", "Ġ12345", "ĊĊ", "Ġx"]),
        ("starcoder", ["Hello", "Ġ", "Ġit", "'", "S", "Ġ", *"12345", "ĊĊ", "Ġx"]),
        ("qwen2", ["Hello", "Ġ", "Ġit", "'S", "Ġ", *"12345", "ĊĊ", "Ġx"]),
        ("tekken", ["Hello", "Ġ", "Ġit", "'", "S", "Ġ", *"12345", "ĊĊ", "Ġx"]),
        ("deepseek-coder", ["Hello", "Ġ", "Ġit", "'", "S", "Ġ", *"12345", "Ċ", "Ċ", "Ġx"]),
    ],
)
def test_splitting_rules(make_gguf, pre: str, words: list[str]) -> None:
    t = Tokenizer.from_gguf(make_gguf(pre=pre).path)
    pieces = t.backend.pre_tokenizer.pre_tokenize_str("Hello  it'S 12345\n\n x")
    if pre == "tekken":  # one leading mark may belong to a word
        words = ["Hello", "Ġ", "Ġit", "'S", *words[5:]]
    assert [p for p, _ in pieces] == words


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        (None, r"tokenizer\.ggml\.pre is missing; .*known: deepseek-coder, gpt-2"),
        ("default", r"tokenizer\.ggml\.pre is 'default', which is unknown; .*known: .*smollm"),
        ("novel", r"tokenizer\.ggml\.pre is 'novel', which is unknown"),
    ],
)
def test_a_missing_or_unknown_pre_tokenizer_is_loud(make_gguf, pre, message: str) -> None:
    path = make_gguf(pre=pre).path
    with pytest.raises(UserError, match=message):
        Tokenizer.from_gguf(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.merges": ["h e", "abc"]}, "'abc' is not two tokens"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "the merges do not fit the vocabulary"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "token types"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "bos_token_id 9999 is outside"),
        ({"tokenizer.ggml.bos_token_id": None}, "no bos_token_id"),
    ],
)
def test_inconsistent_vocabularies_are_refused(make_gguf, keys, message: str) -> None:
    path = make_gguf(keys=keys).path
    with pytest.raises(UserError, match=message):
        Tokenizer.from_gguf(path)


def test_bos_comes_once_from_template_or_tokenizer(make_gguf) -> None:
    t = Tokenizer.from_gguf(make_gguf().path)
    assert t.add_bos
    hello = t.encode("hello", add_special=False)
    assert t.encode("hello") == [t.bos_id, *hello]
    assert t.encode("<s>hello") == [t.bos_id, *hello]
    assert t.encode("") == [t.bos_id]
    ids = t.chat([{"role": "user", "content": "hello"}])  # this template writes BOS itself
    assert ids.count(t.bos_id) == 1
    keys = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    bare = Tokenizer.from_gguf(make_gguf(keys=keys, name="bare.gguf").path)
    assert bare.chat([{"role": "user", "content": "hello"}]) == [t.bos_id, *hello]
    without = make_gguf(keys={"tokenizer.ggml.add_bos_token": False}, name="c.gguf").path
    assert Tokenizer.from_gguf(without).encode("hello") == hello


def test_chat_errors_are_one_line(make_gguf) -> None:
    none = Tokenizer.from_gguf(make_gguf(keys={"tokenizer.chat_template": None}).path)
    with pytest.raises(UserError, match=r"tiny\.gguf has no chat template"):
        none.chat([{"role": "user", "content": "x"}])
    template = "{{ raise_exception('roles must alternate') }}"
    picky = Tokenizer.from_gguf(make_gguf(keys={"tokenizer.chat_template": template}).path)
    with pytest.raises(UserError, match="refuses: roles must alternate"):
        picky.chat([{"role": "user", "content": "x"}])


def test_vocabularies_that_differ_in_padding_alone_are_equal(make_gguf) -> None:
    a = Tokenizer.from_gguf(make_gguf(padding=3, name="a.gguf").path)
    b = Tokenizer.from_gguf(make_gguf(padding=40, name="b.gguf").path)
    assert a.vocab_size == b.vocab_size
    assert first_mismatch(a, b) is None


def test_the_first_different_token_is_named(make_gguf) -> None:
    a = make_gguf(name="a.gguf")
    tokens = list(open_gguf(a.path).metadata["tokenizer.ggml.tokens"])
    at = tokens.index("<tool>")
    tokens[at] = "<fool>"
    b = make_gguf(keys={"tokenizer.ggml.tokens": tokens}, name="b.gguf")
    pair = Tokenizer.from_gguf(a.path), Tokenizer.from_gguf(b.path)
    assert first_mismatch(*pair) == (at, "<tool>", "<fool>")
    types = list(open_gguf(a.path).metadata["tokenizer.ggml.token_type"])
    types[at] = 5
    c = make_gguf(keys={"tokenizer.ggml.token_type": types}, name="c.gguf")
    assert first_mismatch(pair[0], Tokenizer.from_gguf(c.path)) == (at, "<tool>", None)


def test_undefined_ids_are_empty_and_half_characters_visible(make_gguf) -> None:
    t = Tokenizer.from_gguf(make_gguf().path)
    assert t.token(10**6) is None
    assert t.token(-1) is None
    assert t.token_bytes(10**6) == b""
    assert t.decode([10**6]) == ""
    assert t.token_text(0xC3) == "\ufffd"
    assert t.decode([0xC3, 0xA9]) == "é"
    with pytest.raises(UserError, match="half of a surrogate pair"):
        t.encode("\ud800")


# SentencePiece


def sentencepiece_keys() -> dict[str, Any]:
    words = ["\u2581", "h", "e", "l", "o", "w", "r", "d", "a", "b", "1", "2"]
    pieces = [("he", -2.0), ("ll", -1.0), ("hell", -3.0), ("\u2581he", -2.5), ("hello", -4.0)]
    pieces += [("\u2581hello", -5.0), ("wo", -6.0), ("\u2581wo", -6.5), ("el", -0.5), ("ab", -7.0)]
    pieces += [("\u2581\u2581", -8.0), ("ba", -7.5)]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *words]
    scores = [0.0] * (3 + 256) + [-100.0 - i for i in range(len(words))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(pieces))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *[p for p, _ in pieces]],
        "tokenizer.ggml.scores": [*scores, *[s for _, s in pieces]],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": None,
    }


def slow_sentencepiece(keys: dict[str, Any], text: str) -> list[int]:
    """Kudo & Richardson 2018: merge the neighbours whose union scores best, leftmost first."""
    tokens = keys["tokenizer.ggml.tokens"]
    ids = {t: i for i, t in enumerate(tokens)}
    normal = {t for t, k in zip(tokens, keys["tokenizer.ggml.token_type"], strict=True) if k == 1}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        unions = [
            (-keys["tokenizer.ggml.scores"][ids[a + b]], i)
            for i, (a, b) in enumerate(pairwise(parts))
            if a + b in normal
        ]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    out: list[int] = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{b:02X}>"] for b in part.encode()]
    return out


def test_sentencepiece_equals_the_slow_algorithm(make_gguf) -> None:
    keys = sentencepiece_keys()
    t = Tokenizer.from_gguf(make_gguf(keys=keys, pre=None).path)
    rng = random.Random(4)
    for _ in range(1000):
        text = "".join(
            rng.choices(["h", "e", "l", "o", "hello", " ", "wo", "ab", "1", "é", "😀"], k=9)
        )
        ids = t.encode(text)
        assert ids == [1, *slow_sentencepiece(keys, text)], repr(text)
        assert t.decode(ids) == text
        assert b"".join(map(t.token_bytes, ids[1:])) == b" " + text.encode()
    assert t.encode("<s>hello") == [1, *slow_sentencepiece(keys, "hello")]


# Hugging Face folders


def test_a_folder_equals_the_gguf_file_of_the_same_vocabulary(make_gguf, tmp_path: Path) -> None:
    t = Tokenizer.from_gguf(make_gguf().path)
    folder = tmp_path / "hf"
    folder.mkdir()
    t.backend.save(str(folder / "tokenizer.json"))
    options = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(options | {"chat_template": t.chat_template})
    )
    u = Tokenizer.from_folder(folder)
    assert first_mismatch(t, u) is None
    messages = [{"role": "user", "content": "hello 12 é"}]
    assert u.chat(messages) == t.chat(messages)
    assert u.eos_ids == (t.backend.token_to_id("<|im_end|>"),)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}x")
    assert Tokenizer.from_folder(folder).render_chat(messages) == "<s>x"


def test_a_post_processor_that_adds_bos_is_heard(make_gguf, tmp_path: Path) -> None:
    backend = Tokenizer.from_gguf(make_gguf().path).backend
    bos = backend.token_to_id("<s>")
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    copy.enable_truncation(4)
    copy.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    t = Tokenizer.from_folder(tmp_path)
    assert t.encode("<s>ab") == t.encode("ab")
    assert t.encode("ab")[0] == bos
    assert len(t.encode("abcdefgh")) == 9


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a usable tokenizer"):
        Tokenizer.from_folder(tmp_path)
