"""The process that serves the store is stopped: calls that wait in the store end all the same."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import comm_orchestrator as dist
from comm_utils.errors import CommTimeoutError
from comm_utils.testing import run_ranks

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
