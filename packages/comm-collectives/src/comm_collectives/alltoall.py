"""Collectives in which every rank ends with a part: reduce_scatter and all_to_all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from comm_collectives import fast_path, reduction, traced, untraced
from comm_collectives.arguments import check_dtype, check_list, check_numel, check_tensor, enter, splits
from comm_collectives.memory import Landing, after_landing, apart, as_bytes, disjoint, flat, readable
from comm_collectives.work import After, deliver, run
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError
from comm_utils.reduce_op import ReduceOp, parse_reduce_op
from comm_utils.torch_support import flattening

__all__ = ["all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"]


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor] | torch.Tensor,
    op: Any = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Reduce over all ranks and leave part r of the result on rank r.

    Args:
        output: any shape; dense; overwritten with this rank's part.
        input_list: W tensors, entry r of the size of rank r's ``output`` (sizes may differ); or one tensor of W times
            the elements of ``output``. Same dtype as ``output``; only read.
        op: as for ``all_reduce``.
    """
    if is_dynamo_compiling():
        return untraced.reduce_scatter(output, input_list, op, group, async_op, timeout=timeout)
    if isinstance(input_list, torch.Tensor):
        return _reduce_scatter_tensor("reduce_scatter", output, input_list, op, group, async_op, timeout)
    if not async_op and timeout is None and not isinstance(op, (int, float, complex)):
        short = fast_path.from_list("reduce_scatter", op, input_list, output, group)
        if short is not None:
            with suppress(NotImplementedError):  # as in all_reduce
                short(flat(output), flattening.together(input_list, output))
                return None
    backend = enter("reduce_scatter", group, timeout)
    if backend is None:
        return None
    check_tensor("reduce_scatter", "output", output, backend, group, written=True)
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    check_list("reduce_scatter", "input_list", input_list, W, backend, group, like=output)
    check_numel("reduce_scatter", f"input_list[{rank}]", input_list[rank], output.numel(), "the size of output")
    landing = Landing(output)
    reduce_op = parse_reduce_op(op, "reduce_scatter")
    _remember_reduction(backend, "reduce_scatter", op, reduce_op, output, group)
    work = reduction.reduce_scatter(backend, landing.memory, input_list, reduce_op, group, async_op)
    return _landed(work, landing, output, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = "sum",
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """:func:`reduce_scatter` of one tensor.

    Args:
        output: any shape, n elements; dense; overwritten with elements r*n to (r+1)*n of the result on rank r.
        input: W*n elements of the dtype of ``output``, the same shape on every rank; only read.
        op: as for ``all_reduce``.
    """
    if is_dynamo_compiling():
        return traced.reduce_scatter_tensor(output, input, op, group, async_op, timeout)
    call = "reduce_scatter_tensor"
    if not async_op and timeout is None and not isinstance(op, (int, float, complex)):
        known = fast_path.between(call, op, output, input, group)
        if known is not None and input.numel() == known[1] * output.numel() and disjoint(output, input):
            with suppress(NotImplementedError):  # as in all_reduce
                known[0](output if output.dim() == 1 else flat(output), input if input.dim() == 1 else flat(input))
                return None
    return _reduce_scatter_tensor(call, output, input, op, group, async_op, timeout)


def _reduce_scatter_tensor(
    call: str,
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any,
    group: ProcessGroup | None,
    async_op: bool,
    timeout: float | timedelta | None,
) -> Work | None:
    backend = enter(call, group, timeout)
    if backend is None:
        return None
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
    landing = Landing(output)
    reduce_op = parse_reduce_op(op, call)
    _remember_reduction(backend, call, op, reduce_op, input, group)
    source = apart(readable(input), landing.memory)
    work = reduction.reduce_scatter_tensor(backend, landing.memory, source, reduce_op, group, async_op, call)
    return _landed(work, landing, output, async_op)


def _remember_reduction(
    backend: Backend, call: str, op: object, reduce_op: ReduceOp, tensor: torch.Tensor, group: ProcessGroup | None
) -> None:
    def make() -> tuple[Any, int] | None:
        short = reduction.short_reduce_scatter(backend, call, op, reduce_op, tensor, group)
        return short and (short, backend.get_world_size(group))

    fast_path.remember(backend, (call, op, tensor.dtype, tensor.device, group), make)


def _landed(work: Work | None, landing: Landing, output: torch.Tensor, async_op: bool) -> Work | None:
    if not async_op or work is None:
        run(landing.land)
        return None
    return After([work], landing.land, output)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Send part r of ``input`` to rank r, and put what rank r sent into part r of ``output``.

    Args:
        output: (sum of ``output_split_sizes``, ...); dense; overwritten.
        input: (sum of ``input_split_sizes``, ...), the dtype and trailing dimensions of ``output``; only read.
        output_split_sizes: W numbers of rows to receive from each rank; None for equal parts.
        input_split_sizes: W numbers of rows to send to each rank; None for equal parts.
    """
    if is_dynamo_compiling():
        return traced.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op, timeout)
    call = "all_to_all_single"
    if not async_op and timeout is None and output_split_sizes is None and input_split_sizes is None:
        known = fast_path.between(call, None, output, input, group)
        if known is not None and output.shape == input.shape:
            rows = input.shape[0] if input.dim() else 1
            if rows % known[1] == 0 and disjoint(output, input):
                with suppress(NotImplementedError):  # as in all_reduce
                    known[0](output, input)
                    return None
    elif not async_op and timeout is None:
        short = fast_path.exchange(output, input, output_split_sizes, input_split_sizes, group)
        if short is not None:
            with suppress(NotImplementedError):
                short(output, input, output_split_sizes, input_split_sizes)
                return None
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
    if output_split_sizes is None and input_split_sizes is None:
        fast_path.remember_moving(backend, call, None, input, group, lambda: (backend.prepare(call, group), W))
    else:
        _remember_exchange(backend, "all_to_all_v", input, group)
    row = prod(input.shape[1:])
    landing = Landing(output)
    sizes_out, sizes_in = [rows * row for rows in rows_out], [rows * row for rows in rows_in]
    source = apart(readable(input), landing.memory)
    work = _exchange(backend, landing.memory, source, sizes_out, sizes_in, group, async_op)
    return deliver([work], after_landing([landing]), output, async_op)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    timeout: float | timedelta | None = None,
) -> Work | None:
    """Send entry r of ``input_tensor_list`` to rank r, and receive its entry for this rank into entry r of the other
    list.

    Args:
        output_tensor_list: W tensors of the sizes that the other ranks send; dense; overwritten.
        input_tensor_list: W tensors of one dtype, of any sizes; only read.
    """
    if is_dynamo_compiling():
        return untraced.all_to_all(output_tensor_list, input_tensor_list, group, async_op, timeout=timeout)
    if not async_op and timeout is None:
        short = fast_path.exchange_of_lists(output_tensor_list, input_tensor_list, group)
        if short is not None:
            source = flattening.together(input_tensor_list)
            memory, finish_list = flattening.landing(output_tensor_list, source)
            sizes_out = [tensor.numel() for tensor in output_tensor_list]
            with suppress(NotImplementedError):  # as in all_reduce
                short(memory, source, sizes_out, [tensor.numel() for tensor in input_tensor_list])
                finish_list()
                return None
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
    _remember_exchange(backend, "all_to_all", like, group)
    joined = torch.cat([readable(tensor) for tensor in input_tensor_list])
    received = joined.new_empty(sum(sizes_out))

    def finish() -> None:
        for output, part in zip(output_tensor_list, torch.split(received, sizes_out), strict=True):
            output.detach().copy_(part.view(output.shape))

    work = _exchange(backend, received, joined, sizes_out, sizes_in, group, async_op)
    return deliver([work], finish, output_tensor_list, async_op)


def _remember_exchange(backend: Backend, name: str, tensor: torch.Tensor, group: ProcessGroup | None) -> None:
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    make = lambda: (backend.prepare("all_to_all_v", group), W, rank)  # noqa: E731
    fast_path.remember_moving(backend, name, None, tensor, group, make)


def _exchange(
    backend: Backend,
    received: torch.Tensor,
    sent: torch.Tensor,
    sizes_out: list[int],
    sizes_in: list[int],
    group: ProcessGroup | None,
    async_op: bool,
) -> Work | None:
    native = backend.capabilities(group, sent.device.type).dtypes
    if sent.dtype not in native:
        size = sent.element_size()
        sizes_out, sizes_in = [count * size for count in sizes_out], [count * size for count in sizes_in]
    wire_out, wire_in = as_bytes(received, native), as_bytes(sent, native)
    return backend.all_to_all_single(wire_out, wire_in, sizes_out, sizes_in, group, async_op)
