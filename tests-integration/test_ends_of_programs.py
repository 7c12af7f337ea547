"""Programs that end while a daemon thread of theirs is in a call, and worlds that end where memory is short."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks, run_ranks_outcomes


def ends_beside_a_call(backend: str, pause_s: float, call: str) -> None:
    """Rank 0's program ends while its thread waits for rank 1, which makes no call, or is about to wait."""
    dist.init_distributed(backend, timeout=30, verbose=False)
    for _ in range(3):  # the later ones on the fast path
        dist.all_reduce_coalesced([torch.ones(5), torch.ones(6)])
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(3)
    else:
        calls = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(5)),
            "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([torch.ones(5), torch.ones(6)]),
            "recv": lambda: dist.recv(torch.ones(5), 1),
        }
        threading.Thread(target=calls[call], daemon=True).start()
        time.sleep(pause_s)


# Every backend, call and pause; their other combinations are slow, as each starts two interpreters.
QUICK = [("gloo", "recv", 0.6), ("gloo", "all_reduce_coalesced", 0.0), ("ccl", "all_reduce", 0.6), ("ccl", "recv", 0.0)]
EVERY = itertools.product(["gloo", "ccl"], ["all_reduce", "all_reduce_coalesced", "recv"], [0.0, 0.6])


@pytest.mark.parametrize(
    ("backend", "call", "pause_s"),
    [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in EVERY],
)
def test_a_program_ends_beside_a_call(
    rank_environment: dict[str, Any], backend: str, call: str, pause_s: float
) -> None:
    env = {**rank_environment, "COMM_TESTS_FORK": "0"}  # or the interpreter would not be taken apart
    outcomes = run_ranks_outcomes(ends_beside_a_call, 2, backend, pause_s, call, env=env, timeout_s=60 * patience())
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
    run_ranks(ends_without_threads, 2, backend, timeout_s=60 * patience())


HANDLES = """
import sys, torch
import comm_orchestrator as dist
import torch.distributed as c10d
dist.init_distributed(sys.argv[1], verbose=False)
if sys.argv[2] == "complete":
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    torchs = c10d.all_reduce(torch.ones(1000), async_op=True)
    average = dist.all_reduce(torch.ones(1000), "avg", async_op=True)
    work.wait()
    torchs.wait()
    average.wait()
    dist.barrier()
elif dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
sys.work = work if "work" in globals() else None
"""


@pytest.mark.parametrize(
    ("backend", "state"),
    [
        ("gloo", "open"),
        ("ccl", "complete"),
        pytest.param("gloo", "complete", marks=pytest.mark.slow),
        pytest.param("ccl", "open", marks=pytest.mark.slow),
    ],
)
def test_a_handle_that_lives_until_the_end_of_the_program_is_no_trouble(
    backend: str, state: str, free_port: int
) -> None:
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", HANDLES, backend, state],
            env={**os.environ, **common, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [(one.communicate(timeout=60 * patience())[1], one.returncode) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert [code for _, code in ended] == [0, 0], ended
    assert not any("Traceback" in said or "ignored in" in said for said, _ in ended), ended


_COMMUNICATES_AT_THE_END = """
import atexit

def end():
    for call in (lambda: dist.all_reduce(torch.ones(3)), lambda: dist.all_reduce(torch.ones(3), async_op=True).wait()):
        try:
            call()
        except Exception as error:
            print(f"{type(error).__name__}: {error}")

atexit.register(end)
import torch
import comm_orchestrator as dist

dist.init_distributed("ccl", verbose=False)
dist.all_reduce(torch.ones(3))
"""


def test_a_call_after_the_end_of_the_groups_says_that_the_process_is_ending() -> None:
    program = [sys.executable, "-c", _COMMUNICATES_AT_THE_END]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    said = "NotInitializedError: all_reduce on the group of ranks [0] failed: this process is ending, and its groups "
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, ended.stderr
    for line in lines:
        assert line.startswith(said), line
        assert "register it after init_distributed()" in line


_INTERRUPTED_AT_THE_END = """
import atexit

def call():
    try:
        dist.all_reduce(torch.ones(3), async_op=True).wait(1)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

atexit.register(call)
import os, signal, sys, threading, time, torch
import comm_orchestrator as dist

def interrupt():
    def functions(frame):
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    while "drain" not in functions(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

dist.init_distributed("ccl", verbose=False)
dist.barrier()
if dist.get_rank() == 0:
    sys.stdin.read()
else:
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    threading.Thread(target=interrupt, daemon=True).start()
"""


def end_beside_a_rank_that_stays(program: str, port: int) -> tuple[str, str]:
    """Return the output and the errors of rank 1 of a program, whose rank 0 reads its input until rank 1 has ended."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **common, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said, complaint = ranks[1].communicate(timeout=60 * patience())
        ranks[0].communicate(timeout=60 * patience())
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return said, complaint


def test_ctrl_c_while_a_program_that_ends_waits_for_its_calls_leaves_no_group_open(free_port: int) -> None:
    said, complaint = end_beside_a_rank_that_stays(_INTERRUPTED_AT_THE_END, free_port)
    assert complaint.rstrip().endswith("KeyboardInterrupt:"), complaint
    expected = "NotInitializedError: all_reduce on the group of ranks [0, 1] failed: this process is ending, "
    assert said.startswith(expected), said + complaint


_ENDS_WITH_CALLS_UNDER_WAY = """
import atexit, time
atexit.register(lambda: print(time.monotonic() - begin))
import sys, torch
import comm_orchestrator as dist

dist.init_distributed("ccl", verbose=False)
groups = [dist.new_group([0, 1]) for _ in range(8)]
if dist.get_rank() == 0:
    sys.stdin.read()
else:
    works = [dist.all_reduce(torch.ones(1000), group=one, async_op=True) for one in groups]
begin = time.monotonic()
"""


def test_the_end_of_a_program_waits_for_the_calls_of_all_groups_together(free_port: int) -> None:
    said, complaint = end_beside_a_rank_that_stays(_ENDS_WITH_CALLS_UNDER_WAY, free_port)
    assert float(said) < 6, said + complaint  # a second for each of them would be 8
