"""A tiny collective on each library."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

import comm_config
from comm_orchestrator import facade
from comm_orchestrator.tools.devices import device_of
from comm_orchestrator.tools.doctor.finding import from_error
from comm_orchestrator.tools.doctor.time_limit import StuckError, within

__all__ = ["Trial", "limit_of", "reduce_once", "run"]


@dataclass(frozen=True)
class Trial:
    """The outcome of the trial of one library on one rank.

    Attributes:
        setup_s, all_reduce_s: None where it did not get that far.
        stuck: it still has not come back.
    """

    backend: str
    rank: int
    setup_s: float | None = None
    all_reduce_s: float | None = None
    error: str = ""
    remedy: str = ""
    stuck: bool = False


def limit_of(timeout_s: float) -> float:
    """Return when to stop waiting for a library that ignores its own timeout, at the start and in the operation."""
    return 2 * timeout_s + 5


def reduce_once(device: torch.device) -> float:
    """Return seconds that an ``all_reduce`` of 1,024 numbers takes, which is checked.

    Raises:
        ArithmeticError: its result is wrong.
    """
    size = facade.get_world_size()
    expected = size * (size + 1) / 2
    tensor = torch.full((1024,), facade.get_rank() + 1.0, device=device)
    start = time.perf_counter()
    facade.all_reduce(tensor)
    got = tensor.tolist()  # waits for the device
    took_s = time.perf_counter() - start
    if got != [expected] * len(got):
        raise ArithmeticError(f"all_reduce gave {next(one for one in got if one != expected)}, expected {expected}")
    return took_s


def run(backend: str, rank: int, settings: comm_config.Settings, timeout_s: float) -> Trial:
    """Set up ``backend``, reduce once and tear it down; called by all ranks."""
    setup_s: list[float] = []

    def call() -> float:
        start = time.perf_counter()
        facade.init_distributed(backend, config=settings, verbose=False)
        setup_s.append(time.perf_counter() - start)
        return reduce_once(device_of(backend))

    try:
        with _raising(backend):
            took_s = within(limit_of(timeout_s), call, f"an all_reduce on {backend}")
    except Exception as error:
        reported = from_error("communication", error)
        with suppress(Exception):
            within(timeout_s, facade.destroy_process_group, f"destroying {backend}")
        return Trial(
            backend,
            rank,
            next(iter(setup_s), None),
            None,
            reported.found,
            reported.remedy,
            isinstance(error, StuckError),
        )
    try:
        within(limit_of(timeout_s), facade.destroy_process_group, f"destroying {backend}")
    except Exception as error:
        reported = from_error("communication", error)
        return Trial(backend, rank, setup_s[0], took_s, reported.found, reported.remedy, isinstance(error, StuckError))
    return Trial(backend, rank, setup_s[0], took_s)


@contextmanager
def _raising(backend: str) -> Iterator[None]:
    """Let NCCL raise what it would end the process for."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    if backend != "nccl" or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)
