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
from comm_collectives.reduction.order import FoldParts
from comm_collectives.work import deliver
from comm_utils.backend import Backend, Work

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


def all_reduce(call: ComposedCall, elements: torch.Tensor, fold: FoldParts) -> Work | None:
    """Reduce ``elements``, (n,), the memory of the tensor of ``call``, in place."""
    wire, W = _real(elements), call.backend.get_world_size(call.group)
    if W * wire.nbytes > _GATHERED_BYTES:
        return call.run(lambda inner, used: _reduce_in_pieces(inner, used, wire, fold, None))

    def started(inner: Backend) -> Work | None:
        parts = wire.new_empty(W, wire.numel())
        work = inner.all_gather_into_tensor(_bytes(parts), _bytes(wire), call.group, call.async_op)
        return deliver([work], lambda: fold(parts, wire), call.result, call.async_op)

    return call.observed(started)


def reduce(
    call: ComposedCall, elements: torch.Tensor, fold: FoldParts, finish: Callable[[], None] | None
) -> Work | None:
    """Reduce ``elements``, (n,), of the tensor of ``call`` in place on its root, and then ``finish`` there."""
    group, async_op, (_, root) = call.group, call.async_op, call.root
    wire, W = _real(elements), call.backend.get_world_size(group)
    if W * wire.nbytes > _GATHERED_BYTES:

        def body(inner: Backend, used: ProcessGroup | None) -> None:
            _reduce_in_pieces(inner, used, wire, fold, root)
            if finish is not None:
                finish()

        return call.run(body)

    def started(inner: Backend) -> Work | None:
        if inner.get_rank(group) != root:
            work = inner.gather(_bytes(wire), None, None, group, async_op, root)
            return deliver([work], None, call.result, async_op)
        parts = wire.new_empty(W, wire.numel())
        work = inner.gather(_bytes(wire), [_bytes(part) for part in parts], None, group, async_op, root)

        def add() -> None:
            fold(parts, wire)
            if finish is not None:
                finish()

        return deliver([work], add, call.result, async_op)

    return call.observed(started)


def reduce_scatter(call: ComposedCall, input: torch.Tensor, sizes: Sequence[int], fold: FoldParts) -> Work | None:
    """Reduce part r, ``sizes[r]`` elements, of every rank's ``input``, (n,), into the result of ``call`` on rank r."""
    target, W = _real(call.result), call.backend.get_world_size(call.group)
    slices = [_real(one) for one in torch.split(input, list(sizes))]
    if _real(input).nbytes > _PIECE_BYTES:
        return call.run(lambda inner, used: _reduce_slices_in_pieces(inner, used, target, slices, fold))

    def started(inner: Backend) -> Work | None:
        parts = target.new_empty(W, target.numel())
        nbytes = [one.nbytes for one in slices]
        work = exchange_parts(inner, _bytes(parts), _bytes(_real(input)), nbytes, call.group, call.async_op)
        return deliver([work], lambda: fold(parts, target), call.result, call.async_op)

    return call.observed(started)


def _reduce_in_pieces(
    backend: Backend, group: ProcessGroup | None, elements: torch.Tensor, fold: FoldParts, root: int | None
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
            fold(one.received.view(W, -1), own)
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
    fold: FoldParts,
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
            fold(one.received.view(W, one.target.numel()), one.target)
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
