"""Measurement of the methods of moving data by a group in shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from comm_backend_ccl import host_profile, shared_communicator, variables
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.tables import Operation
from comm_backend_ccl.work import CclWork
from comm_utils.errors import ArgumentError
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import factories

__all__ = ["THOROUGH", "Effort", "measure", "quick", "transfer_profile", "tune"]

_KIB, _MIB = 1 << 10, 1 << 20
# Of the ring of a rank.
_MOST_SHARED_BYTES = 2 * _MIB
# Of what all ranks gather.
_MOST_GATHERED_BYTES = 1024 * _MIB
# Of what all other ranks publish in one step; and up to which nothing is compared.
_MOST_IN_ONE_STEP_BYTES, _LEAST_MEASURED_BYTES = 128 * _KIB, 16 * _KIB


class Effort(NamedTuple):
    """The sizes and dtypes to measure.

    Attributes:
        sizes_bytes: of one rank's input, in ascending order.
        dtypes: of reductions; what only moves data is measured with the first.
        limit_s: the measurement ends with the calls under way after so long, by the first rank's clock.
    """

    sizes_bytes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    limit_s: float


THOROUGH = Effort(tuple((16 * _KIB) << step for step in range(13)), (torch.float32, torch.bfloat16), 120.0)


class _Buffers(NamedTuple):
    """``input`` has the size that is measured; ``gathered`` is as many times as large as there are ranks."""

    input: torch.Tensor
    gathered: torch.Tensor
    part: torch.Tensor


_Start = Callable[[SharedCommunicator, _Buffers], CclWork]
_REDUCTIONS: dict[Operation, _Start] = {
    Operation.ALL_REDUCE: lambda group, data: group.all_reduce(data.input, ReduceOp.SUM),
    Operation.REDUCE: lambda group, data: group.reduce(data.input, 0, ReduceOp.SUM),
    Operation.REDUCE_SCATTER: lambda group, data: group.reduce_scatter(data.part, data.input, ReduceOp.SUM),
}
_MOVEMENTS: dict[Operation, _Start] = {
    Operation.BROADCAST: lambda group, data: group.broadcast(data.input, 0),
    Operation.ALL_GATHER: lambda group, data: group.all_gather(data.gathered, data.input),
    Operation.ALL_TO_ALL_V: lambda group, data: group.all_to_all(data.gathered[: data.input.numel()], data.input),
}
# Calls between two looks at the clock and at whether all methods were compared, and after which that is given up:
# where the group compares nothing, and where it does.
_CALLS, _CALLS_IN_VAIN, _MOST_CALLS = 12, 60, 600


def quick(ranks: int) -> Effort:
    """Return what the first group of so many ranks measures."""
    # One size that ranks publish in one step, which is less the more of them there are.
    in_one_step = 64 * _KIB
    while in_one_step > _LEAST_MEASURED_BYTES and in_one_step * (ranks - 1) > _MOST_IN_ONE_STEP_BYTES:
        in_one_step //= 2
    sizes_bytes = sorted({in_one_step, 64 * _KIB, 256 * _KIB, _MIB, 4 * _MIB})
    return Effort(tuple(sizes_bytes), (torch.float32,), 0.25)


def measure(communicator: SharedCommunicator, effort: Effort, seen: Callable[[str, int], None] | None = None) -> bool:
    """Call the group's operations until it has compared its methods for each size; all ranks call this alike.

    ``communicator.methods()`` has the result. All ranks stop at the same call: what the group has learned is the same
    everywhere, and the first rank tells the others when the time is up.

    Args:
        seen: called with the name of an operation and the size in bytes before each.

    Returns:
        Whether all sizes were measured that fit into memory; False where the limit has cut the measurement off.

    Raises:
        PeerLostError: a rank ended meanwhile.
        CommTimeoutError: a rank did not take part.
    """
    if not _touch_memory(communicator, _TimeLimit(communicator, effort.limit_s)):
        return False
    limit = _TimeLimit(communicator, effort.limit_s)
    for size_bytes in effort.sizes_bytes:
        for dtype in effort.dtypes:
            elements = size_bytes // dtype.itemsize // communicator.size * communicator.size
            if size_bytes * communicator.size**2 > _MOST_GATHERED_BYTES:
                return True
            data = _Buffers(
                factories.zeros(elements, dtype=dtype),
                factories.zeros(elements * communicator.size, dtype=dtype),
                factories.zeros(elements // communicator.size, dtype=dtype),
            )
            operations = _REDUCTIONS if dtype.itemsize == 2 else _REDUCTIONS | _MOVEMENTS
            for operation, start in operations.items():
                name = operation.name.lower()
                if seen is not None:
                    seen(name, size_bytes)
                kind = name, dtype.itemsize == 2, 1 << (data.input.nbytes.bit_length() - 1)
                if not _compare_methods(communicator, kind, partial(start, communicator, data), limit):
                    return False
    return True


class _TimeLimit:
    """The end of a measurement by the first rank's clock, which counts the waits for a core as well."""

    def __init__(self, communicator: SharedCommunicator, limit_s: float) -> None:
        self._communicator, self._end = communicator, time.monotonic() + limit_s
        self._decision = factories.zeros(1, dtype=torch.uint8)

    def has_passed(self) -> bool:
        """Return whether the measurement is to end; every rank calls this, and gets the first rank's answer."""
        if self._communicator.rank == 0:
            self._decision.fill_(time.monotonic() >= self._end)
        self._communicator.broadcast(self._decision, 0).wait()
        return bool(self._decision.item())


