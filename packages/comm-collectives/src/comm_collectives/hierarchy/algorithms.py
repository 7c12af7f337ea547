"""The steps of hierarchical collectives, for one-dimensional contiguous tensors.

Every rank of a host exchanges an equal share with the ranks of the same position on the other hosts: so all of them
drive the link, and each element crosses it as often as between as many ranks as there are hosts. This is the scheme of
Cho et al., "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", MLSys 2019, for
two levels. Tensors travel in pieces: the link carries pieces while others are exchanged within the hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from comm_collectives import reduction
from comm_collectives.buffers import Buffers
from comm_collectives.hierarchy.between import Between, gather
from comm_collectives.hierarchy.plan import Plan
from comm_collectives.memory import as_bytes
from comm_collectives.pieces import pieces
from comm_utils.backend import Backend, Work
from comm_utils.reduce_op import ReduceOp

__all__ = ["all_gather", "all_reduce", "broadcast", "reduce_scatter"]

# Bytes of a piece on one host: long enough to hide what starting a step costs, short enough to overlap.
_PIECE_BYTES = 4 << 20
# Of the longest pieces, the shortest.
_SHORTEST_PART = 4
# Pieces that the link carries at the same time.
_DEPTH = 2


def _pieces(count: int, itemsize: int, unit: int, most_bytes: int | None = None) -> Iterator[slice]:
    """Cut ``count`` elements into pieces of a multiple of ``unit``, but for the last one.

    Args:
        most_bytes: of pieces that are all of this size, but for the last one.
    """
    longest = max(1, (most_bytes or _PIECE_BYTES) // (itemsize * unit)) * unit
    ramps = most_bytes is None and count > longest
    shortest = max(1, longest // (_SHORTEST_PART * unit)) * unit if ramps else longest
    return pieces(count, unit, longest, shortest, first=shortest)


class _UnderWay:
    """The pieces that the link carries, and what is left to do with each."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[Work | None, Callable[[], None]]] = deque()

    def add(self, work: Work | None, finish: Callable[[], None]) -> None:
        self._pieces.append((work, finish))
        if len(self._pieces) > _DEPTH:
            self._finish_one()

    def finish(self) -> None:
        while self._pieces:
            self._finish_one()

    def _finish_one(self) -> None:
        work, finish = self._pieces.popleft()
        if work is not None:
            work.wait()
        finish()


class _Memory:
    """Memory of one dtype that is used again."""

    def __init__(self, buffers: Buffers, like: torch.Tensor) -> None:
        self._buffers, self._dtype, self._itemsize = buffers, like.dtype, like.element_size()

    def take(self, count: int) -> torch.Tensor:
        return self._buffers.take(count * self._itemsize).view(self._dtype)

    def give_back(self, *some: torch.Tensor) -> None:
        for one in some:
            self._buffers.give_back(one.view(torch.uint8))


