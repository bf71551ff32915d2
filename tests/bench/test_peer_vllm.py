"""What surrounds vLLM: commands, exported weights, servers that start, stall or die."""

from __future__ import annotations

import ctypes.util
import json
import sys
import time
from pathlib import Path

import pytest
import torch
from head_devices import eagle_config, random_eagle, random_medusa, torch_target
from safetensors.torch import load_file

from paceline.bench.peers import Fleet, PeerError, PeerPrompt, Server, vllm
from paceline.bench.peers.compare import compare
from paceline.models.heads.formats import HeadNotes, open_head, save_head

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
    for method in ("draft_model", "eagle3", "medusa"):
        with pytest.raises(PeerError, match="need a draft"):
            vllm.speculative_config(method, 4)
    assert vllm.speculative_config("eagle3", 4, tmp_path)["model"] == str(tmp_path)


def test_a_server_gets_its_cores_and_what_its_manual_preloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"tcmalloc_minimal": "libtcmalloc_minimal.so.4"}
    monkeypatch.setattr(ctypes.util, "find_library", found.get)
    monkeypatch.setenv("LD_PRELOAD", "mine.so other.so")
    python = tmp_path / "bin" / "python"
    env = vllm.environment(python, 2, 3)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert env["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert env["LD_PRELOAD"] == "libtcmalloc_minimal.so.4:mine.so:other.so"
    openmp = tmp_path / "lib" / "libiomp5.so"
    openmp.parent.mkdir()
    openmp.touch()
    monkeypatch.delenv("LD_PRELOAD")
    found.clear()
    assert vllm.environment(python, 1)["LD_PRELOAD"] == str(openmp)
    assert vllm.environment(python, 1)["VLLM_CPU_OMP_THREADS_BIND"] == "0"


@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_heads_are_exported_in_a_precision_that_vllm_reads(layout: str, tmp_path: Path) -> None:
    target = torch_target()
    head = random_eagle(eagle_config("eagle3", 90), target)
    save_head(head, tmp_path / "ours", dtype="int8", notes=HeadNotes(target="tiny"))
    out = vllm.export_head(tmp_path / "ours", tmp_path / "theirs", layout)
    tensors = load_file(out / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    assert {"d2t", "t2d"} <= set(tensors)
    source = open_head(out)
    assert (source.config, source.about.target) == (head.config, "tiny")
    again = source.load().module.state_dict()
    for name, tensor in head.state_dict().items():
        step = tensor.float().abs().max() / 100  # of int8, and of bfloat16
        assert (again[name].float() - tensor.float()).abs().max() <= step, name
    save_head(random_medusa(target), tmp_path / "medusa")
    with pytest.raises(PeerError, match="kind medusa"):
        vllm.export_head(tmp_path / "medusa", tmp_path / "x")


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
    times = [sum(s.seconds - s.first_s for s in arm.shots) for arm in (plain, draft)]
    assert draft.speedup.value == pytest.approx(times[0] / times[1])
    assert all(s.seconds >= 2 * 0.04 for s in plain.shots)
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


def test_workers_of_a_server_that_hears_no_signal_end_with_it(tmp_path: Path) -> None:
    port, log = vllm.free_port(), tmp_path / "x.log"
    deaf = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(worker.pid, flush=True)\n"
    )
    args = [sys.executable, "-c", deaf + SCRIPT, str(port), "0"]
    url = f"http://127.0.0.1:{port}"
    with vllm.running(args, url, env={}, log=log, poll=0.05, patience=0.2):
        pass
    worker = int(log.read_text().splitlines()[0])
    for _ in range(100):  # whoever adopts it has to bury it
        status = Path(f"/proc/{worker}/status")
        if not status.exists() or "\nState:\tZ" in status.read_text():
            return
        time.sleep(0.05)
    raise AssertionError("the worker is still there")


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