def _touch_memory(communicator: SharedCommunicator, limit: _TimeLimit) -> bool:
    """Write to all of what the ranks share, as the first call that does so takes many times as long as later ones.

    Returns:
        Whether the time has sufficed.
    """
    data = factories.zeros(2 * _MOST_SHARED_BYTES, dtype=torch.uint8)
    for root in range(communicator.size):
        communicator.broadcast(data, root).wait()
        if limit.has_passed():
            return False
    return True


def _compare_methods(
    communicator: SharedCommunicator, kind: tuple[str, bool, int], start: Callable[[], CclWork], limit: _TimeLimit
) -> bool:
    """Return whether the time has sufficed to compare the methods of an operation.

    Args:
        kind: the operation, whether it is of 16-bit floats, and the least size of its class.
    """
    calls = 0
    rows: list[dict[str, Any]] = []
    while calls < (_MOST_CALLS if rows else _CALLS_IN_VAIN) and not (rows and all(row["settled"] for row in rows)):
        for _ in range(_CALLS):
            start().wait()
        calls += _CALLS
        found = communicator.methods()
        rows = [row for row in found if (row["operation"], row["narrow"], row["least_bytes"]) == kind]
        if limit.has_passed():
            return False
    return True


def transfer_profile() -> dict[str, Any]:
    """Return the host's profile, see ``comm_utils.kernels.transfer_profile``."""
    world = _shared_world()
    return {**host_profile.known(), "world": None if world is None else world.profile_by}


def _shared_world() -> SharedCommunicator | None:
    return next((one for one in shared_communicator.open_groups() if one.is_world), None)


def tune(seen: Callable[[str, int], None] | None = None) -> bool:
    """Measure thoroughly with the world and keep the result, see ``comm_utils.kernels.tune_transfers``.

    Raises:
        ArgumentError: the methods are fixed; or on rank 0, the result cannot be kept.
    """
    world = _shared_world()
    if world is None or world.size < 2:
        return False
    if not world.learns:
        raise ArgumentError(f"{' and '.join(variables.SETTINGS)} fix how data is moved; unset them to measure it")
    world.start_from([])
    measure(world, THOROUGH, seen)
    if world.rank == 0 and not host_profile.store(world.size, host_profile.rows_of(world.methods()), host_profile.TUNE):
        reason = host_profile.unavailable_reason(host_profile.TUNE) or "no room"
        raise ArgumentError(f"the profile was measured, and could not be kept: {reason}")
    return True
