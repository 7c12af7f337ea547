"""The values of a trace's lines, checked for their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from comm_utils.observability.traces.events import Operation, RankTrace

__all__ = ["header_fields", "integers", "operation_fields"]

# A clock that gains a second a second is no clock; and the times on rank 0's clock stay finite.
_MOST_DRIFT = 1.0


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_integer(value: object) -> bool:
    return type(value) is int


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_drift(value: object) -> bool:
    return type(value) in (int, float) and abs(value) <= _MOST_DRIFT  # type: ignore[arg-type]


def _is_integers(value: object) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


_Test = Callable[[object], bool]
_TESTS: Mapping[str, tuple[_Test, str]] = {
    "str": (_is_text, "text"),
    "int": (_is_integer, "an integer"),
    "bool": (_is_flag, "true or false"),
    "float": (_is_drift, f"a number from {-_MOST_DRIFT:g} to {_MOST_DRIFT:g}"),
    "tuple[int, ...]": (_is_integers, "a list of integers"),
}
# Annotations are text here, as both classes postpone their evaluation.
_HEADER: Mapping[str, str] = {one.name: str(one.type) for one in fields(RankTrace) if one.name != "events"}
_OPERATION: Mapping[str, str] = {one.name: str(one.type) for one in fields(Operation)}


def header_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``found`` has of the fields of :class:`RankTrace`; other keys are of later versions.

    Raises:
        ValueError: one has a value of a wrong type.
    """
    return _checked({name: found[name] for name in _HEADER if name in found}, _HEADER)


def operation_fields(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``found`` as arguments of :class:`Operation`.

    Raises:
        ValueError: a value is of a wrong type, or a name is none of the fields'.
    """
    for name in found:
        if name not in _OPERATION:
            raise ValueError(f"{name!r:.60}: no field of an operation")
    values = _checked(found, _OPERATION)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def integers(found: list[Any]) -> list[int]:
    """Return ``found``, numbers and times of one event.

    Raises:
        ValueError: one is no integer.
    """
    for one in found:
        if type(one) is not int:
            raise ValueError(f"got {one!r:.60}; expected an integer")
    return found


def _checked(values: Mapping[str, Any], kinds: Mapping[str, str]) -> dict[str, Any]:
    for name, value in values.items():
        test, expected = _TESTS[kinds[name]]
        if not test(value):
            raise ValueError(f"{name}: got {value!r:.60}; expected {expected}")
    return dict(values)
