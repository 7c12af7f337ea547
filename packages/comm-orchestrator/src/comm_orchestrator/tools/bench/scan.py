"""Sizes as nccl-tests writes them, and the series that is measured."""

from __future__ import annotations

import re

from comm_utils.errors import ArgumentError

__all__ = ["MOST_SIZES", "duration_s", "parse_size", "percentage", "series"]

#: More rows than anybody reads; what asks for them has most likely forgotten a unit.
MOST_SIZES = 10_000

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)


def parse_size(name: str, text: str) -> int:
    """``"4K"`` as 4096.

    Raises:
        ArgumentError: it is no size, or no whole number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    size = float(found[1]) * 2 ** _UNITS[found[2].upper()] if found else -1.0
    if size < 0 or size != int(size) or size >= 2**53:
        raise ArgumentError(f"{name}: got {text!r:.40}; expected a number of bytes such as 8, 4K, 64M or 1G")
    return int(size)


def percentage(name: str, text: str) -> float:
    """``"10%"`` and ``"0.1"`` as 0.1.

    Raises:
        ArgumentError: it is neither, or negative.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if found is None:
        raise ArgumentError(f"{name}: got {text!r:.40}; expected a share such as 10% or 0.1")
    return float(found[1]) / (100 if found[2] else 1)


def duration_s(name: str, value: float) -> float:
    """``value``, checked.

    Raises:
        ArgumentError: it is negative, not a number, or longer than a day.
    """
    if not 0 <= value <= 86400:
        raise ArgumentError(f"{name}: got {value:g}; expected 0 (no limit) to 86400 seconds")
    return value


def series(minimum: int, maximum: int, factor: int, step: int) -> list[int]:
    """``minimum`` to ``maximum`` bytes, multiplied by ``factor`` or, where that is not 0, advanced by ``step``.

    Raises:
        ArgumentError: more than :data:`MOST_SIZES`.
    """
    found, size = [], minimum
    while size <= maximum:
        found.append(size)
        if len(found) > MOST_SIZES:
            raise ArgumentError(
                f"got more than {MOST_SIZES} sizes from {minimum} to {maximum} bytes; expected fewer: give a larger "
                "--stepbytes, or --stepfactor"
            )
        size = size + step if step else size * factor
    return found
