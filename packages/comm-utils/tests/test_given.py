"""Values in error messages, and timeouts of waits."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import LONGEST, seconds_to_wait, shown


class HalfMade:
    def __repr__(self) -> str:
        return f"HalfMade({self.name})"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("two\nlines", "'two\\nlines'"),
        (type("Lines", (), {"__repr__": lambda self: "one\n   and another"})(), "one and another"),
        ("x" * 58, "'" + "x" * 58 + "'"),
        ("x" * 59, "'" + "x" * 56 + "..."),
        (HalfMade(), "<HalfMade>"),
        pytest.param(10**5000, "<int>", id="more digits than Python prints"),
    ],
)
def test_values_are_shown_in_one_short_line(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (None, None),
        (2, 2.0),
        (0.5, 0.5),
        (timedelta(minutes=1), 60.0),
        (0, 0.0),
        (-1.5, 0.0),
        pytest.param(-(10**400), 0.0, id="long before"),
        (timedelta(days=-1), 0.0),
        (float("-inf"), 0.0),
        (float("inf"), None),
        pytest.param(10**400, None, id="long after"),
        (timedelta.max, None),
        (LONGEST.total_seconds() + 1, None),
        (LONGEST, LONGEST.total_seconds()),
    ],
)
def test_waits_of_any_length(timeout: Any, seconds: float | None) -> None:
    assert seconds_to_wait(timeout) == seconds


@pytest.mark.parametrize("timeout", ["1", True, [1], 1j, HalfMade()], ids=["text", "bool", "list", "complex", "object"])
def test_waits_of_no_number(timeout: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"wait: timeout: got .*; expected seconds or a timedelta, or None"):
        seconds_to_wait(timeout)


def test_waits_of_nan() -> None:
    with pytest.raises(ArgumentError, match="wait: timeout: got nan"):
        seconds_to_wait(float("nan"))
