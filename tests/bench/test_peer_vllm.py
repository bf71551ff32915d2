"""What surrounds vLLM: commands, exported weights, servers that start, stall or die."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from paceline.bench.peers import Fleet, PeerError, PeerPrompt, Server, vllm
from paceline.bench.peers.compare import compare

TESTS = str(Path(__file__).parents[1])
#: A server that is slow to get ready, and says so on the way.
SCRIPT = f"""
import sys, time
sys.path.insert(0, {TESTS!r})
import fake_server as f
print("loading weights", flush=True)
time.sleep(0.3)
f.Handler.b = f.Behaviour(bursts=(1, 1, 1), gap=float(sys.argv[2]), metrics="vllm:x 1\\n")
f.Handler.do_GET_old = f.Handler.do_GET
def get(self):
    self._reply(200, "") if self.path == "/health" else self.do_GET_old()
f.Handler.do_GET = get
f.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), f.Handler).serve_forever()
"""


def test_commands_name_everything_that_a_fair_run_needs(tmp_path: Path) -> None:
    config = vllm.speculative_config("draft_model", 5, tmp_path / "draft")
    args = vllm.serve_command(
        Path("py"),
        tmp_path / "target",
        81,
        max_len=512,
        speculative=config,
        extra=["--enforce-eager"],
    )
    assert "--no-enable-prefix-caching" in args
    assert args[args.index("--port") + 1] == "81"
    assert json.loads(args[args.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 5,
    }  # fmt: skip
    assert args[-1] == "--enforce-eager"
    plain = vllm.serve_command(Path("py"), tmp_path, 81, max_len=512)
    assert "--speculative-config" not in plain
    assert vllm.speculative_config("ngram", 4)["num_speculative_tokens"] == 4
    with pytest.raises(PeerError, match="needs a draft"):
        vllm.speculative_config("draft_model", 4)
    assert vllm.environment(2)["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_servers_start_are_compared_and_end(tmp_path: Path) -> None:
    prompts = [PeerPrompt(id=str(i), tokens=(1, 2), text="a") for i in range(2)]
    urls = [f"http://127.0.0.1:{vllm.free_port()}" for _ in range(2)]
    gaps = {"plain": "0.04", "draft": "0.02"}
    args = [
        [sys.executable, "-c", SCRIPT, url.rpartition(":")[2], gap]
        for url, gap in zip(urls, gaps.values(), strict=True)
    ]
    with (
        vllm.running(args[0], urls[0], env={}, log=tmp_path / "a.log", poll=0.05),
        vllm.running(args[1], urls[1], env={}, log=tmp_path / "b.log", poll=0.05),
    ):
        servers = dict(zip(gaps, map(Server, urls), strict=True))
        fleet = Fleet("vLLM", servers)
        plain, draft = compare([fleet], prompts, max_tokens=3, repeats=2)
    assert plain.version == "vLLM"
    assert draft.speedup is not None
    assert 1.2 < draft.speedup.value < 2.8  # 2 but for the machine's noise
    assert "loading weights" in (tmp_path / "a.log").read_text()
    with pytest.raises(PeerError, match="can't be reached"):
        Server(urls[0], timeout=2)


def test_servers_that_die_or_stall(tmp_path: Path) -> None:
    url, log = f"http://127.0.0.1:{vllm.free_port()}", tmp_path / "logs" / "x.log"
    dies = [sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]
    with (
        pytest.raises(PeerError, match=r"ended with status 2: .*no such model.*x\.log"),
        vllm.running(dies, url, env={}, log=log, poll=0.05),
    ):
        pass
    stalls = [sys.executable, "-c", "import time; time.sleep(60)"]
    with (
        pytest.raises(PeerError, match="not ready after 0 s"),
        vllm.running(stalls, url, env={}, log=log, timeout=0.2, poll=0.05),
    ):
        pass


def test_weights_are_exported_once_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(vllm, "command", lambda args, env: ran.append(args[-2]))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"a")
    assert vllm.export(gguf, tmp_path) == tmp_path / "hf" / "model-bfloat16"
    vllm.export(gguf, tmp_path)
    assert ran == ["model.gguf"]
    gguf.write_bytes(b"changed")
    vllm.export(gguf, tmp_path)
    assert len(ran) == 2
