"""Reductions in which every rank ends with a part: reduce_scatter and reduce_scatter_tensor."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch

from comm_collectives import reduction
from comm_collectives.annotations import Compressing, Group, Op, Timeout
from comm_collectives.arguments import check_dtype, check_list, check_numel, check_tensor, enter
from comm_collectives.collective import collective
from comm_collectives.compression import calls as compressed
from comm_collectives.compression import selection
from comm_collectives.compression.compressed_call import CompressedCall
from comm_collectives.compression.low_rank import stacked_shape
from comm_collectives.hierarchy.choice import with_hierarchy
from comm_collectives.memory import StagingBuffer, contiguous_elements, copy_if_overlapping
from comm_collectives.work import After, run
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError
from comm_utils.reduce_op import parse_reduce_op

__all__ = ["check_reduce_scatter", "checked_reduce_scatter_tensor", "reduce_scatter", "reduce_scatter_tensor"]


@overload
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor] | torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor] | torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor] | torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("output", "input_list"), "op")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor] | torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """Reduce over all ranks and leave part r of the result on rank r.

    Args:
        output: any shape; dense; overwritten with this rank's part.
        input_list: W tensors, entry r of the size of rank r's ``output`` (sizes may differ); or one tensor of W times
            the elements of ``output``. Same dtype as ``output``; only read.
        op, compression: as for ``all_reduce``.
    """
    if isinstance(input_list, torch.Tensor):
        return checked_reduce_scatter_tensor(
            "reduce_scatter", output, input_list, op, group, async_op, timeout, compression
        )
    backend = enter("reduce_scatter", group, timeout)
    if backend is None:
        return None
    check_tensor("reduce_scatter", "output", output, backend, group, written=True)
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    check_list("reduce_scatter", "input_list", input_list, W, backend, group, like=output)
    check_numel("reduce_scatter", f"input_list[{rank}]", input_list[rank], output.numel(), "the size of output")
    buffer = StagingBuffer(output)
    reduce_op = parse_reduce_op(op, "reduce_scatter")
    # This rank's own size may differ from the others'.
    size_bytes = sum(one.nbytes for one in input_list)
    chosen = selection.choose("reduce_scatter", compression, output, reduce_op, group, size_bytes)
    if chosen is not None:
        slices = [copy_if_overlapping(contiguous_elements(one), buffer.memory) for one in input_list]
        call = CompressedCall(
            "reduce_scatter", backend, group, output, reduce_op, async_op, output, chosen, buffer.copy_back
        )
        place = next((one for one in input_list if one.numel()), output)
        shape = stacked_shape([one.shape for one in input_list])
        return compressed.reduce_scatter(call, buffer.memory, slices, place, shape)
    backend = with_hierarchy("reduce_scatter_tensor", backend, group, size_bytes, output.device)
    work = reduction.reduce_scatter(backend, buffer.memory, input_list, reduce_op, group, async_op)
    return _deliver_staged(work, buffer, output, async_op)


@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[False] = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> None: ...
@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: Literal[True] = ...,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None: ...
@collective(("output", "input"), "op")
def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = "sum",
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: Timeout = None,
    compression: Compressing = None,
) -> Work | None:
    """:func:`reduce_scatter` of one tensor.

    Args:
        output: any shape, n elements; dense; overwritten with elements r*n to (r+1)*n of the result on rank r.
        input: W*n elements of the dtype of ``output``, the same shape on every rank; only read.
        op, compression: as for ``all_reduce``.
    """
    return checked_reduce_scatter_tensor(
        "reduce_scatter_tensor", output, input, op, group, async_op, timeout, compression
    )


def checked_reduce_scatter_tensor(
    call: str,
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: Group,
    async_op: bool,
    timeout: Timeout,
    compression: Compressing,
) -> Work | None:
    """Do :func:`reduce_scatter_tensor` without a fast path, for ``call``."""
    backend = enter(call, group, timeout)
    if backend is None:
        return None
    check_reduce_scatter(call, output, input, backend, group)
    W = backend.get_world_size(group)
    buffer = StagingBuffer(output)
    reduce_op = parse_reduce_op(op, call)
    source = copy_if_overlapping(contiguous_elements(input), buffer.memory)
    chosen = selection.choose(call, compression, input, reduce_op, group)
    if chosen is not None:
        slices = torch.split(source, output.numel()) if output.numel() else [source] * W
        compressing = CompressedCall(
            call, backend, group, output, reduce_op, async_op, output, chosen, buffer.copy_back
        )
        return compressed.reduce_scatter(compressing, buffer.memory, slices, input, input.shape)
    backend = with_hierarchy("reduce_scatter_tensor", backend, group, source.nbytes, input.device)
    work = reduction.reduce_scatter_tensor(backend, buffer.memory, source, reduce_op, group, async_op, call)
    return _deliver_staged(work, buffer, output, async_op)


def check_reduce_scatter(call: str, output: Any, input: Any, backend: Backend, group: Group) -> None:
    """Check the tensors of a ``reduce_scatter`` of one tensor."""
    check_tensor(call, "output", output, backend, group, written=True)
    check_tensor(call, "input", input, backend, group)
    check_dtype(call, "output", output, input)
    W = backend.get_world_size(group)
    if input.numel() % W:
        raise ArgumentError(
            f"{call}: input: got {input.numel()} elements (shape {tuple(input.shape)}), which does not divide by the "
            f"world size of {W}; pad it, or pass a list of {W} tensors of different sizes to reduce_scatter"
        )
    check_numel(call, "output", output, input.numel() // W, f"the elements of input divided by the world size of {W}")


def _deliver_staged(work: Work | None, buffer: StagingBuffer, output: torch.Tensor, async_op: bool) -> Work | None:
    if not async_op or work is None:
        run(buffer.copy_back)
        return None
    return After([work], buffer.copy_back, output)
