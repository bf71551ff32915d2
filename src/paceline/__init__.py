"""Paceline: lossless speculative decoding for language models."""

from __future__ import annotations

from paceline.api import LLM
from paceline.core.rules import Guarantee
from paceline.engine.engine import EngineConfig
from paceline.errors import UserError
from paceline.models.base import Numerics
from paceline.types import (
    FinishReason,
    RequestOutput,
    SamplingParams,
    StepOutput,
    TokenOut,
)

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EngineConfig",
    "FinishReason",
    "Guarantee",
    "Numerics",
    "RequestOutput",
    "SamplingParams",
    "StepOutput",
    "TokenOut",
    "UserError",
]
