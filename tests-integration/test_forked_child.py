"""A forked child that communicates over its parent's groups is refused at once, on every library."""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

LIBRARIES = [
    pytest.param("gloo", {}, id="gloo"),
    pytest.param("ccl", {"CCL_SHARED_MEMORY": "1"}, id="shared-memory"),
    pytest.param("ccl", {"CCL_SHARED_MEMORY": "0"}, id="oneccl"),
]


def _calls(group: Any) -> dict[str, Callable[[], object]]:
    one, two = torch.ones(1), torch.ones(2)
    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "asynchronous all_reduce": lambda: dist.all_reduce(one, group=group, async_op=True),
        "all_reduce of another dtype": lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16), group=group),
        "broadcast": lambda: dist.broadcast(one, 0, group=group),
        "all_gather": lambda: dist.all_gather([torch.ones(1), torch.ones(1)], one, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, one, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, two, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), two, group=group),
        "barrier": lambda: dist.barrier(group),
        "send": lambda: dist.send(one, 1 - dist.get_rank(), group),
        "isend": lambda: dist.isend(one, 1 - dist.get_rank(), group),
        "all_gather_object": lambda: dist.all_gather_object([None, None], "text", group),
        "monitored_barrier": lambda: dist.monitored_barrier(group),
        "new_group": lambda: dist.new_group([0, 1]),
        "new_group of another library": lambda: dist.new_group([0, 1], backend="gloo"),
        "split_group": lambda: dist.split_group(group, [[0, 1]]),
    }


# The parent makes one of these groups afterwards.
_MADE_BY_CHILD_ALONE = ("send", "isend", "new_group", "new_group of another library", "split_group")


def _in_child(pipe: Any, groups: list[Any]) -> None:
    said = {}
    for index, group in enumerate(groups):
        for name, call in _calls(group).items():
            start = time.monotonic()
            try:
                call()
            except Exception as error:
                said[name, index] = f"{type(error).__name__}: {error}", time.monotonic() - start
            else:
                said[name, index] = "no error", 0.0
    # What sends nothing still works, as in the worker of a data loader.
    said["ranks", 0] = f"{dist.get_rank()} of {dist.get_world_size()}", 0.0
    pipe.send(said)


def run_forked(backend: str) -> None:
    dist.init_distributed(backend, verbose=False)
    groups = [None, dist.new_group([0, 1], backend="gloo")]
    for group in groups:
        for name, call in _calls(group).items():
            if name not in _MADE_BY_CHILD_ALONE:
                for _ in range(3):  # the later ones on the fast path
                    made = call()
                    if made is not None:
                        made.wait()  # type: ignore[attr-defined]
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(theirs, groups))
    process.start()
    assert mine.poll(60), "the child hangs"
    said = mine.recv()
    process.join(20)
    assert process.exitcode == 0
    assert said.pop(("ranks", 0))[0] == f"{dist.get_rank()} of 2"
    for key, (text, took_s) in said.items():
        assert text.startswith("BackendUnavailableError: "), (key, text)
        assert "forked child" in text, (key, text)
        assert "spawn or forkserver" in text, (key, text)
        assert took_s < patience(), (key, took_s)
    groups.append(dist.new_group([0, 1]))  # the child has left the connection to the store alone
    for group in groups:
        dist.all_reduce(tensor := torch.ones(1), group=group)
        assert tensor.item() == 2
    dist.destroy_process_group()


@pytest.mark.parametrize(("backend", "env"), LIBRARIES)
def test_a_forked_child_is_refused_at_once(backend: str, env: dict[str, Any], rank_environment: dict[str, Any]) -> None:
    run_ranks(run_forked, 2, backend, timeout_s=120, env={**rank_environment, **env})


def run_handles_in_a_child() -> list[str]:
    """A child uses handles of its parent, which are under way; rank 0 goes on when the child has ended."""
    dist.init_distributed("ccl", verbose=False)
    other = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.barrier(other)
        dist.send(torch.full((4,), 5.0), 1, tag=7)
        dist.send(torch.full((4,), 6.0), 1)
        dist.all_reduce(torch.ones(4))
        return []
    tensors = [torch.zeros(4), torch.zeros(4), torch.ones(4)]
    works: list[Any] = [dist.irecv(tensors[0], tag=7), dist.irecv(tensors[1])]
    works.append(dist.all_reduce(tensors[2], async_op=True))
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_use_handles, args=(theirs, works))
    process.start()
    said: list[str] = mine.recv() if mine.poll(60) else []
    process.join(20)
    assert process.exitcode == 0
    dist.barrier(other)
    for work in works:
        work.wait()
    assert [one.unique().tolist() for one in tensors] == [[5.0], [6.0], [2.0]]
    return said


