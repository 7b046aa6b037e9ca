"""Paceline: an LLM inference engine. `from paceline import LLM, SamplingParams`; no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    InvalidGrammar,
    InvalidRequest,
    MissingExtra,
    NotFound,
    Overloaded,
    PacelineError,
    PromptTooLong,
)
from paceline.request import (
    CompletionOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "EngineDead",
    "InvalidGrammar",
    "InvalidRequest",
    "MissingExtra",
    "NotFound",
    "Overloaded",
    "PacelineError",
    "PromptTooLong",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Every module of ours imports this one, the engine's too; LLM brings the whole front with it.
    if name == "LLM":
        from paceline.llm import LLM

        return LLM
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
