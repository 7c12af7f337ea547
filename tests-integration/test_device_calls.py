"""Calls that the host has left: streams, graphs, records, and what happens when ranks cannot go on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.flight_recorder import RECORDER, open_ring
from comm_utils.testing import RankOutcome, run_ranks, run_ranks_outcomes, sharing_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# The looks of the watch come at most so far apart.
LOOK_S = 0.6


def env(ranks: int) -> dict[str, Any]:
    return {} if ranks <= torch.cuda.device_count() else sharing_device(ranks)


def start(timeout: float = 60) -> tuple[int, int, torch.Tensor]:
    dist.init_distributed(verbose=False, timeout=timeout)
    tensor = torch.ones(1 << 18, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return dist.get_rank(), dist.get_world_size(), tensor.fill_(1)


def sleep_on_device(seconds: float) -> None:
    torch.cuda._sleep(round(seconds * torch.cuda.get_device_properties(0).clock_rate * 1e3))


# --- streams and graphs


def order_streams() -> None:
    _, W, tensor = start()
    dist.all_reduce(tensor, async_op=True).wait()
    tensor.fill_(1).mul(2)  # what is used first is loaded, for which the host waits for the device
    sleep_on_device(0.001)
    torch.cuda.synchronize()
    begin = time.monotonic()
    sleep_on_device(0.5)
    work = dist.all_reduce(tensor, async_op=True)
    assert not work.is_completed()
    assert work.wait()  # has the stream wait, not the host
    doubled = tensor * 2
    assert time.monotonic() - begin < 0.4
    side, other = torch.cuda.Stream(), torch.ones(1000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(other)
        other.mul_(3)
    torch.cuda.current_stream().wait_stream(side)
    assert (doubled == 2 * W).all()
    assert (other == 3 * W).all()
    torch.cuda.synchronize()
    assert work.is_completed()
    dist.destroy_process_group()


def capture_graph() -> None:
    _, W, tensor = start()
    dist.configure(enabled=True)
    gathered, codes = torch.zeros(W * 1000, device="cuda"), torch.ones(1000, device="cuda")
    dist.all_gather_into_tensor(gathered, codes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.mul_(2)
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, codes)
        time.sleep(LOOK_S)  # the watch looks meanwhile
    for round in range(3):
        tensor.fill_(round)
        codes.fill_(round)
        graph.replay()
        torch.cuda.synchronize()
        assert (tensor == 2 * round * W).all()
        assert (gathered == round).all()
    dist.all_reduce(tensor.fill_(1))
    assert tensor[0].item() == W
    graph.reset()  # NCCL destroys no communicator that a graph uses
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", [order_streams, capture_graph])
def test_streams_and_graphs(program: Callable[[], None], ranks: int) -> None:
    run_ranks(program, ranks, timeout_s=100, env=env(ranks))


# --- the flight recorder


def record() -> None:
    _, _, tensor = start()
    ring = open_ring(RECORDER.path)
    sleep_on_device(0.001)
    time.sleep(LOOK_S)

    def calls() -> list[Any]:
        ring.refresh()
        return [call for call in ring.calls(0, most=100) if call.operation == "all_reduce"]

    sleep_on_device(1.5)
    for _ in range(50):
        dist.all_reduce(tensor)
    work = dist.all_reduce(tensor, async_op=True)
    assert not calls()[-1].is_waited_for
    work.wait()
    time.sleep(LOOK_S)
    assert [call.is_open for call in calls()] == [False] + [True] * 51
    assert all(call.is_waited_for for call in calls())
    torch.cuda.synchronize()
    time.sleep(LOOK_S)
    assert not any(call.is_open for call in calls())
    dist.destroy_process_group()


def test_a_call_ends_in_the_records_when_the_device_has_completed_it() -> None:
    run_ranks(record, 2, timeout_s=60, env=env(2))


# --- ranks that cannot go on


def go_on(tensor: torch.Tensor, kind: type[Exception], for_s: float = 10) -> str:
    """Return the error of the first call that raises."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        try:
            dist.all_reduce(tensor)
        except kind as error:
            return str(error)
        torch.cuda.synchronize()
        time.sleep(0.02)
    raise AssertionError(f"no call raised in {for_s:g} s")


