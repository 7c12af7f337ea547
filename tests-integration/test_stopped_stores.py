"""The process that serves the store is stopped: calls that wait in the store end all the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import Store

import comm_orchestrator as dist
from comm_utils.errors import CommError, CommTimeoutError
from comm_utils.testing import patience, run_ranks, run_ranks_outcomes
from comm_utils.torch_support import group_agreement
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.store_waits import StoreWait, answers

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "ccl"])
TIMEOUT_S = 20


def outlasts_a_stopped_store(backend: str, folder: str) -> None:
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    pids: list[Any] = [os.getpid()]
    dist.broadcast_object_list(pids, src=0)
    rank, first, here = dist.get_rank(), psutil.Process(pids[0]), Path(folder)
    (here / f"{rank} is ready").touch()
    if rank == 0:
        _await(here / "1 is ready", here / "2 is ready")
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        while first.status() != psutil.STATUS_STOPPED:
            time.sleep(0.02)
        for call in (dist.new_group, dist.monitored_barrier):
            silent = rf"{call.__name__} on rank {rank}: the store of the world at .* does not answer"
            with pytest.raises(CommTimeoutError, match=silent):
                call(timeout=0.5)
    dist.destroy_process_group()
    (here / f"{rank} is done").touch()
    if rank == 1:
        _await(here / "2 is done")
        first.send_signal(signal.SIGCONT)


def _await(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.02)


@BACKENDS
def test_calls_in_a_stopped_store_end(backend: str, tmp_path: Path) -> None:
    """TCPStore waits for an answer without a limit."""
    run_ranks(outlasts_a_stopped_store, 3, backend, str(tmp_path))


def loses_the_store_while_a_group_is_connected(folder: str) -> tuple[str, float]:
    """Rank 0, which has the store, is stopped when it has come; return the error of rank 1, and how long it waited."""
    dist.init_distributed("gloo", timeout=TIMEOUT_S, verbose=False)
    pids: list[Any] = [os.getpid()]
    dist.broadcast_object_list(pids, src=0)
    rank, first, here, agree = dist.get_rank(), psutil.Process(pids[0]), Path(folder), group_agreement.agree

    def agree_and_stop(*args: Any) -> Any:
        places = agree(*args)
        if rank == 0:
            _await(here / "1 has come")
            os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("went on")
        else:
            (here / "1 has come").touch()
            while first.status() != psutil.STATUS_STOPPED:
                time.sleep(0.02)
        return places

    group_agreement.agree = agree_and_stop
    begin = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="went on"):
            dist.new_group([0, 1], timeout=1)
        return "", 0.0
    try:
        with pytest.raises(CommError) as caught:
            dist.new_group([0, 1], timeout=1)
        return str(caught.value), time.monotonic() - begin
    finally:
        first.send_signal(signal.SIGCONT)


@pytest.mark.skipif(not hasattr(Store, "clone"), reason="needs a second connection to the store, of torch 2.8")
def test_a_store_that_is_stopped_while_a_group_is_connected_does_not_keep_the_others(tmp_path: Path) -> None:
    outcomes = run_ranks_outcomes(loses_the_store_while_a_group_is_connected, 2, str(tmp_path), timeout_s=60)
    text, seconds = outcomes[1].value
    assert "new_group on rank 1: the store of the world at " in text, text
    assert "does not answer" in text
    assert seconds < 6 * patience()


def loses_the_store_while_its_own_connection_is_opened(folder: str) -> str:
    """Rank 0, which has the store, ends while rank 1 opens a second connection to it; return the error of rank 1."""
    dist.init_distributed("gloo", timeout=10 * TIMEOUT_S, verbose=False)
    pids: list[Any] = [os.getpid()]
    dist.broadcast_object_list(pids, src=0)
    rank, first, here, agree = dist.get_rank(), psutil.Process(pids[0]), Path(folder), group_agreement.agree

    def connections() -> int:
        mine = psutil.Process().net_connections("tcp")
        return sum(bool(one.raddr) and one.raddr.port == int(os.environ["MASTER_PORT"]) for one in mine)

    def end_when_another_is_open(before: int) -> None:
        while connections() == before:
            time.sleep(0.02)
        first.kill()

    def agree_and_stop(*args: Any) -> Any:
        places = agree(*args)
        if rank == 0:
            _await(here / "1 has come")
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            (here / "1 has come").touch()
            while first.status() != psutil.STATUS_STOPPED:
                time.sleep(0.02)
            threading.Thread(target=end_when_another_is_open, args=(connections(),), daemon=True).start()
        return places

    group_agreement.agree = agree_and_stop
    with pytest.raises(CommError) as caught:
        dist.new_group([0, 1])
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.skipif(not hasattr(Store, "clone"), reason="needs a second connection to the store, of torch 2.8")
def test_a_store_that_ends_while_a_group_is_connected_does_not_keep_the_others(tmp_path: Path) -> None:
    """TCPStore tried to connect for the timeout of the world."""
    outcomes = run_ranks_outcomes(loses_the_store_while_its_own_connection_is_opened, 2, str(tmp_path), timeout_s=60)
    assert outcomes[1].status == "returned", outcomes[1]
    assert outcomes[1].value.startswith("PeerLostError: new_group on rank 1: "), outcomes[1].value
    assert "rank 0" in outcomes[1].value


def waits_longer_than_the_holder_of_the_store(folder: str, call: str) -> str:
    """Return the error of rank 1, which still waits for rank 2 when rank 0 has given up and left with the store."""
    dist.init_distributed("gloo", timeout=10 * TIMEOUT_S, verbose=False)
    dist.barrier()
    rank, done = dist.get_rank(), Path(folder) / "done"
    said = ""
    if rank == 2:
        _await(done)
    else:
        with pytest.raises(CommError) as caught:
            getattr(dist, call)(timeout=3 if rank == 0 else 10 * TIMEOUT_S)
        said = f"{type(caught.value).__name__}: {caught.value}"
        if rank == 1:
            done.touch()
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize("call", ["new_group", "monitored_barrier"])
def test_who_kept_the_holder_of_the_store_waiting_is_named(tmp_path: Path, call: str) -> None:
    """The error named rank 0, whose own error named rank 2."""
    first, second, _ = run_ranks(waits_longer_than_the_holder_of_the_store, 3, str(tmp_path), call)
    assert first.startswith("CommTimeoutError: ")
    assert "[2] did not" in first or "rank 2" in first
    assert second.startswith(f"PeerLostError: {call} on rank 1: the store of the world has gone: "), second
    assert f" has not called {call}" in second.partition("Until then, the call waited: ")[2].partition("rank 2 ")[2]


def ends_its_wait_after_the_holder_of_the_store(folder: str) -> str:
    """Return the error of rank 1, whose time is over just before rank 0, with the store, has given up and left."""
    dist.init_distributed("gloo", timeout=10 * TIMEOUT_S, verbose=False)
    dist.barrier()
    rank, over, done = dist.get_rank(), Path(folder) / "over", Path(folder) / "done"
    until = StoreWait.until

    def until_the_store_has_gone(wait: StoreWait, store: BoundedStore, *args: Any) -> bool:
        found = until(wait, store, *args)
        over.touch()
        while answers(store):
            time.sleep(0.02)
        return found

    said = ""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(StoreWait, "until", until_the_store_has_gone)
        if rank == 2:
            _await(done)
        else:
            with pytest.raises(CommError) as caught:
                dist.new_group(timeout=1)
            said = f"{type(caught.value).__name__}: {caught.value}"
    if rank == 0:
        _await(over)
    elif rank == 1:
        done.touch()
    dist.destroy_process_group()
    return said


def test_who_kept_the_ranks_waiting_is_named_where_the_store_goes_first(tmp_path: Path) -> None:
    """The error named rank 0, and advised a barrier before its end."""
    _, second, _ = run_ranks(ends_its_wait_after_the_holder_of_the_store, 3, str(tmp_path))
    assert second.startswith("PeerLostError: new_group on rank 1: the store of the world has gone: "), second
    assert " has not called new_group" in second.partition("Until then, the call waited: ")[2].partition("rank 2 ")[2]
