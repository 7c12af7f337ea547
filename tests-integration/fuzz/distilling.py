"""Chooses the few inputs of many that reach lines which no smaller one reaches."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from fuzz.bounds import Decoder, Finding, check

__all__ = ["distilled"]

_PACKAGES = ("/comm_utils/", "/comm_config/", "/comm_collectives/", "/comm_backend_ccl/", "/comm_orchestrator/")


def distilled(decoder: Decoder, kept: Sequence[bytes], made: Iterable[bytes], most_bytes: int = 2048) -> list[bytes]:
    """Return what of ``made`` reaches lines that nothing of ``kept`` does, small ones first."""
    covered: set[tuple[str, int]] = set()
    for data in kept:
        covered |= _lines(decoder, data)
    found = []
    for data in sorted(set(made), key=lambda one: (len(one), one)):
        if len(data) > most_bytes:
            break
        more = _lines(decoder, data) - covered
        if more:
            covered |= more
            found.append(data)
    return found


def _lines(decoder: Decoder, data: bytes) -> set[tuple[str, int]]:
    lines: set[tuple[str, int]] = set()

    def trace(frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(one in name for one in _PACKAGES):
            return None
        if event == "line":
            lines.add((name, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(Finding):
            check(decoder, data)
    finally:
        sys.settrace(before)
    return lines
