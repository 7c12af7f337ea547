"""Barriers through the store that something ends early: no rank passes alone, and who has gone is said."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import comm_orchestrator as dist
from comm_utils.errors import CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.testing import run_ranks, run_ranks_outcomes
from comm_utils.torch_support.monitored_barrier import pass_monitored_barrier

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "ccl"])
TIMEOUT_S = 20


class Interruption(Exception):
    """What a signal handler raises."""


def is_interrupted(backend: str, comes_meanwhile: bool) -> tuple[float, float]:
    """Return when this rank came to its second barrier, and when it had passed it."""

    def interrupt(*_: object) -> None:
        if comes_meanwhile:  # rank 1 opens the barrier while the handler runs
            time.sleep(2)
        raise Interruption

    signal.signal(signal.SIGALRM, interrupt)
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    if dist.get_rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interruption):
            dist.monitored_barrier()
    else:
        time.sleep(1.5)
        if comes_meanwhile:
            dist.monitored_barrier()
            time.sleep(2)
    came = time.monotonic()
    dist.monitored_barrier()
    passed = time.monotonic()
    dist.destroy_process_group()
    return came, passed


@BACKENDS
@pytest.mark.parametrize("comes_meanwhile", [False, True])
def test_a_barrier_that_a_signal_ends_counts_its_rank_once(backend: str, comes_meanwhile: bool) -> None:
    ends = run_ranks(is_interrupted, 2, backend, comes_meanwhile)
    assert min(passed for _, passed in ends) >= max(came for came, _ in ends)


def gives_up_by_another_clock(backend: str, folder: str) -> str:
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    has_given_up, done = Path(folder, "has_given_up"), Path(folder, "done")
    rank, text = dist.get_rank(), ""
    if rank == 1:
        real = time.time
        time.time = lambda: real() + 3600
    else:
        _await(has_given_up)
    with pytest.raises(CommTimeoutError) as raised:
        dist.monitored_barrier(timeout=0.5)
    if rank == 1:
        has_given_up.touch()
        _await(done)
    else:
        text = str(raised.value)
        done.touch()
    dist.destroy_process_group()
    return text


def _await(path: Path) -> None:
    end = time.monotonic() + 30
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)


@BACKENDS
def test_a_rank_that_gave_up_before_is_missing_whatever_its_clock_shows(backend: str, tmp_path: Path) -> None:
    text, _ = run_ranks(gives_up_by_another_clock, 2, backend, str(tmp_path))
    assert text.startswith("monitored_barrier: rank 1 did not arrive within 0.5 s")


def outlives_the_store(backend: str) -> None:
    dist.init_distributed(backend, timeout=TIMEOUT_S, verbose=False)
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"^monitored_barrier on "):
            dist.monitored_barrier()
    dist.destroy_process_group()


@BACKENDS
def test_a_barrier_whose_store_has_gone_says_so(backend: str) -> None:
    killed, *others = run_ranks_outcomes(outlives_the_store, 3, backend)
    assert killed.status == "died"
    assert [(one.status, one.message) for one in others] == [("returned", "")] * 2


class Client:
    """A rank's connection to the store, of which ``before`` gets every question before it is asked."""

    def __init__(self, port: int, before: Callable[[str, tuple[Any, ...]], object] = lambda *_: None) -> None:
        self._store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
        self._before = before

    def __getattr__(self, name: str) -> Any:
        question = getattr(self._store, name)

        def ask(*arguments: Any) -> Any:
            self._before(name, arguments)
            return question(*arguments)

        return ask


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


def passes(store: Any, rank: int, ranks: int, limit_s: float) -> bool:
    try:
        pass_monitored_barrier(store, rank, RingGroup("members", tuple(range(ranks))), limit_s, True)
    except CommTimeoutError:
        return False
    return True


@pytest.mark.parametrize("opens_first", [True, False])
def test_a_barrier_is_passed_by_all_or_by_none_when_the_last_rank_comes_as_others_give_up(
    server: TCPStore, opens_first: bool
) -> None:
    first, gives_up, is_decided = ("open" if opens_first else "given up"), threading.Event(), threading.Event()

    def order(name: str, arguments: tuple[Any, ...]) -> None:
        """Have the last rank come when others have found that it is missing, and the decisions made in order."""
        if name == "set" and arguments[0].endswith("/0/here/2"):
            assert gives_up.wait(10)
        elif name == "compare_set" and arguments[0].endswith("/0/decision"):
            if arguments[2] == "given up":
                gives_up.set()
            if arguments[2] == first:
                threading.Timer(0.2, is_decided.set).start()
            else:
                assert is_decided.wait(10)

    between = threading.Barrier(3)

    def take_part(rank: int) -> list[bool]:
        client = Client(server.port, order)
        passed = passes(client, rank, 3, 0.5)
        between.wait(20)
        return [passed, passes(client, rank, 3, 10)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(take_part, range(3)))
    assert found == [[opens_first, True]] * 3


def test_ranks_with_little_time_pass_the_same_barriers(server: TCPStore) -> None:
    ranks, barriers = 4, 6
    draws = [random.Random(seed) for seed in range(ranks)]

    def take_part(rank: int) -> list[tuple[float, float]]:
        client, draw, passed = Client(server.port), draws[rank], []
        end = time.monotonic() + 60
        while len(passed) < barriers and time.monotonic() < end:
            time.sleep(draw.uniform(0, 0.02))
            came = time.monotonic()
            if passes(client, rank, ranks, draw.choice([0.005, 0.02, 0.1, 1.0])):
                passed.append((came, time.monotonic()))
        return passed

    with ThreadPoolExecutor(ranks) as pool:
        found = list(pool.map(take_part, range(ranks)))
    assert [len(passed) for passed in found] == [barriers] * ranks
    for of_one_barrier in zip(*found, strict=True):
        assert min(left for _, left in of_one_barrier) >= max(came for came, _ in of_one_barrier)
    left = server.num_keys()
    assert left <= 4 * ranks, left  # of the last round, and where each rank is


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_was_interrupted_anywhere_does_not_pass_alone(server: TCPStore, goes_on: bool) -> None:
    interrupted = 0
    for number in range(12):
        asked = iter(range(100))

        def interrupt(*_: Any, asked: Iterator[int] = asked, number: int = number) -> None:
            current = next(asked)
            if current == number or (current > number and goes_on):
                raise Interruption

        with pytest.raises((Interruption, CommTimeoutError)) as raised:
            pass_monitored_barrier(Client(server.port, interrupt), 1, RingGroup("two", (0, 1)), 0.01, True)
        interrupted += raised.type is Interruption
        assert not passes(Client(server.port), 1, 2, 0.02), number
    assert interrupted > 5
    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(lambda rank: passes(Client(server.port), rank, 2, 20), range(2)))


_HOLDER = """\
import sys
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def held_store() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        try:
            yield int(holder.stdout.readline()), holder
        finally:
            holder.kill()


def test_a_rank_whose_store_was_silent_does_not_pass_alone() -> None:
    with held_store() as (port, holder):
        client = Client(port)
        threading.Timer(0.5, holder.send_signal, [signal.SIGSTOP]).start()
        threading.Timer(2.5, holder.send_signal, [signal.SIGCONT]).start()
        assert not passes(client, 1, 2, 1.0)
        time.sleep(1)
        assert not passes(client, 1, 2, 0.5)
        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(lambda rank: passes(Client(port), rank, 2, 20), range(2)))
