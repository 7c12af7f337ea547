"""Fast paths: plain tensors in, one call of c10d, nothing else.

The methods of a process group are operators of torch's dispatcher, each of which calls the same method of the library
behind the group. What the dispatcher adds to that is work for modes, transforms and subclasses of tensors, which no
plain tensor needs, and an event for the profiler. So a fast path calls the library itself, which saves about a
microsecond, unless a profiler watches this thread. Asynchronous calls go through the dispatcher, which makes their
handles known to compiled code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as internals

from comm_backend_torch.message_waits import message_wait
from comm_backend_torch.starts import ON_ONE, STARTS, CallKind, Start, device_of_barrier, result_of
from comm_backend_torch.waits import Wait, how_to_wait
from comm_backend_torch.work import TorchWork
from comm_backend_torch.world import World
from comm_utils import operations
from comm_utils.fast_path import FastPath
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import Kind
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support.fast_arguments import acceptance
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.plain_tensors import PlainTensors, by_device, plain_tensors, present
from comm_utils.torch_support.recorded_calls import KindsByDtype, Note, measure_of

__all__ = ["fast_path"]

# Reduces in place where made in inference mode; c10d, which copies for some calls, cannot write such tensors otherwise.
_IN_PLACE = "all_reduce"

# Whether a profiler watches this thread.
_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
_MESSAGES = frozenset(("recv", "send"))


def fast_path(
    backend: World, operation: str, detail: Any, group: ProcessGroup | None, async_op: bool
) -> FastPath | None:
    """Make the fast path; see ``comm_utils.backend.Backend.fast_path``."""
    if operation not in STARTS or (async_op and operation in _MESSAGES):
        return None
    state = backend._state(group)
    if state.broken is not None:  # a call that ended well after that asks for one
        return None
    op, root = _settle(operation, detail, state)
    devices = present([device_of_barrier(state)] if operation == "barrier" else state.devices)
    name = backend._call or operation
    found = {
        device: path
        for device in devices
        if (
            path := _on_device(
                backend, operation, group, CallKind(operation, name, state, device, op, root, async_op, state.pg)
            )
        )
        is not None
    }
    return by_device(found, None if async_op else False)


def _settle(operation: str, detail: Any, state: GroupState) -> tuple[ReduceOp | None, int | None]:
    """Return the op and the root's group rank that ``detail`` names."""
    op, root = operations.get(operation).op_and_root(detail)
    return None if op is None else parse_reduce_op(op), None if root is None else state.position(root, None)


def _on_device(backend: World, operation: str, group: ProcessGroup | None, kind: CallKind) -> FastPath | None:
    state = kind.state
    capabilities = kind.capabilities
    dtypes = capabilities.dtypes
    if operation in operations.PRIMITIVES - capabilities.operations:
        return None
    if kind.op is not None:
        dtypes = frozenset(dtype for op, dtype in capabilities.reductions if op is kind.op)
        if not dtypes:
            return None  # c10d may not know the op at all
    inference = operation == _IN_PLACE
    accepts = acceptance(operation, kind.device, dtypes, len(state.ranks), state.rank, kind.root, inference=inference)
    dispatched = _start(kind)
    if dispatched is None or accepts is None:
        return None
    alive, pg, failure = internals._world.pg_map, state.pg, partial(backend._failure, operation, state)
    failed = partial(backend._failed, operation, state, kind.device)
    is_profiled = _is_profiled
    own_wait = _own_wait(operation, kind)
    kinds, measure = _kinds(kind), measure_of(operation, len(state.ranks))
    are_plain = plain_tensors(kind.device, dtypes, inference=inference) if operation in ON_ONE else None

    if kind.async_op and are_plain is not None:
        return _begin_on_one(dispatched, are_plain, pg, failure, failed, kinds, own_wait)
    if kind.async_op:

        def begin(*tensors: Any) -> TorchWork | None:
            if not accepts(*tensors) or pg not in alive:
                return None
            dtype, elements, sent, received = measure(*tensors)
            recorded = kinds[dtype]
            number = recorded.begin(elements, 2, sent, received, IN_BACKGROUND)
            try:
                work = dispatched(*tensors)
            except BaseException as error:
                _fail(recorded, number, error, failed)
            return TorchWork(work, result_of(operation, tensors), failure, None, Note(recorded, number), own_wait)

        return begin
    direct = _direct(kind) or dispatched
    if are_plain is not None:
        return _on_one(direct, dispatched, are_plain, pg, failed, kinds, own_wait)

    def call(*tensors: Any) -> bool:
        if not accepts(*tensors) or pg not in alive:
            return False
        dtype, elements, sent, received = measure(*tensors)
        recorded = kinds[dtype]
        number = recorded.begin(elements, 2, sent, received)
        work = None
        try:
            work = (dispatched if is_profiled() else direct)(*tensors)
            if work is None:
                pass
            elif own_wait is None:
                work.wait()
            else:
                own_wait(work)
        except BaseException as error:
            _fail(recorded, number, error, failed, work)
        recorded.end(number)
        return True

    return call


