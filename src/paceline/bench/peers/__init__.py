"""Other systems on the same prompts: transformers, llama.cpp, and servers by URL.

`base` has what they share, `compare` runs them interleaved with ours in one run, `worker.py` is
the script that a peer's own Python runs in a process of its own.
"""

from __future__ import annotations

from paceline.bench.peers.base import Peer, PeerError, PeerInfo, PeerPrompt, PeerRun
from paceline.bench.peers.environments import find_llamacpp
from paceline.bench.peers.llamacpp import LlamaCpp
from paceline.bench.peers.server import Fleet, Server
from paceline.bench.peers.transformers_peer import Transformers

__all__ = [
    "Fleet",
    "LlamaCpp",
    "Peer",
    "PeerError",
    "PeerInfo",
    "PeerPrompt",
    "PeerRun",
    "Server",
    "Transformers",
    "find_llamacpp",
]
