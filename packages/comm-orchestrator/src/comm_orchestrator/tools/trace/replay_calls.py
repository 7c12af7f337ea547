"""Calls as they were recorded, with tensors of zeros."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.trace.matching import kind_of
from comm_orchestrator.tools.trace.replay_plan import WORLD, type_of
from comm_utils.observability.comms_logger import OPERATIONS
from comm_utils.observability.traces import Operation

__all__ = ["Calls", "Memory"]

#: Makes a call; with True an asynchronous one, of which it returns the handle.
Call = Callable[[bool], Any]


class Memory:
    """Buffers of bytes, used again and again: no larger than twice what was in use at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer of at least so many bytes."""
        capacity = 1 << max(size_bytes - 1, 63).bit_length()
        free = self._free[capacity]
        return free.pop() if free else torch.zeros(capacity, dtype=torch.uint8, device=self._device)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Nobody uses these any more."""
        for buffer in buffers:
            self._free[buffer.numel()].append(buffer)


class Calls:
    """The calls of one rank.

    Args:
        groups: name in the plan -> the group.
    """

    def __init__(self, rank: int, groups: dict[str, Any], device: torch.device) -> None:
        self._rank = rank
        self._groups = {WORLD: None, **groups}
        self._memory = Memory(device)
        self._known: dict[Operation, Callable[..., Any]] = {}
        self._sizes: dict[Operation, tuple[int, ...]] = {}
        self._synchronous: dict[Operation, Callable[[], Any]] = {}

    def prepare(self, operations: Sequence[Operation]) -> None:
        """Reserve what synchronous calls need: they do not overlap, so all of them share the largest buffers."""
        needed = [self._bytes(operation) for operation in operations if not operation.asynchronous]
        most = [max((sizes[place] for sizes in needed if len(sizes) > place), default=0) for place in range(2)]
        shared = [self._memory.take(size) for size in most]
        for operation in operations:
            if not operation.asynchronous:
                self._synchronous[operation] = self._bound(operation, shared, False)

    def run(self, operation: Operation) -> None:
        """A synchronous call."""
        self._synchronous[operation]()

    def issue(self, operation: Operation) -> tuple[Any, list[torch.Tensor]]:
        """An asynchronous call: its handle, and what has to be given back when it is complete."""
        buffers = [self._memory.take(size) for size in self._bytes(operation)]
        return self._bound(operation, buffers, True)(), buffers

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """The asynchronous call that these belong to is complete."""
        self._memory.give_back(buffers)

    def _bytes(self, operation: Operation) -> tuple[int, ...]:
        """Of each buffer that a call needs."""
        found = self._sizes.get(operation)
        if found is None:
            found = self._sizes[operation] = _SIZES.get(kind_of(operation), _one)(operation, self._rank)
        return found

    def _bound(self, operation: Operation, buffers: Sequence[torch.Tensor], asynchronous: bool) -> Callable[[], Any]:
        sizes = self._bytes(operation)
        kind = kind_of(operation)
        dtype = type_of(operation.dtype) if operation.dtype else torch.uint8
        tensors = [buffer[:size].view(dtype) for buffer, size in zip(buffers, sizes, strict=False)]
        label: Label = {} if operation.name in OPERATIONS else {"log_name": operation.name}
        return _CALLS[kind](self._rank, operation, tensors, self._groups[operation.group], asynchronous, label)


def _one(operation: Operation, rank: int) -> tuple[int, ...]:
    return (operation.size_bytes,)


def _whole_and_part(operation: Operation, rank: int) -> tuple[int, ...]:
    return operation.size_bytes, operation.size_bytes // operation.world_size


def _exchanged(operation: Operation, rank: int) -> tuple[int, ...]:
    gives, gets = _splits(operation, rank)
    unit = type_of(operation.dtype).itemsize
    return sum(gets) * unit, sum(gives) * unit


def _splits(operation: Operation, rank: int) -> tuple[list[int], list[int]]:
    """Elements for and from each rank."""
    W, gives, gets = operation.world_size, list(operation.input_splits), list(operation.output_splits)
    if gives or gets:
        # Even on one side only: what a rank keeps is on both.
        own = operation.ranks.index(rank)
        return gives or [gets[own]] * W, gets or [gives[own]] * W
    even = [operation.size_bytes // type_of(operation.dtype).itemsize // W] * W
    return even, even


_SIZES: dict[str, Callable[[Operation, int], tuple[int, ...]]] = {
    "all_gather_into_tensor": _whole_and_part,
    "reduce_scatter_tensor": _whole_and_part,
    "gather": _whole_and_part,
    "scatter": _whole_and_part,
    "all_to_all_single": _exchanged,
}

Tensors = list[torch.Tensor]
Label = dict[str, Any]


def _all_reduce(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    (tensor,), op = tensors, what.op or "sum"
    if later or label:
        return lambda: facade.all_reduce(tensor, op, group, async_op=later, **label)
    return lambda: facade.all_reduce(tensor, op, group)


def _all_gather(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    whole, part = tensors
    return lambda: facade.all_gather_into_tensor(whole, part, group, later, **label)


def _reduce_scatter(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    (whole, part), op = tensors, what.op or "sum"
    return lambda: facade.reduce_scatter_tensor(part, whole, op, group, later, **label)


def _all_to_all(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    output, given = tensors
    gives, gets = _splits(what, rank)
    uneven = bool(what.input_splits or what.output_splits)
    outputs, inputs = (gets, gives) if uneven else (None, None)
    return lambda: facade.all_to_all_single(output, given, outputs, inputs, group, later, **label)


def _broadcast(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    (tensor,) = tensors
    return lambda: facade.broadcast(tensor, what.root, group, later, **label)


def _reduce(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    (tensor,), op = tensors, what.op or "sum"
    return lambda: facade.reduce(tensor, what.root, op, group, later, **label)


def _parts(whole: torch.Tensor, W: int) -> Tensors:
    return list(whole.view(W, -1).unbind()) if whole.numel() else [whole] * W


def _gather(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    whole, part = tensors
    parts = _parts(whole, what.world_size) if rank == what.root else None
    return lambda: facade.gather(part, parts, what.root, group, later, **label)


def _scatter(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    whole, part = tensors
    parts = _parts(whole, what.world_size) if rank == what.root else None
    return lambda: facade.scatter(part, parts, what.root, group, later, **label)


def _barrier(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    return lambda: facade.barrier(group, later, **label)


def _message(rank: int, what: Operation, tensors: Tensors, group: Any, later: bool, label: Label) -> Any:
    (tensor,) = tensors
    call = getattr(facade, what.operation)
    return lambda: call(tensor, what.root, group, what.tag, **label)


_CALLS: dict[str, Callable[..., Callable[[], Any]]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    **dict.fromkeys(("irecv", "isend", "recv", "send"), _message),
}
