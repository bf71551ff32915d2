"""Text to token ids and back, chat templates, and the comparison of two vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers

from paceline.errors import UserError
from paceline.models.config import from_hf, load_json
from paceline.models.gguf_file import GGUFFile, open_gguf
from paceline.models.tokenizer_gguf import read_vocabulary

_SPECIAL_KEYS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A vocabulary with its rules. Immutable; safe to share between threads.

    vocab_size: one more than the largest *defined* id. The embedding matrix may have more
        rows (padding); those are no tokens.
    eos_ids: ids that end generation, ascending.
    add_bos: whether `encode` puts `bos_id` in front.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        add_bos: bool = False,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "model",
    ) -> None:
        self._backend = backend
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.bos_id = bos_id
        self.add_bos = add_bos
        self.chat_template = chat_template
        self.name = name
        self._special_tokens = dict(special_tokens or {})
        self._special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @classmethod
    def from_gguf(cls, source: GGUFFile | str | Path) -> Tokenizer:
        """The tokenizer that a GGUF file carries.

        Raises:
            UserError: see `paceline.models.tokenizer_gguf.read_vocabulary`.
        """
        file = source if isinstance(source, GGUFFile) else open_gguf(source)
        v = read_vocabulary(file)
        ids = {"bos_token": v.bos_id, "eos_token": v.eos_id}
        texts = {k: v.backend.id_to_token(i) for k, i in ids.items() if i is not None}
        return cls(
            v.backend,
            eos_ids=file.eos_ids(),
            bos_id=v.bos_id,
            add_bos=v.add_bos,
            chat_template=v.chat_template,
            special_tokens={k: t for k, t in texts.items() if t is not None},
            name=file.path.name,
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer of a Hugging Face folder: `tokenizer.json` and the files beside it.

        End tokens are those of `config.json`, `generation_config.json` and the tokenizer.

        Raises:
            UserError: `tokenizer.json` is missing or damaged.
        """
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(
                f"{folder}: has no tokenizer.json; save the model with a fast tokenizer"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as e:  # the library raises bare Exception
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise UserError(f"{file}: is not a usable tokenizer ({reason})") from None
        # Some files limit or pad every text for training; a prompt must come through whole.
        backend.no_truncation()
        backend.no_padding()
        options: dict[str, Any] = {}
        for extra in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / extra).is_file():
                options |= load_json(folder / extra)
        texts = {k: t for k in _SPECIAL_KEYS if (t := _content(options.get(k))) is not None}
        bos = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
        ends = set(from_hf(folder).eos_ids) if (folder / "config.json").is_file() else set()
        end = backend.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
        add_bos = options.get("add_bos_token")
        if add_bos is None:  # then the tokenizer's own post-processor decides
            add_bos = bos is not None and backend.encode("").ids[:1] == [bos]
        return cls(
            backend,
            eos_ids=tuple(ends if end is None else ends | {end}),
            bos_id=bos,
            add_bos=bool(add_bos) and bos is not None,
            chat_template=_folder_template(folder, options),
            special_tokens=texts,
            name=folder.name,
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The wrapped object, for readers of its vocabulary (grammar engines); not to change."""
        return self._backend

    @cached_property
    def _tokens(self) -> list[str | None]:
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for text, i in vocabulary.items():
            tokens[i] = text
        return tokens

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which `decode` leaves out unless asked."""
        return self._special_ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Ids of a text. With `add_special`, BOS comes first where this tokenizer wants one,
        and only once: not if the text already starts with it. No end token is ever added,
        since the text is to be continued. Special tokens that the text spells out count.
        """
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):  # which one depends on the library's version
            raise UserError(
                "the text holds half of a surrogate pair; it is no valid text"
            ) from None
        if add_special and self.add_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD, undefined ids nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id (as `Ġthe`), None if it is undefined."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for inside a text; none for an undefined id."""
        text = self.token(token_id)
        if text is None:
            return b""
        if token_id in self._added:
            return text.encode()
        if self._byte_level:
            # A character outside the table occurs in no token that a byte-level merge makes.
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, for people; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in bytes(decoder.__getstate__())

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The chat template's text for messages ({"role": ..., "content": ...}, in order).

        Raises:
            UserError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(f"{self.name} has no chat template; give a plain prompt instead")
        try:
            text = self._renderer.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as e:  # a template is a program that the model's author wrote
            reason = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise UserError(f"{self.name}: the chat template refuses: {reason}") from None
        return str(text)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a chat. BOS comes once, whether the template or the tokenizer puts it."""
        return self.encode(self.render_chat(messages, add_generation_prompt))

    @cached_property
    def _renderer(self) -> Any:
        # transformers takes a second to import, and only chats need it. Rendering needs the
        # special tokens' texts but no vocabulary, so an empty one serves.
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast
        return make(
            tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
            chat_template=self.chat_template,
            **self._special_tokens,
        )


def first_mismatch(a: Tokenizer, b: Tokenizer) -> tuple[int, str | None, str | None] | None:
    """The first id that the two vocabularies spell differently, with both spellings (None:
    undefined there); None if they agree. Padding of the models' matrices does not count.
    """
    for i in range(max(a.vocab_size, b.vocab_size)):
        if a.token(i) != b.token(i):
            return i, a.token(i), b.token(i)
    return None


def _content(token: Any) -> str | None:
    """A special token's text, which files give plain or as a table."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _folder_template(folder: Path, options: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = options.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _byte_table() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, the other bytes, in
    order, for the characters from U+0100 on (Radford et al. 2019, released code)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in set(printable)]
    table = {chr(b): b for b in printable}
    return table | {chr(0x100 + n): b for n, b in enumerate(rest)}


_BYTE_OF: Final = _byte_table()