def _use_handles(pipe: Any, works: list[Any]) -> None:
    said = []
    for work in works:
        for call in (lambda work=work: work.get_future().wait(), lambda work=work: work.wait(3)):
            try:
                said.append(f"no error: {call()}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
        said.append(f"{type(work.exception()).__name__}: {work.exception()}")
        assert work.is_completed()  # to the child
    pipe.send(said)


@pytest.mark.parametrize(("backend", "env"), LIBRARIES[1:])
def test_a_handle_of_the_parent_is_refused(backend: str, env: dict[str, Any], rank_environment: dict[str, Any]) -> None:
    said = run_ranks(run_handles_in_a_child, 2, env={**rank_environment, **env})[1]
    assert len(said) == 9
    for one in said:
        assert one.startswith("BackendUnavailableError: "), said
        assert "forked child" in one
        assert "spawn or forkserver" in one


def run_dropped_in_a_child(backend: str) -> str:
    """A child drops a handle of an operation of its parent that is under way."""
    dist.init_distributed(backend, verbose=False)
    held = [dist.all_reduce(torch.ones(100_000), async_op=True)] if dist.get_rank() == 0 else []
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        held.clear()
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as said:
        text = said.read()
    for work in held or [dist.all_reduce(torch.ones(100_000), async_op=True)]:
        work.wait()
    return text


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_child_drops_a_handle_of_its_parent_silently(backend: str, rank_environment: dict[str, Any]) -> None:
    assert run_ranks(run_dropped_in_a_child, 2, backend, env=rank_environment) == ["", ""]


def run_forked_while_reserving() -> None:
    dist.init_distributed("ccl", verbose=False)
    kept = [dist.empty_shared(1024)]
    reserving = threading.Thread(target=lambda: kept.append(dist.empty_shared((2**29,), torch.uint8)))
    reserving.start()
    is_first = True
    while is_first or reserving.is_alive():
        is_first = False
        child = os.fork()
        if child == 0:
            signal.alarm(int(20 * patience()))
            os._exit(0 if dist.shared_memory_stats()["tensors"] >= 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    reserving.join()
    dist.destroy_process_group()


def test_a_child_forked_while_memory_is_reserved_has_statistics(rank_environment: dict[str, Any]) -> None:
    run_ranks(run_forked_while_reserving, 1, env={**rank_environment, "CCL_SHARED_MEMORY": "1"})


def _future_of_own_world(backend: str, pipe: Any) -> None:
    """Make a world of children, and complete a future in it."""
    dist.init_distributed(backend, verbose=False)
    completed = threading.Event()
    work = dist.all_reduce(tensor := torch.ones(3), async_op=True)
    work.get_future().then(lambda _: completed.set())
    pipe.send((completed.wait(60), tensor.tolist()))
    dist.destroy_process_group()


def run_future_in_own_world(backend: str) -> tuple[bool, list[float]]:
    dist.init_distributed(backend, verbose=False)
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
    dist.destroy_process_group()
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_future_of_own_world, args=(backend, theirs))
    process.start()
    assert mine.poll(100), "the child hangs"
    said: tuple[bool, list[float]] = mine.recv()
    process.join(20)
    return said


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_futures_of_a_child_with_its_own_world_complete(backend: str, rank_environment: dict[str, Any]) -> None:
    said = run_ranks(run_future_in_own_world, 2, backend, timeout_s=120, env=rank_environment)
    assert said == [(True, [2.0] * 3)] * 2


def _begin_another_world(pipe: Any, changed: dict[str, str], arguments: dict[str, int], destroys: bool) -> None:
    os.environ.update(changed)
    try:
        if destroys:
            dist.destroy_process_group()
        dist.init_distributed(verbose=False, **arguments)  # type: ignore[arg-type]
        pipe.send(f"rank {dist.get_rank()} of {dist.get_world_size()}")
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _in_a_fork(changed: dict[str, str], arguments: dict[str, int], destroys: bool = False) -> str:
    mine, theirs = multiprocessing.Pipe()
    given = (theirs, changed, arguments, destroys)
    process = multiprocessing.get_context("fork").Process(target=_begin_another_world, args=given)
    process.start()
    assert mine.poll(60), "the child hangs"
    said = str(mine.recv())
    process.join(20)
    return said


def run_forks_that_begin_another_world(backend: str, adopts: bool) -> dict[str, str]:
    if adopts:
        torch.distributed.init_process_group(backend)
    dist.init_distributed(backend, verbose=False)
    dist.all_reduce(torch.ones(1))
    said = {
        "variables": _in_a_fork({"RANK": "3", "WORLD_SIZE": "5"}, {}),
        "arguments": _in_a_fork({}, {"rank": 3, "world_size": 5}),
        "nothing": _in_a_fork({}, {}),
        "the same": _in_a_fork({}, {"rank": dist.get_rank(), "world_size": dist.get_world_size()}),
        "destroyed": _in_a_fork({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "0"}, {}, destroys=True),
    }
    dist.all_reduce(tensor := torch.ones(1))
    assert tensor.item() == 2
    dist.destroy_process_group()
    return said


@pytest.mark.parametrize(("backend", "adopts"), [("gloo", False), ("gloo", True), ("ccl", False)])
def test_a_fork_that_begins_another_world_is_not_given_its_parents(
    backend: str, adopts: bool, rank_environment: dict[str, Any]
) -> None:
    """As a notebook with a world of its own that starts ranks by a fork, with Accelerate's notebook_launcher."""
    found = run_ranks(run_forks_that_begin_another_world, 2, backend, adopts, timeout_s=120, env={**rank_environment})
    for rank, said in enumerate(found):
        for given, names in (("variables", "RANK=3, WORLD_SIZE=5"), ("arguments", "rank=3, world_size=5")):
            assert said[given].startswith(
                "BackendUnavailableError: init_distributed: this process was forked from one with a world, where it is "
                f"rank {rank} of 2, and got {names} for another world; call destroy_process_group() first"
            ), (given, said[given])
        assert said["nothing"] == said["the same"] == f"rank {rank} of 2"
        assert said["destroyed"] == "rank 0 of 1"


_ENDS_THE_WORLD_IN_A_CHILD = """
import os, signal, sys, torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
group = dist.new_group([0])
dist.all_reduce(torch.ones(1), group=group)
child = os.fork()
if child == 0:
    signal.alarm(30)
    {ends}
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "ends",
    [
        "dist.destroy_process_group()",
        "dist.destroy_process_group(); dist.init_distributed('gloo', verbose=False)",
        "torch.distributed.destroy_process_group()",
    ],
)
def test_a_child_that_ends_its_parents_world_on_gloo_ends(ends: str) -> None:
    program = [sys.executable, "-c", _ENDS_THE_WORLD_IN_A_CHILD.format(ends=ends)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.stdout == "0\n", ended.stderr


_HOLDS_LOCKS = """
import os, signal, threading, torch
import comm_orchestrator as dist
from comm_utils import process_locks

dist.init_distributed("BACKEND", verbose=False)
dist.destroy_process_group()
held, done = threading.Event(), threading.Event()

def hold():
    for one in process_locks._every:
        one.lock.acquire()
    held.set()
    done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os.environ["MASTER_PORT"] = "0"
    dist.init_distributed("BACKEND", verbose=False)
    group, tensor = dist.new_group([0]), torch.ones(5000)
    dist.all_reduce(tensor, compression="int8")
    with dist.coalescing():
        dist.all_reduce(tensor)
    dist.all_reduce(tensor.to(torch.int16), async_op=True).wait()
    dist.destroy_process_group()
    os._exit(0 if tensor[0] == 1 else 1)
print(len(process_locks._every), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
"""


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_child_forked_while_a_thread_has_every_lock_begins_a_world(backend: str) -> None:
    program = [sys.executable, "-c", _HOLDS_LOCKS.replace("BACKEND", backend)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    locks, status = ended.stdout.split()
    assert int(locks) > 5
    assert status == "0", ended.stderr


_LOCKS = ("threading.Lock", "threading.RLock", "threading.Condition")


def _locks_of(body: list[ast.stmt]) -> list[int]:
    """Return the lines of a module or class that make a lock of the threading module."""
    found = []
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            found += _locks_of(statement.body)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            made = statement.value
            if isinstance(made, ast.Call) and ast.unparse(made.func) in _LOCKS:
                found.append(statement.lineno)
    return found


def test_every_lock_of_a_module_is_renewed_in_a_child() -> None:
    sources = sorted((Path(__file__).parents[1] / "packages").glob("*/src/**/*.py"))
    found = [f"{path}:{line}" for path in sources for line in _locks_of(ast.parse(path.read_text()).body)]
    assert found == [], "a child forked while another thread has it waits for ever; use comm_utils.process_locks"
