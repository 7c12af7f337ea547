"""How far the clocks of the ranks are apart."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import torch

from comm_utils.backend import Backend

__all__ = ["Clock", "clock_name", "measure"]

_PINGS = 16


@dataclass(frozen=True)
class Clock:
    """A rank's clock minus rank 0's, give or take ``uncertainty_ns``, when its own clock showed ``at_ns``."""

    rank: int
    offset_ns: int = 0
    uncertainty_ns: int = 0
    at_ns: int = 0


def clock_name() -> str:
    """The same for processes that share the clock of ``perf_counter_ns``: those of one boot of one machine."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # A container may have a clock of its own.
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    return f"{socket.gethostname()} {os.getpid()}"


def measure(
    backend: Backend,
    ranks: Sequence[int],
    device: torch.device | str,
    clock_ns: Callable[[], int] = perf_counter_ns,
    pings: int = _PINGS,
) -> list[Clock]:
    """The clocks of ``ranks`` against that of rank 0; called by all ranks, and rank 0 gets the result.

    Rank 0 asks each rank for the time, several times, and believes the answer that came quickest: it was given between
    question and answer, so half of that time is what it can be wrong by.
    Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).

    Args:
        ranks: global ranks; rank 0 itself is not asked.
        device: of the messages.
        clock_ns: the clock that is compared.
    """
    message = torch.zeros(1, dtype=torch.int64, device=device)
    rank, found = backend.get_rank(None), []
    if rank == 0:
        for peer in ranks:
            if peer != 0:
                asked = [_ask(backend, peer, message, clock_ns) for _ in range(pings)]
                found.append(min(asked, key=lambda one: one.uncertainty_ns))
    elif rank in ranks:
        for _ in range(pings):
            backend.recv(message, 0)
            message.fill_(clock_ns())
            backend.send(message, 0)
    return found


def _ask(backend: Backend, peer: int, message: torch.Tensor, clock_ns: Callable[[], int]) -> Clock:
    # The length of the round trip comes from a clock that nobody sets.
    asked_ns, start_ns = clock_ns(), perf_counter_ns()
    backend.send(message, peer)
    backend.recv(message, peer)
    theirs_ns = int(message.item())
    half_ns = (perf_counter_ns() - start_ns) // 2
    return Clock(peer, theirs_ns - (asked_ns + half_ns), half_ns, theirs_ns)
