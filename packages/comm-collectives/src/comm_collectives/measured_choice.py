"""Measure from which size on one way to do a collective is faster than another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup

from comm_utils import operations
from comm_utils.backend import Backend
from comm_utils.operations import Direction, Role
from comm_utils.reduce_op import ReduceOp

__all__ = ["AUTO", "Call", "least_faster_size", "prepared_call", "whole_and_part"]

#: A size that is to be measured.
AUTO = "auto"

Call: TypeAlias = Callable[[], object]

_CPU = torch.device("cpu")
_ROUNDS = 3
# Of one call, after which larger ones are not measured.
_LONG_S = 0.1


def least_faster_size(
    backend: Backend,
    group: ProcessGroup | None,
    sizes: Sequence[int],
    make: Callable[[int], tuple[Call, Call]],
    at_most: float = 1.0,
    device: torch.device = _CPU,
) -> int | None:
    """Return the size from which on the second way is faster; None where it is not at the largest that was measured.

    All ranks take turns with both, and agree on the times of the slowest rank.

    Args:
        sizes: in bytes, ascending.
        make: return a call of either way for a size.
        at_most: of the first way's time; the second one counts as faster below that.
        device: on which the calls are to be over before the clock is read.
    """
    least: int | None = None
    for size_bytes in sizes:
        calls = make(size_bytes)
        taken = torch.zeros(2, _ROUNDS, dtype=torch.float64)
        for round_ in range(-1, _ROUNDS):  # one before, which opens connections and touches memory
            for place, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                if round_ >= 0:
                    taken[place, round_] = time.perf_counter() - begin
        slowest = taken.to(device)
        backend.all_reduce(slowest, ReduceOp.MAX, group)
        first, second = (statistics.median(row) for row in slowest.tolist())
        if second >= first * at_most:
            least = None
        elif least is None:
            least = size_bytes
        if max(first, second) > _LONG_S:
            break
    return least


def whole_and_part(size_bytes: int, ranks: int, device: torch.device = _CPU) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 zeros of about ``size_bytes``, (ranks * n,), and of one rank's part of that, (n,)."""
    part = torch.zeros(size_bytes // 4 // ranks, dtype=torch.float32, device=device)
    return torch.zeros(ranks * part.numel(), dtype=torch.float32, device=device), part


def prepared_call(
    backend: Backend, operation: str, group: ProcessGroup | None, size_bytes: int, device: torch.device = _CPU
) -> Call:
    """Return a call of ``operation`` on new tensors, of which the larger one has about ``size_bytes``."""
    row, size = operations.get(operation), backend.get_world_size(group)
    arguments: dict[str, Any] = {}
    for one in row.arguments:
        if one.role is Role.TENSOR:
            whole, part = whole_and_part(size_bytes, size, device)
            is_input, pattern = one.direction is Direction.INPUT, row.pattern
            arguments[one.name] = part if (pattern.input_is_part if is_input else pattern.output_is_part) else whole
        elif one.role is Role.GROUP:
            arguments[one.name] = group
        elif one.role is Role.GROUP_ROOT:
            arguments[one.name] = 0
    return partial(getattr(backend, operation), **arguments)
