"""Timing of a loop of calls, on CPUs and on accelerators."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, repeat
from typing import Any

import torch

__all__ = ["calls_us", "loop", "loop_us", "undisturbed"]


def loop(number: int, function: Callable[..., object], arguments: Sequence[object]) -> None:
    """Call ``number`` times."""
    # What costs least of a call's time whatever the number of arguments.
    call = partial(function, *arguments) if arguments else function
    for _ in repeat(None, number):
        call()


def loop_us(device: torch.device, number: int, function: Callable[..., object], arguments: Sequence[object]) -> float:
    """Return time per call of ``number`` calls one after the other; on an accelerator, until it has done them all."""
    _settle(device)
    start_ns = time.perf_counter_ns()
    loop(number, function, arguments)
    _settle(device)
    return (time.perf_counter_ns() - start_ns) / 1e3 / number


def calls_us(
    device: torch.device, number: int, function: Callable[..., object], arguments: Sequence[object]
) -> list[float]:
    """Return time of each of ``number`` calls; on an accelerator, between events on its current stream."""
    call = partial(function, *arguments)
    _settle(device)
    if device.type != "cpu":
        return _between_events(device, number, call)
    now_ns = time.perf_counter_ns
    stamps_ns = [now_ns()]
    for _ in repeat(None, number):
        call()
        stamps_ns.append(now_ns())
    return [(end - start) / 1e3 for start, end in pairwise(stamps_ns)]


def _between_events(device: torch.device, number: int, call: Callable[[], object]) -> list[float]:
    events: list[Any] = [getattr(torch, device.type).Event(enable_timing=True) for _ in range(number + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    _settle(device)
    return [start.elapsed_time(end) * 1e3 for start, end in pairwise(events)]


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's garbage collector, which would be part of some call's time."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
