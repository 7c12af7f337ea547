"""Collectives in which every rank holds a tensor of the same shape: all_reduce, reduce, broadcast, barrier.

Throughout this package *W* is the size of the group, ``group=None`` the world group; ``src`` and ``dst`` are global
ranks, ``group_src`` and ``group_dst`` ranks within the group. ``async_op=True`` returns a
:class:`comm_utils.backend.Work`. ``timeout``, in seconds or as a timedelta, is how long this call may take, instead of
the group's timeout; what it ends in is the same. A rank that is not a member of ``group`` does nothing and gets None.

Errors common to all: ``NotInitializedError``; ``ArgumentError`` (a ``ValueError``) for what this rank's own arguments
show to be wrong, before anything is sent; ``BrokenGroupError``, ``PeerLostError`` and ``CommTimeoutError`` (a
``TimeoutError``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from comm_collectives import fast_path, reduction, traced, untraced
from comm_collectives.arguments import check_tensor, enter, group_rank_of, integer
from comm_collectives.memory import Landing, after_landing, as_bytes, readable
from comm_collectives.work import deliver
from comm_utils.active import slot
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentTypeError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op

__all__ = ["all_reduce", "barrier", "broadcast", "inference_all_reduce", "reduce"]

# A number, of Python's or NumPy's, may equal an enumerator of torch's, and is no op all the same.
_OPS = (str, ReduceOp, torch.distributed.ReduceOp, torch.distributed.ReduceOp.RedOpType)


def all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over all ranks and leave the result on every one.

    Args:
        tensor: any shape, dense, the same shape, strides and dtype on every rank; overwritten with the result. Any
            integer, bool or float dtype except fp8; complex for ``"sum"`` and ``"avg"``. Integers wrap around; on bool,
            a sum is a logical or and a product a logical and.
        op: ``"sum" "product" "min" "max" "avg" "band" "bor" "bxor"``, a ``ReduceOp`` or a
            ``torch.distributed.ReduceOp``. ``"avg"`` is for float and complex dtypes; 16-bit floats are averaged in
            float32 and rounded once.
    """
    if is_dynamo_compiling():
        return traced.all_reduce(tensor, op, group, async_op, timeout)
    try:
        call = slot.backend.prepared.get((op, tensor.dtype, tensor.device, group))
        if (
            not (call and tensor.is_contiguous())
            or timeout is not None
            or tensor.is_neg()
            or tensor.is_nested
            or not isinstance(op, _OPS)
        ):
            call = None
    except (AttributeError, RuntimeError, TypeError):
        call = None  # not a strided tensor, not an op, not initialised: the full check says so
    if call is None:
        return _all_reduce_checked("all_reduce", tensor, op, group, async_op, timeout)
    try:
        if async_op:
            backend = enter("all_reduce", group)
            return None if backend is None else backend.all_reduce(tensor, op, group, True)
        call(tensor)
    except NotImplementedError:  # not a kind of tensor that c10d knows, and nothing was sent: the full check says so
        return _all_reduce_checked("all_reduce", tensor, op, group, async_op)
    return None


def _all_reduce_checked(
    name: str,
    tensor: torch.Tensor,
    op: Any,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None = None,
) -> Work | None:
    backend = enter(name, group, timeout)
    if backend is None:
        return None
    check_tensor(name, "tensor", tensor, backend, group, written=True)
    reduce_op = parse_reduce_op(op, name)
    if (reduce_op, tensor.dtype) in backend.capabilities(group, tensor.device.type).reductions:
        like = (op, tensor.dtype, tensor.device, group)
        key = like if name == "all_reduce" else (name, *like)  # they are recorded apart
        fast_path.remember(backend, key, lambda: backend.prepare("all_reduce", group, op))
        fast_path.remember_shortest(backend, name, op, group)
        if tensor.is_contiguous():
            return backend.all_reduce(tensor, op, group, async_op)
    return reduction.all_reduce(backend, tensor, reduce_op, group, async_op, name)


