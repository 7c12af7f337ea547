"""Exchanges: part r of what a rank has goes to rank r."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, overload

import torch

from comm_collectives.annotations import Compressing, Group, Timeout
from comm_collectives.arguments import check_dtype, check_list, check_numel, check_tensor, enter, splits
from comm_collectives.collective import collective
from comm_collectives.compression import calls as compressed
from comm_collectives.compression import selection
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.memory import (
    StagingBuffer,
    as_bytes,
    concatenate,
    contiguous_elements,
    copy_back,
    copy_if_overlapping,
    copyable,
)
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError
from comm_utils.torch_support.passed_tensors import passing_as

__all__ = ["all_to_all", "all_to_all_single"]


@overload
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("output", "input", "output_split_sizes", "input_split_sizes"))
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """Send part r of ``input`` to rank r, and put what rank r sent into part r of ``output``.

    Args:
        output: (sum of ``output_split_sizes``, ...); dense; overwritten.
        input: (sum of ``input_split_sizes``, ...), the dtype and trailing dimensions of ``output``; only read.
        output_split_sizes: W numbers of rows to receive from each rank; None for equal parts.
        input_split_sizes: W numbers of rows to send to each rank; None for equal parts.
        compression: as for ``all_reduce``; what a rank sends itself is exact.
    """
    call = "all_to_all_single"
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    check_tensor(call, "output", output, backend, group, written=True)
    check_tensor(call, "input", input, backend, group)
    check_dtype(call, "output", output, input)
    if output.shape[1:] != input.shape[1:]:
        raise ArgumentError(
            f"{call}: output: got shape {tuple(output.shape)}; expected (rows, "
            f"{', '.join(map(str, input.shape[1:]))}), "
            f"the trailing dimensions of input, {tuple(input.shape)}"
        )
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    rows_out = splits(call, "output_split_sizes", output_split_sizes, "output", output, W)
    rows_in = splits(call, "input_split_sizes", input_split_sizes, "input", input, W)
    if rows_out[rank] != rows_in[rank]:
        raise ArgumentError(
            f"{call}: output_split_sizes: got {rows_out[rank]} rows from rank {rank}, which is this rank, but it "
            f"sends itself {rows_in[rank]}; expected the same number in both"
        )
    row = prod(input.shape[1:])
    buffer = StagingBuffer(output)
    sizes_out, sizes_in = [rows * row for rows in rows_out], [rows * row for rows in rows_in]
    source = copy_if_overlapping(contiguous_elements(input), buffer.memory)
    chosen = selection.choose(call, compression, input, None, group)
    if chosen is not None:
        targets, sources = torch.split(buffer.memory, sizes_out), torch.split(source, sizes_in)

        def plain(inner: Backend, used: Group) -> None:
            _exchange(inner, buffer.memory, source, sizes_out, sizes_in, used, False)

        compressing = CompressedCall(call, backend, group, input, None, async_op, output, chosen, buffer.copy_back)
        return compressed.all_to_all(compressing, targets, sources, plain)
    work = _exchange(backend, buffer.memory, source, sizes_out, sizes_in, group, async_op)
    return deliver([work], copy_back([buffer]), output, async_op)


@overload
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("output_tensor_list", "input_tensor_list"))
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """Send entry r of ``input_tensor_list`` to rank r, and receive entry r of ``output_tensor_list`` from it.

    Args:
        output_tensor_list: W tensors of the sizes that the other ranks send; dense; overwritten.
        input_tensor_list: W tensors of one dtype, of any sizes; only read.
        compression: as for :func:`all_to_all_single`.
    """
    backend = enter("all_to_all", group, timeout)
    if backend is None:
        return None
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    check_list("all_to_all", "input_tensor_list", input_tensor_list, W, backend, group)
    like = input_tensor_list[0]
    check_list("all_to_all", "input_tensor_list", input_tensor_list, W, backend, group, like=like)
    check_list("all_to_all", "output_tensor_list", output_tensor_list, W, backend, group, like=like, written=True)
    own = input_tensor_list[rank].numel()
    name = f"output_tensor_list[{rank}]"
    check_numel("all_to_all", name, output_tensor_list[rank], own, f"what this rank, {rank}, sends itself")
    sizes_out = [tensor.numel() for tensor in output_tensor_list]
    sizes_in = [tensor.numel() for tensor in input_tensor_list]
    joined = concatenate([copyable(contiguous_elements(tensor)) for tensor in input_tensor_list])
    received = joined.new_empty(sum(sizes_out))

    def finish() -> None:
        for output, part in zip(output_tensor_list, torch.split(received, sizes_out), strict=True):
            copyable(output.detach()).copy_(part.view(output.shape))

    chosen = selection.choose("all_to_all", compression, joined, None, group)
    if chosen is not None:
        targets, sources = torch.split(received, sizes_out), torch.split(joined, sizes_in)

        def plain(inner: Backend, used: Group) -> None:
            _exchange(inner, received, joined, sizes_out, sizes_in, used, False)

        call = CompressedCall("all_to_all", backend, group, joined, None, async_op, output_tensor_list, chosen, finish)
        return compressed.all_to_all(call, targets, sources, plain)
    work = _exchange(backend, received, joined, sizes_out, sizes_in, group, async_op)
    return deliver([work], finish, output_tensor_list, async_op)


def _exchange(
    backend: Backend,
    received: torch.Tensor,
    sent: torch.Tensor,
    sizes_out: list[int],
    sizes_in: list[int],
    group: Group,
    async_op: bool,
) -> Work | None:
    native = backend.capabilities(group, sent.device.type).dtypes
    if sent.dtype not in native:
        size = sent.element_size()
        sizes_out, sizes_in = [count * size for count in sizes_out], [count * size for count in sizes_in]
    wire_out, wire_in = as_bytes(received, native), as_bytes(sent, native)
    with passing_as(sent, wire_in):
        return backend.all_to_all_single(wire_out, wire_in, sizes_out, sizes_in, group, async_op)
