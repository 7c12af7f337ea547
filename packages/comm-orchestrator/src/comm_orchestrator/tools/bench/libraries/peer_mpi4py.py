"""An MPI through mpi4py: the upper-case methods, on the memory of CPU tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from comm_orchestrator.tools.bench.libraries.contract import Group, UnsupportedError
from comm_orchestrator.tools.bench.operations import IN_PLACE
from comm_orchestrator.tools.bench.plan import Row
from comm_utils.errors import ArgumentError

__all__ = ["open_mpi4py"]

# What MPI's standard can reduce. Everything is moved as bytes.
_TYPES = {
    **{f"int{bits}": f"INT{bits}_T" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}_T" for bits in (8, 16, 32, 64)},
    "float32": "FLOAT",
    "float64": "DOUBLE",
}
_OPS = {"sum": "SUM", "product": "PROD", "min": "MIN", "max": "MAX"}


def open_mpi4py(backend: str, group: Group) -> _Mpi4py:
    """MPI's ranks have to be ours.

    Raises:
        ArgumentError: they are not.
    """
    mpi: Any = importlib.import_module("mpi4py.MPI")
    world = mpi.COMM_WORLD
    expected = (group.members[group.rank], sum(len(members) for members in group.all_members))
    if (got := (world.Get_rank(), world.Get_size())) != expected:
        raise ArgumentError(
            f"--peers: mpi4py: got rank {got[0]} of {got[1]} from MPI, expected rank {expected[0]} of {expected[1]}; "
            "start all ranks with the mpirun of the MPI that mpi4py uses"
        )
    return _Mpi4py(mpi, world.Split(group.all_members.index(group.members), group.rank), group)


class _Mpi4py:
    name, device, compression = "mpi4py", torch.device("cpu"), None

    def __init__(self, mpi: Any, comm: Any, group: Group) -> None:
        self._mpi, self._comm, self._group = mpi, comm, group
        self.backend = mpi.get_vendor()[0].lower().replace(" ", "")

    def call(
        self, row: Row, way: str, source: torch.Tensor, target: torch.Tensor
    ) -> tuple[Callable[..., object], Sequence[object]]:
        reduces = bool(row.op)
        if reduces and row.op not in _OPS:
            raise UnsupportedError(f"MPI has no reduction {row.op}")
        if reduces and row.dtype not in _TYPES:
            raise UnsupportedError(f"MPI's standard reduces no {row.dtype}")
        kind = getattr(self._mpi, _TYPES[row.dtype]) if reduces else self._mpi.BYTE
        scale = 1 if reduces else source.element_size()
        count = row.count * scale

        def part(tensor: torch.Tensor, number: int = 0) -> Any:
            return (self._memory(tensor), number or tensor.numel() * scale, kind)

        make = getattr(self, f"_{row.operation}", None)
        if make is None:
            raise UnsupportedError(f"MPI has no {row.operation}")
        made: tuple[Callable[..., object], Sequence[object]] = make(row, way == IN_PLACE, part, count, source, target)
        return made

    def close(self) -> None:
        self._comm.Free()

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self._mpi.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)

    def _op(self, row: Row) -> Any:
        return getattr(self._mpi, _OPS[row.op])

    def _all_reduce(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        return self._comm.Allreduce, (self._mpi.IN_PLACE, part(source), self._op(row))

    def _reduce(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        if self._group.rank == row.root:
            return self._comm.Reduce, (self._mpi.IN_PLACE, part(source), self._op(row), row.root)
        return self._comm.Reduce, (part(source), None, self._op(row), row.root)

    def _broadcast(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        return self._comm.Bcast, (part(source), row.root)

    def _all_gather_into_tensor(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        own = self._mpi.IN_PLACE if in_place else part(source)
        return self._comm.Allgather, (own, part(target, count))

    def _reduce_scatter_tensor(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        if in_place:
            raise UnsupportedError("MPI leaves a rank's part at the beginning of the input, not at its own place in it")
        return self._comm.Reduce_scatter_block, (part(source, count), part(target), self._op(row))

    def _all_to_all_single(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        return self._comm.Alltoall, (part(source, count), part(target, count))

    def _gather(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        at_root = self._group.rank == row.root
        own = self._mpi.IN_PLACE if in_place and at_root else part(source)
        return self._comm.Gather, (own, part(target, count) if at_root else None, row.root)

    def _scatter(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        at_root = self._group.rank == row.root
        own = self._mpi.IN_PLACE if in_place and at_root else part(target)
        return self._comm.Scatter, (part(source, count) if at_root else None, own, row.root)

    def _barrier(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        return self._comm.Barrier, ()

    def _send(self, row: Row, in_place: bool, part: Any, count: int, source: Any, target: Any) -> Any:
        last = len(self._group.members) - 1
        send, receive, sent, received = self._comm.Send, self._comm.Recv, part(source), part(target)

        def ping() -> None:
            send(sent, last)
            receive(received, last)

        def pong() -> None:
            receive(received, 0)
            send(received, 0)

        return {0: ping, last: pong}.get(self._group.rank, partial(int)), ()
