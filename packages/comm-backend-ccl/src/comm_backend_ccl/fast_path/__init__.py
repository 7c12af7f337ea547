"""Fast paths of both engines: plain tensors in, one call of native code, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.fast_path.coalesced import all_reduce_coalesced
from comm_backend_ccl.fast_path.kinds import MESSAGES, PLANNED, TO_LISTS, Kind
from comm_backend_ccl.fast_path.oneccl import planned
from comm_backend_ccl.fast_path.shared import in_shared_memory, started_natively
from comm_backend_ccl.fast_path.starts import STARTS, Start
from comm_backend_ccl.oneccl_communicator import OneCclCommunicator
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.work import CclWork
from comm_utils import operations
from comm_utils.fast_path import FastPath
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.fast_arguments import Accept, acceptance

__all__ = ["fast_path"]


def fast_path(
    ours: Communicator, operation: str, detail: Any, name: str, async_op: bool, forget: Callable[[], None]
) -> FastPath | None:
    """Make the fast path; see ``comm_utils.backend.Backend.fast_path``.

    Args:
        name: the call, for messages.
        forget: called after a failure.
    """
    if operation == "all_reduce_coalesced" and isinstance(ours, SharedCommunicator) and not async_op:
        return all_reduce_coalesced(ours, parse_reduce_op(detail), name, forget)
    if operation not in STARTS or (async_op and operation in MESSAGES):
        return None
    given, source = operations.get(operation).op_and_root(detail)
    op = ReduceOp.SUM if given is None else parse_reduce_op(given)
    root = 0 if source is None else ours.position(source, None)
    kind = Kind(operation, name, op, root, async_op)
    capabilities = ours.capabilities
    dtypes = capabilities.dtypes
    if given is not None:
        dtypes = frozenset(dtype for reduced, dtype in capabilities.reductions if reduced is op)
        if not dtypes:
            return None  # the library may not know the op at all
    # Native code writes tensors of the inference mode as any others; torch, which copies to lists, refuses to.
    inference = operation not in TO_LISTS
    accepts = acceptance(operation, "cpu", dtypes, ours.size, ours.rank, root, inference=inference)
    assert accepts is not None
    if async_op:
        started = started_natively(ours, kind) if isinstance(ours, SharedCommunicator) else None
        return started or _asynchronous(ours, kind, accepts)
    if isinstance(ours, SharedCommunicator) and operation not in MESSAGES:
        found = in_shared_memory(ours, kind, accepts, forget)
        if found is not None:
            return found
    if isinstance(ours, OneCclCommunicator) and operation in PLANNED:
        return _waiting(ours, kind, accepts, planned(ours, kind), forget)
    return _waiting(ours, kind, accepts, STARTS[operation](ours, kind), forget)


def _asynchronous(ours: Communicator, kind: Kind, accepts: Accept) -> FastPath:
    start, outcome_at = STARTS[kind.operation](ours, kind), 1 if kind.operation == "gather" else 0

    def begin(*tensors: Any) -> CclWork | None:
        if not ours.usable or not accepts(*tensors):
            return None
        work = start(*tensors)
        assert work is not None
        work.outcome = tensors[outcome_at] if tensors else None
        return work

    return begin


def _waiting(
    ours: Communicator, kind: Kind, accepts: Accept, start: Start, forget: Callable[[], None]
) -> Callable[..., bool]:
    def call(*tensors: Any) -> bool:
        if not ours.usable or not accepts(*tensors):
            return False
        try:
            work = start(*tensors)
            if work is not None:
                work.wait()
        except BaseException:
            forget()
            raise
        return True

    return call
