"""Offsets between the clocks of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.doctor.finding import Finding
from comm_utils.active import active_backend

__all__ = ["MAX_SKEW_S", "judge", "measure"]

#: beyond this, traces and log files of several ranks are misread
MAX_SKEW_S = 0.1
_PINGS = 8


def measure(
    ranks: Sequence[int],
    device: torch.device | str = "cpu",
    pings: int = _PINGS,
    clock: Callable[[], float] = time.time,
) -> list[facade.clocks.Clock]:
    """Return the clocks of ``ranks`` against that of rank 0; called by all ranks, and rank 0 gets the result.

    Args:
        ranks: rank 0 and others.
        device: of the tensors that travel.
        clock: seconds since some epoch that all ranks share.
    """
    backend = active_backend().during("doctor")
    measured = facade.clocks.measure(backend, device, lambda: round(clock() * 1e9), pings)
    if facade.get_rank() != 0:
        return []
    return [one for one in measured if one.rank in ranks]


def judge(clocks: Sequence[facade.clocks.Clock]) -> list[Finding]:
    """Return whether the clocks agree well enough."""
    if len(clocks) < 2:
        return [Finding("ok", "clocks", "one rank, one clock")]
    first, last = min(clocks, key=lambda one: one.offset_s), max(clocks, key=lambda one: one.offset_s)
    skew, doubt = last.offset_s - first.offset_s, first.uncertainty_s + last.uncertainty_s
    text = f"the clocks of {len(clocks)} ranks are {_ms(skew)} ± {_ms(doubt)} apart"
    if skew <= MAX_SKEW_S:
        return [Finding("ok", "clocks", text)]
    text += f": rank {last.rank} is ahead of rank {first.rank}; traces and log files of several ranks mislead"
    return [Finding("warning", "clocks", text, "timedatectl set-ntp true (or chronyc makestep) on their hosts")]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 10 else f"{seconds:.0f} s"
