"""Offsets between the clocks of the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from comm_utils.backend import Backend
from comm_utils.host_identity import host_identity, host_name
from comm_utils.torch_support import factories

__all__ = ["Clock", "clock_name", "measure"]

_ROUNDS = 24


@dataclass(frozen=True)
class Clock:
    """A rank's clock minus rank 0's, give or take ``uncertainty_ns``, when its own clock showed ``at_ns``."""

    rank: int
    offset_ns: int = 0
    uncertainty_ns: int = 0
    at_ns: int = 0

    @property
    def offset_s(self) -> float:
        return self.offset_ns * 1e-9

    @property
    def uncertainty_s(self) -> float:
        return self.uncertainty_ns * 1e-9


def clock_name() -> str:
    """Return the same for processes that share the clock of ``perf_counter_ns``: those of one boot of one machine."""
    with suppress(OSError):
        return host_identity("time")  # a container may have a clock of its own
    return f"{host_name()} {os.getpid()}"


def measure(
    backend: Backend,
    device: torch.device | str,
    clock_ns: Callable[[], int] = perf_counter_ns,
    rounds: int = _ROUNDS,
) -> list[Clock]:
    """Return the clocks of all ranks against rank 0's, on every rank; called by all ranks.

    In each round every rank reads its clock and all ranks gather the readings. Nobody reads its clock for round k
    before rank 0 has come to round k-1, nor after rank 0 has left round k: so it was between rank 0's readings for
    rounds k-1 and k+1, and the middle is wrong by half of what lies between them at most. The quickest round is
    believed. After F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989), with collectives
    for messages, as a message might be received by a receive of the program's.

    Args:
        device: of the messages.
        clock_ns: the clock that is compared.
    """
    W = backend.get_world_size(None)
    mine = factories.zeros(1, dtype=torch.int64, device=device)
    everyones = factories.zeros(W, dtype=torch.int64, device=device)
    readings: list[list[int]] = []
    for _ in range(max(rounds, 3)):
        mine.fill_(clock_ns())
        backend.all_gather_into_tensor(everyones, mine)
        readings.append(everyones.tolist())
    found = [Clock(0, at_ns=readings[-1][0])]
    for rank in range(1, W):
        asked = [
            Clock(rank, now[rank] - (before[0] + after[0]) // 2, (after[0] - before[0] + 1) // 2, now[rank])
            for before, now, after in zip(readings, readings[1:], readings[2:], strict=False)
        ]
        found.append(min(asked, key=lambda one: one.uncertainty_ns))
    return found
