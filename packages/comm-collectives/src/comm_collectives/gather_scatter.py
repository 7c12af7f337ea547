"""Collectives with a root that gets every rank's tensor, or hands parts out: gather, scatter."""

from __future__ import annotations

from typing import Literal, overload

import torch

from comm_collectives.annotations import Group, Timeout
from comm_collectives.arguments import (
    check_list,
    check_numel,
    check_tensor,
    enter,
    group_rank_of,
)
from comm_collectives.collective import collective
from comm_collectives.memory import (
    StagingBuffer,
    as_bytes,
    contiguous_elements,
    copy_back,
    copy_if_overlapping,
    copy_if_overlapping_any,
)
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.torch_support.passed_tensors import passing_as

__all__ = ["gather", "scatter"]


@overload
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensor", "gather_list"), "dst")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Collect every rank's tensor on ``dst``.

    Args:
        tensor: any shape and dtype, the same on every rank; only read.
        gather_list: on ``dst``, W tensors of that size and dtype; overwritten. None on the other ranks.
        dst: by default global rank 0, where it is a member.
    """
    backend = enter("gather", group, timeout)
    if backend is None:
        return None
    check_tensor("gather", "tensor", tensor, backend, group)
    position = group_rank_of("gather", "dst", backend, group, dst, group_dst, default=_first_global(backend, group))
    native = backend.capabilities(group, tensor.device.type).dtypes
    if backend.get_rank(group) != position:
        _check_absent("gather", "gather_list", gather_list, "dst")
        sent = as_bytes(contiguous_elements(tensor), native)
        with passing_as(tensor, sent):
            work = backend.gather(sent, None, None, group, async_op, position)
        return deliver([work], None, None, async_op)
    W = backend.get_world_size(group)
    check_list("gather", "gather_list", gather_list, W, backend, group, like=tensor, written=True)
    assert gather_list is not None
    for rank, output in enumerate(gather_list):
        check_numel("gather", f"gather_list[{rank}]", output, tensor.numel(), "the size of tensor")
    buffers = [StagingBuffer(output) for output in gather_list]
    sent = as_bytes(copy_if_overlapping_any(contiguous_elements(tensor), buffers, position), native)
    received = [as_bytes(buffer.memory, native) for buffer in buffers]
    with passing_as(tensor, sent):
        work = backend.gather(sent, received, None, group, async_op, position)
    return deliver([work], copy_back(buffers), gather_list, async_op)


@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> None: ...
@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work: ...
@overload
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None: ...
@collective(("tensor", "scatter_list"), "src")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    timeout: Timeout = None,
) -> Work | None:
    """Hand entry r of ``scatter_list`` on ``src`` to rank r.

    Args:
        tensor: any shape and dtype, the same on every rank; dense; overwritten.
        scatter_list: on ``src``, W tensors of that size and dtype; only read. None on the other ranks.
        src: by default global rank 0, where it is a member.
    """
    backend = enter("scatter", group, timeout)
    if backend is None:
        return None
    check_tensor("scatter", "tensor", tensor, backend, group, written=True)
    position = group_rank_of("scatter", "src", backend, group, src, group_src, default=_first_global(backend, group))
    native = backend.capabilities(group, tensor.device.type).dtypes
    buffer = StagingBuffer(tensor)
    received = as_bytes(buffer.memory, native)
    sent = None
    if backend.get_rank(group) == position:
        W = backend.get_world_size(group)
        check_list("scatter", "scatter_list", scatter_list, W, backend, group, like=tensor)
        assert scatter_list is not None
        for rank, entry in enumerate(scatter_list):
            check_numel("scatter", f"scatter_list[{rank}]", entry, tensor.numel(), "the size of tensor")
        sent = [
            as_bytes(
                copy_if_overlapping(contiguous_elements(entry), buffer.memory, 0 if rank == position else None), native
            )
            for rank, entry in enumerate(scatter_list)
        ]
    else:
        _check_absent("scatter", "scatter_list", scatter_list, "src")
    with passing_as(tensor, received):
        work = backend.scatter(received, sent, None, group, async_op, position)
    return deliver([work], copy_back([buffer]), tensor, async_op)


def _first_global(backend: Backend, group: Group) -> int | None:
    """Return the group rank of global rank 0, torch's default, where it is a member; otherwise there is no default."""
    ranks = backend.get_process_group_ranks(group)
    return ranks.index(0) if 0 in ranks else None


def _check_absent(call: str, name: str, value: object, role: str) -> None:
    if isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{call}: {name}: got a tensor; expected a list of tensors on {role}, None elsewhere")
    if value:
        raise ArgumentError(f"{call}: {name}: got a list on a rank that is not {role}; expected None there")
