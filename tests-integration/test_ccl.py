"""The backend ccl behind our API and behind ``torch.distributed``, in shared memory and on oneCCL."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d

import comm_orchestrator as dist
from comm_utils.testing import RankPool, run_ranks

Pools: TypeAlias = Callable[[int], RankPool]

_FOUND = dist.available_backends()["ccl"]
pytestmark = pytest.mark.skipif(not _FOUND.usable, reason=_FOUND.reason)


def start() -> None:
    dist.init_distributed("ccl", verbose=False)


@pytest.fixture(scope="module", params=["1", "0"], ids=["shared_memory", "oneccl"])
def ccl_environment(request: pytest.FixtureRequest, rank_environment: dict[str, Any]) -> dict[str, Any]:
    """``env`` for ranks on either engine."""
    return {**rank_environment, "CCL_SHARED_MEMORY": request.param}


@pytest.fixture(scope="module")
def ccl_pools(ccl_environment: dict[str, Any]) -> Any:
    with RankPool(4, env=ccl_environment, setup=start) as four, RankPool(2, env=ccl_environment, setup=start) as two:
        yield {2: two, 4: four}.__getitem__


# --- which library serves which group


def run_two_libraries() -> None:
    rank = dist.get_rank()
    beside = dist.new_group([0, 1], backend="gloo")
    assert (dist.get_backend(), dist.get_backend(beside)) == ("ccl", "gloo")
    for group in (None, beside):
        tensor = torch.tensor([1.0, rank])
        assert dist.all_reduce(tensor, "sum", group) is None
        assert tensor.tolist() == [2.0, 1.0]
        received = torch.empty(2)
        if rank == 0:
            dist.send(tensor, 1, group)
        else:
            assert dist.recv(received, 0, group) == 0
            assert torch.equal(received, tensor)
        works = [dist.all_reduce(torch.ones(3), "max", group, async_op=True) for _ in range(3)]
        for work in reversed(works):
            work.wait()  # type: ignore[union-attr]
    dist.destroy_process_group(beside)


def test_a_group_of_gloo_beside_a_world_of_ccl(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_two_libraries)


def run_beside_gloo() -> None:
    dist.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    group = dist.new_group([0, 1], backend="ccl")
    assert (dist.get_backend(), dist.get_backend(group)) == ("gloo", "ccl")
    for tensor, op, expected in (
        (torch.tensor([1.0, rank]), "sum", [2.0, 1.0]),
        (torch.tensor([1.0, rank], dtype=torch.bfloat16), "avg", [1.0, 0.5]),
        (torch.tensor([6, 3 + rank], dtype=torch.int16), "band", [6, 0]),
    ):
        dist.all_reduce(tensor, op, group)
        assert tensor.tolist() == expected
    dist.destroy_process_group()


def test_a_group_of_ccl_beside_a_world_of_gloo(ccl_environment: dict[str, Any]) -> None:
    run_ranks(run_beside_gloo, 2, env=ccl_environment)


def run_several_beside_gloo() -> None:
    dist.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    for ranks in ([0, 1], [0, 2], [1, 2]):
        group = dist.new_group(ranks, backend="ccl")
        if rank in ranks:
            dist.all_reduce(tensor := torch.ones(2), "sum", group)
            assert tensor.tolist() == [2.0, 2.0], ranks
    dist.barrier()  # rank 0 has the store by which the last group is made
    dist.destroy_process_group()


def test_different_groups_of_ccl_beside_a_world_of_gloo(ccl_environment: dict[str, Any]) -> None:
    run_ranks(run_several_beside_gloo, 3, env=ccl_environment)


def run_adopted() -> None:
    import comm_backend_ccl

    assert comm_backend_ccl
    c10d.init_process_group("ccl", timeout=timedelta(seconds=17))
    dist.init_distributed(verbose=False)
    group = dist.new_group([0, 1])
    assert c10d.distributed_c10d._world.pg_map[group][0] == "ccl"
    assert group.timeout == timedelta(seconds=17)
    dist.all_reduce(tensor := torch.ones(2), "sum", group)
    assert tensor.tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_a_world_of_ccl_is_adopted_with_its_timeout(ccl_environment: dict[str, Any]) -> None:
    run_ranks(run_adopted, 2, env=ccl_environment)


def run_without_the_one_that_left() -> float | None:
    """Rank 1 has ended; a message between the others does not need it."""
    dist.init_distributed("ccl", verbose=False, timeout=30)
    rank = dist.get_rank()
    dist.barrier()
    if rank == 1:
        return None
    store = c10d.distributed_c10d._get_default_store()
    if rank == 2:
        time.sleep(2.0)
        dist.send(torch.ones(2), 0)
        store.wait(["received"])
        return None
    begin = time.monotonic()
    assert dist.recv(torch.empty(2), 2) == 2
    store.set("received", "")
    return time.monotonic() - begin


def test_a_message_does_not_need_the_other_ranks(ccl_environment: dict[str, Any]) -> None:
    waited_s, *_ = run_ranks(run_without_the_one_that_left, 3, env=ccl_environment)
    assert waited_s > 1.0


# --- torch.distributed alone


def run_plain_torch() -> None:
    import comm_backend_ccl

    assert comm_backend_ccl
    rank = int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = c10d.TCPStore(*address, 2, rank == 0)
    c10d.init_process_group("ccl", store=c10d.PrefixStore("first", store), rank=rank, world_size=2)
    ops = {
        c10d.ReduceOp.SUM: [3, 5],
        c10d.ReduceOp.PRODUCT: [2, 6],
        c10d.ReduceOp.MIN: [1, 2],
        c10d.ReduceOp.MAX: [2, 3],
        c10d.ReduceOp.BAND: [0, 2],
        c10d.ReduceOp.BOR: [3, 3],
        c10d.ReduceOp.BXOR: [3, 1],
    }
    for op, expected in ops.items():
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
            tensor = torch.tensor([1 + rank, 2 + rank], dtype=dtype)
            c10d.all_reduce(tensor, op)
            assert tensor.tolist() == expected, (op, dtype)
            c10d.reduce(tensor.copy_(torch.tensor([1 + rank, 2 + rank])), 1, op)
            assert tensor.tolist() == (expected if rank == 1 else [1, 2]), (op, dtype)
            output = torch.empty(1, dtype=dtype)
            c10d.reduce_scatter_tensor(output, torch.tensor([1 + rank, 2 + rank], dtype=dtype), op)
            assert output.tolist() == expected[rank : rank + 1], (op, dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.tensor([1.0 + rank, 2.0 + rank], dtype=dtype)
        c10d.all_reduce(tensor, c10d.ReduceOp.AVG)
        assert tensor.tolist() == [1.5, 2.5]
        c10d.reduce_scatter_tensor(output := torch.empty(1, dtype=dtype), tensor, c10d.ReduceOp.AVG)
        assert output.tolist() == [1.5 + rank]
    # The sum is not a number of fp16.
    tensor = torch.tensor([60000.0], dtype=torch.float16)
    c10d.all_reduce(tensor, c10d.ReduceOp.AVG)
    assert tensor.item() == torch.tensor(60000.0, dtype=torch.float16).item()
    for op, expected_bools in ((c10d.ReduceOp.SUM, [True, True]), (c10d.ReduceOp.MIN, [True, False])):
        flags = torch.tensor([True, rank == 1])
        c10d.all_reduce(flags, op)
        assert flags.tolist() == expected_bools
    rows = torch.arange(6.0).view(2, 3).t() + rank  # not contiguous
    c10d.all_reduce(rows)
    assert torch.equal(rows, 2 * torch.arange(6.0).view(2, 3).t() + 1)
    outputs = [torch.empty(3, 2).t() for _ in range(2)]
    c10d.all_gather(outputs, torch.full((2, 3), float(rank)))
    assert [one.unique().tolist() for one in outputs] == [[0.0], [1.0]]
    if rank == 0:
        c10d.send(torch.arange(4.0), 1)
    else:
        c10d.recv(received := torch.empty(2, 2).t(), 0)
        assert torch.equal(received, torch.arange(4.0).view(2, 2))
    objects: list[Any] = [None, None]
    c10d.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    pieces: list[Any] = [None]
    c10d.scatter_object_list(pieces, ["a", "b"] if rank == 0 else None, 0)
    assert pieces == ["ab"[rank]]
    many = [torch.full((n,), float(rank + 1)) for n in (1, 4)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for one in many:
            c10d.all_reduce(one)
    manager.wait()
    assert [one.unique().tolist() for one in many] == [[3.0], [3.0]]
    future = c10d.all_reduce(torch.ones(1 << 20), async_op=True).get_future()
    assert future.wait()[0].unique().tolist() == [2.0]
    for wrong, expected_text in (
        (lambda: c10d.all_reduce(torch.ones(2, device="meta")), "ccl serves CPU tensors, xccl"),
        (
            lambda: c10d.all_reduce(torch.ones(2).to(torch.float8_e5m2)),
            "torch.float8_e5m2 tensors can be moved but not reduced",
        ),
        (
            lambda: c10d.all_reduce(torch.ones(2, dtype=torch.bool), c10d.ReduceOp.AVG),
            "op 'avg' is not defined for torch.bool",
        ),
        (lambda: c10d.send(torch.ones(2), 1 - rank, tag=-3), "send: tag: got -3; expected an integer of 0"),
    ):
        with pytest.raises(ValueError, match=expected_text):
            wrong()
    for unfit in (
        lambda: c10d.all_gather_into_tensor(torch.empty(1), torch.ones(1 << 20)),
        lambda: c10d.all_gather([torch.empty(3)] * 2, torch.ones(4)),
        lambda: c10d.reduce_scatter_tensor(torch.empty(2), torch.ones(6)),
        lambda: c10d.reduce_scatter_tensor(torch.empty(2), torch.ones(4, dtype=torch.float64)),
        lambda: c10d.all_to_all_single(torch.empty(4), torch.ones(4), [1, 1], [2, 2]),
        lambda: c10d.all_to_all([torch.empty(2)] * 2, [torch.ones(2), torch.ones(2, device="meta")]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            unfit()
    c10d.barrier()
    weight = torch.nn.Parameter(torch.full((2, 3), float(rank)).t())
    c10d.broadcast(weight, 1)
    c10d.all_reduce(weight, c10d.ReduceOp.AVG)
    assert weight.detach().unique().tolist() == [1.0]
    chained = (
        c10d.all_reduce(torch.ones(1 << 18), async_op=True)
        .get_future()
        .then(lambda _: c10d.all_reduce(torch.ones(3), async_op=True).get_future().wait()[0])
    )
    assert chained.wait().tolist() == [2.0] * 3
    half = c10d.new_group([1], timeout=None)
    if rank == 1:
        c10d.all_reduce(one := torch.ones(1), group=half)
        assert one.item() == 1
    c10d.barrier()
    c10d.destroy_process_group()
    c10d.init_process_group("ccl", store=c10d.PrefixStore("again", store), rank=rank, world_size=2)
    c10d.all_reduce(again := torch.ones(1))
    assert again.item() == 2
    c10d.destroy_process_group()


def test_torch_distributed_alone(ccl_environment: dict[str, Any]) -> None:
    run_ranks(run_plain_torch, 2, env=ccl_environment)


# --- sizes, ranks, processes


def run_lists_that_need_gradients() -> None:
    """What is read may be part of a graph; it is joined from memory of its own, or read where it lies."""
    rank = dist.get_rank()
    for apart in (True, False):
        leaf = torch.full((4,), rank + 1.0, requires_grad=True)
        parts = [leaf[:2] * 1.0, leaf[2:] * 1.0] if apart else list((leaf * 1.0).chunk(2))
        for api in (c10d, dist):
            received: Any = torch.zeros(2)
            api.reduce_scatter(received, parts)
            assert received.tolist() == [3.0, 3.0]
            outputs: Any = [torch.zeros(2), torch.zeros(2)]
            api.all_to_all(outputs, parts)
            assert [one.tolist() for one in outputs] == [[1.0, 1.0], [2.0, 2.0]]
            api.scatter(received, parts if rank == 1 else None, 1)
            assert received.tolist() == [2.0, 2.0]
            assert not received.requires_grad


def test_lists_that_need_gradients(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_lists_that_need_gradients)


def run_large() -> None:
    """Above 1 MiB another algorithm of oneCCL's is at work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
        for count in ((1 << 20) + 1, (1 << 21) + 7):
            steps = torch.arange(count) % 11
            tensor = (steps + rank).to(dtype)
            dist.all_reduce(tensor)
            assert torch.equal(tensor, (size * steps + sum(range(size))).to(dtype)), (dtype, count)


