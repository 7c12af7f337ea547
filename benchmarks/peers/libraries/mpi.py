"""An MPI through mpi4py: upper-case methods on the tensors' memory, with specifications made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from peers.data import Unsupported

__all__ = ["Library"]

TYPES = {"float32": "FLOAT", "bfloat16": "BFLOAT16_T", "float16": "FLOAT16_T"}
# Elements of a first call on a type that an MPI may not know.
PROBED = 4096


class Library:
    def __init__(self, rank: int, ranks: int, meet: Callable[[], None]) -> None:
        self.comm: Any = MPI.COMM_WORLD
        if (got := (self.comm.Get_rank(), self.comm.Get_size())) != (rank, ranks):
            raise SystemExit(f"got rank and world size {got} of MPI, expected {(rank, ranks)}")
        self.facts = {"MPI": MPI.Get_library_version().splitlines()[0].strip("\0 ,")}
        self.requests: list[Any] = []
        self.refusals: dict[str, str] = {}

    def empty(self, elements: int, dtype: Any, way: str) -> Any:
        return None

    def call(self, task: Any, source: Any, target: Any) -> tuple[Callable[..., object], tuple[Any, ...]]:
        if task.dtype != "float32":
            if task.dtype not in self.refusals:
                self.refusals[task.dtype] = self.refusal(task.dtype)
            if self.refusals[task.dtype]:
                raise Unsupported(self.refusals[task.dtype])
        comm, count = self.comm, source.numel() // self.comm.Get_size()
        sent, received = specification(source, task.dtype), specification(target, task.dtype)
        if task.operation == "all_reduce":
            # A memory, a count and a type, in a tuple, is what mpi4py unpacks fastest.
            arguments = (MPI.IN_PLACE, sent, MPI.SUM)
            if task.way == "persistent":
                return self.persistent(arguments), ()
            return comm.Allreduce, arguments
        if task.operation == "broadcast":
            return comm.Bcast, (sent, 0)
        if task.operation == "all_gather_into_tensor":
            return comm.Allgather, (sent, (received[0], sent[1], received[2]))
        if task.operation == "reduce_scatter_tensor":
            return comm.Reduce_scatter_block, ((sent[0], count, sent[2]), received, MPI.SUM)
        return comm.Alltoall, ((sent[0], count, sent[2]), (received[0], count, received[2]))

    def persistent(self, arguments: tuple[Any, ...]) -> Callable[[], None]:
        request = self.comm.Allreduce_init(*arguments)
        self.requests.append(request)
        start, wait = request.Start, request.Wait

        def call() -> None:
            start()
            wait()

        return call

    def refusal(self, dtype: str) -> str:
        """Why this MPI cannot sum ``dtype``, or nothing; MPI has no such types in its standard."""
        # One that is named but null ends MPICH's processes.
        if getattr(MPI, TYPES[dtype], MPI.DATATYPE_NULL) == MPI.DATATYPE_NULL:
            return f"this MPI has no {dtype}"
        rank, ranks = self.comm.Get_rank(), self.comm.Get_size()
        values = [torch.rand(PROBED, generator=torch.Generator().manual_seed(one)) for one in range(ranks)]
        inputs = [one.to(getattr(torch, dtype)) for one in values]
        expected = torch.stack([one.double() for one in inputs]).sum(0)
        tensor = inputs[rank].clone()
        try:
            self.comm.Allreduce(MPI.IN_PLACE, specification(tensor, dtype), MPI.SUM)
        except MPI.Exception as error:
            return f"this MPI does not sum {dtype} ({error.Get_error_string().splitlines()[0]})"
        # A unit in the last place for each addition.
        tolerance = ranks * torch.finfo(tensor.dtype).eps
        wrong = bool(((tensor.double() - expected).abs() > tolerance * expected).any())
        return f"this MPI sums {dtype} wrongly" if wrong else ""

    def close(self) -> None:
        for request in self.requests:
            request.Free()
        MPI.Finalize()


def specification(tensor: torch.Tensor, dtype: str) -> tuple[Any, int, Any]:
    memory = MPI.memory.fromaddress(tensor.data_ptr(), tensor.nbytes)
    return memory, tensor.numel(), getattr(MPI, TYPES[dtype])
