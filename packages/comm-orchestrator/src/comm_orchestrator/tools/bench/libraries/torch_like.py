"""Measure libraries with the functions of ``torch.distributed``: ours, torch and DeepSpeed."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as c10d

from comm_orchestrator import facade
from comm_orchestrator.facade import Compression
from comm_orchestrator.tools.bench.libraries.contract import Group, UnsupportedError
from comm_orchestrator.tools.bench.plan import Row
from comm_orchestrator.tools.devices import device_of
from comm_utils import operations
from comm_utils.operations import Argument, OperationSpec, Role

__all__ = ["TorchLike", "backend_of", "make_group", "op_of", "open_deepspeed", "open_ours", "open_torch"]


class TorchLike:
    """Functions of ``module``.

    Args:
        handle: the group to pass, None for the world.
        op_of: turns the name of a reduction into what ``module`` takes.
        close: frees what was made for this.
        compression: of all calls.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        module: Any,
        group: Group,
        handle: Any,
        op_of: Callable[[str], Any],
        close: Callable[[], object] = lambda: None,
        compression: Compression | None = None,
    ) -> None:
        self.compression = compression
        self.name, self.backend, self.device = name, backend, device_of(backend)
        self._module, self._group, self._handle, self._op_of, self._close = module, group, handle, op_of, close

    def call(
        self, row: Row, way: str, source: torch.Tensor, target: torch.Tensor
    ) -> tuple[Callable[..., object], Sequence[object]]:
        operation = operations.get(row.operation)
        if self.compression is not None:
            if operation.argument(Role.COMPRESSION) is None:
                raise UnsupportedError(f"{row.operation} is not compressed")
            function = functools.partial(self._function(operation), compression=self.compression)
            return function, self._arguments(row, source, target)
        if row.pattern.is_message:
            return self._ping_pong(source, target), ()
        return self._function(operation), self._arguments(row, source, target)

    def compressed(self, method: str) -> TorchLike:
        """Return the same library on the same group with all calls compressed; this one is to be closed."""
        same = self.name, self.backend, self._module, self._group, self._handle, self._op_of
        return TorchLike(*same, compression=Compression(method))

    def _function(self, operation: OperationSpec) -> Callable[..., object]:
        # By their new names torch's do not warn, which takes longer than a short call.
        for name in (*operation.torch_names, operation.name):
            if hasattr(self._module, name):
                found: Callable[..., object] = getattr(self._module, name)
                return found
        if self._module is facade:
            return operations.function_of(operation)
        raise UnsupportedError(f"{self.name} has no {operation.name}")

    def close(self) -> None:
        self._close()

    def _arguments(self, row: Row, source: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
        is_root = self._group.rank == row.root or row.root < 0
        op = self._op_of(row.op) if row.op else None
        values = {Role.GROUP: self._handle, Role.OP: op, Role.ROOT: self._group.members[row.root]}
        defaults = {**operations.DEFAULTS, Role.OP: op if row.op == "sum" else None}

        def split(whole: torch.Tensor) -> list[torch.Tensor]:
            return list(torch.split(whole, row.count))

        def tensor(one: Argument) -> object:
            return operations.tensor_for(one, source, target, split, is_root)

        return operations.positional(operations.get(row.operation), tensor, values, defaults)

    def _ping_pong(self, source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
        """Between the first and the last rank; the others do nothing."""
        send, recv, members, group = self._module.send, self._module.recv, self._group.members, self._handle
        more = () if group is None else (group,)
        first, last = members[0], members[-1]

        def ping() -> None:
            send(source, last, *more)
            recv(target, last, *more)

        def pong() -> None:
            recv(target, first, *more)
            send(target, first, *more)

        return {0: ping, len(members) - 1: pong}.get(self._group.rank, lambda: None)


def open_ours(backend: str, group: Group) -> TorchLike:
    """Our collectives on ``backend``: on the world itself where that is what it runs on."""
    # The same object as in a program's source, by which the facade knows that it was checked before.
    op_of = sys.intern
    if group.is_world and backend == facade.get_backend():
        return TorchLike("ours", backend, facade, group, None, op_of)
    handle = facade.new_group(group.members, backend=backend)
    return TorchLike("ours", backend, facade, group, handle, op_of, lambda: facade.destroy_process_group(handle))


def backend_of(ours: str) -> str:
    """Return torch's backend for the tensors that ``ours`` takes."""
    return ours if ours in ("nccl", "xccl") else "gloo"


def make_group(group: Group, backend: str) -> Any:
    """Return this rank's group; torch wants all ranks to make all of them."""
    made = [c10d.new_group(members, backend=backend) for members in group.all_members]
    return made[group.all_members.index(group.members)]


def op_of(name: str) -> Any:
    return getattr(c10d.ReduceOp, name.upper())


def open_torch(backend: str, group: Group) -> TorchLike:
    """``torch.distributed`` beside ``backend`` of ours."""
    chosen = backend_of(backend)
    handle = make_group(group, chosen)
    return TorchLike("torch", chosen, c10d, group, handle, op_of, lambda: facade.destroy_process_group(handle))


def open_deepspeed(backend: str, group: Group) -> TorchLike:
    """DeepSpeed on the ``torch.distributed`` that is set up already, as it does in a training program."""
    deepspeed: Any = importlib.import_module("deepspeed.comm")
    # It calls torch by names that torch has replaced, which is nothing that who measures could change.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    chosen = backend_of(backend)
    deepspeed.init_distributed(dist_backend=chosen, verbose=False)
    handle = make_group(group, chosen)
    return TorchLike(
        "deepspeed",
        chosen,
        deepspeed,
        group,
        handle,
        lambda name: getattr(deepspeed.ReduceOp, name.upper()),
        lambda: facade.destroy_process_group(handle),
    )
