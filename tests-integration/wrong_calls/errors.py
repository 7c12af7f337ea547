"""What a call raises, compared with what it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from wrong_calls.right import Arguments, call

import comm_orchestrator as dist

__all__ = ["caught", "error_of", "expect"]


def caught(what: Callable[[], Any]) -> Exception:
    """Return what the call raises; it is one of ours and a built-in."""
    try:
        what()
    except Exception as error:
        raised = error
    else:
        raise AssertionError("a wrong call was accepted")
    assert isinstance(raised, dist.CommError), f"{type(raised).__qualname__}: {raised}"
    assert isinstance(raised, (ValueError, RuntimeError, TimeoutError))
    return raised


def expect(
    name: str, arguments: Arguments, error: type[Exception], texts: Sequence[str], by_position: bool = False
) -> None:
    """Check that the call raises exactly ``error``, with a message that begins with its name and holds ``texts``."""
    raised = caught(lambda: call(name, arguments, by_position))
    assert type(raised) is error, f"{type(raised).__qualname__}: {raised}"
    assert str(raised).startswith(f"{name}: "), str(raised)
    for text in texts:
        assert text in str(raised), f"{text!r} is not in: {raised}"


def error_of(
    name: str, arguments: Arguments, error: type[Exception], texts: Sequence[str], by_position: bool = False
) -> str:
    """Return how the call fell short of :func:`expect`; an empty text where it did not."""
    try:
        expect(name, arguments, error, texts, by_position)
    except AssertionError as problem:
        return str(problem)
    return ""
