"""What the commands share: options, the console, JSON output."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from paceline.api import LLM
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.loading import OnPack
from paceline.models.memory import parse_bytes
from paceline.types import RequestOutput, TokenOut

#: Everything for people goes to stderr; stdout is for text and JSON.
console = Console(stderr=True)

DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Catalog name, .gguf file, safetensors folder or Hub id."),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        "-d",
        help="none, ngram, layerskip, a smaller model, a trained head (eagle3, medusa, a "
        "folder), or ngram+DRAFT for both.",
    ),
]
Tree = Annotated[
    str | None,
    typer.Option(help="3x2x1, top:3x2x1, paths:12, paths:60x10, sequoia:12 (docs/drafters.md)."),
]
DraftVocab = Annotated[
    str, typer.Option(help="same; intersect or slem for a draft with another tokenizer.")
]
DraftWeights = Annotated[
    str,
    typer.Option(help="On the native core: fast (4 bits, frequent tokens) or stored."),
]
K = Annotated[
    int | None,
    typer.Option(
        "-k",
        help="Tokens to draft a round at most; 0 is plain decoding.",
        show_default="8; 4 where fixed; a whole tree",
    ),
]
Policy = Annotated[
    str,
    typer.Option(help="adaptive: draft what pays, never slower than plain; fixed: always -k."),
]
CostProfile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="Costs for the adaptive policy, as `paceline advise` saves them."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (native core for quantised weights on a CPU), bfloat16, float32; "
        "q4 or q8: native core, weights quantised to 4 or 8 bits."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
KvTokens = Annotated[int, typer.Option(help="Tokens that the key/value cache holds.")]
MemoryLimit = Annotated[
    str | None,
    typer.Option(help="Memory for weights and caches, like 4GB (default: what is free)."),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on the last line of stdout, nothing else.")
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the most probable.")]
TypicalP = Annotated[
    float, typer.Option(help="Keep the tokens nearest to the entropy up to this mass.")
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Divide logits of tokens of prompt and output by this; 1 is off.")
]
PresencePenalty = Annotated[
    float, typer.Option(help="Lower logits of output tokens by this, once; 0 is off.")
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Lower logits of output tokens by this each time; 0 is off.")
]
LogitBias = Annotated[
    list[str] | None, typer.Option(metavar="ID=VALUE", help="Add to a logit; may be repeated.")
]
AllowToken = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Emit only such tokens; may be repeated.")
]
BanToken = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Never emit this token; may be repeated.")
]
BanWord = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Never emit this text; may be repeated.")
]
StopToken = Annotated[
    list[int] | None, typer.Option(metavar="ID", help="Token that ends the output; repeatable.")
]
MinTokens = Annotated[
    int, typer.Option(help="No end-of-sequence or stop token before so many tokens.")
]
JsonSchema = Annotated[
    str | None, typer.Option(metavar="JSON|@FILE", help="The output is JSON of this schema.")
]
Regex = Annotated[
    str | None, typer.Option(metavar="REGEX|@FILE", help="The output matches this expression.")
]
Grammar = Annotated[
    str | None,
    typer.Option(metavar="TEXT|@FILE", help="The output is of this Lark or EBNF grammar."),
]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal draws.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="New tokens at most.")]
Show = Annotated[
    bool,
    typer.Option(
        "--show", help="Colour tokens by who brought them: accepted draft, replacement, bonus."
    ),
]

#: Colours of `--show`.
STYLES = {"accepted": "green", "replacement": "red", "bonus": "cyan", "plain": ""}


def load(
    model: str,
    *,
    draft: str = "none",
    kv_tokens: int = 16384,
    memory_limit: str | None = None,
    **options: Any,
) -> LLM:
    """An LLM from command-line values, with a note while it loads. options: as of `LLM`."""
    limit = None if memory_limit is None else parse_bytes(memory_limit)
    engine = EngineConfig(kv_tokens=kv_tokens)
    with loading(model, draft) as on_pack:
        llm = LLM(model, draft=draft, engine=engine, memory_limit=limit, on_pack=on_pack, **options)
    for note in llm.notes:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    return llm


def logit_bias(pairs: list[str] | None) -> dict[int, float]:
    """`ID=VALUE` options as a mapping."""
    bias = {}
    for pair in pairs or ():
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise UserError(f"--logit-bias {pair!r} is not of the form ID=VALUE") from None
    return bias


def text_or_file(value: str | None) -> str | None:
    """An option's text, or that of the file which it names behind an @."""
    if value is None or not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"file '{value[1:]}' can't be read: {e}") from None


@contextmanager
def loading(model: str, *drafts: str) -> Iterator[OnPack]:
    """A spinner that says what is being loaded, and how far it is packed where what this
    gives is told."""
    names = (model, *(d for d in drafts if d not in ("none", "ngram")))
    text = f"loading {' and '.join(names)}"
    with status(text) as say:
        yield lambda name, share: say(packing(name, share) or text)


def packing(name: str, share: float) -> str:
    """Where weights are being packed, once for all starts; empty when it is done."""
    return "" if share == 1 else f"packing {name}, this once: {share:.0%}"


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal, nothing elsewhere. What it gives sets another text."""
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as spinner:
        yield spinner.update


class Painter:
    """Tokens as coloured text; a character that spans tokens has the colour of its last."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer
        self._held = b""

    def paint(self, tokens: Iterable[TokenOut]) -> Text:
        text = Text()
        for token in tokens:
            self._held += self._tokenizer.token_bytes(token.id)
            try:
                piece = self._held.decode()
            except UnicodeDecodeError as e:
                if e.reason == "unexpected end of data":
                    continue  # the rest of the character is in the next token
                piece = self._held.decode(errors="replace")
            self._held = b""
            text.append(piece, style=STYLES[token.origin.value])
        return text


def print_json(value: dict[str, Any]) -> None:
    """The one object on the last line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def token_dict(llm: LLM, token: TokenOut) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "id": token.id,
        "text": llm.tokenizer.token_text(token.id),
        "origin": token.origin.value,
    }
    if token.logprob is not None:
        entry["logprob"] = token.logprob
        entry["top_logprobs"] = [
            {"id": i, "text": llm.tokenizer.token_text(i), "logprob": lp}
            for i, lp in token.top_logprobs or ()
        ]
    return entry


def output_dict(llm: LLM, output: RequestOutput) -> dict[str, Any]:
    """A generation as JSON."""
    stats = output.stats
    decode_s = (stats.finished or 0.0) - (stats.first_token or stats.finished or 0.0)
    rest = len(output.tokens) - 1
    return {
        "index": output.index,
        "text": output.text,
        "finish_reason": output.finish_reason.value,
        "error": output.error,
        "guarantee": output.guarantee.value,
        "numerics": llm.engine.model.info.numerics.value,
        "prompt_tokens": len(output.prompt_tokens),
        "completion_tokens": len(output.tokens),
        "tokens": [token_dict(llm, t) for t in output.tokens],
        "time_to_first_token_s": round((stats.first_token or 0.0) - stats.submitted, 6)
        if stats.first_token
        else None,
        "decode_tok_s": round(rest / decode_s, 2) if rest > 0 and decode_s > 0 else None,
        "stats": stats.as_dict(),
    }


def own_command() -> str:
    """This command as it may be published with what it makes: of paths their names alone."""
    return shlex.join(["paceline", *(_name(a) for a in sys.argv[1:])])


def _name(argument: str) -> str:
    """Of an absolute path, also in `--option=path`, the last part."""
    option, equals, value = argument.rpartition("=") if argument[:1] == "-" else ("", "", argument)
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)