@pytest.mark.parametrize("world_size", [2, 4])
def test_large_tensors(ccl_pools: Pools, world_size: int) -> None:
    ccl_pools(world_size).run(run_large, timeout_s=60)


def run_more_than_two_gibibytes() -> None:
    size = (1 << 31) + 12345
    tensor = torch.full((size,), 1 + dist.get_rank(), dtype=torch.uint8)
    dist.all_reduce(tensor)
    assert int(tensor.min()) == int(tensor.max()) == 3
    dist.broadcast(tensor.fill_(dist.get_rank() + 5), 1)
    assert int(tensor.min()) == int(tensor.max()) == 6


@pytest.mark.slow
def test_more_than_two_gibibytes(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_more_than_two_gibibytes, timeout_s=250)


def run_oversubscribed() -> None:
    """More ranks than this machine may have cores, a group of them among them."""
    rank = dist.get_rank()
    pair = dist.new_group([rank - rank % 2, rank - rank % 2 + 1])
    for step in range(100):
        dist.all_reduce(mine := torch.tensor([float(rank + step)]), "sum", pair)
        assert mine.item() == 2 * (rank - rank % 2 + step) + 1
        dist.all_reduce(everyones := torch.tensor([float(rank + step)]))
        assert everyones.item() == 4 * step + 6
    dist.destroy_process_group(pair)