def all_reduce(backend: Backend, plan: Plan, elements: torch.Tensor, op: ReduceOp, between: Between) -> None:
    """Overwrite ``elements``, (n,), with their reduction over all ranks."""
    size = plan.layout.ranks_per_host
    under_way = _UnderWay()
    with Buffers(elements.device) as buffers:
        memory = _Memory(buffers, elements)

        def finish(piece: torch.Tensor, whole: torch.Tensor, share: torch.Tensor) -> None:
            gather(backend, plan, whole, share)
            if whole is not piece:
                piece.copy_(whole[: piece.numel()])
                memory.give_back(whole)
            memory.give_back(share)

        for place in _pieces(elements.numel(), elements.element_size(), size, between.piece_bytes):
            piece = elements[place]
            whole = piece if piece.numel() % size == 0 else _padded(piece, size, memory)
            share = memory.take(whole.numel() // size)
            reduction.reduce_scatter_tensor(backend, share, whole, op, plan.within, False)
            work = between.all_reduce(share, op)
            under_way.add(work, partial(finish, piece, whole, share))
        under_way.finish()


def reduce_scatter(
    backend: Backend, plan: Plan, output: torch.Tensor, rows: Sequence[torch.Tensor], op: ReduceOp, between: Between
) -> None:
    """Overwrite ``output``, (n,), with the reduction of this rank's entry of every rank's ``rows``, (n,) each."""
    hosts, size = plan.layout.hosts, plan.layout.ranks_per_host
    under_way = _UnderWay()
    with Buffers(output.device) as buffers:
        memory = _Memory(buffers, output)
        for place in _pieces(output.numel(), output.element_size() * len(rows), 1, between.piece_bytes):
            count = place.stop - place.start
            # The part of each position on a host, for the ranks of that position on every host.
            ordered = memory.take(len(rows) * count)
            parts = iter(ordered.view(-1, count))
            for local in range(size):
                for members in hosts:
                    next(parts).copy_(rows[members[local]][place])
            share = memory.take(len(hosts) * count)
            reduction.reduce_scatter_tensor(backend, share, ordered, op, plan.within, False)
            memory.give_back(ordered)
            under_way.add(between.reduce_scatter(output[place], share, op), partial(memory.give_back, share))
        under_way.finish()


def all_gather(
    backend: Backend, plan: Plan, rows: Sequence[torch.Tensor], input: torch.Tensor, between: Between
) -> None:
    """Overwrite every rank's entry of ``rows``, (n,) each, with its ``input``, (n,)."""
    hosts, size = plan.layout.hosts, plan.layout.ranks_per_host
    under_way = _UnderWay()
    with Buffers(input.device) as buffers:
        memory = _Memory(buffers, input)

        def finish(place: slice, share: torch.Tensor) -> None:
            count = place.stop - place.start
            ordered = memory.take(len(rows) * count)
            gather(backend, plan, ordered, share)
            parts = iter(ordered.view(-1, count))
            for local in range(size):
                for members in hosts:
                    rows[members[local]][place].copy_(next(parts))
            memory.give_back(ordered, share)

        for place in _pieces(input.numel(), input.element_size() * len(rows), 1, between.piece_bytes):
            share = memory.take(len(hosts) * (place.stop - place.start))
            under_way.add(between.all_gather(share, input[place]), partial(finish, place, share))
        under_way.finish()


def broadcast(backend: Backend, plan: Plan, elements: torch.Tensor, src: int) -> None:
    """Overwrite ``elements``, (n,), with those of the group rank ``src``."""
    size = plan.layout.ranks_per_host
    root_host, root_local = plan.layout.position(src)
    native = backend.capabilities(plan.within, elements.device.type).dtypes
    native &= backend.capabilities(plan.between, elements.device.type).dtypes
    under_way = _UnderWay()
    with Buffers(elements.device) as buffers:
        memory = _Memory(buffers, elements)

        def finish(piece: torch.Tensor, whole: torch.Tensor, share: torch.Tensor) -> None:
            if plan.layout.host != root_host:
                gather(backend, plan, whole, share)
                if whole is not piece:
                    piece.copy_(whole[: piece.numel()])
            if whole is not piece:
                memory.give_back(whole)

        for place in _pieces(elements.numel(), elements.element_size(), size):
            piece = elements[place]
            if plan.layout.host == root_host:
                backend.broadcast(as_bytes(piece, native), None, plan.within, False, root_local)
            whole = piece if piece.numel() % size == 0 else _padded(piece, size, memory)
            count = whole.numel() // size
            share = whole[plan.layout.local * count : (plan.layout.local + 1) * count]
            work = backend.broadcast(as_bytes(share, native), None, plan.between, True, root_host)
            under_way.add(work, partial(finish, piece, whole, share))
        under_way.finish()


def _padded(piece: torch.Tensor, unit: int, memory: _Memory) -> torch.Tensor:
    """Return a copy of ``piece`` with zeros after it, up to a multiple of ``unit``."""
    whole = memory.take(-(-piece.numel() // unit) * unit)
    whole[: piece.numel()].copy_(piece)
    whole[piece.numel() :].zero_()
    return whole
