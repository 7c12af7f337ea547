"""Processes without descriptors or address space: one error that names the limit, on every rank, and no abort."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import patience, per_rank, run_ranks
from comm_utils.watch import WATCH


def limit_descriptors(left: int) -> None:
    """Leave this process ``left`` descriptors."""
    limit = len(os.listdir("/proc/self/fd")) - 1 + left
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def limit_address_space(left_mib: int) -> None:
    """Leave this process ``left_mib`` MiB that it can map."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + (left_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def start(backend: str, descriptors: int | None, address_space_mib: int | None) -> str:
    if descriptors is not None:
        limit_descriptors(descriptors)
    if address_space_mib is not None:
        limit_address_space(address_space_mib)
    with pytest.raises(dist.BackendUnavailableError) as caught:
        dist.init_distributed(backend, verbose=False, timeout=30)
    return str(caught.value)


@pytest.mark.parametrize("backend", ["gloo", "ccl"])
@pytest.mark.parametrize(
    ("descriptors", "address_space_mib", "texts"),
    [
        (0, None, ("can open 0 more files, the limit is ", "raise the limit before the start (ulimit -n 4096")),
        (13, None, ("can open 13 more files, the limit is ", "raise the limit before the start (ulimit -n 4096")),
        (None, 1, ("MiB more, the limit of its address space is ", "before the start (ulimit -v unlimited")),
        (None, 40, ("MiB more, the limit of its address space is ", "before the start (ulimit -v unlimited")),
    ],
)
def test_the_start_names_the_limit(
    rank_environment: dict[str, Any],
    backend: str,
    descriptors: int | None,
    address_space_mib: int | None,
    texts: tuple[str, ...],
) -> None:
    found = run_ranks(start, 2, backend, descriptors, address_space_mib, env=rank_environment)
    for rank, message in enumerate(found):
        assert f"init_distributed: rank {rank} can " in message
        assert all(text in message for text in texts), message


def test_all_ranks_learn_whose_limit_it_is(rank_environment: dict[str, Any]) -> None:
    found = run_ranks(start, 2, "gloo", per_rank([None, 18]), None, env=rank_environment)
    for message in found:
        assert "rank 1 can open 18 more files" in message


def test_the_start_counts_rings_processes_connections_and_clients_of_the_store(
    rank_environment: dict[str, Any],
) -> None:
    """Beside two ranks, which need 24 files, rank 0 has two of each: rings, processes, connections, and clients."""
    for message in run_ranks(start, 4, "gloo", per_rank([29, None, None, None]), None, env=rank_environment):
        assert "rank 0 can open 29 more files" in message
        assert "expected 32 at least" in message


def start_at_a_url(address_space_mib: int | None) -> str:
    place = [os.environ.pop(name) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE")]
    port, rank, world_size = map(int, place)
    if address_space_mib is not None:
        limit_address_space(address_space_mib)
    with pytest.raises(dist.BackendUnavailableError) as caught:
        dist.init_distributed(
            "gloo",
            verbose=False,
            timeout=30,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world_size,
        )
    return str(caught.value)


def test_all_ranks_learn_whose_limit_it_is_at_a_url(rank_environment: dict[str, Any]) -> None:
    for message in run_ranks(start_at_a_url, 2, per_rank([None, 40]), env=rank_environment):
        assert "init_distributed: rank 1 can map " in message


def make_groups() -> tuple[str, int]:
    dist.init_distributed("gloo", verbose=False, timeout=30)
    dist.all_reduce(torch.ones(3))
    time.sleep(1)  # by then, the watch has opened the ring of the other rank
    limit_descriptors(30)
    groups: list[Any] = []

    def make_many() -> None:
        groups.extend(dist.new_group([0, 1]) for _ in range(64))

    with pytest.raises(dist.BackendUnavailableError) as caught:
        make_many()
    made = len(groups)
    for place in range(-1, made):
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=groups[place] if place >= 0 else None)
        assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group(groups.pop())
    groups.append(dist.new_group([0, 1]))  # there is room again
    dist.all_reduce(torch.ones(3), group=groups[-1])
    return str(caught.value), made


def test_groups_of_gloo_end_at_the_limit_with_an_error(rank_environment: dict[str, Any]) -> None:
    for rank, (message, made) in enumerate(run_ranks(make_groups, 2, env=rank_environment)):
        assert f"new_group: rank {rank} can open " in message
        assert "destroy groups that are not used any more, or raise the limit before the start (ulimit -n" in message
        assert made > 1


def start_beside_one_that_cannot_report(left: int | None) -> tuple[str, float]:
    if left is not None:
        limit_descriptors(left)
    begin = time.monotonic()
    with pytest.raises(dist.CommError) as caught:
        dist.init_distributed("gloo", verbose=False, timeout=3)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.parametrize("left", [0, 11])
