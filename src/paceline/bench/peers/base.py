"""What every peer is to the comparison: a thing that turns a prompt into timed tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from paceline.errors import UserError


class PeerError(UserError):
    """A peer that can't be set up or reached, or that fails at work. The comparison records it
    in the peer's rows and goes on with the others."""


#: How the tokens of a run were counted. `ids`: the peer handed out token ids. `stream-usage`:
#: each chunk carried the running count. `logprobs`: each chunk named its tokens. `usage`: only
#: the total is known, so there is no latency of single tokens. `chunks`: nothing was said, and
#: chunks are all there is: a lower bound wherever a chunk holds several tokens.
Counted = Literal["ids", "stream-usage", "logprobs", "usage", "chunks"]


@dataclass(frozen=True, kw_only=True)
class PeerPrompt:
    """A prompt as our side tokenised it. text: the same, with its special tokens written out.
    turns: the conversation that it renders, for peers that apply their own template."""

    id: str
    tokens: tuple[int, ...]
    text: str
    turns: tuple[str, ...] = ()
    synthetic: bool = False


@dataclass(frozen=True, kw_only=True)
class PeerInfo:
    """name: of the peer. version: of its software. model: what it runs. precision: of its
    weights, in words. modes: what it can do, `plain` first. notes: what a reader must know to
    compare fairly. options: settings that were in force."""

    name: str
    version: str
    model: str
    precision: str
    modes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """What a peer says of its speculation in one generation; None where it does not say.

    rounds, drafted, accepted: counts. tau: tokens a round (accepted + 1). acceptance_rate:
    accepted over drafted. joint: share of rounds that accepted the i-th position. source:
    where the figures are from; a `gauge` is a server's own recent average, not this run's.
    """

    rounds: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    tau: float | None = None
    acceptance_rate: float | None = None
    joint: tuple[float, ...] = ()
    source: str = ""

    @classmethod
    def of_counts(
        cls,
        rounds: int | None,
        drafted: int,
        accepted: int,
        source: str,
        joint: tuple[float, ...] = (),
    ) -> Speculation:
        return cls(
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            tau=1 + accepted / rounds if rounds else None,
            acceptance_rate=accepted / drafted if drafted else None,
            joint=joint,
            source=source,
        )


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """One generation. Times are seconds after the request was sent.

    n_tokens: new tokens. tokens: their ids, where the peer tells (None: only text).
    arrivals: when each token came; tokens of one round or chunk share a time. Empty where
        only the total is known (`counted` says so).
    first, seconds: when the first token came, and the last.
    speculation: as the peer tells it, None where it tells nothing or drafted nothing.
    prompt_tokens: the peer's own count of the prompt.
    """

    n_tokens: int
    seconds: float
    first: float
    arrivals: tuple[float, ...] = ()
    tokens: tuple[int, ...] | None = None
    text: str = ""
    counted: Counted = "ids"
    speculation: Speculation | None = None
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        assert not self.arrivals or len(self.arrivals) == self.n_tokens


class Peer(Protocol):
    """A system to compare with. Not thread-safe; `close` ends what it started."""

    @property
    def info(self) -> PeerInfo: ...

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        """`n` new tokens of the prompt, greedily, past any end-of-sequence. Raises PeerError."""
        ...

    def close(self) -> None: ...