def _own_wait(operation: str, kind: CallKind) -> Wait | None:
    if operation not in _MESSAGES:
        return how_to_wait(kind.state, kind.device)
    return message_wait(kind.state) if kind.state.libraries[kind.device] == "gloo" else None


def _fail(
    recorded: Kind, number: int, error: BaseException, failed: Callable[[Any, Any], BaseException], work: Any = None
) -> NoReturn:
    """Record that a call failed with ``error``, and raise what the user gets."""
    # The other ranks may be asked for the cause, and look at this call as well.
    failure = failed(error, work)
    recorded.fail(number)
    if failure is error:
        raise error
    raise failure from error


def _start(kind: CallKind) -> Start | None:
    """Return how the operation is started; a reduce leaves the tensors of the other ranks as they are."""
    start = STARTS[kind.operation](kind)
    if start is None or kind.operation != "reduce" or kind.state.rank == kind.root:
        return start
    if kind.capabilities.preserving_reduce:
        return start
    if kind.async_op:
        return lambda tensor: start(tensor.detach().clone())
    return lambda tensors: start([tensors[0].detach().clone()])


def _direct(kind: CallKind) -> Start | None:
    """Return how the operation is started without torch's dispatcher; None where that is not possible."""
    try:
        library = kind.state.pg._get_backend(torch.device(kind.device))
        return _start(kind._replace(methods=library))
    except (AttributeError, RuntimeError):  # written in Python, in parts
        return None


def _on_one(
    direct: Start,
    dispatched: Start,
    are_plain: PlainTensors,
    pg: ProcessGroup,
    failed: Callable[[Any, Any], BaseException],
    kinds: dict[torch.dtype | None, Kind],
    own_wait: Wait | None,
) -> FastPath:
    """Make the fast path of one tensor, which saves a call over the general one."""
    alive, is_profiled = internals._world.pg_map, _is_profiled

    def call(tensor: Any) -> bool:
        one = [tensor]
        if not are_plain(one) or pg not in alive:
            return False
        recorded = kinds[tensor.dtype]
        number = recorded.begin(tensor.numel(), 2)
        work = None
        try:
            work = (dispatched if is_profiled() else direct)(one)
            if work is None:
                pass
            elif own_wait is None:
                work.wait()
            else:
                own_wait(work)
        except BaseException as error:
            _fail(recorded, number, error, failed, work)
        recorded.end(number)
        return True

    return call


def _begin_on_one(
    dispatched: Start,
    are_plain: PlainTensors,
    pg: ProcessGroup,
    failure: Callable[[Any], BaseException],
    failed: Callable[[Any, Any], BaseException],
    kinds: dict[torch.dtype | None, Kind],
    own_wait: Wait | None,
) -> FastPath:
    """Make the asynchronous fast path of one tensor."""
    alive = internals._world.pg_map

    def begin(tensor: Any) -> TorchWork | None:
        if not are_plain((tensor,)) or pg not in alive:
            return None
        recorded = kinds[tensor.dtype]
        number = recorded.begin(tensor.numel(), 2, None, None, IN_BACKGROUND)
        try:
            work = dispatched(tensor)
        except BaseException as error:
            _fail(recorded, number, error, failed)
        return TorchWork(work, tensor, failure, None, Note(recorded, number), own_wait)

    return begin


def _kinds(kind: CallKind) -> dict[torch.dtype | None, Kind]:
    """Return the kinds of call in the flight recorder by dtype."""
    state = kind.state
    calls = state.on_device(kind.device)
    return KindsByDtype(state.recorded_as(), state.ranks, kind.operation, kind.call, **kind.recorded, calls=calls)