def test_a_rank_that_cannot_report_is_named_in_time(rank_environment: dict[str, Any], left: int) -> None:
    """It has no descriptor for a connection, and what it prints says why."""
    args = per_rank([None, left, None])
    found = run_ranks(start_beside_one_that_cannot_report, 3, args, env=rank_environment)
    assert f"rank 1 can open {left} more files" in found[1][0]
    for message, took_s in (found[0], found[2]):
        assert "rank 1 of 3 did not come within 3 s" in message
        assert took_s < 3 + 5 * patience()


def make_a_group_that_one_cannot_make(left: int) -> tuple[str, float]:
    dist.init_distributed("gloo", verbose=False, timeout=60)
    free = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        limit_descriptors(left)
    begin = time.monotonic()
    with pytest.raises(dist.BackendUnavailableError) as caught:
        dist.new_group([0, 1])
    took_s = time.monotonic() - begin
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, free)
    # All members have refused it alike, so the same group can be made once there is room.
    group = dist.new_group([0, 1])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    return str(caught.value), took_s


@pytest.mark.parametrize("left", [0, 6])
def test_members_learn_at_once_who_cannot_make_a_group(rank_environment: dict[str, Any], left: int) -> None:
    found = run_ranks(make_a_group_that_one_cannot_make, 2, left, env=rank_environment)
    for rank, (message, took_s) in enumerate(found):
        assert message.startswith(f"new_group: rank 1 can open {left} more files, the limit is ")
        assert message.endswith("[reported by rank 1; rank 0 could go on]") == (rank == 0)
        assert took_s < 10 * patience()


# Of Linux's capability.h.
CAPABILITY_VERSION, CAP_SYS_ADMIN, CAP_SYS_RESOURCE = 0x20080522, 21, 24


@contextmanager
def limited_threads(left: int) -> Iterator[None]:
    """Leave this process ``left`` threads, as a user without other processes, who still reads what root may read.

    The limit holds for neither root nor threads with one of two capabilities.
    """
    library = ctypes.CDLL(None)
    user, free = os.getresuid(), resource.getrlimit(resource.RLIMIT_NPROC)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    os.setresuid(50_000 + os.getpid() % 10_000, 0, 0)
    assert library.capget(header, sets) == 0
    effective = sets[0]
    sets[0] &= ~(1 << CAP_SYS_ADMIN | 1 << CAP_SYS_RESOURCE)
    assert library.capset(header, sets) == 0
    resource.setrlimit(resource.RLIMIT_NPROC, (len(os.listdir("/proc/self/task")) + left, free[1]))
    try:
        yield
    finally:
        sets[0] = effective
        assert library.capset(header, sets) == 0
        os.setresuid(*user)
        resource.setrlimit(resource.RLIMIT_NPROC, free)


def make_a_group_for_which_one_has_no_threads(left: int) -> str:
    dist.init_distributed("gloo", verbose=False, timeout=60)
    limited = limited_threads(left) if dist.get_rank() == 1 else nullcontext()
    with pytest.raises(dist.BackendUnavailableError) as caught, limited:
        dist.new_group([0, 1])
    group = dist.new_group([0, 1])
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [2.0] * 3
    return str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize("left", [0, 2])
def test_members_learn_who_has_no_threads_for_a_group(rank_environment: dict[str, Any], left: int) -> None:
    found = run_ranks(make_a_group_for_which_one_has_no_threads, 2, left, env=rank_environment)
    for rank, message in enumerate(found):
        assert message.startswith("new_group: rank 1: this process cannot start another thread; the user's limit is ")
        assert "ulimit -u" in message
        assert message.endswith("[reported by rank 1; rank 0 could go on]") == (rank == 0)


def compress_where_one_has_no_thread(backend: str) -> tuple[str, float]:
    dist.init_distributed(backend, verbose=False, timeout=60)
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    begin = time.monotonic()
    limited = limited_threads(0) if dist.get_rank() == 1 else nullcontext()
    with pytest.raises(dist.CommError) as caught, limited:
        dist.all_reduce(torch.ones(1 << 16), compression="int8", async_op=True).wait()
    return str(caught.value), time.monotonic() - begin


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_compressed_call_without_a_thread_ends_on_all_ranks(rank_environment: dict[str, Any], backend: str) -> None:
    for message, took_s in run_ranks(compress_where_one_has_no_thread, 2, backend, env=rank_environment):
        assert "rank 1: this process cannot start another thread; the user's limit is " in message
        assert took_s < 20 * patience()


