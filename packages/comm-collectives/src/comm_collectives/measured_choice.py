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
from comm_utils.torch_support import factories

__all__ = ["AUTO", "Call", "least_faster_size", "prepared_call", "whole_and_part"]

#: A size that is to be measured.
AUTO = "auto"

Call: TypeAlias = Callable[[], object]

_CPU = torch.device("cpu")
# Of a size: the fewest and the most rounds, and for how long more than the fewest are worth their time.
_ROUNDS = (3, 9)
_ROUNDS_S = 0.05
# Of one call, after which larger ones are not measured.
_LONG_S = 0.1
# Of the first way's time: what takes less at two sizes, one after the other, is faster at larger ones as well.
_CLEARLY = 0.8


def least_faster_size(
    backend: Backend,
    group: ProcessGroup | None,
    sizes: Sequence[int],
    make: Callable[[int], tuple[Call, Call]],
    at_most: float = 1.0,
    device: torch.device = _CPU,
    stays_faster: bool = False,
) -> int | None:
    """Return the size from which on the second way is faster; None where it is not at the largest that was measured.

    All ranks take turns with both, and agree on the times of the slowest rank.

    Args:
        sizes: in bytes, ascending.
        make: return a call of either way for a size.
        at_most: of the first way's time; the second one counts as faster below that.
        device: on which the calls are to be over before the clock is read.
        stays_faster: do not measure sizes above two at which the second way is clearly faster.
    """
    least: int | None = None
    was_clear = False
    for size_bytes in sizes:
        first, second = _times(backend, group, make(size_bytes), device)
        # Medians alone differ by chance where a thread of the library's waits for a tick of the kernel now and then.
        part = max(of(second) / of(first) for of in (min, statistics.median))
        if part >= at_most:
            least = None
        elif least is None:
            least = size_bytes
        is_clear = part < min(at_most, _CLEARLY)
        is_long = max(map(statistics.median, (first, second))) > _LONG_S
        if is_long or (stays_faster and was_clear and is_clear):
            break
        was_clear = is_clear
    return least


def _times(
    backend: Backend, group: ProcessGroup | None, calls: tuple[Call, Call], device: torch.device
) -> tuple[Sequence[float], Sequence[float]]:
    """Return the seconds of both in each round, of the slowest rank; the same on every rank."""

    def taken() -> list[float]:
        of_each = []
        for call in calls:
            backend.barrier(group)  # ranks that begin at once disturb each other most
            begin = time.perf_counter()
            call()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            of_each.append(time.perf_counter() - begin)
        return of_each

    def slowest(rounds: list[list[float]]) -> list[list[float]]:
        agreed = factories.tensor(rounds, dtype=torch.float64).to(device)
        backend.all_reduce(agreed, ReduceOp.MAX, group)
        return agreed.tolist()

    taken()  # opens connections and touches memory
    fewest, most = _ROUNDS
    rounds = slowest([taken() for _ in range(fewest)])
    more = min(most, int(_ROUNDS_S / max(sum(one) for one in rounds))) - fewest
    if more > 0:
        rounds += slowest([taken() for _ in range(more)])
    first, second = zip(*rounds, strict=True)
    return first, second


def whole_and_part(size_bytes: int, ranks: int, device: torch.device = _CPU) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 zeros of about ``size_bytes``, (ranks * n,), and of one rank's part of that, (n,)."""
    part = factories.zeros(size_bytes // 4 // ranks, dtype=torch.float32, device=device)
    return factories.zeros(ranks * part.numel(), dtype=torch.float32, device=device), part


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