def say_errors() -> list[str]:
    seen: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    logging.getLogger("comm").addHandler(Keep(logging.ERROR))
    return seen


def lose_peer() -> tuple[float, str, list[str]]:
    rank, _, tensor = start()
    seen = say_errors()
    if rank == 1:
        time.sleep(0.5)  # the others are in the call
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    dist.all_reduce(tensor)  # is in the stream, and the host goes on
    torch.cuda.synchronize()  # waits for a rank that will not come
    took_s = time.monotonic() - begin
    text = go_on(tensor, dist.PeerLostError)
    assert torch.ones(3, device="cuda").sum().item() == 3
    dist.destroy_process_group()
    return took_s, text, seen


def values(outcomes: list[RankOutcome]) -> list[Any]:
    for one in outcomes:
        assert one.status == "returned", (one.message, one.traceback)
    return [one.value for one in outcomes]


def test_a_killed_rank_is_named_and_the_device_goes_on() -> None:
    first, second, third = run_ranks_outcomes(lose_peer, 3, timeout_s=60, env=env(3))
    assert second.exit_code == -signal.SIGKILL
    for took_s, text, seen in values([first, third]):
        assert took_s < 5
        assert "rank 1 (pid " in text, text
        assert "has ended" in text, text
        assert any("rank 1 (pid " in one and "results are undefined" in one for one in seen), seen


def miss_call() -> tuple[float, str]:
    rank, _, tensor = start(timeout=6)
    begin = time.monotonic()
    if rank == 1:
        time.sleep(8)
        text = go_on(tensor, dist.CommError)
    else:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        text = go_on(tensor, dist.CommTimeoutError)
    took_s = time.monotonic() - begin
    dist.destroy_process_group()
    return took_s, text


def test_a_missing_rank_is_named_before_the_library_ends_the_process() -> None:
    (took_s, text), (_, late) = values(run_ranks_outcomes(miss_call, 2, timeout_s=60, env=env(2)))
    assert 4 < took_s < 7
    assert "the device has not completed a call in " in text, text
    assert "(the timeout is 6 s)" in text, text
    assert "rank 1 (pid " in text, text
    assert "has not called all_reduce" in text, text
    assert "rank 0" in late, late


def differ() -> tuple[float, str]:
    rank, _, tensor = start()
    begin = time.monotonic()
    try:
        dist.all_reduce(tensor[: 1000 * (rank + 1)])  # NCCL returns a wrong result, or waits
    except dist.CollectiveMismatchError as error:
        text = str(error)
    else:
        torch.cuda.synchronize()
        time.sleep(1)
        text = go_on(tensor, dist.CollectiveMismatchError)
    took_s = time.monotonic() - begin
    dist.destroy_process_group()
    return took_s, text


@pytest.mark.parametrize("mode", ["lazy", "strict"])
def test_calls_that_differ_are_named(mode: str) -> None:
    for took_s, text in values(
        run_ranks_outcomes(differ, 2, timeout_s=60, env={**env(2), "COMM_CHECKS__MISMATCH": mode})
    ):
        assert took_s < 4
        assert "1000 elements of float32" in text, text
        assert "2000 elements of float32" in text, text


def be_interrupted() -> tuple[float, str]:
    rank, _, tensor = start()
    begin = time.monotonic()
    if rank == 1:
        time.sleep(4)  # makes no call, for which rank 0 waits
        text = go_on(tensor, dist.CommError)
        dist.destroy_process_group()
        return 0.0, text
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
    except KeyboardInterrupt:
        pass
    took_s = time.monotonic() - begin
    text = go_on(tensor, dist.CommError)
    dist.destroy_process_group()
    return took_s, text


def test_ctrl_c_ends_a_wait_for_the_device() -> None:
    (took_s, text), _ = values(run_ranks_outcomes(be_interrupted, 2, timeout_s=60, env=env(2)))
    assert took_s < 4
    assert "was interrupted (SIGINT)" in text, text
