"""Programs that end while a daemon thread of theirs is in a call, and worlds that end where memory is short."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import run_ranks, run_ranks_outcomes


def ends_beside_a_call(backend: str, pause_s: float, call: str) -> None:
    """Rank 0's program ends while its thread waits for rank 1, which makes no call, or is about to wait."""
    dist.init_distributed(backend, timeout=30, verbose=False)
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3)
    else:
        calls = {"all_reduce": lambda: dist.all_reduce(torch.ones(5)), "recv": lambda: dist.recv(torch.ones(5), 1)}
        threading.Thread(target=calls[call], daemon=True).start()
        time.sleep(pause_s)


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
@pytest.mark.parametrize("call", ["all_reduce", "recv"])
@pytest.mark.parametrize("pause_s", [0.0, 0.6])
def test_a_program_ends_beside_a_call(
    rank_environment: dict[str, Any], backend: str, call: str, pause_s: float
) -> None:
    env = {**rank_environment, "COMM_TESTS_FORK": "0"}  # or the interpreter would not be taken apart
    outcomes = run_ranks_outcomes(ends_beside_a_call, 2, backend, pause_s, call, env=env)
    assert [(one.status, one.exit_code, one.message) for one in outcomes] == [("returned", 0, "")] * 2


def ends_without_threads(backend: str) -> None:
    dist.init_distributed(backend, timeout=30, verbose=False)
    dist.all_reduce(torch.ones(5))

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        dist.destroy_process_group()
    assert not dist.is_initialized()
    dist.init_distributed(backend, timeout=30, verbose=False)
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_world_ends_where_no_thread_can_be_started(backend: str) -> None:
    run_ranks(ends_without_threads, 2, backend)
