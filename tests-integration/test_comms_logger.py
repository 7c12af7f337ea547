"""The comms logger counts every call once, by whichever way it travels, and its times agree with another clock."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import RankPool

Pools: TypeAlias = Callable[[int], RankPool]

CALLS = 7


@contextlib.contextmanager
def recording() -> Iterator[None]:
    dist.reset_log()
    dist.configure(enabled=True)
    try:
        yield
    finally:
        dist.configure(enabled=False)
        dist.reset_log()


def recorded() -> dict[str, dict[int, dict[str, Any]]]:
    with contextlib.redirect_stdout(None):
        found = dist.log_summary(return_dict=True)
    assert found is not None
    summary: dict[str, dict[int, dict[str, Any]]] = found["summary"]
    return summary


def run_calls() -> None:
    W, me = dist.get_world_size(), dist.get_rank()
    part, whole = torch.ones(64), torch.ones(64 * W)  # 256 B a rank
    expected: dict[str, tuple[Callable[[], Any], int]] = {
        "all_reduce": (lambda: dist.all_reduce(part), 256),
        "inference_all_reduce": (lambda: dist.inference_all_reduce(part), 256),
        "broadcast": (lambda: dist.broadcast(part, 1), 256),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, part), 256 * W),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(part, whole), 256 * W),
        "all_to_all_single": (lambda: dist.all_to_all_single(whole, whole.clone()), 256 * W),
        "barrier": (dist.barrier, 0),
        "send" if me == 0 else "recv": (lambda: (dist.send if me == 0 else dist.recv)(part, 1 - me), 256),
    }
    for call, _ in expected.values():  # what is prepared without the logger is not what is prepared with it
        call()
    for again in range(2):
        with recording():
            for name, (call, size) in expected.items():
                before, start = recorded(), time.perf_counter()
                assert name not in before, (name, again)
                for _ in range(CALLS):
                    call()
                took_ms = (time.perf_counter() - start) * 1e3
                row = recorded()[name][size]
                assert row["count"] == CALLS, (name, row)
                assert 0 < CALLS * row["min_latency_ms"] <= row["total_latency_ms"] <= took_ms, (name, row, took_ms)


def test_each_call_counts_once(pools: Pools) -> None:
    pools(2).run(run_calls)


def run_groups() -> str:
    me = dist.get_rank()
    group = dist.new_group([0, 2])
    tensor, out = torch.ones(16), io.StringIO()
    with recording():
        for _ in range(3):
            dist.all_reduce(tensor)
            if me in (0, 2):
                dist.all_reduce(tensor, "sum", group)
        with contextlib.redirect_stdout(out):
            dist.log_summary()
    if me in (0, 2):
        dist.destroy_process_group(group)
    return out.getvalue()


def test_groups_are_kept_apart(pools: Pools) -> None:
    lines = pools(4).run(run_groups)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()][:4] for line in lines]
    assert cells == [["all_reduce", "64 B", "2 [0, 2]", "3"], ["all_reduce", "64 B", "4", "3"]]


def run_against_a_clock(asynchronous: bool) -> None:
    tensor = torch.ones(2**24)  # 64 MiB: long enough that the calls themselves are nothing
    dist.all_reduce(tensor, async_op=asynchronous)
    dist.barrier()
    took_ms = []
    with recording():
        for _ in range(10):
            ends: list[float] = []
            start = time.perf_counter()
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is None:
                ends.append(time.perf_counter())
            elif not hasattr(work, "get_future"):
                while not work.is_completed():
                    pass
                ends.append(time.perf_counter())
                time.sleep(0.01)  # which is not the operation's
                work.wait()
            else:
                work.get_future().add_done_callback(lambda _, ends=ends: ends.append(time.perf_counter()))
                work.wait()
                while not ends:  # the library's thread is about to
                    time.sleep(1e-4)
            took_ms.append((ends[0] - start) * 1e3)
        row = recorded()["all_reduce"][2**26]
    assert row["count"] == 10
    # Of the fastest: between the readings of two clocks, other processes may have had their turn.
    assert row["min_latency_ms"] == pytest.approx(min(took_ms), rel=0.05)


def run_late_waits() -> None:
    tensor = torch.ones(16)
    with recording():
        for _ in range(5):
            work = dist.all_reduce(tensor, async_op=True)
            time.sleep(0.1)
            assert work is not None
            work.wait()
        assert recorded()["all_reduce"][64]["min_latency_ms"] < 50


def test_an_operation_ends_before_somebody_waits(pools: Pools) -> None:
    pools(2).run(run_late_waits)
    pools(1).run(run_late_waits)  # complete before there is a handle


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_times_agree_with_another_clock(pools: Pools, asynchronous: bool) -> None:
    pools(2).run(run_against_a_clock, asynchronous)