def start_where_one_has_no_thread(backend: str, left: int) -> tuple[str, float]:
    begin = time.monotonic()
    limited = limited_threads(left) if os.environ["RANK"] == "1" else nullcontext()
    with pytest.raises(dist.BackendUnavailableError) as caught, limited:
        dist.init_distributed(backend, verbose=False, timeout=120)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize(("backend", "left"), [("ccl", 0), ("ccl", 1), ("ccl", 2), ("gloo", 0)])
def test_all_ranks_learn_who_can_start_no_thread_for_the_world(
    rank_environment: dict[str, Any], backend: str, left: int
) -> None:
    env = {**rank_environment, "COMM_JOB_SECRET": "given, as the ranks have different users"}
    for message, took_s in run_ranks(start_where_one_has_no_thread, 2, backend, left, env=env):
        assert "rank 1: this process cannot start another thread; the user's limit is " in message
        assert "ulimit -u" in message
        assert took_s < 60 * patience()


def start_where_one_cannot_watch(backend: str, folder: str) -> tuple[str, float]:
    """Leave rank 1 without a thread when the group of all ranks exists and its watch starts."""
    begin, has_started, start = time.monotonic(), Path(folder) / "rank 0 has started", WATCH.start

    def start_without_a_thread(*arguments: Any) -> None:
        while not has_started.exists():
            time.sleep(0.02)
        with limited_threads(0):
            start(*arguments)

    if os.environ["RANK"] == "1":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WATCH, "start", start_without_a_thread)
            with pytest.raises(dist.BackendUnavailableError) as caught:
                dist.init_distributed(backend, verbose=False, timeout=120)
        return str(caught.value), 0.0
    dist.init_distributed(backend, verbose=False, timeout=120)
    has_started.touch()
    with pytest.raises((dist.PeerLostError, dist.CommTimeoutError)) as lost:  # by what the watch sees first
        dist.all_reduce(torch.ones(3))
    return str(lost.value), time.monotonic() - begin


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_ranks_that_go_on_learn_who_can_start_no_thread_for_the_watch(
    rank_environment: dict[str, Any], backend: str, tmp_path: Path
) -> None:
    env = {**rank_environment, "COMM_JOB_SECRET": "given, as the ranks have different users"}
    for message, took_s in run_ranks(start_where_one_cannot_watch, 2, backend, str(tmp_path), env=env):
        assert "init_distributed: rank 1: this process cannot start another thread; the user's limit is " in message
        assert "another group" not in message
        assert took_s < 60 * patience()


def receive_without_a_thread(strict: bool) -> tuple[list[str], list[float]]:
    dist.init_distributed(
        "gloo", verbose=False, timeout=60, config={"checks": {"mismatch": "strict" if strict else "auto"}}
    )
    if dist.get_rank() == 0:
        for _ in range(2):
            dist.send(torch.ones(3), 1)
        dist.barrier()
        return [], []
    errors, tensor = [], torch.zeros(3)
    if strict:
        with limited_threads(0), pytest.raises(dist.BackendUnavailableError) as caught:
            dist.irecv(tensor, 0)
        errors.append(str(caught.value))
        dist.recv(tensor, 0)  # nothing has begun
    else:
        work = dist.irecv(tensor, 0)
        with limited_threads(0):
            for ask in (work.is_completed, lambda: work.wait(1.0), work.get_future):
                with pytest.raises(dist.BackendUnavailableError) as caught:
                    ask()
                errors.append(str(caught.value))
            work.wait()
    found = tensor.tolist()
    work = dist.irecv(tensor.zero_(), 0)  # there is room again
    assert work.wait(60)
    dist.barrier()
    return errors, found + tensor.tolist()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize(
    ("strict", "remedies"),
    [(True, ["or receive with recv()"]), (False, ["or call wait() without one"] * 3)],
)
def test_messages_name_the_limit_where_no_thread_can_be_started(
    rank_environment: dict[str, Any], strict: bool, remedies: list[str]
) -> None:
    errors, received = run_ranks(receive_without_a_thread, 2, strict, env=rank_environment)[1]
    assert received == [1.0] * 6
    for error, remedy in zip(errors, remedies, strict=True):
        assert "this process cannot start another thread; the user's limit is " in error
        assert remedy in error


def begin_without_a_progress_thread() -> tuple[str, list[float]]:
    dist.init_distributed("ccl", verbose=False, timeout=60)
    other, token = dist.new_group([0, 1]), torch.ones(4)
    message, memory = "", np.full(1000, 7.0, dtype=np.float32)
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
    else:
        with limited_threads(0), pytest.raises(dist.BackendUnavailableError) as caught:
            dist.all_reduce(torch.from_numpy(memory), async_op=True)
        message = str(caught.value)
    for _ in range(20):  # which completes what the ranks have begun
        dist.all_reduce(token, group=other)
    return message, np.unique(memory).tolist()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
