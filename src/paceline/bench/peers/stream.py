"""A stream of an OpenAI-compatible server: its events, and the tokens in them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.bench.peers.base import Counted, PeerError, PeerRun


def events(reply: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    """Server-sent events until `[DONE]`. A stream that stops earlier has to have told why
    it ended; else it broke off, and its figures would be wrong."""
    finished = False
    try:
        for raw in reply:
            line = raw.decode(errors="replace").strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            try:
                event = json.loads(data)
            except ValueError:
                raise PeerError(f"{name} sent an event that is no JSON") from None
            if not isinstance(event, dict) or event.get("error"):
                raise PeerError(f"{name} failed at work: {str(event)[:200]}")
            choices = event.get("choices") or ()
            finished = finished or any(c.get("finish_reason") for c in choices)
            yield event
    except (OSError, http.client.HTTPException) as e:
        raise PeerError(f"{name} broke off its answer: {e}") from None
    if not finished:
        raise PeerError(f"{name} broke off its answer before the end")


class Tally:
    """Counts the tokens of a stream as they come. Mutable."""

    def __init__(self) -> None:
        self.chunks: list[float] = []  # when chunks with text came
        self.by_usage: list[float] = []  # when tokens came, by running usage
        self.by_names: list[float] = []  # the same, by the names of tokens
        self.usages = 0
        self.total: int | None = None
        self.prompt: int | None = None
        self.text = ""
        self.tail = 0.0

    def add(self, event: dict[str, Any], at: float) -> None:
        usage = event.get("usage") or {}
        for choice in event.get("choices") or ():
            piece = choice.get("text")
            if piece is None:
                delta = choice.get("delta") or {}
                piece = (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            if piece:
                self.chunks.append(at)
                self.text += piece
                self.tail = at
                self.usages += bool(usage)
            names = choice.get("logprobs") or {}
            named = names.get("tokens") or names.get("content") or ()
            self.by_names += [at] * len(named)
        if "completion_tokens" in usage:
            self.total = int(usage["completion_tokens"])
            self.prompt = usage.get("prompt_tokens", self.prompt)
            when = at if event.get("choices") else (self.tail or at)
            self.by_usage += [when] * (self.total - len(self.by_usage))

    def run(self) -> PeerRun:
        counted, arrivals = self._arrivals()
        n = self.total if counted == "usage" and self.total is not None else len(arrivals)
        return PeerRun(
            n_tokens=n,
            seconds=max(self.tail, arrivals[-1] if arrivals else 0.0),
            first=arrivals[0] if arrivals else (self.chunks or [0.0])[0],
            arrivals=tuple(arrivals),
            text=self.text,
            counted=counted,
            prompt_tokens=self.prompt,
        )

    def _arrivals(self) -> tuple[Counted, list[float]]:
        if self.chunks and self.usages == len(self.chunks):
            return "stream-usage", self.by_usage
        if self.by_names and self.total in (None, len(self.by_names)):
            return "logprobs", self.by_names
        if self.total is not None:
            return "usage", []
        return "chunks", self.chunks
