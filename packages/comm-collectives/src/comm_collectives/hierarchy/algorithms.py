"""The steps of hierarchical collectives, for one-dimensional contiguous tensors.

Every rank of a host exchanges an equal share with the ranks of the same position on the other hosts: so all of them
drive the link, and each element crosses it as often as between as many ranks as there are hosts. This is the scheme of
Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", MLSys 2019, for
two levels. Tensors travel in pieces: the link carries pieces while others are exchanged within the hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from comm_collectives import reduction
from comm_collectives.buffers import Buffers
from comm_collectives.hierarchy.between import Between, gather
from comm_collectives.hierarchy.layout import Layout
from comm_collectives.hierarchy.plan import Plan
from comm_collectives.memory import as_bytes
from comm_collectives.pieces import pieces
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_gather", "all_reduce", "all_reduce_pieces", "broadcast", "reduce_scatter", "reduce_scatter_pieces"]

# Bytes of a piece on one host: long enough to hide what starting a step costs, short enough to overlap.
_PIECE_BYTES = 4 << 20
# Of the longest pieces, the shortest.
_SHORTEST_PART = 4
# Pieces that the link carries at the same time.
_DEPTH = 2


def all_reduce_pieces(layout: Layout, elements: torch.Tensor, most_bytes: int | None) -> Iterator[slice]:
    """Return the pieces in which :func:`all_reduce` exchanges ``elements``."""
    return _pieces(elements.numel(), elements.element_size(), layout.ranks_per_host, most_bytes)


def reduce_scatter_pieces(layout: Layout, output: torch.Tensor, most_bytes: int | None) -> Iterator[slice]:
    """Return the pieces of ``output`` in which :func:`reduce_scatter` exchanges rows."""
    ranks = len(layout.hosts) * layout.ranks_per_host
    return _pieces(output.numel(), output.element_size() * ranks, 1, most_bytes)


def _pieces(count: int, itemsize: int, unit: int, most_bytes: int | None = None) -> Iterator[slice]:
    """Cut ``count`` elements into pieces of a multiple of ``unit``, but for the last one.

    Args:
        most_bytes: of pieces that are all of this size, but for the last one.
    """
    longest = max(1, (most_bytes or _PIECE_BYTES) // (itemsize * unit)) * unit
    ramps = most_bytes is None and count > longest
    shortest = max(1, longest // (_SHORTEST_PART * unit)) * unit if ramps else longest
    return pieces(count, unit, longest, shortest, first=shortest)


class _Piece(NamedTuple):
    """A piece, and the steps that are left of it.

    Attributes:
        entering: the step within the host before the exchange, where that is under way.
        cross: exchange it between hosts; returns None once that is complete.
        leave: what is done within the host afterwards; with True, only start that.
        finish: what is done once all steps are complete.
    """

    entering: Work | None
    cross: Callable[[], Work | None]
    leave: Callable[[bool], Work | None]
    finish: Callable[[], None]


def _run(places: Iterable[slice], begin: Callable[[slice, bool], _Piece], between: Between | None) -> None:
    """Do the steps of all pieces, so that the link carries one while others are exchanged within the hosts.

    Args:
        begin: do the step before the exchange; with True, only start it.
        between: does the exchange; None for one that is started.
    """
    under_way: deque[tuple[_Piece, Work | None]] = deque()

    def complete_one(leave: bool) -> None:
        piece, work = under_way.popleft()
        _wait(work)
        if leave:
            _wait(piece.leave(False))
        piece.finish()

    if between is None or not between.waits:
        for place in places:
            piece = begin(place, False)
            under_way.append((piece, piece.cross()))
            if len(under_way) > _DEPTH:
                complete_one(leave=True)
        while under_way:
            complete_one(leave=True)
        return
    # This thread exchanges; the steps within the hosts go on beside that.
    begun = (begin(place, True) for place in places)
    upcoming = next(begun, None)
    while upcoming is not None:
        piece = upcoming
        _wait(piece.entering)
        upcoming = next(begun, None)
        _wait(piece.cross())
        under_way.append((piece, piece.leave(True)))
        if len(under_way) > _DEPTH:
            complete_one(leave=False)
    while under_way:
        complete_one(leave=False)


def _wait(work: Work | None) -> None:
    if work is not None:
        work.wait()


class _Memory:
    """Memory of one dtype that is used again."""

    def __init__(self, buffers: Buffers, dtype: torch.dtype) -> None:
        self._buffers, self.dtype = buffers, dtype

    def take(self, count: int) -> torch.Tensor:
        return self._buffers.take(count * self.dtype.itemsize).view(self.dtype)

    def give_back(self, *some: torch.Tensor) -> None:
        for one in some:
            self._buffers.give_back(one.view(torch.uint8))


def all_reduce(
    backend: Backend,
    plan: Plan,
    elements: torch.Tensor,
    op: ReduceOp,
    between: Between,
    values: torch.Tensor | None = None,
) -> None:
    """Overwrite ``elements``, (n,), with the reduction of all ranks' ``values``, (n,); None stands for ``elements``."""
    size = plan.layout.ranks_per_host
    with Buffers(elements.device) as buffers:
        memory = _Memory(buffers, between.sum_dtype or elements.dtype)

        def begin(place: slice, async_op: bool) -> _Piece:
            piece = elements[place]
            fits = values is None and piece.numel() % size == 0 and piece.dtype == memory.dtype
            whole = piece if fits else _padded(piece if values is None else values[place], size, memory)
            share = memory.take(whole.numel() // size)
            entering = reduction.reduce_scatter_tensor(backend, share, whole, op, plan.within, async_op)
            leave = partial(gather, backend, plan.within, whole, share)
            return _Piece(entering, partial(between.all_reduce, share, op), leave, partial(finish, piece, whole, share))

        def finish(piece: torch.Tensor, whole: torch.Tensor, share: torch.Tensor) -> None:
            if whole is not piece:
                piece.copy_(whole[: piece.numel()])
                memory.give_back(whole)
            memory.give_back(share)

        _run(all_reduce_pieces(plan.layout, elements, between.piece_bytes), begin, between)


def reduce_scatter(
    backend: Backend, plan: Plan, output: torch.Tensor, rows: Sequence[torch.Tensor], op: ReduceOp, between: Between
) -> None:
    """Overwrite ``output``, (n,), with the reduction of this rank's entry of every rank's ``rows``, (n,) each."""
    hosts, size = plan.layout.hosts, plan.layout.ranks_per_host
    with Buffers(output.device) as buffers:
        memory = _Memory(buffers, between.sum_dtype or output.dtype)

        def begin(place: slice, async_op: bool) -> _Piece:
            count = place.stop - place.start
            # The part of each position on a host, for the ranks of that position on every host.
            ordered = memory.take(len(rows) * count)
            parts = iter(ordered.view(-1, count))
            for local in range(size):
                for members in hosts:
                    next(parts).copy_(rows[members[local]][place])
            share = memory.take(len(hosts) * count)
            entering = reduction.reduce_scatter_tensor(backend, share, ordered, op, plan.within, async_op)
            cross = partial(between.reduce_scatter, output[place], share, op)
            return _Piece(entering, cross, _nothing, partial(memory.give_back, share, ordered))

        _run(reduce_scatter_pieces(plan.layout, output, between.piece_bytes), begin, between)


def _nothing(async_op: bool) -> None:
    """Stand for the step after an exchange that has none."""


def all_gather(
    backend: Backend, plan: Plan, rows: Sequence[torch.Tensor], input: torch.Tensor, between: Between
) -> None:
    """Overwrite every rank's entry of ``rows``, (n,) each, with its ``input``, (n,)."""
    hosts, size = plan.layout.hosts, plan.layout.ranks_per_host
    with Buffers(input.device) as buffers:
        memory = _Memory(buffers, input.dtype)

        def begin(place: slice, async_op: bool) -> _Piece:
            count = place.stop - place.start
            share, ordered = memory.take(len(hosts) * count), memory.take(len(rows) * count)
            leave = partial(gather, backend, plan.within, ordered, share)
            return _Piece(
                None, partial(between.all_gather, share, input[place]), leave, partial(finish, place, share, ordered)
            )

        def finish(place: slice, share: torch.Tensor, ordered: torch.Tensor) -> None:
            parts = iter(ordered.view(-1, place.stop - place.start))
            for local in range(size):
                for members in hosts:
                    rows[members[local]][place].copy_(next(parts))
            memory.give_back(share, ordered)

        _run(_pieces(input.numel(), input.element_size() * len(rows), 1, between.piece_bytes), begin, between)


def broadcast(backend: Backend, plan: Plan, elements: torch.Tensor, src: int) -> None:
    """Overwrite ``elements``, (n,), with those of the group rank ``src``."""
    size = plan.layout.ranks_per_host
    root_host, root_local = plan.layout.position(src)
    native = backend.capabilities(plan.within, elements.device.type).dtypes
    native &= backend.capabilities(plan.between, elements.device.type).dtypes
    is_at_root = plan.layout.host == root_host
    with Buffers(elements.device) as buffers:
        memory = _Memory(buffers, elements.dtype)

        def begin(place: slice, async_op: bool) -> _Piece:
            piece = elements[place]
            if is_at_root:
                backend.broadcast(as_bytes(piece, native), None, plan.within, False, root_local)
            whole = piece if piece.numel() % size == 0 else _padded(piece, size, memory)
            count = whole.numel() // size
            share = whole[plan.layout.local * count : (plan.layout.local + 1) * count]
            cross = partial(backend.broadcast, as_bytes(share, native), None, plan.between, True, root_host)
            leave = _nothing if is_at_root else partial(gather, backend, plan.within, whole, share)
            return _Piece(None, cross, leave, partial(finish, piece, whole))

        def finish(piece: torch.Tensor, whole: torch.Tensor) -> None:
            if whole is piece:
                return
            if not is_at_root:
                piece.copy_(whole[: piece.numel()])
            memory.give_back(whole)

        _run(_pieces(elements.numel(), elements.element_size(), size), begin, None)


def _padded(piece: torch.Tensor, unit: int, memory: _Memory) -> torch.Tensor:
    """Return a copy of ``piece`` in the dtype of ``memory``, with zeros after it, up to a multiple of ``unit``."""
    whole = memory.take(-(-piece.numel() // unit) * unit)
    whole[: piece.numel()].copy_(piece)
    whole[piece.numel() :].zero_()
    return whole
