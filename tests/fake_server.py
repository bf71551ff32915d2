"""A tiny OpenAI-compatible server that answers what a test tells it to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """bursts: tokens of each chunk. refuse: request fields that get a 400. routes: completion
    routes that exist. each_usage, usage, logprobs: ways of counting that it knows. gap: seconds
    between chunks. metrics: the page (None: no such route); counters: adds vLLM's counters,
    which rise with every request. end: `done`, `finish` (no [DONE]), `cut` or `error`."""

    bursts: tuple[int, ...] = (1, 3, 4)
    refuse: frozenset[str] = frozenset()
    routes: tuple[str, ...] = ("/v1/completions",)
    each_usage: bool = True
    usage: bool = True
    logprobs: bool = True
    gap: float = 0.01
    counters: bool = False
    metrics: str | None = None
    key: str | None = None
    end: str = "done"
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake"}]})
    seen: list[dict[str, Any]] = field(default_factory=list)
    drafts: int = 0


def fields_of(body: dict[str, Any]) -> set[str]:
    names = set(body) | set(body.get("stream_options", {}))
    if isinstance(body.get("prompt"), list):
        names.add("ids")
    return names


class Handler(BaseHTTPRequestHandler):
    b: Behaviour

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, status: int, body: str, kind: str = "application/json") -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._reply(200, json.dumps(self.b.models))
        elif self.path == "/version" and self.b.counters:
            self._reply(200, json.dumps({"version": "9.9"}))
        elif self.path == "/metrics" and (self.b.counters or self.b.metrics is not None):
            self._reply(200, self.b.metrics or self._counters(), "text/plain")
        else:
            self._reply(404, "{}")

    def _counters(self) -> str:
        n = self.b.drafts
        if not n:  # before traffic there is nothing of speculation yet
            return '# HELP x y\nvllm:num_requests_running{engine="0"} 0.0\n'
        accepted = sum(self.b.bursts) - len(self.b.bursts)
        return (
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(n * len(self.b.bursts))}\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(12 * n)}\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {float(accepted * n)}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} '
            f"{float(2 * n)}\n"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.b.seen.append(body)
        if self.b.key and self.headers.get("Authorization") != f"Bearer {self.b.key}":
            self._reply(401, '{"error": "who are you?"}')
        elif self.path not in self.b.routes:
            self._reply(404, '{"error": "no such route"}')
        elif bad := fields_of(body) & self.b.refuse:
            self._reply(400, json.dumps({"error": f"unexpected {sorted(bad)}"}))
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        self.b.drafts += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()  # no length: the connection's end is the answer's
        options, done, chat = body.get("stream_options", {}), 0, "messages" in body
        for i, n in enumerate(self.b.bursts):
            if i:
                time.sleep(self.b.gap)
            done += n
            text = "x" * n
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if body.get("logprobs") and self.b.logprobs:
                named = [{"token": "x"}] * n
                choice["logprobs"] = {"content": named} if chat else {"tokens": ["x"] * n}
            event: dict[str, Any] = {"choices": [choice]}
            last = i == len(self.b.bursts) - 1
            if last and self.b.end in ("done", "finish"):
                choice["finish_reason"] = "length"
            if options.get("continuous_usage_stats") and self.b.each_usage:
                event["usage"] = {"completion_tokens": done, "prompt_tokens": 3}
            self._event(event)
            if last and self.b.end == "error":
                self._event({"error": {"message": "out of memory"}})
        if self.b.end == "done":
            if options.get("include_usage") and self.b.usage:
                usage = {"completion_tokens": done, "prompt_tokens": 3}
                self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The address of a running server."""
    handler = type("Bound", (Handler,), {"b": behaviour})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
