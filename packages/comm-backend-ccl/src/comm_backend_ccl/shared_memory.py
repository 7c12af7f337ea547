"""The engine in shared memory: groups, operations and blocks of memory, objects that own what they stand for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, TypeAlias

import torch

from comm_backend_ccl import host_profile
from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.native_module import LOAD_ERROR, NATIVE
from comm_backend_ccl.tables import CALL_CODES, DTYPES, MESSAGE_DTYPES, OPS, OTHER_DTYPE, Operation
from comm_backend_ccl.variables import SWITCH, TRANSFERS, fixed_transfer, is_off, settings, warn_of_values
from comm_utils.flight_recorder.layout import CODES
from comm_utils.log import logger
from comm_utils.reduce_op import ReduceOp

#: Of the native module: a rank's side of a group, an operation under way, and memory that peers can map.
Group: TypeAlias = Any
Pending: TypeAlias = Any
Block: TypeAlias = Any

__all__ = [
    "MOST_RANKS",
    "NEEDS_PROC",
    "Block",
    "Group",
    "Pending",
    "allocate",
    "begin_wait",
    "build",
    "close",
    "close_descriptor",
    "coalesced_path",
    "create",
    "drain",
    "ended_ns",
    "facts",
    "failure",
    "fast_path",
    "join",
    "methods",
    "missing",
    "record_as",
    "record_to",
    "source",
    "start",
    "start_from",
    "starter",
    "statistics",
    "time_out",
    "timed_out",
    "unavailable_reason",
    "wait",
    "waits_for",
    "warn_of_single_copy",
]

_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
MOST_RANKS = 64
NEEDS_PROC = "ranks share memory through /proc, which is not mounted here"
#: The indices of groups that fit into the records of native code.
_RECORDED_GROUPS = 1 << CODES["group"][1]


def unavailable_reason() -> tuple[str, str] | None:
    """Return why it cannot be used in this process, and the remedy; None where it can."""
    if NATIVE is None:
        if sys.platform != "linux":
            return f"collectives in shared memory need Linux, this is {sys.platform}", "use dist_backend='gloo'"
        return (
            f"this installation of comm-backend-ccl was built without native code ({LOAD_ERROR})",
            "reinstall it without COMM_CCL_WITHOUT_NATIVE in the environment",
        )
    if NATIVE.is_forked():
        return "shared memory was used before this process was forked", "start processes with spawn or forkserver"
    warn_of_values(NATIVE.choose_kernels())
    if is_off():
        return f"shared memory is turned off by {SWITCH}=0", f"unset {SWITCH}"
    if not os.path.exists("/proc/self/fd"):  # through which ranks open each other's memory
        return NEEDS_PROC, "mount it (mount -t proc proc /proc), or use dist_backend='gloo'"
    return None


def build() -> str:
    """Return what has to be the same on all ranks of a group; "" where there is no native code."""
    return "" if NATIVE is None else f"release {version('comm-backend-ccl')}, layout {NATIVE.LAYOUT}"


def facts() -> dict[str, str]:
    """Return the facts about this engine that availability reports show."""
    found: dict[str, Any] = NATIVE.facts()
    return {
        "shared memory": f"between up to {MOST_RANKS} ranks of a host, kernels for {found['kernels']}",
        "shared memory from": str(NATIVE.__file__),
        "profile of transfers": f"none; {fixed_transfer()}" if fixed_transfer() else host_profile.describe(),
    }


def methods(group: Group) -> list[dict[str, Any]]:
    """Return what a group has learned about moving data, a dict for each operation and size class.

    ``operation``, ``least_bytes`` (of the class, which ends at twice as much), ``narrow`` (16-bit floats), ``eager``
    (in one step), ``method`` (the choice), ``settled`` (all candidates were measured), ``changes`` (of the choice),
    ``typical_ns`` (the median duration of the last calls with each candidate; 0 is unknown).
    """
    names = ("operation", "least_bytes", "narrow", "eager", "method", "settled", "changes")
    return [{**dict(zip(names, row[:-1], strict=True)), "typical_ns": dict(row[-1])} for row in group.methods()]


def start_from(group: Group, rows: Sequence[host_profile.Row]) -> None:
    """Replace what a group has learned of its methods; on all ranks alike, between two operations."""
    codes = {one.name.lower(): one.value for one in Operation}
    group.start_from([(codes[row.operation], *row[1:]) for row in rows if row.operation in codes])


def warn_of_single_copy(group: Group) -> None:
    """Say that the kernel forbids the transfer which is wanted, where it does; all ranks have joined the group."""
    if settings()[0] == "single_copy" and not group.reads_peers():
        logger.warning(
            "%s: the kernel forbids this process to read the memory of its peers, as kernel.yama.ptrace_scope above 0 "
            "and seccomp do; all ranks of the group use cached copies instead",
            fixed_transfer(),
        )


def create(size: int) -> tuple[int, int]:
    """Return new memory for a group of ``size`` ranks, through which others :func:`join`: its descriptor and inode.

    Raises:
        MemoryError: there is not enough; says how much is needed.
        RuntimeError: a limit of this process, such as that of open files, is used up.
    """
    descriptor, inode = NATIVE.create(size)
    return int(descriptor), int(inode)


def join(
    holder: int,
    memory: tuple[int, int],
    rank: int,
    pids: Sequence[int],
    oversubscribed: bool,
    reading_order: Sequence[int] = (),
    cache_share: int = 0,
    moved_by: Sequence[str] = ("", ""),
) -> Group:
    """Return this rank's side of a group.

    Args:
        holder: the pid of the process that created the memory.
        memory: what :func:`create` returned there.
        pids: of all ranks, in their order.
        oversubscribed: ranks share hardware threads, so that who waits must not keep its own.
        reading_order: the other ranks, in the order in which this one reads from them; that after ``rank`` where empty.
        cache_share: this rank's part of its last-level cache, in bytes; 0 is unknown. Outputs that do not fit are
            written around the caches.
        moved_by: how the group moves data, as :func:`variables.settings` returns it; all ranks have the same.

    Raises:
        MemoryError: there is not enough memory.
        PermissionError: the memory cannot be opened from here.
        RuntimeError: a limit of this process, such as that of open files, is used up.
    """
    transfer, learning = moved_by
    code = TRANSFERS.index(transfer) if transfer else -1
    return NATIVE.join(
        holder, *memory, rank, list(pids), oversubscribed, list(reading_order), cache_share, code, learning != "0"
    )


def start(group: Group, call: Call, passed: tuple[str, int] | None = None) -> Pending | None:
    """Start an operation on memory that stays where it is; None if it is complete, else a handle.

    The handle keeps the tensors until the operation is over, even if it is dropped before. A receive from any source
    always has one, of which to ask :func:`source`. Elements of a dtype that native code does not know travel as bytes:
    the numbers of ``call`` count those.

    Args:
        passed: what the program passed to a collective instead of that: a text that follows its description, and 64
            bits that ranks compare.

    Raises:
        RuntimeError: it was refused.
        MemoryError: there is not enough shared memory.
    """
    source, target = call.source, call.target
    dtype = DTYPES.get(source.dtype)
    message_dtype = 0 if dtype is not None else MESSAGE_DTYPES.get(source.dtype, OTHER_DTYPE)
    return group.start(
        call.operation,
        source.data_ptr(),
        target.data_ptr(),
        call.elements,
        DTYPES[torch.uint8] if dtype is None else dtype,
        OPS[call.op],
        call.root,
        call.watched,
        call.source_counts or None,
        call.target_counts or None,
        (source, target),
        call.tag,
        *(passed or (None, 0)),
        CALL_CODES.get(call.name, 0),
        message_dtype,
    )


def wait(handle: Pending, seconds: float) -> int:
    """0: still under way after so long; 1: complete; -1: failed."""
    state: int = handle.wait(seconds)
    return state


def fast_path(
    group: Group, operation: Operation, op: ReduceOp, root: int, later: Callable[..., bool], user_call: str = ""
) -> Callable[..., bool] | None:
    """Return a function of the tensors of an operation, output first, that does it.

    None where torch is too old to be asked.

    It takes plain, contiguous tensors on the CPU that fit; of others it returns False, having done nothing. It returns
    True when the operation is complete.

    Args:
        operation: barrier; all_reduce, broadcast and reduce, of one tensor; all_gather, reduce_scatter and
            all_to_all_v, of two; gather and scatter, of two on the root and of one elsewhere. all_to_all_v is in equal
            parts unless lists follow: the rows of each rank's part in both tensors.
        later: called with a handle and the tensors where the operation is not complete within a moment; what it returns
            is returned.
        user_call: in whose course it is, for the flight recorder; "" is the operation.
    """
    found: Callable[..., bool] | None = group.fast_path(operation, OPS[op], root, later, CALL_CODES.get(user_call, 0))
    return found


def starter(
    group: Group, operation: Operation, op: ReduceOp, root: int, user_call: str = ""
) -> Callable[..., Pending | bool] | None:
    """Return a function of the same tensors that starts the operation, watched as by :func:`start`.

    It returns a handle, which keeps the tensors until the end; True when the operation is complete already; False,
    having done nothing, for other tensors. None where torch is too old to be asked.
    """
    found: Callable[..., Pending | bool] | None = group.fast_path(
        operation, OPS[op], root, None, CALL_CODES.get(user_call, 0)
    )
    return found


def coalesced_path(
    group: Group,
    op: ReduceOp,
    later: Callable[[Pending], bool],
    describe: Callable[[bytes], tuple[str, int]],
    put: Callable[[torch.Tensor, int, int, torch.dtype], None],
    user_call: str = "",
) -> Callable[[Any], bool] | None:
    """Return a function of a list of tensors, or of the ``native`` of a ``kernels.NativeBatch``, that reduces them.

    It returns as that of :func:`fast_path`, which takes the same tensors. None where torch is too old to be asked.

    Args:
        later: as of :func:`fast_path`, with a handle alone; tensors of further dtypes are reduced when it returns.
        describe: returns the text and the digest of tensors of these sizes, for messages and for other ranks; each size
            has 8 bytes, least significant first.
        put: is called with each tensor that has other memory or another dtype when the results have come, and the
            address, the bytes and the dtype of its results, which it is to put there.
        user_call: as of :func:`fast_path`.
    """

    def put_code(tensor: torch.Tensor, address: int, size: int, code: int) -> None:
        put(tensor, address, size, _DTYPES[code])

    found: Callable[[Any], bool] | None = group.coalesced_path(
        OPS[op], later, describe, put_code, CALL_CODES.get(user_call, 0)
    )
    return found


def failure(handle: Pending) -> str:
    """Describe what went wrong in the group of an operation."""
    return str(handle.failure())


def close(group: Group, quietly: bool = False) -> None:
    """Forget what is under way; the memory of its tensors is not touched any more.

    Args:
        quietly: threads that wait for it are not woken with a failure, as the process is ending.
    """
    group.close(quietly)


def time_out(group: Group) -> None:
    """Fail what is under way on all ranks, as this rank has waited in vain; a rank that comes later fails at once."""
    group.time_out()


def timed_out(group: Group) -> tuple[int, set[int]] | None:
    """Return the rank that gave up waiting, and the ranks for which it waited; None where none did."""
    found = group.timed_out()
    return None if found is None else (int(found[0]), _ranks(found[1]))


def missing(handle: Pending) -> set[int]:
    """Return the ranks without which an operation cannot go on."""
    return _ranks(handle.missing())


def source(handle: Pending) -> int:
    """Return the rank whose message a receive got; -1 where there is none yet."""
    return int(handle.source())


def waits_for(group: Group) -> set[int]:
    """Return the ranks without which the next operation in order cannot go on."""
    return _ranks(group.missing())


def _ranks(bits: int) -> set[int]:
    return {rank for rank in range(MOST_RANKS) if bits >> rank & 1}


def ended_ns(handle: Pending) -> int | None:
    """Return when a watched operation was complete, by ``time.perf_counter_ns``; None where that is not known."""
    return handle.ended() or None


def record_to(descriptor: int) -> None:
    """Write this process's calls into a ring of the flight recorder, from now on.

    Args:
        descriptor: of the ring's file, which may be closed afterwards; -1 writes no more.

    Raises:
        RuntimeError: the file is no ring; calls are recorded as before.
        MemoryError: its file system has no room for it, or it cannot be mapped; likewise.
    """
    if NATIVE is not None:
        NATIVE.record_to(descriptor)


def record_as(group: Group, index: int) -> None:
    """Set the index by which the flight recorder knows a group; one too large for a record counts as 0, unknown."""
    group.record_as(index if index < _RECORDED_GROUPS else 0)


def begin_wait(handle: Pending, caller: int, limited: bool) -> None:
    """Note in the record of an operation that somebody begins to wait for it.

    Args:
        caller: the place in the program, as the flight recorder knows it; 0 is unknown.
        limited: for a time that is not the group's.
    """
    handle.begin_wait(caller, limited)


def drain(group: Group, seconds: float) -> None:
    """Let what is under way come to an end, for so long."""
    group.drain(seconds)


def close_descriptor(descriptor: int) -> None:
    """Give back the descriptor that :func:`create` returned, when all have joined."""
    NATIVE.close_descriptor(descriptor)


def allocate(size: int) -> Block:
    """Return ``size`` bytes at ``.address`` that peers can map; they are given back when the object ends.

    Raises:
        MemoryError: there is not enough; says how much is needed.
        RuntimeError: a limit of this process, such as that of open files, is used up; or this is a forked child.
    """
    return NATIVE.allocate(size)


def statistics() -> dict[str, int]:
    """Return the statistics of this process's blocks, see ``comm_collectives.shared_memory_stats``."""
    if NATIVE is None:
        return {}
    found: dict[str, int] = NATIVE.statistics()
    return found
