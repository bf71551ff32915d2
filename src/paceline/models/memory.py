"""How much memory there is, counted before anything large is allocated."""

from __future__ import annotations

import os
import re

import torch

from paceline.errors import UserError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def available_bytes(device: torch.device) -> int:
    """Free bytes on the device; on CPU what can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:  # other systems: all physical memory is the best that is known
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 2**63 - 1


def parse_bytes(text: str) -> int:
    """'500MB', '4 GiB', '1e9' to bytes; UserError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]?i?)b?\s*", text.lower())
    try:
        if match is None or match[2] not in _UNITS:
            raise ValueError
        return int(float(match[1]) * _UNITS[match[2]])
    except ValueError:
        raise UserError(f"memory size {text!r} is not understood: write it like 4GB") from None


def readable(n: int) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 10**9 else f"{n / 1e6:.1f} MB"


def check_memory(parts: dict[str, int], limit: int) -> None:
    """UserError, with the sum spelled out, where the parts need more than `limit` bytes."""
    total = sum(parts.values())
    if total > limit:
        spelled = ", ".join(f"{name} {readable(n)}" for name, n in parts.items())
        raise UserError(
            f"this needs {readable(total)} of memory ({spelled}), but {readable(limit)} is "
            "available; lower --kv-tokens, choose a smaller model or draft, or --dtype bfloat16"
        )
