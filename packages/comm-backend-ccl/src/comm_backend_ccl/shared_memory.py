"""The engine in shared memory: the one module that calls into ``_shared_memory``.

Groups, operations and memory are integers; none may be used after it was freed.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_backend_ccl.tables import DTYPES, OPS, Operation
from comm_utils.log import logger
from comm_utils.reduce_op import ReduceOp

_native: Any = None
try:
    _native = importlib.import_module("comm_backend_ccl._shared_memory")
    _native.meet(torch.Tensor)
except ImportError as error:
    _missing = str(error)

__all__ = [
    "MOST_RANKS",
    "SWITCH",
    "VALIDATES",
    "allocate",
    "close",
    "close_descriptor",
    "create",
    "drain",
    "ended_ns",
    "facts",
    "failure",
    "free",
    "give_back",
    "has_kernels",
    "join",
    "missing",
    "reduce",
    "release",
    "shortcut",
    "start",
    "unavailable_reason",
    "wait",
]

#: The variable that turns it off.
SWITCH = "CCL_SHARED_MEMORY"
_KERNELS = "CCL_KERNELS"
_BUILDS = "avx512, avx2, portable"
MOST_RANKS = 64
#: Whether native code checks the memory and the dtype of tensors by itself.
VALIDATES: bool = getattr(_native, "validates_tensors", False)


def unavailable_reason() -> tuple[str, str] | None:
    """Return why it cannot be used in this process, and the remedy; None where it can."""
    if _native is None:
        if sys.platform != "linux":
            return f"collectives in shared memory need Linux, this is {sys.platform}", "use dist_backend='gloo'"
        return (
            f"this installation of comm-backend-ccl was built without native code ({_missing})",
            "reinstall it without COMM_CCL_WITHOUT_NATIVE in the environment",
        )
    if _native.is_forked():
        return "shared memory was used before this process was forked", "start processes with spawn or forkserver"
    _warn_of_variables()
    if os.environ.get(SWITCH, "").strip() == "0":
        return f"shared memory is turned off by {SWITCH}=0", f"unset {SWITCH}"
    return None


@functools.cache
def _warn_of_variables() -> None:
    """Name values that mean nothing, once."""
    switch, wanted, found = os.environ.get(SWITCH, "").strip(), os.environ.get(_KERNELS), _native.facts()["kernels"]
    if switch not in ("", "0", "1"):
        logger.warning("%s: got %r, expected 0 or 1; shared memory is used", SWITCH, switch)
    if wanted and wanted != found:
        logger.warning(
            "%s: got %r, expected one of %s that this machine has; %s is used", _KERNELS, wanted, _BUILDS, found
        )


def facts() -> dict[str, str]:
    """What it runs with."""
    found: dict[str, Any] = _native.facts()
    return {
        "shared memory": f"between up to {MOST_RANKS} ranks of a host, kernels for {found['kernels']}",
        "shared memory from": str(_native.__file__),
    }


def has_kernels() -> bool:
    """Whether :func:`reduce` can be called."""
    return _native is not None


def reduce(dtype: int, op: ReduceOp, output: int, inputs: Sequence[int], count: int) -> None:
    """Overwrite the ``count`` elements at ``output`` with the reduction of those at ``inputs``."""
    _native.reduce(dtype, OPS[op], output, inputs, count)


def create(size: int) -> tuple[int, int]:
    """New memory for a group of ``size`` ranks, through which others :func:`join`: its descriptor and inode.

    Raises:
        MemoryError: there is not enough; says how much is needed.
    """
    descriptor, inode = _native.create(size)
    return int(descriptor), int(inode)


def join(holder: int, memory: tuple[int, int], rank: int, pids: Sequence[int], crowded: bool) -> int:
    """This rank's side of a group.

    Args:
        holder: the pid of the process that created the memory.
        memory: what :func:`create` returned there.
        pids: of all ranks, in their order.
        crowded: there are more ranks than cores, so that who waits must not keep its core.

    Raises:
        MemoryError: there is not enough memory.
        PermissionError: the memory cannot be opened from here.
    """
    return int(_native.join(holder, *memory, rank, list(pids), crowded))


def start(
    group: int,
    operation: Operation,
    source: int,
    target: int,
    count: int,
    dtype: torch.dtype,
    op: ReduceOp,
    root: int,
    watched: bool,
    source_counts: Sequence[int] | None = None,
    target_counts: Sequence[int] | None = None,
) -> int:
    """Start an operation on memory that stays where it is; 0 if it is complete, else a handle.

    Raises:
        RuntimeError: it was refused.
        MemoryError: there is not enough shared memory.
    """
    code, value = DTYPES[dtype], OPS[op]
    handle: int = _native.start(
        group, operation, source, target, count, code, value, root, watched, source_counts, target_counts
    )
    return handle


def wait(handle: int, seconds: float) -> int:
    """0: still under way after so long; 1: complete; -1: failed."""
    state: int = _native.wait(handle, seconds)
    return state


def shortcut(
    group: int, operation: Operation, op: ReduceOp, root: int, later: Callable[..., Any]
) -> Callable[..., Any] | None:
    """A function of the tensors of an operation, output first, that does it; None where torch is too old to be asked.

    It takes plain, contiguous tensors on the CPU that fit; of others it returns False, having done nothing. It returns
    True when the operation is complete.

    Args:
        operation: barrier; all_reduce, broadcast and reduce, of one tensor; all_gather, reduce_scatter and
            all_to_all_v, of two; gather and scatter, of two on the root and of one elsewhere. all_to_all_v is in equal
            parts unless lists follow: the rows of each rank's part in both tensors.
        later: called with a handle and the tensors where the operation is not complete within a moment; what it returns
            is returned.
    """
    found: Callable[..., Any] | None = _native.shortcut(group, operation, OPS[op], root, later)
    return found


def failure(handle: int) -> str:
    """What went wrong in the group of an operation, for people."""
    return str(_native.failure(handle))


def close(group: int, quietly: bool = False) -> None:
    """Forget what is under way; the memory of its tensors is not touched any more.

    Args:
        quietly: who waits for it is not told, as the process is ending.
    """
    _native.close(group, quietly)


def free(group: int) -> None:
    """The last use of a group; its operations hold what they need."""
    _native.free(group)


def missing(handle: int) -> set[int]:
    """The ranks without which an operation cannot go on."""
    bits = int(_native.missing(handle))
    return {rank for rank in range(MOST_RANKS) if bits >> rank & 1}


def ended_ns(handle: int) -> int | None:
    """When a watched operation was complete, by ``time.perf_counter_ns``; None where that is not known."""
    return _native.ended(handle) or None


def drain(group: int, seconds: float) -> None:
    """Let what is under way come to an end, for so long."""
    _native.drain(group, seconds)


def release(handle: int) -> None:
    """The last use of a handle; the operation goes on."""
    _native.release(handle)


def close_descriptor(descriptor: int) -> None:
    """Give back the descriptor that :func:`create` returned, when all have joined."""
    _native.close_descriptor(descriptor)


def allocate(size: int) -> int:
    """The address of ``size`` bytes that peers can map, to be given to :func:`give_back`.

    Raises:
        MemoryError: there is not enough; says how much is needed.
    """
    return int(_native.allocate(size))


def give_back(address: int) -> None:
    """Keep the memory for the next that asks for so much."""
    _native.give_back(address)
