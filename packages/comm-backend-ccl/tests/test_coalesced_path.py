"""The fast path of many tensors in shared memory; its ranks are threads of this process, but in the last test."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from comm_backend_ccl import kernels, shared_memory
from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.shared_tensors import shared_memory_stats, tensor_at
from comm_backend_ccl.tables import Operation
from comm_utils import ReduceOp
from comm_utils.testing import run_ranks
from comm_utils.testing.conformance_world import bring_up
from comm_utils.torch_support.flattening import flatten, unflatten
from comm_utils.torch_support.passed_tensors import packed_sizes, passed_sizes, passing_joined

pytestmark = pytest.mark.skipif(
    shared_memory.unavailable_reason() is not None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="there is no shared memory here, or this torch has no DLPack exchange for native code",
)


class Side:
    """One rank of a group.

    Attributes:
        waited: the handles of operations that took longer.
        described: the sizes that Python was asked to describe.
        put: the tensors that Python was asked to overwrite.
    """

    def __init__(self, group: shared_memory.Group, op: ReduceOp = ReduceOp.SUM) -> None:
        self.group = group
        self.waited: list[Any] = []
        self.described: list[bytes] = []
        self.put: list[torch.Tensor] = []
        path = shared_memory.coalesced_path(group, op, self._wait, self._describe, self._put)
        assert path is not None
        self.path = path

    def _wait(self, handle: Any) -> bool:
        self.waited.append(handle)
        while not (state := shared_memory.wait(handle, 10)):
            pass
        if state < 0:
            raise RuntimeError(shared_memory.failure(handle))
        return True

    def _describe(self, sizes: bytes) -> tuple[str, int]:
        self.described.append(sizes)
        what = passed_sizes(sizes)
        return what.text, what.digest

    def _put(self, tensor: torch.Tensor, address: int, size: int, dtype: torch.dtype) -> None:
        self.put.append(tensor)
        tensor.copy_(tensor_at(address, size, None).view(dtype).view(tensor.shape))


def sides(op: ReduceOp = ReduceOp.SUM, count: int = 2, reserves: bool = True) -> list[Side]:
    """Return the sides of a group, which have the memory for large tensors if ``reserves``."""
    memory, pids = shared_memory.create(count), [os.getpid()] * count
    groups = [shared_memory.join(pids[0], memory, rank, pids, oversubscribed=True) for rank in range(count)]
    shared_memory.close_descriptor(memory[0])
    all_of_them = [Side(group, op) for group in groups]
    if reserves:
        large = [torch.ones(10_000) for _ in groups]
        handles = [start_all_reduce(*pair) for pair in zip(groups, large, strict=True)]
        assert all(handle is None or shared_memory.wait(handle, 30) == 1 for handle in handles)
    return all_of_them


def start_all_reduce(group: shared_memory.Group, tensor: torch.Tensor) -> Any:
    return shared_memory.start(group, Call(Operation.ALL_REDUCE, tensor, tensor, tensor.numel(), watched=True))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Do these calls at once, one in each thread, and return what they return or raise."""
    found: list[Any] = [None] * len(calls)

    def one(number: int) -> None:
        try:
            found[number] = calls[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def reduce_while(change: Callable[[], Any], first: Side, given: list[torch.Tensor], second: Side) -> None:
    """Reduce ``given`` with what is :func:`mixed` on the second rank, with ``change`` while the first one waits."""
    begun = threading.Event()

    def wait(handle: Any) -> bool:
        change()
        begun.set()
        return first._wait(handle)

    path = shared_memory.coalesced_path(first.group, ReduceOp.SUM, wait, first._describe, first._put)
    assert path is not None

    def late() -> bool:
        assert begun.wait(30)
        return second.path(mixed(1))

    assert together(lambda: path(given), late) == [True, True]


def mixed(rank: int, scale: int = 1) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.float32, torch.float64, torch.int64)
    return [torch.full((scale * (number + 1), 3), rank + number).to(dtype) for number, dtype in enumerate(dtypes)]


