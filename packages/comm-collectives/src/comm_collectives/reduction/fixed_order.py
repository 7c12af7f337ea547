"""Reductions whose result is a function of the ranks' elements alone, over libraries that add in an order of their own.

Each rank gets one slice of every other rank's tensor, adds the slices in the order of the ranks
(:func:`comm_utils.torch_support.folding.fold`), and sends the result where it belongs: the reduce_scatter by exchange
and the all_gather of Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
International Journal of High Performance Computing Applications 19 (2005), sections 4.3 and 4.5. Small tensors are
gathered whole and added by everyone. Both ways give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from comm_collectives.buffers import Buffers
from comm_collectives.composed import ComposedCall
from comm_collectives.memory import as_bytes
from comm_collectives.reduction.exchanging import exchange_parts
from comm_collectives.reduction.order import Fold, Order
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_reduce", "reduce", "reduce_scatter"]

# Of all ranks' tensors together, up to which everyone gathers all of them: one message instead of two.
_GATHERED_BYTES = 64 << 10
# Of a tensor that is exchanged in one operation; two of them are under way at a time.
_PIECE_BYTES = 4 << 20
_DEPTH = 2


class _Piece(NamedTuple):
    """A piece that is under way, and its memory."""

    work: Work
    target: torch.Tensor
    sent: torch.Tensor
    received: torch.Tensor


def all_reduce(
    backend: Backend,
    tensor: torch.Tensor,
    elements: torch.Tensor,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    order: Order,
    call: str,
) -> Work | None:
    """Reduce ``elements``, (n,), the memory of ``tensor``, in place."""
    wire, W = _real(elements), backend.get_world_size(group)
    composed = ComposedCall(call, backend, group, tensor, op, async_op, tensor)
    if W * wire.nbytes > _GATHERED_BYTES:

        def body(inner: Backend, used: ProcessGroup | None) -> None:
            _reduce_in_pieces(inner, used, wire, op, order.fold, None)

        return composed.run(body)

    def started(inner: Backend) -> Work | None:
        parts = wire.new_empty(W, wire.numel())
        work = inner.all_gather_into_tensor(_bytes(parts), _bytes(wire), group, async_op)
        return deliver([work], lambda: order.fold(parts, op, wire), tensor, async_op)

    return composed.observed(started)


def reduce(
    backend: Backend,
    tensor: torch.Tensor,
    elements: torch.Tensor,
    group_dst: int,
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    order: Order,
    finish: Callable[[], None] | None,
) -> Work | None:
    """Reduce ``elements``, (n,), of ``tensor`` in place on ``group_dst``, and then ``finish`` there."""
    wire, W = _real(elements), backend.get_world_size(group)
    is_dst, root = backend.get_rank(group) == group_dst, (None, group_dst)
    composed = ComposedCall("reduce", backend, group, tensor, op, async_op, tensor, root=root)
    if W * wire.nbytes > _GATHERED_BYTES:

        def body(inner: Backend, used: ProcessGroup | None) -> None:
            _reduce_in_pieces(inner, used, wire, op, order.fold, group_dst)
            if finish is not None:
                finish()

        return composed.run(body)

    def started(inner: Backend) -> Work | None:
        if not is_dst:
            work = inner.gather(_bytes(wire), None, None, group, async_op, group_dst)
            return deliver([work], None, tensor, async_op)
        parts = wire.new_empty(W, wire.numel())
        work = inner.gather(_bytes(wire), [_bytes(part) for part in parts], None, group, async_op, group_dst)

        def add() -> None:
            order.fold(parts, op, wire)
            if finish is not None:
                finish()

        return deliver([work], add, tensor, async_op)

    return composed.observed(started)


def reduce_scatter(
    backend: Backend,
    output: torch.Tensor,
    input: torch.Tensor,
    sizes: Sequence[int],
    op: ReduceOp,
    group: ProcessGroup | None,
    async_op: bool,
    order: Order,
    call: str,
) -> Work | None:
    """Reduce part r, ``sizes[r]`` elements, of every rank's ``input``, (n,), into ``output`` of rank r."""
    target, W = _real(output), backend.get_world_size(group)
    slices = [_real(one) for one in torch.split(input, list(sizes))]
    counted = input[: input.numel() // W]  # the part of a rank, of the same size on every rank
    composed = ComposedCall(call, backend, group, counted, op, async_op, output)
    if _real(input).nbytes > _PIECE_BYTES:

        def body(inner: Backend, used: ProcessGroup | None) -> None:
            _reduce_slices_in_pieces(inner, used, target, slices, op, order.fold)

        return composed.run(body)

    def started(inner: Backend) -> Work | None:
        parts = target.new_empty(W, target.numel())
        nbytes = [one.nbytes for one in slices]
        work = exchange_parts(inner, _bytes(parts), _bytes(_real(input)), nbytes, group, async_op)
        return deliver([work], lambda: order.fold(parts, op, target), output, async_op)

    return composed.observed(started)


def _reduce_in_pieces(
    backend: Backend, group: ProcessGroup | None, elements: torch.Tensor, op: ReduceOp, fold: Fold, root: int | None
) -> None:
    """Reduce ``elements``, (n,), in place on ``root``, or on every rank where that is None."""
    W, rank = backend.get_world_size(group), backend.get_rank(group)
    most = max(1, _PIECE_BYTES // (W * elements.element_size())) * W

    with Buffers(elements.device) as buffers:

        def send(target: torch.Tensor) -> _Piece:
            count = -(-target.numel() // W) * W
            sent = target
            if count != target.numel():
                sent = _take(buffers, count, elements.dtype)
                sent[: target.numel()].copy_(target)
                sent[target.numel() :].zero_()
            received = _take(buffers, count, elements.dtype)
            work = exchange_parts(backend, _bytes(received), _bytes(sent), [sent.nbytes // W] * W, group, True)
            assert work is not None
            return _Piece(work, target, sent, received)

        def add(one: _Piece) -> _Piece:
            one.work.wait()
            own = _take(buffers, one.received.numel() // W, elements.dtype)
            fold(one.received.view(W, -1), op, own)
            whole = one.sent
            buffers.give_back(one.received.view(torch.uint8))
            if root is None:
                work = backend.all_gather_into_tensor(_bytes(whole), _bytes(own), group, True)
            else:
                targets = list(_bytes(whole).chunk(W)) if rank == root else None
                work = backend.gather(_bytes(own), targets, None, group, True, root)
            assert work is not None
            return _Piece(work, one.target, whole, own)

        def finish(one: _Piece) -> None:
            one.work.wait()
            buffers.give_back(one.received.view(torch.uint8))
            if one.sent is not one.target:
                if root in (None, rank):
                    one.target.copy_(one.sent[: one.target.numel()])
                buffers.give_back(one.sent.view(torch.uint8))

        sending: deque[_Piece] = deque()
        gathering: deque[_Piece] = deque()
        pieces = torch.split(elements, most)
        for turn in range(len(pieces) + 2 * _DEPTH):
            if turn < len(pieces):
                sending.append(send(pieces[turn]))
            if sending and turn >= _DEPTH:
                gathering.append(add(sending.popleft()))
            if gathering and turn >= 2 * _DEPTH:
                finish(gathering.popleft())


def _reduce_slices_in_pieces(
    backend: Backend,
    group: ProcessGroup | None,
    output: torch.Tensor,
    slices: Sequence[torch.Tensor],
    op: ReduceOp,
    fold: Fold,
) -> None:
    """Reduce entry r of every rank's ``slices`` into ``output``, (n,), of rank r."""
    W, dtype = backend.get_world_size(group), output.dtype
    most = max(1, _PIECE_BYTES // (W * output.element_size()))

    with Buffers(output.device) as buffers:

        def send(begin: int) -> _Piece:
            target, parts = output[begin : begin + most], [one[begin : begin + most] for one in slices]
            sent = _take(buffers, sum(part.numel() for part in parts), dtype)
            for place, part in zip(torch.split(sent, [part.numel() for part in parts]), parts, strict=True):
                place.copy_(part)
            received = _take(buffers, W * target.numel(), dtype)
            nbytes = [part.nbytes for part in parts]
            work = exchange_parts(backend, _bytes(received), _bytes(sent), nbytes, group, True)
            assert work is not None
            return _Piece(work, target, sent, received)

        def add(one: _Piece) -> None:
            one.work.wait()
            fold(one.received.view(W, one.target.numel()), op, one.target)
            buffers.give_back(one.received.view(torch.uint8), one.sent.view(torch.uint8))

        sending: deque[_Piece] = deque()
        for begin in range(0, max(one.numel() for one in slices), most):
            sending.append(send(begin))
            if len(sending) > _DEPTH:
                add(sending.popleft())
        while sending:
            add(sending.popleft())


def _take(buffers: Buffers, count: int, dtype: torch.dtype) -> torch.Tensor:
    return buffers.take(count * dtype.itemsize).view(dtype)


def _real(elements: torch.Tensor) -> torch.Tensor:
    """Return ``elements``, (n,), or of complex ones the real and imaginary parts, (2n,), in the same memory."""
    return torch.view_as_real(elements).view(-1) if elements.is_complex() else elements


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return as_bytes(tensor, frozenset())
