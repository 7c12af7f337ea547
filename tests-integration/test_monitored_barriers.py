"""Barriers through the store that something ends early: no rank passes alone, and who has gone is said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import comm_orchestrator as dist
from comm_utils.errors import CommTimeoutError, PeerLostError
from comm_utils.testing import run_ranks, run_ranks_outcomes

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