def test_nothing_has_begun_on_oneccl_where_no_thread_can_be_started(rank_environment: dict[str, Any]) -> None:
    env = {**rank_environment, "CCL_SHARED_MEMORY": "0"}
    message, memory = run_ranks(begin_without_a_progress_thread, 2, env=env)[1]
    assert "a thread for asynchronous operations cannot be started" in message
    assert "ulimit -u" in message
    assert memory == [7.0]


def watch_without_a_thread(left: int) -> tuple[str, int]:
    dist.init_distributed("gloo", verbose=False, timeout=60)
    WATCH.stop()
    opened = len(os.listdir("/proc/self/fd"))
    with limited_threads(left), pytest.raises(RuntimeError, match="can't start new thread") as caught:
        WATCH.start(dist.get_rank(), 2)
    assert not WATCH.is_running
    end = time.monotonic() + 60 * patience()
    while len(os.listdir("/proc/self/fd")) > opened and time.monotonic() < end:
        time.sleep(0.01)  # until the thread that could start has ended
    left_open = len(os.listdir("/proc/self/fd")) - opened
    dist.barrier()
    return str(caught.value), left_open


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes a user without other processes")
@pytest.mark.parametrize("left", [0, 1])
def test_a_watch_without_threads_keeps_nothing_open(rank_environment: dict[str, Any], left: int) -> None:
    for _, left_open in run_ranks(watch_without_a_thread, 2, left, env=rank_environment):
        assert left_open <= 0


def make_a_group_alone() -> str:
    dist.init_distributed("gloo", verbose=False, timeout=60)
    if dist.get_rank() == 1:
        return ""
    with pytest.raises(dist.CommTimeoutError) as caught:
        dist.new_group([0, 1], timeout=1)
    return str(caught.value)


def test_members_that_do_not_come_are_named(rank_environment: dict[str, Any]) -> None:
    message = run_ranks(make_a_group_alone, 2, env=rank_environment)[0]
    assert "not every rank of [0, 1] came to make the group: [1] did not within 1 s" in message


def gather_without_memory() -> tuple[str, str]:
    dist.init_distributed("gloo", verbose=False, timeout=30)
    part, whole = torch.ones(16 << 20), torch.empty(32 << 20)
    time.sleep(1)  # by then, the watch has opened the ring of the other rank
    dist.barrier()
    if dist.get_rank() == 1:
        limit_address_space(1)
    try:
        dist.all_gather_into_tensor(whole, part)
    except dist.CommError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_both_ranks_learn_that_one_has_no_memory_for_a_call(rank_environment: dict[str, Any]) -> None:
    (waiting, seen), (lacking, said) = run_ranks(gather_without_memory, 2, env=rank_environment)
    assert lacking == "BackendUnavailableError"
    assert "failed on rank 1, whose process lacks what the call needs: DefaultCPUAllocator: can't allocate" in said
    assert waiting == "CommTimeoutError"
    assert "rank 1 (pid " in seen
    assert "gave up in all_gather_into_tensor: DefaultCPUAllocator: can't allocate memory" in seen


def reduce_beside_a_limited_peer() -> str:
    dist.init_distributed("ccl", verbose=False, timeout=30)
    if dist.get_rank() == 1:
        limit_address_space(2048)
    tensor = dist.empty_shared(1 << 20)
    tensor.fill_(1.0)
    with pytest.raises(dist.CommError) as caught:
        dist.all_reduce(tensor)
    return str(caught.value)


def test_a_peer_that_cannot_map_a_shared_tensor_names_the_limit(rank_environment: dict[str, Any]) -> None:
    """The other rank's region of shared tensors is larger than what is left."""
    for message in run_ranks(reduce_beside_a_limited_peer, 2, env=rank_environment):
        assert "it cannot be mapped: the address space is limited (ulimit -v unlimited" in message, message


def reduce_with_limits() -> float:
    dist.init_distributed("ccl", verbose=False, timeout=30)
    limit_address_space(1500)
    tensor = dist.empty_shared(1 << 20)
    tensor.fill_(dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    return float(tensor.sum() / tensor.numel())


def test_shared_tensors_leave_address_space_for_those_of_peers(rank_environment: dict[str, Any]) -> None:
    assert run_ranks(reduce_with_limits, 3, env=rank_environment) == [6.0] * 3


def start_without_threads() -> str:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(dist.BackendUnavailableError) as caught:
            dist.init_distributed("gloo", verbose=False, timeout=5, config={"timeouts": {"init_s": 5}})
    return str(caught.value)


def test_a_process_that_can_start_no_thread_names_the_limit() -> None:
    for text in run_ranks(start_without_threads, 2):
        assert re.match("init_distributed: rank [01]: this process cannot start another thread; the user's limit", text)
        assert "ulimit -u" in text