def test_more_ranks_than_cores(ccl_pools: Pools) -> None:
    ccl_pools(4).run(run_oversubscribed, timeout_s=60)


def run_forked() -> None:
    def child(pipe: Any) -> None:
        try:
            dist.all_reduce(torch.ones(2))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        else:
            pipe.send("no error")
        assert pending.is_completed()  # to it; and its end must not touch what belongs to the parent

    pending = dist.irecv(torch.empty(1), 1 - dist.get_rank())
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    assert mine.poll(20)
    said = mine.recv()
    process.join(20)
    assert process.exitcode == 0
    assert said.startswith("BackendUnavailableError: "), said
    assert "forked child" in said
    dist.send(torch.ones(1), 1 - dist.get_rank())
    pending.wait()
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2


def test_a_forked_child_is_refused(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_forked)


def run_interrupted(interrupted: str) -> None:
    """The memory of a call that an exception of a signal handler has ended stays until the operation is over."""
    dist.init_distributed("ccl", verbose=False)
    other, token = dist.new_group([0, 1]), torch.ones(4)
    for _ in range(3):  # the later ones on the fast path
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(token, group=other)
    if dist.get_rank() == 1:
        while not os.path.exists(interrupted):
            time.sleep(0.01)
        dist.all_reduce(tensor := torch.ones(1000))
        assert tensor.unique().tolist() == [2.0]
    else:
        kept = call_that_is_interrupted()
        assert kept() is not None
        Path(interrupted).touch()
    for _ in range(8):
        dist.all_reduce(token, group=other)
    dist.all_reduce(tensor := torch.ones(1000))
    assert tensor.unique().tolist() == [2.0]


