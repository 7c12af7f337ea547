"""Types of settings that several sections share.

They accept what pydantic's own types accept (``1`` and ``"true"`` for a flag, ``1e9`` for a whole number),
because DeepSpeed's documents rely on it, but for what can only be a mistake.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "MAX_TIMEOUT_S",
    "MIN_TIMEOUT_S",
    "TEXT_PATTERN",
    "Positive",
    "Seconds",
    "Section",
    "Text",
    "lower_case",
    "not_a_flag",
    "upper_case",
]

MAX_TIMEOUT_S = 1e9
"""About 31 years: in nanoseconds, as NCCL's watchdog counts, it still fits into 64 bits."""

MIN_TIMEOUT_S = 0.001
"""Stores and libraries count milliseconds, and take 0 for no limit or for one that has passed."""


class Section(BaseModel):
    """A part of the configuration: immutable, and unknown keys are errors."""

    # pydantic before 2.10 warns of names that begin with "model_", such as that of the plan of a parallel model.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def lower_case(value: object) -> object:
    """Return ``value`` in lower case where it is a string."""
    return value.strip().lower() if isinstance(value, str) else value


def upper_case(value: object) -> object:
    """Return ``value`` in upper case where it is a string."""
    return value.strip().upper() if isinstance(value, str) else value


def _refuse_flag(value: object) -> object:
    # bool is a subclass of int: without this, "master_port": true would be port 1.
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


# Limits stand before it in Annotated: pydantic writes those that follow a validator into the JSON Schema
# under names of its own ("ge" for "minimum").
not_a_flag = BeforeValidator(_refuse_flag)
"""For a number: true and false are errors."""

Positive = Annotated[int, Field(ge=1), not_a_flag]
"""A whole number of at least 1."""

Seconds = Annotated[float, Field(ge=MIN_TIMEOUT_S, le=MAX_TIMEOUT_S, allow_inf_nan=False), not_a_flag]
"""A finite duration in seconds, of at least a millisecond."""

TEXT_PATTERN = r"^[^\x00]*[^\s\x00][^\x00]*$"
"""The regular expression of `Text`."""

Text = Annotated[str, Field(pattern=TEXT_PATTERN)]
"""A string that may stand in an environment variable: not blank, and without NUL."""