def inference_all_reduce(
    tensor: torch.Tensor,
    op: Any = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """:func:`all_reduce` by the path of lowest latency that the active backend has."""
    if is_dynamo_compiling():
        return traced.inference_all_reduce(tensor, op, group, async_op, timeout)
    name = "inference_all_reduce"
    try:  # as in all_reduce, which cannot share these lines without paying for a call
        call = slot.backend.prepared.get((name, op, tensor.dtype, tensor.device, group))
        if (
            async_op
            or timeout is not None
            or not (call and tensor.is_contiguous())
            or tensor.is_neg()
            or tensor.is_nested
            or not isinstance(op, _OPS)
        ):
            call = None
    except (AttributeError, RuntimeError, TypeError):
        call = None
    if call is None:
        return _all_reduce_checked(name, tensor, op, group, async_op, timeout)
    try:
        call(tensor)
    except NotImplementedError:
        return _all_reduce_checked(name, tensor, op, group, async_op)
    return None


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Any = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into the one of ``dst``; on every other rank it stays as it was, bit for bit.

    Args:
        tensor: as for :func:`all_reduce`, but of any strides, which need not be the same on every rank; dense on
            ``dst``, where it is overwritten with the result.
        op: as for :func:`all_reduce`.
    """
    if is_dynamo_compiling():
        return untraced.reduce(tensor, dst, op, group, async_op, group_dst, timeout=timeout)
    is_usual = group_dst is None and type(dst) is int and isinstance(op, _OPS)
    if is_usual and not async_op and timeout is None:
        call = fast_path.on("reduce", (dst, op), tensor, group)
        if call is not None:
            with suppress(NotImplementedError):  # as in all_reduce
                call(tensor)
                return None
    backend = enter("reduce", group, timeout)
    if backend is None:
        return None
    position = group_rank_of("reduce", "dst", backend, group, dst, group_dst)
    is_dst = backend.get_rank(group) == position
    check_tensor("reduce", "tensor", tensor, backend, group, written=is_dst)
    reduce_op = parse_reduce_op(op, "reduce")
    capabilities = backend.capabilities(group, tensor.device.type)
    if is_usual and (reduce_op, tensor.dtype) in capabilities.reductions:
        keeps = is_dst or capabilities.preserving_reduce
        like = ("reduce", (dst, op), tensor.dtype, tensor.device, group)
        fast_path.remember(backend, like, lambda: _reduction(backend, group, op, position, keeps))
    return reduction.reduce(backend, tensor, position, reduce_op, group, async_op)


def _reduction(
    backend: Backend, group: ProcessGroup | None, op: object, position: int, keeps: bool
) -> Callable[[torch.Tensor], None]:
    call = backend.prepare("reduce", group, op, position)
    return call if keeps else lambda tensor: call(tensor.detach().clone())


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Copy ``tensor`` of ``src`` into ``tensor`` of every other rank.

    Args:
        tensor: any shape and dtype, the same on every rank; dense; overwritten except on ``src``.
    """
    if is_dynamo_compiling():
        return untraced.broadcast(tensor, src, group, async_op, group_src, timeout=timeout)
    if not async_op and timeout is None and group_src is None and type(src) is int:
        call = fast_path.on("broadcast", src, tensor, group)
        if call is not None:
            with suppress(NotImplementedError):  # as in all_reduce
                call(tensor)
                return None
    backend = enter("broadcast", group, timeout)
    if backend is None:
        return None
    position = group_rank_of("broadcast", "src", backend, group, src, group_src)
    is_src = backend.get_rank(group) == position
    check_tensor("broadcast", "tensor", tensor, backend, group, written=not is_src)
    native = backend.capabilities(group, tensor.device.type).dtypes
    if type(src) is int:
        fast_path.remember_moving(
            backend, "broadcast", src, tensor, group, lambda: backend.prepare("broadcast", group, None, position)
        )
    if is_src:
        work = backend.broadcast(as_bytes(readable(tensor), native), None, group, async_op, position)
        return deliver([work], None, tensor, async_op)
    landing = Landing(tensor)
    work = backend.broadcast(as_bytes(landing.memory, native), None, group, async_op, position)
    return deliver([work], after_landing([landing]), tensor, async_op)


def barrier(
    group: ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Return when every rank of the group has called it.

    Args:
        device_ids: for device backends, a list with the index of the device on which to synchronise.
    """
    if torch.compiler.is_dynamo_compiling():
        return untraced.barrier(group, async_op, device_ids, timeout=timeout)
    if not async_op and timeout is None and device_ids is None:
        call = fast_path.barrier(group)
        if call is not None:
            call()
            return None
    backend = enter("barrier", group, timeout)
    if backend is None:
        return None
    if device_ids is not None:
        if not isinstance(device_ids, (list, tuple)):
            raise ArgumentTypeError(f"barrier: device_ids: got {device_ids!r:.60}; expected a list of device indices")
        device_ids = [integer("barrier", "device_ids", index) for index in device_ids]
    if device_ids is None:
        fast_path.remember(backend, ("barrier", group), lambda: backend.prepare("barrier", group))
    return backend.barrier(group, async_op, device_ids)