def call_that_is_interrupted() -> weakref.ref[torch.Tensor]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    tensor = torch.ones(1000)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.02)  # within the native call, which ends after 0.05 s
    with contextlib.suppress(KeyboardInterrupt):
        dist.all_reduce(tensor)
        pytest.fail("the call was not interrupted")
    return weakref.ref(tensor)


def test_an_interrupted_call_keeps_its_memory(ccl_environment: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(run_interrupted, 2, str(tmp_path / "interrupted"), env=ccl_environment)


def run_garbage() -> None:
    tensor = torch.ones(5)
    for makes_cycle_at_handle in (True, False) * 20:
        work: Any = dist.all_reduce(tensor, "max", async_op=True)
        work.wait()
        handle = work._handle
        # Objects of a garbage are finalized in no order that they can know.
        work.cycle = [work]
        if makes_cycle_at_handle and hasattr(handle, "kept"):
            handle.kept = (handle, work)
        del work, handle
        gc.collect()
    dist.barrier()


def test_handles_in_cyclic_garbage_are_released_once(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_garbage)


def run_progress() -> None:
    """Rank 0 starts an operation and does other things that rank 1 needs first."""
    tensor = torch.ones(1 << 20)
    work = dist.all_reduce(tensor, async_op=True)
    store = c10d.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["rank 1 is done"])  # which it is only when the operation is
        assert work is not None
        assert work.wait()
    else:
        assert work is not None
        work.wait()
        store.set("rank 1 is done", "")
    assert tensor.unique().tolist() == [2.0]


def test_asynchronous_operations_progress_without_their_caller(ccl_pools: Pools) -> None:
    ccl_pools(2).run(run_progress)


def run_after_a_mismatch() -> str:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    dist.init_distributed("ccl", verbose=False, timeout=5)
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(4))
    said = ""
    try:
        dist.all_reduce(torch.ones(1000 if rank == 0 else 4))
    except dist.CommError as error:
        said = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    # oneCCL ends the call of the rank with more elements, with a wrong result, which the end of its world tells.
    assert said or any("after calls that differed" in line for line in lines)
    with pytest.raises(dist.BackendUnavailableError, match=r"failed earlier in this process .*start them again"):
        dist.init_distributed("ccl", verbose=False, timeout=30)
    # Another library takes over.
    dist.init_distributed("gloo", verbose=False, timeout=30)
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2
    dist.destroy_process_group()
    return said


def test_after_a_mismatch_on_oneccl_the_processes_must_end(rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0"}
    said = [text for text in run_ranks(run_after_a_mismatch, 2, timeout_s=100, env=env) if text]
    mismatches = [text for text in said if text.startswith("CollectiveMismatchError")]
    assert mismatches, said
    for text in mismatches:
        assert "end the processes of all ranks and start them again" in text


def wait_long() -> float:
    """Return the share of a core that this rank used while it waited in a call for rank 1."""
    dist.init_distributed("ccl", verbose=False, timeout=60)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        time.sleep(4)
    begin, used = time.monotonic(), time.thread_time()
    dist.all_reduce(torch.ones(4))
    share = (time.thread_time() - used) / (time.monotonic() - begin)
    dist.destroy_process_group()
    return share


def test_a_long_wait_on_oneccl_does_not_take_a_core(rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0"}
    assert run_ranks(wait_long, 2, timeout_s=100, env=env)[0] < 0.25
