"""Types of settings that several sections share.

They accept what pydantic's own types accept (``1`` and ``"true"`` for a flag, ``1e9`` for a whole number),
because DeepSpeed's documents rely on it, but for what can only be a mistake.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["MAX_TIMEOUT_S", "Positive", "Seconds", "Section", "Text", "Whole", "lower_case", "upper_case"]

MAX_TIMEOUT_S = 1e9
"""About 31 years: in nanoseconds, as NCCL's watchdog counts, it still fits into 64 bits."""


class Section(BaseModel):
    """A part of the configuration: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def lower_case(value: object) -> object:
    """Return ``value`` in lower case where it is a string."""
    return value.strip().lower() if isinstance(value, str) else value


def upper_case(value: object) -> object:
    """Return ``value`` in upper case where it is a string."""
    return value.strip().upper() if isinstance(value, str) else value


def _refuse_bool(value: object) -> object:
    # bool is a subclass of int: without this, "master_port": true would be port 1.
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _refuse_unusable_text(value: str) -> str:
    # These strings end up in environment variables, which cannot hold NUL.
    if not value.strip() or "\0" in value:
        raise ValueError("expected a string that is not empty and holds no NUL character")
    return value


Whole = Annotated[int, BeforeValidator(_refuse_bool)]
"""A whole number."""

Positive = Annotated[Whole, Field(ge=1)]
"""A whole number of at least 1."""

Seconds = Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False), BeforeValidator(_refuse_bool)]
"""A positive, finite duration in seconds."""

Text = Annotated[str, Field(min_length=1), AfterValidator(_refuse_unusable_text)]
"""A string that may stand in an environment variable."""
