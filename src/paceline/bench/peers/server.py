"""Any OpenAI-compatible server by URL.

Tokens are counted, never chunks: a speculating server sends the tokens of a round in one chunk,
so chunks undercount tokens and overstate latency. The count comes from the usage that each
chunk carries (vLLM, SGLang: `continuous_usage_stats`), else from log-probabilities that name
the tokens of a chunk; where only the total is told, no latency of single tokens is reported.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.bench.peers.base import PeerError, PeerInfo, PeerPrompt, PeerRun
from paceline.bench.peers.prometheus import Page, speculation
from paceline.bench.peers.stream import Tally, events


@dataclass(frozen=True, kw_only=True)
class _Dialect:
    """What a server understands, found out with one short request. ids: prompts as token ids.
    ignore_eos, each_usage, usage: extensions of the request. logprobs: to count tokens by."""

    chat: bool = False
    ids: bool = True
    ignore_eos: bool = True
    each_usage: bool = True
    usage: bool = True
    logprobs: bool = False


_LESS: tuple[dict[str, bool], ...] = (
    {},
    {"each_usage": False},
    {"each_usage": False, "ignore_eos": False},
    {"each_usage": False, "ignore_eos": False, "usage": False},
)
#: From the fullest to the barest.
_DIALECTS = tuple(
    _Dialect(chat=chat, ids=ids, **less)
    for chat, ids in ((False, True), (False, False), (True, False))
    for less in _LESS
)


class Refused(PeerError):
    """The server answered with an HTTP error. status: its code."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A running server. url: `http://host:port`, with or without `/v1`. model: its name there
    (default: the first that it lists). name: how tables call it. key: bearer token.
    timeout: seconds without a byte. precision: of its weights, where that is known. Raises
    PeerError where it can't be used."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        name: str | None = None,
        key: str | None = None,
        timeout: float = 300.0,
        precision: str = "as served",
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise PeerError(f"'{url}' is no address of a server: use http://HOST:PORT")
        self._root = url.rstrip("/").removesuffix("/v1")
        self._key, self._timeout = key, timeout
        self._model = model or self._first_model()
        page = self.scrape()
        software = (page.software if page else None) or "OpenAI-compatible server"
        self._dialect = self._probe()
        self.info = PeerInfo(
            name=name or software,
            version=f"{software} {self._version()}".strip(),
            model=self._model,
            precision=precision,
            modes=("served",),
            notes=self._notes(page is not None),
            options={"url": self._root},
        )

    def _notes(self, metrics: bool) -> tuple[str, ...]:
        d, notes = self._dialect, []
        if d.chat:
            notes.append("the server applies its own chat template")
        elif not d.ids:
            notes.append("prompts were sent as text, and the server tokenised them")
        if not d.ignore_eos:
            notes.append("the server can't go past an end of sequence: lengths may differ")
        if not metrics:
            notes.append("no /metrics: nothing is known of its speculation")
        return tuple(notes)

    # Requests

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._root + path, data, headers)
        try:
            reply = urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as e:
            said = " ".join(e.read(500).decode(errors="replace").split())[:200]
            raise Refused(e.code, f"{self._root}{path} refused with {e.code}: {said}") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            why = getattr(e, "reason", e)
            raise PeerError(f"{self._root} can't be reached: {why}; is it running?") from None
        assert isinstance(reply, http.client.HTTPResponse)
        return reply

    def _get_json(self, path: str) -> Any:
        with self._open(path) as reply:
            text = self._read(reply)
        try:
            return json.loads(text)
        except ValueError:
            raise PeerError(f"{self._root}{path} answered something that is no JSON") from None

    def _read(self, reply: http.client.HTTPResponse) -> str:
        try:
            return reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as e:
            raise PeerError(f"{self._root} broke off its answer: {e}") from None

    def _first_model(self) -> str:
        listed = self._get_json("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise PeerError(f"{self._root} lists no model: name one with --peer-model") from None

    def _version(self) -> str:
        for path, field in (("/version", "version"), ("/props", "build_info")):
            try:
                value = self._get_json(path)
            except PeerError:
                continue
            if isinstance(value, dict) and field in value:
                return str(value[field])
        return ""

    def scrape(self) -> Page | None:
        """Its Prometheus page; None where there is none."""
        try:
            with self._open("/metrics") as reply:
                page = Page.parse(self._read(reply))
        except PeerError:
            return None
        return page if page.samples else None

    # Generation

    def _probe(self) -> _Dialect:
        """Drop what the server refuses, one extension after another, then see how it counts."""
        prompt = PeerPrompt(id="probe", tokens=(100, 200, 300), text="One, two", turns=("Hello",))
        failure: PeerError | None = None
        no_route = False
        for dialect in _DIALECTS:
            if no_route and not dialect.chat:
                continue
            try:
                run = self._stream(dialect, prompt, 4)
            except Refused as e:
                if e.status in (401, 403):
                    raise PeerError(f"{e}; give a key with --peer-key-env") from None
                failure, no_route = failure or e, no_route or e.status == 404
                continue
            return self._counting(dialect, prompt, run)
        assert failure is not None
        raise failure

    def _counting(self, dialect: _Dialect, prompt: PeerPrompt, run: PeerRun) -> _Dialect:
        if run.counted == "stream-usage":
            return dialect
        try:
            named = self._stream(replace(dialect, logprobs=True), prompt, 4)
        except PeerError:
            return dialect
        return replace(dialect, logprobs=named.counted == "logprobs")

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        """As served, whatever `mode` says: a server has but one."""
        before = self.scrape()
        run = self._stream(self._dialect, prompt, n)
        after = self.scrape()
        if run.n_tokens == 0:
            raise PeerError(f"{self._root} ended its answer without a token")
        if after is None:
            return run
        return replace(run, speculation=speculation(before or Page(), after))

    def close(self) -> None:
        """Nothing to end: the server is not ours."""

    def _body(self, d: _Dialect, prompt: PeerPrompt, n: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": n,
            "temperature": 0,
            "stream": True,
        }
        if d.chat:
            turns = prompt.turns or (prompt.text,)
            body["messages"] = [{"role": "user", "content": turns[-1]}]
        else:
            body["prompt"] = list(prompt.tokens) if d.ids else prompt.text
        if d.usage:
            body["stream_options"] = {"include_usage": True}
            if d.each_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if d.ignore_eos:
            body["ignore_eos"] = True
        if d.logprobs:
            body["logprobs"] = True if d.chat else 1
        return body

    def _stream(self, d: _Dialect, prompt: PeerPrompt, n: int) -> PeerRun:
        path = "/v1/chat/completions" if d.chat else "/v1/completions"
        tally = Tally()
        begin = time.perf_counter()
        with self._open(path, self._body(d, prompt, n)) as reply:
            for event in events(reply, self._root):
                tally.add(event, time.perf_counter() - begin)
        return tally.run()


class Fleet:
    """Servers of one software that differ in how they speculate, as one peer: each is a mode.

    name: of the peer. servers: by mode, `plain` first, so that the others' speed-up is over
    the same software's plain decoding.
    """

    def __init__(self, name: str, servers: Mapping[str, Server]) -> None:
        self._servers = dict(servers)
        first = next(iter(self._servers.values())).info
        self.info = replace(
            first,
            name=name,
            modes=tuple(self._servers),
            options={mode: server.info.options for mode, server in self._servers.items()},
        )

    def generate(self, mode: str, prompt: PeerPrompt, n: int) -> PeerRun:
        return self._servers[mode].generate(mode, prompt, n)

    def close(self) -> None:
        """Nothing to end: the servers are not ours."""
