"""Calls as they were recorded, with tensors of zeros."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from comm_orchestrator import facade
from comm_orchestrator.tools.trace.matching import kind_of
from comm_orchestrator.tools.trace.replay_plan import WORLD, type_of
from comm_utils import operations
from comm_utils.observability.traces import Operation
from comm_utils.operations import Argument, Role

__all__ = ["Calls", "Memory"]


class Memory:
    """Buffers of bytes, used again and again: no larger than twice what was in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Return a buffer of at least so many bytes."""
        capacity = 1 << max(size_bytes - 1, 63).bit_length()
        free = self._free[device, capacity]
        return free.pop() if free else torch.zeros(capacity, dtype=torch.uint8, device=device)

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Nobody uses these any more."""
        for buffer in buffers:
            self._free[buffer.device, buffer.numel()].append(buffer)


class Calls:
    """The calls of one rank.

    Args:
        groups: name in the plan -> the group.
        devices: of the tensors, by whether they were recorded on an accelerator.
    """

    def __init__(self, rank: int, groups: dict[str, Any], devices: Mapping[bool, torch.device]) -> None:
        self._rank = rank
        self._groups = {WORLD: None, **groups}
        self._devices = devices
        self._memory = Memory()
        self._known: dict[Operation, Callable[..., Any]] = {}
        self._sizes: dict[Operation, tuple[int, ...]] = {}
        self._labels: dict[str, Label] = {}
        self._synchronous: dict[Operation, Callable[[], Any]] = {}

    def prepare(self, calls: Sequence[Operation]) -> None:
        """Reserve what synchronous calls need: they do not overlap, so all of them share the largest buffers."""
        for device in {*self._devices.values()}:
            alike = [one for one in calls if not one.asynchronous and self._devices[one.on_device] == device]
            needed = [self._bytes(operation) for operation in alike]
            most = [max((sizes[place] for sizes in needed if len(sizes) > place), default=0) for place in range(2)]
            shared = [self._memory.take(size, device) for size in most]
            for operation in alike:
                self._synchronous[operation] = self._bound(operation, shared, False)

    def run(self, operation: Operation) -> None:
        """Make a synchronous call."""
        self._synchronous[operation]()

    def issue(self, operation: Operation) -> tuple[Any, list[torch.Tensor]]:
        """Return an asynchronous call: its handle, and what has to be given back when it is complete."""
        device = self._devices[operation.on_device]
        buffers = [self._memory.take(size, device) for size in self._bytes(operation)]
        return self._bound(operation, buffers, True)(), buffers

    def give_back(self, buffers: Sequence[torch.Tensor]) -> None:
        """Release the tensors of an asynchronous call that is complete."""
        self._memory.give_back(buffers)

    def _bytes(self, operation: Operation) -> tuple[int, ...]:
        """Of each buffer that a call needs."""
        found = self._sizes.get(operation)
        if found is None:
            found = self._sizes[operation] = _sizes(operation, self._rank)
        return found

    def _bound(self, operation: Operation, buffers: Sequence[torch.Tensor], asynchronous: bool) -> Callable[[], Any]:
        sizes = self._bytes(operation)
        dtype = type_of(operation.dtype) if operation.dtype else torch.uint8
        tensors = [buffer[:size].view(dtype) for buffer, size in zip(buffers, sizes, strict=False)]
        label = self._labels.get(operation.name)
        if label is None:
            row = operations.find(operation.name)
            label = {} if row is not None and row.recorded else {"log_name": operation.name}
            self._labels[operation.name] = label
        return _call(self._rank, operation, tensors, self._groups[operation.group], asynchronous, label)


def _sizes(what: Operation, rank: int) -> tuple[int, ...]:
    """Return the bytes of what the call reads and of what it writes; of one buffer where that is the same."""
    pattern, W = what.pattern, what.world_size
    if pattern.is_empty:
        return ()
    if pattern.uneven:
        gives, gets = _splits(what, rank)
        unit = type_of(what.dtype).itemsize
        return sum(gives) * unit, sum(gets) * unit
    if len(operations.get(kind_of(what)).tensors) == 1:
        return (what.size_bytes,)
    part = what.size_bytes // W
    return (part if pattern.input_is_part else what.size_bytes), (part if pattern.output_is_part else what.size_bytes)


def _splits(operation: Operation, rank: int) -> tuple[list[int], list[int]]:
    """Elements for and from each rank."""
    W, gives, gets = operation.world_size, list(operation.input_splits), list(operation.output_splits)
    if gives or gets:
        # Even on one side only: what a rank keeps is on both.
        own = operation.ranks.index(rank)
        return gives or [gets[own]] * W, gets or [gives[own]] * W
    even = [operation.size_bytes // type_of(operation.dtype).itemsize // W] * W
    return even, even


Label = dict[str, Any]


def _call(
    rank: int, what: Operation, tensors: list[torch.Tensor], group: Any, asynchronous: bool, label: Label
) -> Callable[[], Any]:
    row, W = operations.get(kind_of(what)), what.world_size
    values: dict[Role, object] = {
        Role.OP: what.op or "sum",
        Role.ROOT: what.root,
        Role.TAG: what.tag,
        Role.GROUP: group,
        Role.ASYNC_OP: asynchronous,
    }
    if what.input_splits or what.output_splits:
        values[Role.INPUT_SPLITS], values[Role.OUTPUT_SPLITS] = _splits(what, rank)

    def split(whole: torch.Tensor) -> list[torch.Tensor]:
        return list(whole.view(W, -1).unbind()) if whole.numel() else [whole] * W

    def tensor(one: Argument) -> object:
        return operations.tensor_for(one, tensors[0], tensors[-1], split, rank == what.root or what.root < 0)

    function = operations.function_of(row, facade)
    return partial(function, *operations.positional(row, tensor, values), **label)