def sums_of(ranks: int, scale: int = 1) -> list[torch.Tensor]:
    return [sum(parts) for parts in zip(*(mixed(rank, scale) for rank in range(ranks)), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("scale", [1, 100, 20_000])
def test_every_dtype_is_reduced_and_versions_are_counted(ranks: int, scale: int) -> None:
    every = sides(count=ranks)
    for _ in range(3):
        tensors = [mixed(rank, scale) for rank in range(ranks)]
        calls = [partial(side.path, of_rank) for side, of_rank in zip(every, tensors, strict=True)]
        assert together(*calls) == [True] * ranks
        for of_rank in tensors:
            assert all(map(torch.equal, of_rank, sums_of(ranks, scale)))
            assert [one._version for one in of_rank] == [1] * len(of_rank)
    # Of the float64 there is one alone, which is compared by its size as ever; the others are described once.
    floats, integers = ([one for one in mixed(0, scale) if one.dtype is kind] for kind in (torch.float32, torch.int64))
    assert every[0].described == [packed_sizes(floats), packed_sizes(integers)]


def test_other_sizes_are_described_anew_and_memory_is_kept() -> None:
    (side,) = sides(count=1)
    gc.collect()
    before = shared_memory_stats()["used_bytes"]
    many = [torch.ones(1000), torch.ones(2000)]
    assert side.path(many)
    kept = shared_memory_stats()["used_bytes"] - before
    assert kept >= 12_000
    for again in ([torch.ones(2000), torch.ones(1000)], tuple(many), [torch.ones(10), torch.ones(3)], many):
        assert side.path(again)
    assert shared_memory_stats()["used_bytes"] - before == kept
    assert len(side.described) == 5
    assert side.path([torch.ones(100_000), torch.ones(1)])
    larger = shared_memory_stats()["used_bytes"] - before
    assert kept < larger <= 4 * 400_004
    del side
    gc.collect()
    assert shared_memory_stats()["used_bytes"] == before


def test_a_batch_of_plain_tensors_is_taken_as_well() -> None:
    (side,) = sides(ReduceOp.MAX, 1)
    tensors = [torch.ones(3), torch.ones(2, dtype=torch.float64)]
    batch = kernels.plain_batch(tensors)
    assert batch is not None
    assert side.path(batch.native)
    assert [one._version for one in tensors] == [1, 1]


def test_a_late_rank_is_waited_for() -> None:
    first, second = sides()
    tensors = [mixed(0), mixed(1)]

    def late() -> bool:
        end = time.monotonic() + 30
        while not first.waited and time.monotonic() < end:
            time.sleep(0.01)
        return second.path(tensors[1])

    assert together(lambda: first.path(tensors[0]), late) == [True, True]
    assert first.waited
    for of_rank in tensors:
        assert all(map(torch.equal, of_rank, sums_of(2)))


def test_results_go_where_a_tensor_has_its_memory_by_then() -> None:
    first, second = sides()
    tensors = mixed(0)
    moved, old, new = tensors[3], tensors[3].untyped_storage(), torch.zeros_like(tensors[3])
    reduce_while(lambda: moved.set_(new), first, tensors, second)  # type: ignore[call-overload]
    assert all(map(torch.equal, tensors, sums_of(2)))
    assert first.put == [moved]
    assert torch.empty(0).set_(old, 0, (12,)).tolist() == [3.0] * 12  # type: ignore[call-overload]  # as it was


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_results_are_converted_where_a_tensor_has_another_dtype_by_then(dtype: torch.dtype) -> None:
    first, second = sides()
    tensors = mixed(0)
    other = torch.zeros(tensors[3].shape, dtype=dtype)
    reduce_while(lambda: setattr(tensors[3], "data", other), first, tensors, second)
    assert all(torch.equal(one.double(), total.double()) for one, total in zip(tensors, sums_of(2), strict=True))


def test_tensors_that_change_before_they_are_packed_are_refused() -> None:
    (side,) = sides(count=1)
    tensors = [torch.ones(2), torch.ones(3)]

    def describe(sizes: bytes) -> tuple[str, int]:
        tensors[0].untyped_storage().resize_(0)
        return Side._describe(side, sizes)

    path = shared_memory.coalesced_path(side.group, ReduceOp.SUM, side._wait, describe, side._put)
    assert path is not None
    assert path(tensors) is False
    assert path([torch.ones(2), torch.ones(3)]) is True


def test_a_list_that_is_changed_meanwhile_does_not_matter() -> None:
    first, second = sides()
    tensors = mixed(0)
    given = list(tensors)
    reduce_while(given.clear, first, given, second)
    assert all(map(torch.equal, tensors, sums_of(2)))


def test_ranks_with_other_sizes_of_the_same_sum_fail() -> None:
    first, second = sides()
    tensors = [[torch.ones(2), torch.ones(3)], [torch.ones(3), torch.ones(2)]]
    found = together(lambda: first.path(tensors[0]), lambda: second.path(tensors[1]))
    text = r"in 2 tensors on rank \d, whose tensors have other sizes or another order$"
    assert any(isinstance(one, RuntimeError) and re.search(text, str(one)) for one in found), found
    assert first.path(tensors[0]) is False  # as the group is broken, which the checked path says
    assert all(one.eq(1).all() for some in tensors for one in some)


def refused() -> dict[str, Any]:
    plain, whole = torch.ones(2), torch.ones(8)
    with torch.inference_mode():
        made_there = torch.ones(2)
    return {
        "one tensor": [plain],
        "no list": plain,
        "nothing": None,
        "no tensor": [plain, 3],
        "strided": [plain, torch.ones(4)[::2]],
        "shared memory": [whole[:4], whole[3:]],
        "a gradient": [plain, torch.ones(2, requires_grad=True)],
        "of inference mode": [plain, made_there],
        "a dtype that is not reduced": [plain, torch.ones(2, dtype=torch.float8_e5m2)],
        "more than 16 MiB": [plain, torch.ones(4 << 20)],
    }


@pytest.mark.parametrize("name", refused())
def test_others_are_refused_with_nothing_done(name: str) -> None:
    (side,) = sides(count=1)
    assert side.path(refused()[name]) is False
    assert side.path([torch.ones(2), torch.ones(3)]) is True


def test_an_average_of_integers_is_refused() -> None:
    (side,) = sides(ReduceOp.AVG, 1)
    assert side.path([torch.ones(2), torch.ones(2, dtype=torch.int32)]) is False
    assert side.path([torch.ones(2), torch.ones(2)]) is True


def test_a_closed_group_is_refused() -> None:
    (side,) = sides(count=1)
    shared_memory.close(side.group)
    assert side.path([torch.ones(2), torch.ones(2)]) is False


def test_a_large_call_is_left_to_what_reserves_its_memory() -> None:
    (side,) = sides(count=1, reserves=False)
    large, small = [torch.ones(5000), torch.ones(3)], [torch.ones(2), torch.ones(3)]
    assert side.path(large) is False
    assert side.path(small) is True
    start_all_reduce(side.group, torch.ones(5000))
    assert side.path(large) is True


def test_an_error_while_waiting_is_raised_and_later_calls_go_on_with_other_memory() -> None:
    first, second = sides()

    def interrupted(_: Any) -> bool:
        raise KeyboardInterrupt

    path = shared_memory.coalesced_path(first.group, ReduceOp.SUM, interrupted, first._describe, first._put)
    assert path is not None
    mine, others = [torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]
    with pytest.raises(KeyboardInterrupt):
        path(mine)
    assert second.path(others)  # the operation that was dropped has come to its end all the same
    assert [one.tolist() for one in mine] == [[1.0] * 2, [1.0] * 3]
    assert [one.tolist() for one in others] == [[2.0] * 2, [2.0] * 3]
    assert together(lambda: first.path(mine), lambda: second.path(mine[::-1][::-1])) == [True, True]


def test_an_error_in_describing_is_raised_before_anything_is_sent() -> None:
    (side,) = sides(count=1)

    def failing(_: bytes) -> tuple[str, int]:
        raise LookupError("sizes")

    path = shared_memory.coalesced_path(side.group, ReduceOp.SUM, side._wait, failing, side._put)
    assert path is not None
    tensors: Sequence[torch.Tensor] = [torch.ones(2), torch.ones(3)]
    with pytest.raises(LookupError):
        path(tensors)
    assert path([torch.ones(2), torch.ones(2, dtype=torch.float64)])  # of each dtype one, of which nothing is asked


def test_paths_in_cycles_are_collected() -> None:
    (side,) = sides(count=1)
    side.path([torch.ones(2), torch.ones(3)])
    gone = weakref.ref(side)  # which holds the path, which holds its methods
    del side
    gc.collect()
    assert gone() is None


def meet_ranks_that_join() -> list[list[float]]:
    """On rank 0 take the fast path, and on rank 1 do what the checked path does."""
    backend = bring_up("comm_backend_ccl:provider", "ccl", "cpu")
    rank, found = backend.get_rank(), []
    backend.all_reduce(torch.ones(10_000))  # which reserves the memory for large tensors
    for scale in (1, 20_000):
        tensors = mixed(rank, scale)
        if rank == 0:
            reduce = backend.fast_path("all_reduce_coalesced", "sum")
            assert reduce is not None
            assert reduce(tensors)
        else:
            for dtype in dict.fromkeys(one.dtype for one in tensors):
                some = [one for one in tensors if one.dtype is dtype]
                joined = flatten(some)
                with passing_joined(some):
                    backend.all_reduce(joined)
                unflatten(joined, some)
        found.append([float(one.double().mean()) for one in tensors])
    backend.destroy_process_group()
    return found


def test_the_fast_path_meets_ranks_that_join_the_tensors() -> None:
    expected = [[float(one.double().mean()) for one in sums_of(2)]] * 2
    assert run_ranks(meet_ranks_that_join, 2) == [expected] * 2
