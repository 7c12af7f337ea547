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

from typing import Any, Literal, overload

import torch

from comm_collectives import reduction
from comm_collectives.annotations import Compressing, Group, Op, Timeout
from comm_collectives.arguments import check_tensor, enter, group_rank_of, integer
from comm_collectives.collective import collective
from comm_collectives.compression import calls as compressed
from comm_collectives.compression import selection
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.hierarchy.choice import with_hierarchy
from comm_collectives.memory import StagingBuffer, as_bytes, contiguous, copy_back
from comm_collectives.work import deliver
from comm_utils.backend import Work
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.passed_tensors import passing_as

__all__ = ["all_reduce", "barrier", "broadcast", "checked_all_reduce", "inference_all_reduce", "reduce"]

# torch counts devices in 8 bits, with a sign.
_LAST_DEVICE = 127


@overload
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("tensor",), "op")
def all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """Reduce ``tensor`` element by element over all ranks and leave the result on every one.

    Like ``torch.distributed``'s, it need not count a new version of ``tensor``: a backward that saved ``tensor`` then
    silently uses the result. Give a ``clone()`` of what a backward needs.

    Args:
        tensor: any shape, dense, the same shape, strides and dtype on every rank; overwritten with the result. Any
            integer, bool or float dtype except fp8; complex for ``"sum"`` and ``"avg"``. Integers wrap around; on bool,
            a sum is a logical or and a product a logical and.
        op: ``"sum" "product" "min" "max" "avg" "band" "bor" "bxor"``, a ``ReduceOp`` or a
            ``torch.distributed.ReduceOp``. ``"avg"`` is for float and complex dtypes; 16-bit floats are averaged in
            float32 and rounded once.
        compression: a codec such as ``"int8"``, or a ``Compression``: elements travel in fewer bits, and are added in
            float32. For sums and averages of float32, float16 and bfloat16.
    """
    return checked_all_reduce("all_reduce", tensor, op, group, async_op, timeout, compression)


def checked_all_reduce(
    name: str,
    tensor: torch.Tensor,
    op: Any,
    group: Group,
    async_op: bool,
    timeout: Timeout,
    compression: Compressing,
) -> Work | None:
    """Do :func:`all_reduce` without a fast path, for the call ``name``."""
    backend = enter(name, group, timeout)
    if backend is None:
        return None
    check_tensor(name, "tensor", tensor, backend, group, written=True)
    reduce_op = parse_reduce_op(op, name)
    chosen = selection.choose(name, compression, tensor, reduce_op, group)
    if chosen is not None:
        call = CompressedCall(name, backend, group, tensor, reduce_op, async_op, tensor, chosen)
        return compressed.all_reduce(call, tensor)
    backend = with_hierarchy("all_reduce", backend, group, tensor.nbytes, tensor.device)
    capabilities = backend.capabilities(group, tensor.device.type)
    native = (reduce_op, tensor.dtype) in capabilities.reductions and not reduction.needed_order(
        group, reduce_op, tensor.dtype, capabilities, backend.get_world_size(group)
    )
    if native and tensor.is_contiguous():
        return backend.all_reduce(tensor, op, group, async_op)
    return reduction.all_reduce(backend, tensor, reduce_op, group, async_op, name)


@overload
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("tensor",), "op", "all_reduce")
def inference_all_reduce(
    tensor: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """:func:`all_reduce` by the path of lowest latency that the active backend has.

    Args:
        tensor, op, compression: as for :func:`all_reduce`.
    """
    return checked_all_reduce("inference_all_reduce", tensor, op, group, async_op, timeout, compression)


@overload
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensor",), ("dst", "op"))
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce ``tensor`` over all ranks into the one of ``dst``; on every other rank it stays as it was, bit for bit.

    Args:
        tensor: as for :func:`all_reduce`, but of any strides, which need not be the same on every rank; dense on
            ``dst``, where it is overwritten with the result.
        op: as for :func:`all_reduce`.
    """
    backend = enter("reduce", group, timeout)
    if backend is None:
        return None
    position = group_rank_of("reduce", "dst", backend, group, dst, group_dst)
    is_dst = backend.get_rank(group) == position
    check_tensor("reduce", "tensor", tensor, backend, group, written=is_dst)
    reduce_op = parse_reduce_op(op, "reduce")
    return reduction.reduce(backend, tensor, position, reduce_op, group, async_op)


@overload
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensor",), "src")
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Copy ``tensor`` of ``src`` into ``tensor`` of every other rank.

    As with :func:`all_reduce`, a backward that saved ``tensor`` may silently use the new values.

    Args:
        tensor: any shape and dtype, the same on every rank; dense; overwritten except on ``src``.
    """
    backend = enter("broadcast", group, timeout)
    if backend is None:
        return None
    position = group_rank_of("broadcast", "src", backend, group, src, group_src)
    is_src = backend.get_rank(group) == position
    check_tensor("broadcast", "tensor", tensor, backend, group, written=not is_src)
    backend = with_hierarchy("broadcast", backend, group, tensor.nbytes, tensor.device)
    native = backend.capabilities(group, tensor.device.type).dtypes
    if is_src:
        sent = as_bytes(contiguous(tensor), native)
        with passing_as(tensor, sent):
            work = backend.broadcast(sent, None, group, async_op, position)
        return deliver([work], None, tensor, async_op)
    buffer = StagingBuffer(tensor, shaped=True)
    received = as_bytes(buffer.memory, native)
    with passing_as(tensor, received):
        work = backend.broadcast(received, None, group, async_op, position)
    return deliver([work], copy_back([buffer]), tensor, async_op)


@overload
def barrier(
    group: Group = None, async_op: Literal[False] = False, device_ids: list[int] | None = None, timeout: Timeout = None
) -> None: ...
@overload
def barrier(
    group: Group = None, async_op: Literal[True] = ..., device_ids: list[int] | None = None, timeout: Timeout = None
) -> Work: ...
@overload
def barrier(
    group: Group = None, async_op: bool = False, device_ids: list[int] | None = None, timeout: Timeout = None
) -> Work | None: ...
@collective(())
def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Return None when every rank of the group has called it; with ``async_op``, return a handle at once.

    Args:
        device_ids: for device backends, a list with the index of the device on which to synchronise.
    """
    backend = enter("barrier", group, timeout)
    if backend is None:
        return None
    if device_ids is not None:
        if not isinstance(device_ids, (list, tuple)):
            raise ArgumentTypeError(f"barrier: device_ids: got {shown(device_ids)}; expected a list of device indices")
        device_ids = [integer("barrier", "device_ids", index) for index in device_ids]
        if any(not 0 <= index <= _LAST_DEVICE for index in device_ids):
            raise ArgumentError(
                f"barrier: device_ids: got {shown(device_ids)}; expected device indices of 0 to {_LAST_DEVICE}"
            )
    return backend.barrier(group, async_op, device_ids)
