"""Calls on groups without this rank, without their members or without a future, and ranks that fail alone."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d
from wrong_calls.errors import caught, expect
from wrong_calls.kinds import VALUE, replaced
from wrong_calls.right import (
    COLLECTIVES,
    OBJECTS,
    TENSORS,
    Arguments,
    call,
    check_group_works,
    ones,
    operation,
    places,
    right,
    root_argument,
    tensors,
)

import comm_orchestrator as dist
from comm_utils.active import slot
from comm_utils.errors import CollectiveMismatchError
from comm_utils.operations import Role
from comm_utils.testing import RankPool, patience, run_ranks, run_ranks_outcomes
from comm_utils.watch import Trouble

Pools: TypeAlias = Callable[[int], RankPool]

EVERY_CALL = [*TENSORS, *OBJECTS]
ROOTS = {name: root_argument(operation(name)) for name in EVERY_CALL if operation(name).argument(Role.ROOT)}


def run_subgroup() -> None:
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank > 0:
        for name, key in ROOTS.items():
            usual = right(name, rank, 2)
            for outside in (0, 3):
                texts = (f"{key}: got rank {outside}", "not in the group", "its global ranks are [1, 2]")
                expect(name, {**usual, key: outside, "group": group}, VALUE, texts)
            if name in ("gather", "scatter", "gather_object", "scatter_object_list"):  # rank 0 is no default there
                expect(name, {**usual, key: None, "group": group}, VALUE, (f"{key}: missing",))
        check_group_works(group)
        dist.destroy_process_group(group)
    check_group_works()


def test_rank_outside_a_group(pools: Pools) -> None:
    pools(3).run(run_subgroup)


def reduce_lists_in_trouble() -> list[str]:
    """Return the errors of reductions of lists, of which one has a fast path, after the watch has found trouble."""
    group = dist.new_group(list(range(dist.get_world_size())))
    tensors = [torch.ones(3), torch.ones(4, dtype=torch.float64)]
    for _ in range(3):
        dist.all_reduce_coalesced(tensors, group=group)
    backend: Any = slot.backend
    state = getattr(group, "communicator", None) or backend._state(group)
    state.fall_into(Trouble(CollectiveMismatchError, "the ranks' calls differ"))
    errors = [caught(lambda: dist.all_reduce_coalesced(tensors, group=group)) for _ in range(2)]
    return [f"{type(error).__name__}: {error}" for error in errors]


def test_a_list_raises_what_the_watch_has_found(pools: Pools) -> None:
    for first, second in pools(2).run(reduce_lists_in_trouble):
        assert first.startswith("CollectiveMismatchError: ")
        assert "the ranks' calls differ" in first
        assert second.startswith("BrokenGroupError: ")


class Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def run_non_member() -> None:
    from comm_collectives import arguments

    arguments._warned.clear()
    rank, log = dist.get_rank(), Collect()
    logging.getLogger("comm").addHandler(log)
    group = dist.new_group([0, 2])
    if rank == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        for name in EVERY_CALL:
            tensor = ones()
            arguments_ = right(name, 0, 2)
            arguments_.update({key: tensor for key in ("tensor", "output") if key in arguments_}, group=group)
            for _ in range(2):
                assert getattr(dist, name)(**arguments_) == (-1 if name in ("recv", "recv_object_list") else None), name
            assert torch.equal(tensor, ones())
            (record,) = log.records
            assert record.levelno == logging.WARNING
            text = f"{name}: this rank is not a member of the group; the call does nothing"
            assert record.getMessage() == text
            log.records.clear()
        for name in ("all_reduce", "all_gather_into_tensor", "broadcast"):  # with a handle there is nothing to wait for
            assert getattr(dist, name)(**right(name, 0, 2), group=group, async_op=True) is None
        assert dist.batch_isend_irecv([dist.P2POp(dist.isend, ones(), 0, group)]) == []
        assert (dist.get_rank(group), dist.get_world_size(group)) == (-1, -1)
        dist.destroy_process_group(group)
    else:
        check_group_works(group)
        assert log.records == []
        dist.destroy_process_group(group)
    logging.getLogger("comm").removeHandler(log)
    check_group_works()


def test_calls_of_a_rank_outside_the_group_do_nothing(pools: Pools) -> None:
    pools(3).run(run_non_member)


def run_destroyed_group() -> None:
    group = dist.new_group([0, 1])
    check_group_works(group)
    dist.destroy_process_group(group)
    for name in EVERY_CALL:
        usual = right(name, dist.get_rank(), 2)
        expect(name, {**usual, "group": group}, dist.NotInitializedError, ("no longer exists", "make a new one"))
    check_group_works()


def test_group_that_was_destroyed(pools: Pools) -> None:
    pools(2).run(run_destroyed_group)


# --- a rank that is alone with its mistake


#: Changes that make rank 1 wait for rank 0.
WAITING: dict[str, Arguments] = {
    **{name: {} for name in COLLECTIVES if name not in ("reduce", "gather")},
    "reduce": {"dst": 1},
    "gather": {"dst": 1},
    "recv": {},
    "irecv": {},
}
_GROUP_TIMEOUT_S = 0.6


def run_alone(name: str) -> None:
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group([0, 1], timeout=_GROUP_TIMEOUT_S)
    arguments = {**right(name, rank, 2), **WAITING[name], "group": group}
    if name == "gather":
        arguments["gather_list"] = tensors(2) if rank == 1 else None
    start = time.monotonic()
    if rank == 0:
        where = next(where for where, ranks, _ in places(name) if 0 in ranks)
        arguments.update(replaced(arguments, where, ones().to("meta")))
        expect(name, arguments, VALUE, ("got a tensor on meta",))
        assert time.monotonic() - start < _GROUP_TIMEOUT_S
    else:
        raised = caught(lambda: call(name, arguments))
        took = time.monotonic() - start
        # Rank 0 goes on to the world, for which this rank does not come: the watch finds that before the timeout.
        assert isinstance(raised, (dist.CommTimeoutError, dist.PeerLostError, dist.CollectiveMismatchError))
        assert str(raised).startswith(f"{name} on the group of ranks [0, 1] ")
        assert ", as seen by rank 1: " in str(raised)
        assert "cannot be used any more: its members go on with destroy_process_group(group)" in str(raised)
        for theirs in (".cc:", "GLHF"):
            assert theirs not in str(raised)
            assert theirs == "GLHF" or theirs in str(raised.__cause__) or dist.get_backend() != "gloo"
        assert took < _GROUP_TIMEOUT_S + 10 * patience()
        for other in EVERY_CALL:
            usual = right(other, rank, 2)
            expect(other, {**usual, "group": group}, dist.BrokenGroupError, ("group of ranks [0, 1] failed earlier",))
    check_group_works()
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", WAITING)
def test_peers_of_a_rank_with_a_mistake_time_out(pools: Pools, name: str) -> None:
    pools(2).run(run_alone, name)


def run_lost_peer() -> str:
    # The start takes seconds on a busy machine; a lost peer is noticed at once.
    dist.init_distributed(dist_backend="gloo", verbose=False, timeout=20)
    check_group_works()
    if dist.get_rank() == 1:
        os._exit(0)
    found = ""
    try:
        for _ in range(3):  # what a dead rank has sent before is still received
            dist.all_reduce(torch.ones(1000))
    except (dist.PeerLostError, dist.CommTimeoutError) as error:
        found = f"{type(error).__name__}: {error}"
    for name in EVERY_CALL:
        usual = right(name, 0, 2)
        expect(name, usual, dist.BrokenGroupError, ("group of ranks [0, 1] failed earlier", "init_distributed() again"))
    assert dist.is_initialized()
    sys.stdout.flush()
    return found


def test_peer_that_dies(rank_environment: dict[str, Any]) -> None:
    survivor, dead = run_ranks_outcomes(run_lost_peer, 2, env=rank_environment, timeout_s=60)
    assert dead.status == "died", dead.report()
    assert survivor.ok, survivor.report()
    assert survivor.value.startswith(("PeerLostError: all_reduce on", "CommTimeoutError: all_reduce on"))
    assert survivor.duration_s < 30 * patience()


def run_destroyed_during_a_call(backend: str, call: str, end: str) -> str:
    dist.init_distributed(backend, verbose=False)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        while not os.path.exists(end):
            time.sleep(0.01)
        dist.destroy_process_group()
        return ""
    tensor = torch.ones(100_000)
    work = (
        dist.all_reduce(tensor, async_op=True)
        if call == "all_reduce"
        else dist.irecv(tensor, tag=3 if call == "tag" else 0)
    )
    said: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except Exception as error:
            said.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    dist.destroy_process_group()
    waiting.join(60)
    Path(end).touch()
    return f"{type(said[0]).__name__}: {said[0]}"


@pytest.mark.parametrize(
    ("backend", "env", "call"),
    [
        ("gloo", {}, "all_reduce"),
        ("ccl", {"CCL_SHARED_MEMORY": "1"}, "all_reduce"),
        ("ccl", {"CCL_SHARED_MEMORY": "0"}, "all_reduce"),
        ("ccl", {"CCL_SHARED_MEMORY": "0"}, "recv"),
        ("ccl", {"CCL_SHARED_MEMORY": "0"}, "tag"),
    ],
)
def test_a_call_whose_group_another_thread_destroys(
    backend: str, env: dict[str, Any], call: str, tmp_path: Path, rank_environment: dict[str, Any]
) -> None:
    env = {**rank_environment, **env}
    said = run_ranks(run_destroyed_during_a_call, 2, backend, call, str(tmp_path / "end"), env=env)[0]
    name = "all_reduce" if call == "all_reduce" else "irecv"
    expected = f"{name} on the group of ranks [0, 1] failed: this process destroyed the group before the call was"
    assert said.startswith(f"NotInitializedError: {expected} complete"), said


def waits_beyond_the_end_of_the_group(operation: str, is_of_torch: bool, after_s: float, end: str) -> str:
    """Rank 0 waits for a message whose group it destroys, before that or ``after_s``; rank 1 makes no call there."""
    dist.init_distributed("gloo", verbose=False)
    group = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        while not os.path.exists(end):
            time.sleep(0.01)
        return ""
    work = (dist.irecv if operation == "irecv" else dist.isend)(torch.ones(4), 1, group=group)
    destroy = threading.Timer(after_s, (c10d if is_of_torch else dist).destroy_process_group, (group,))
    destroy.start()
    if not after_s:
        destroy.join()
    try:
        work.wait()
    except dist.CommError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Path(end).touch()
    return "no error"


@pytest.mark.parametrize(
    ("operation", "is_of_torch", "after_s"),
    [("irecv", False, 0.0), ("isend", False, 0.0), ("irecv", True, 0.0), ("irecv", True, 0.5)],
)
def test_a_message_whose_group_is_destroyed_is_not_waited_for(
    tmp_path: Path, operation: str, is_of_torch: bool, after_s: float
) -> None:
    end = str(tmp_path / "end")
    said = run_ranks(waits_beyond_the_end_of_the_group, 2, operation, is_of_torch, after_s, end, timeout_s=60)
    expected = f"{operation} on the group of ranks [0, 1] failed: this process destroyed the group before the call was"
    assert said[0].startswith(f"NotInitializedError: {expected} complete"), said


def run_a_failure_of_an_earlier_world(end: str) -> str:
    dist.init_distributed("gloo", verbose=False)
    dist.all_reduce(torch.ones(4))
    said = ""
    if dist.get_rank() == 1:
        while not os.path.exists(end):
            time.sleep(0.01)
        dist.destroy_process_group()
        dist.init_distributed("gloo", verbose=False)
    else:
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        dist.destroy_process_group()
        Path(end).touch()
        dist.init_distributed("gloo", verbose=False)
        try:
            work.wait()
        except dist.CommError as error:
            said = f"{type(error).__name__}: {error}"
    total = torch.ones(4)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 4
    dist.destroy_process_group()
    return said


def test_a_call_that_fails_after_its_world_leaves_the_next_one_alone(
    tmp_path: Path, rank_environment: dict[str, Any]
) -> None:
    args = run_a_failure_of_an_earlier_world, 2, str(tmp_path / "end")
    said = run_ranks(*args, env=rank_environment, timeout_s=120 * patience())[0]
    expected = "all_reduce on the group of ranks [0, 1] failed: this process destroyed the group before the call was"
    assert said.startswith(f"NotInitializedError: {expected} complete"), said
