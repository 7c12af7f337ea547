"""Objects of native code own what they stand for: nothing is used after its end, and nothing in use is freed."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_backend_ccl import native_module, shared_memory, tables
from comm_backend_ccl.engine_call import Call
from comm_utils import ReduceOp
from comm_utils.reduce_op import parse_reduce_op

pytestmark = pytest.mark.skipif(
    shared_memory.unavailable_reason() is not None, reason=str(shared_memory.unavailable_reason())
)


def both_sides() -> list[shared_memory.Group]:
    """Return both ranks of a group, in this process."""
    memory = shared_memory.create(2)
    pids = [os.getpid()] * 2
    sides = [shared_memory.join(pids[0], memory, rank, pids, oversubscribed=True) for rank in range(2)]
    shared_memory.close_descriptor(memory[0])
    return sides


def start(side: shared_memory.Group, tensor: torch.Tensor) -> Any:
    return shared_memory.start(side, Call(tables.Operation.ALL_REDUCE, tensor, tensor, tensor.numel()))


def test_an_operation_that_is_dropped_keeps_its_tensors_until_its_end() -> None:
    first, second = both_sides()
    tensor = torch.ones(100_000)
    kept = weakref.ref(tensor)
    operation = start(first, tensor)
    assert operation is not None
    del operation, tensor
    gc.collect()
    assert kept() is not None
    other = torch.ones(100_000)
    operation = start(second, other)
    while operation is not None and shared_memory.wait(operation, 0.01) == 0:
        shared_memory.drain(first, 0.01)
    shared_memory.drain(first, 1.0)
    alive = kept()
    assert alive is not None
    assert (alive == 2).all()
    assert (other == 2).all()
    del alive, operation
    assert start(first, torch.ones(1)) is not None  # where the next operation is made, what ended is released
    gc.collect()
    assert kept() is None


def test_a_signal_in_the_fast_path_does_not_free_the_tensor() -> None:
    """``later`` is interrupted before it has taken hold of anything."""
    first, second = both_sides()

    def later(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    path = shared_memory.fast_path(first, tables.Operation.ALL_REDUCE, ReduceOp.SUM, -1, later)
    if path is None:
        pytest.skip("this torch offers no fast path")
    tensor = torch.ones(1000)
    kept = weakref.ref(tensor)
    with pytest.raises(KeyboardInterrupt):
        path(tensor)
    del tensor
    gc.collect()
    assert kept() is not None
    assert start(second, torch.ones(1000)) is None
    shared_memory.drain(first, 1.0)
    alive = kept()
    assert alive is not None
    assert (alive == 2).all()


def test_a_started_operation_keeps_its_tensors() -> None:
    first, second = both_sides()
    begin = shared_memory.starter(first, tables.Operation.ALL_REDUCE, ReduceOp.SUM, -1)
    if begin is None:
        pytest.skip("this torch offers no fast path")
    for refused in (torch.ones(4, 4).t(), torch.ones(4).to(torch.complex64), [1.0], None):
        assert begin(refused) is False
    assert begin() is False
    tensor, other = torch.ones(1000), torch.ones(1000)
    kept = weakref.ref(tensor)
    operation = begin(tensor)
    assert operation not in (True, False)
    del tensor
    gc.collect()
    assert kept() is not None
    start(second, other)
    deadline = time.monotonic() + 10
    while shared_memory.wait(operation, 0.01) == 0 and time.monotonic() < deadline:
        shared_memory.drain(second, 0.01)
    assert shared_memory.wait(operation, 0.0) == 1
    assert shared_memory.ended_ns(operation)  # it was watched
    alive = kept()
    assert alive is not None
    assert (alive == 2).all()
    del alive, operation
    gc.collect()
    assert kept() is None


def dropped_operation(first: shared_memory.Group) -> weakref.ref[torch.Tensor]:
    tensor = torch.ones(1000)
    assert start(first, tensor) is not None
    return weakref.ref(tensor)


def test_dropped_operations_release_their_tensors_at_the_next_call() -> None:
    first, second = both_sides()
    path = shared_memory.fast_path(first, tables.Operation.ALL_REDUCE, ReduceOp.SUM, -1, lambda *_: True)
    if path is None:
        pytest.skip("this torch offers no fast path")
    kept = dropped_operation(first)
    assert kept() is not None
    start(second, torch.ones(1000))
    shared_memory.drain(first, 1.0)
    assert kept() is not None
    other = start(second, torch.ones(1))
    path(torch.ones(1))
    assert kept() is None
    del other


def test_dropped_operations_release_their_tensors_at_the_end_of_their_group() -> None:
    first, _second = both_sides()
    kept = dropped_operation(first)
    shared_memory.close(first)
    gc.collect()
    assert kept() is None


def test_a_group_ends_with_its_last_reference() -> None:
    before = len(os.listdir("/proc/self/fd"))
    sides = both_sides()
    operation = start(sides[0], torch.ones(10))
    del sides
    gc.collect()
    assert shared_memory.wait(operation, 0.0) == 0  # which keeps its group
    del operation
    shared_memory.close(both_sides()[0])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # of the group whose operation never ends


@pytest.mark.parametrize(
    "call",
    [
        lambda side: side.start(),
        lambda side: side.start("a", *range(10)),
        lambda side: side.start(0, 0, 0, 1, 9, 0, -1, False, [object()], None, None),
        lambda side: side.start(200, 0, 0, 1, 9, 0, -1, False),
        lambda side: side.start(0, 0, 0, 1, 200, 0, -1, False),
        lambda side: side.fast_path(1),
        lambda side: side.drain("soon"),
        lambda side: type(side)(),
        lambda side: shared_memory.join(os.getpid(), (10**6, 1), 0, [os.getpid()], False),
        lambda side: shared_memory.join(os.getpid(), (0, 1), 5, [os.getpid()], False),
        lambda side: shared_memory.join(os.getpid(), (0, 1), 0, ["a"], False),
        lambda side: shared_memory.create(65),
        lambda side: shared_memory.allocate(-1),
        lambda side: shared_memory.allocate(2**64 - 1),
    ],
)
def test_wrong_arguments_raise(call: Callable[[Any], object]) -> None:
    with pytest.raises((TypeError, RuntimeError, MemoryError, PermissionError, OverflowError)):
        call(both_sides()[0])


def test_codes_are_those_of_native_code() -> None:
    codes = native_module.NATIVE.codes()
    named = {"RECEIVE": "recv"}
    assert codes["operations"] == tuple(named.get(one.name, one.name.lower()) for one in tables.Operation)
    assert codes["dtypes"] == tuple(str(one).removeprefix("torch.") for one in tables.DTYPES)
    names = (*codes["dtypes"], *codes["message_dtypes"])
    here = {getattr(torch, name): code for code, name in enumerate(names) if hasattr(torch, name)}
    assert here == tables.MESSAGE_DTYPES
    assert len(names) < tables.OTHER_DTYPE
    assert [parse_reduce_op(one) for one in codes["ops"]] == list(tables.OPS)
    assert codes["codecs"] == tuple(tables.CODECS)
    assert list(tables.CODECS.values()) == list(range(len(tables.CODECS)))
    assert list(tables.Operation) == list(range(len(tables.Operation)))
    assert list(tables.DTYPES.values()) == list(range(len(tables.DTYPES)))
    assert list(tables.OPS.values()) == list(range(len(tables.OPS)))
