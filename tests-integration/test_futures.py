"""torch's methods of handles: what a hook of DDP makes of them, and who completes a future that nobody waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import comm_orchestrator as dist
from comm_utils.testing import run_ranks, run_ranks_outcomes
from comm_utils.torch_support.completing import Completing

pytestmark = pytest.mark.cpu

LIBRARIES = pytest.mark.parametrize(
    ("backend", "env"),
    [("gloo", {}), ("ccl", {"CCL_SHARED_MEMORY": "1"}), ("ccl", {"CCL_SHARED_MEMORY": "0"})],
    ids=["gloo", "shared", "oneccl"],
)


def set_up(backend: str, **options: Any) -> None:
    dist.init_distributed(backend, verbose=False, timeout=30.0, **options)


def asynchronous_calls() -> dict[str, Callable[[], tuple[Any, list[torch.Tensor]]]]:
    """Return for each kind of handle a call, which returns it with the tensors that its future gives."""
    rank, W = dist.get_rank(), dist.get_world_size()
    n = 20_000

    def one(call: Callable[..., Any], *others: Any, **options: Any) -> tuple[Any, list[torch.Tensor]]:
        tensor = torch.ones(n)
        return call(tensor, *others, async_op=True, **options), [tensor]

    def gathered() -> tuple[Any, list[torch.Tensor]]:
        parts = [torch.zeros(n) for _ in range(W)]
        return dist.all_gather(parts, torch.ones(n), async_op=True), parts

    def coalesced() -> tuple[Any, list[torch.Tensor]]:
        with dist.coalescing(async_op=True) as work:
            dist.all_reduce(torch.ones(3))
            dist.all_reduce(torch.ones(4))
        return work, []

    def message() -> tuple[Any, list[torch.Tensor]]:
        tensor = torch.ones(n)
        return (dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)), [tensor]

    return {
        "all_reduce": lambda: one(dist.all_reduce),
        "of an average": lambda: one(dist.all_reduce, "avg"),
        "with a timeout": lambda: one(dist.all_reduce, timeout=20),
        "compressed": lambda: one(dist.all_reduce, compression="bf16"),
        "broadcast": lambda: one(dist.broadcast, 0),
        "all_gather_into_tensor": lambda: one(dist.all_gather_into_tensor, torch.ones(n // W)),
        "reduce_scatter_tensor": lambda: one(dist.reduce_scatter_tensor, torch.ones(n * W)),
        "all_gather": gathered,
        "barrier": lambda: (dist.barrier(async_op=True), []),
        "coalescing": coalesced,
        "message": message,
    }


def run_each_handle(backend: str, strict: bool, recorded: bool) -> None:
    set_up(backend, config={"checks": {"mismatch": "strict" if strict else "lazy"}})
    dist.configure(enabled=recorded)
    for name, call in asynchronous_calls().items():
        work, tensors = call()
        assert isinstance(work, dist.Work), name
        found: list[list[torch.Tensor]] = []
        future = work.get_future()
        assert work.get_future() is future, name
        then = future.then(lambda done, found=found: found.append(done.value()) or "then")
        assert then.wait() == "then", name
        assert [id(one) for one in found[0]] == [id(one) for one in tensors], name
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name
        work.synchronize()
        assert all(one.any() for one in tensors), name
        if name != "message" or dist.get_rank() == 0:  # which sends it
            with pytest.raises(RuntimeError, match=r"source_?[rR]ank"):
                work.source_rank()
            with pytest.raises(RuntimeError, match=r"source_?[rR]ank"):
                work._source_rank()
        else:
            assert work.source_rank() == work._source_rank() == 0
    dist.destroy_process_group()


@LIBRARIES
@pytest.mark.parametrize("how", ["plain", "strict", "recorded"])
def test_every_handle_has_torchs_methods(backend: str, env: dict[str, str], how: str) -> None:
    run_ranks(run_each_handle, 2, backend, how == "strict", how == "recorded", timeout_s=90, env=env)


def run_ddp(backend: str) -> None:
    set_up(backend)

    def gradients(hook: Callable[[Any, Any], Any] | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        for step in range(3):
            torch.manual_seed(10 * step + dist.get_rank())
            ddp.zero_grad()
            ddp(torch.randn(5, 8)).sum().backward()
        return [one.grad.clone() for one in model.parameters()]

    # DDP refuses annotations that are text.
    def average(_, bucket):
        return dist.all_reduce(bucket.buffer(), "avg", async_op=True).get_future().then(lambda done: done.value()[0])

    def halves(_, bucket):
        tensor = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0])

    expected = gradients(None)
    for hook in (average, halves):
        for one, other in zip(gradients(hook), expected, strict=True):
            torch.testing.assert_close(one, other)
    dist.destroy_process_group()


@LIBRARIES
def test_a_hook_of_ddp_gives_the_gradients_of_none(backend: str, env: dict[str, str]) -> None:
    run_ranks(run_ddp, 2, backend, timeout_s=90, env=env)


def run_losing(backend: str, call: str) -> str:
    set_up(backend)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        time.sleep(0.5)
        os._exit(3)
    work, _ = asynchronous_calls()[call]()
    chained = work.get_future().then(lambda done: done.value())
    with pytest.raises(dist.PeerLostError, match="rank 1"):
        work.get_future().wait()
    with pytest.raises(RuntimeError, match="rank 1"):
        chained.wait()
    assert not work.is_success()
    return type(work.exception()).__name__


@LIBRARIES
@pytest.mark.parametrize("call", ["all_reduce", "of an average", "all_gather"])
def test_a_failure_reaches_the_future(backend: str, env: dict[str, str], call: str) -> None:
    survivor, _ = run_ranks_outcomes(run_losing, 2, backend, call, timeout_s=90, env=env)
    assert survivor.value == "PeerLostError", survivor


def run_late(backend: str) -> str:
    set_up(backend)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3)
        return ""
    future = dist.all_reduce(torch.ones(3), async_op=True, timeout=1.5).get_future()
    with pytest.raises(dist.CommTimeoutError) as raised:
        future.wait()
    return str(raised.value)


@LIBRARIES
def test_a_future_that_times_out_names_who_is_missing(backend: str, env: dict[str, str]) -> None:
    text, _ = run_ranks(run_late, 2, backend, timeout_s=90, env=env)
    assert "rank 1 (pid " in text
    assert "has not called all_reduce, for which rank 0 waits: it is in none of its calls, at " in text


def run_in_another_order(backend: str) -> None:
    """A future that is asked for first ends last: it waits for what a later one starts."""
    set_up(backend)
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        arrived = torch.zeros(3)
        message = dist.irecv(arrived, 1).get_future()
        dist.all_reduce(torch.ones(3), "avg", group=group, async_op=True).get_future().wait()
        inner = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        # In a callback of the thread that completes futures.
        last = message.then(lambda _: dist.all_reduce(torch.ones(5), "avg", async_op=True).get_future().wait())
        assert inner.wait()[0].tolist() == [2.0] * 3
        assert last.wait()[0].tolist() == [1.0] * 5
        assert arrived.tolist() == [1.0] * 3
    else:
        dist.all_reduce(torch.ones(3), "avg", group=group)
        dist.all_reduce(torch.ones(3), group=group)
        dist.send(torch.ones(3), 0)
        dist.all_reduce(torch.ones(5), "avg")
    dist.destroy_process_group()


@LIBRARIES
def test_a_future_does_not_hold_up_others(backend: str, env: dict[str, str]) -> None:
    run_ranks(run_in_another_order, 2, backend, timeout_s=60, env=env)


def run_torchs_calls_in_another_order() -> None:
    """The first future's operation ends after the second's, which its end depends on."""
    set_up("ccl")
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    store, tensors = c10d.distributed_c10d._get_default_store(), [torch.ones(4), torch.ones(4)]
    if dist.get_rank() == 0:
        futures = [
            c10d.all_reduce(tensor, group=group, async_op=True).get_future()
            for tensor, group in zip(tensors, (first, second), strict=True)
        ]
        futures[1].wait()
        store.set("second", "")
        futures[0].wait()
    else:
        time.sleep(0.5)
        c10d.all_reduce(tensors[1], group=second)
        store.wait(["second"], timedelta(seconds=20))
        c10d.all_reduce(tensors[0], group=first)
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 4] * 2


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_future_of_torchs_calls_does_not_hold_up_others(shared: str) -> None:
    run_ranks(run_torchs_calls_in_another_order, 2, env={"CCL_SHARED_MEMORY": shared})


def test_futures_are_completed_however_busy_the_machine_is() -> None:
    """A wait of the completing thread may be over before it begins, and must not last for ever then."""
    completing = Completing()
    for number in range(5000):
        looks, done = iter([False] * (number % 4)), threading.Event()
        completing.add(lambda looks=looks: next(looks, True), done.set)
        assert done.wait(20), number
    completing.stop()


def test_a_future_ends_where_its_operation_cannot_say_whether_it_is_complete() -> None:
    def is_completed() -> bool:
        raise RuntimeError("the library has gone")

    def refuse() -> None:
        raise ValueError("set twice")

    completing = Completing()
    done = threading.Event()
    completing.add(is_completed, refuse)  # which keeps no other one waiting
    completing.add(is_completed, done.set)
    assert done.wait(20)
    completing.stop()


def run_interrupted_finish(backend: str) -> None:
    set_up(backend)
    tensor = torch.full((200_000,), float(dist.get_rank() * 2 + 1), dtype=torch.float16)
    work = dist.all_reduce(tensor, "avg", async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    with pytest.MonkeyPatch.context() as patch:

        def interrupt(*_: Any) -> None:
            raise OSError("interrupted")

        patch.setattr("comm_collectives.work.run", interrupt)
        patch.setattr("comm_backend_ccl.work.torch.inference_mode", interrupt)
        with pytest.raises(OSError, match="interrupted"):
            work.wait()
    # Nobody knows how far it came.
    for question in (work.wait, work.get_future().wait):
        with pytest.raises((OSError, RuntimeError), match="interrupted"):
            question()
    assert isinstance(work.exception(), OSError)
    assert not work.is_success()
    dist.barrier()


def test_a_handle_whose_result_is_not_there_does_not_say_that_it_is() -> None:
    run_ranks(run_interrupted_finish, 2, "gloo")
