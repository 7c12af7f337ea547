"""``timeout=`` of single calls and of groups: who waits for a rank that does not come, for how long, and what is told.

:data:`CALLS` has every function that communicates. On two ranks, rank 0 of each waits for rank 1.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.errors import ArgumentTypeError
from comm_utils.testing import RankPool, patience

Pools: TypeAlias = Callable[[int], RankPool]

GROUP_S = 30.0
CALL_S = 0.15
#: Functions whose timeout is that of the groups they make.
MAKING_GROUPS = {
    "init_distributed",
    "init_process_group",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "split_group",
}


# --- every function that communicates


def mine(n: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Filled with 1 on rank 0, with 2 on rank 1."""
    return torch.full((n,), dist.get_rank() + 1, dtype=dtype)


def parts() -> list[torch.Tensor]:
    return [mine(1), mine(1)]


def exchange(sender: bool, send: str, recv: str, **more: Any) -> tuple[Any, Any]:
    """A message between the two ranks; rank 0 is the sender or not."""
    tensor = mine()
    name = send if sender == (dist.get_rank() == 0) else recv
    return getattr(dist, name)(tensor, 1 - dist.get_rank(), **more), tensor


def exchange_objects(sender: bool, **more: Any) -> tuple[Any, Any]:
    objects = [dist.get_rank() + 1.0]
    send = sender == (dist.get_rank() == 0)
    result = (dist.send_object_list if send else dist.recv_object_list)(objects, 1 - dist.get_rank(), **more)
    assert result == (None if send else 1 - dist.get_rank())
    return None, objects


def batch(**more: Any) -> tuple[Any, Any]:
    group, peer, received = more.pop("group", None), 1 - dist.get_rank(), torch.zeros(2)
    ops = [dist.P2POp(dist.isend, mine(), peer, group), dist.P2POp(dist.irecv, received, peer, group)]
    return dist.batch_isend_irecv(ops, **more), received


def into(name: str, output: Any, *args: Any, **more: Any) -> tuple[Any, Any]:
    return getattr(dist, name)(output, *args, **more), output


def gather(**more: Any) -> tuple[Any, Any]:
    gathered = parts() if dist.get_rank() == 0 else None
    return dist.gather(mine(1), gathered, 0, **more), gathered or []


def scatter(**more: Any) -> tuple[Any, Any]:
    return into("scatter", mine(1), parts() if dist.get_rank() == 1 else None, 1, **more)


def gather_object(**more: Any) -> tuple[Any, Any]:
    gathered: list[Any] = [None] * 2 if dist.get_rank() == 0 else []
    return dist.gather_object(dist.get_rank() + 1.0, gathered or None, 0, **more), gathered


def scatter_object_list(**more: Any) -> tuple[Any, Any]:
    return into("scatter_object_list", [None], [3.0, 4.0] if dist.get_rank() == 1 else None, 1, **more)


#: name -> how it is called with further keywords: what it returned, and its output, None where that is the result.
#: Beside it the values in the output on rank 0 and rank 1.
CALLS: dict[str, tuple[Callable[..., tuple[Any, Any]], tuple[list[float], list[float]]]] = {
    "all_reduce": (lambda **o: into("all_reduce", mine(), **o), ([3, 3], [3, 3])),
    "inference_all_reduce": (lambda **o: into("inference_all_reduce", mine(), **o), ([3, 3], [3, 3])),
    "reduce": (lambda **o: into("reduce", mine(), 0, **o), ([3, 3], [2, 2])),
    "broadcast": (lambda **o: into("broadcast", mine(), 1, **o), ([2, 2], [2, 2])),
    "all_gather": (lambda **o: into("all_gather", parts(), mine(1), **o), ([1, 2], [1, 2])),
    "all_gather_into_tensor": (
        lambda **o: into("all_gather_into_tensor", mine(), mine(1), **o),
        ([1, 2], [1, 2]),
    ),
    "all_gather_single": (lambda **o: into("all_gather_single", mine(), mine(1), **o), ([1, 2], [1, 2])),
    "allgather_fn": (lambda **o: into("allgather_fn", mine(), mine(1), **o), ([1, 2], [1, 2])),
    "all_gather_coalesced": (
        lambda **o: into("all_gather_coalesced", [mine(), parts()], [mine(1), mine(1)], **o),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
    ),
    "gather": (gather, ([1, 2], [])),
    "scatter": (scatter, ([2], [2])),
    "reduce_scatter": (lambda **o: into("reduce_scatter", mine(1), parts(), **o), ([3], [3])),
    "reduce_scatter_tensor": (lambda **o: into("reduce_scatter_tensor", mine(1), mine(), **o), ([3], [3])),
    "reduce_scatter_single": (lambda **o: into("reduce_scatter_single", mine(1), mine(), **o), ([3], [3])),
    "reduce_scatter_fn": (lambda **o: into("reduce_scatter_fn", mine(1), mine(), **o), ([3], [3])),
    "all_to_all": (lambda **o: into("all_to_all", parts(), parts(), **o), ([1, 2], [1, 2])),
    "all_to_all_single": (lambda **o: into("all_to_all_single", mine(), mine(), **o), ([1, 2], [1, 2])),
    "all_reduce_coalesced": (
        lambda **o: into("all_reduce_coalesced", [mine(1), mine(1, torch.float64), mine(1)], **o),
        ([3, 3, 3], [3, 3, 3]),
    ),
    "reduce_scatter_coalesced": (
        lambda **o: (dist.reduce_scatter_coalesced([mine(), mine(4)], **o), None),
        ([1.5, 1.5, 1.5], [1.5, 1.5, 1.5]),
    ),
    "barrier": (lambda **o: (dist.barrier(**o), []), ([], [])),
    "monitored_barrier": (lambda **o: (dist.monitored_barrier(**o), []), ([], [])),
    "send": (lambda **o: exchange(True, "send", "recv", **o), ([1, 1], [1, 1])),
    "recv": (lambda **o: exchange(False, "send", "recv", **o), ([2, 2], [2, 2])),
    "isend": (lambda **o: exchange(True, "isend", "irecv", **o), ([1, 1], [1, 1])),
    "irecv": (lambda **o: exchange(False, "isend", "irecv", **o), ([2, 2], [2, 2])),
    "batch_isend_irecv": (batch, ([2, 2], [1, 1])),
    "all_gather_object": (
        lambda **o: into("all_gather_object", [None] * 2, dist.get_rank() + 1.0, **o),
        ([1, 2], [1, 2]),
    ),
    "allgather_object": (lambda **o: (dist.allgather_object(dist.get_rank() + 1.0, **o), None), ([1, 2], [1, 2])),
    "broadcast_object": (lambda **o: ([dist.broadcast_object(dist.get_rank() + 1.0, 1, **o)], None), ([2], [2])),
    "broadcast_object_list": (
        lambda **o: into("broadcast_object_list", [dist.get_rank() + 1.0], 1, **o),
        ([2], [2]),
    ),
    "gather_object": (gather_object, ([1, 2], [])),
    "scatter_object_list": (scatter_object_list, ([3], [4])),
    "reduce_object": (lambda **o: ([dist.reduce_object(dist.get_rank() + 1.0, 0, **o) or 0], None), ([3], [0])),
    "send_object_list": (lambda **o: exchange_objects(True, **o), ([1], [1])),
    "recv_object_list": (lambda **o: exchange_objects(False, **o), ([2], [2])),
}
#: Another name of the same function, by which failures go.
CANONICAL = {
    "all_gather_single": "all_gather_into_tensor",
    "allgather_fn": "all_gather_into_tensor",
    "reduce_scatter_fn": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
#: Reports who is missing through the store, and leaves the group as it was.
MONITORED = "monitored_barrier"


def parameter(name: str, of: str) -> inspect.Parameter | None:
    return inspect.signature(getattr(dist, name)).parameters.get(of)


ASYNC = [name for name in CALLS if parameter(name, "async_op") is not None]


def handles(returned: Any) -> list[Any]:
    """The handles among what a call returned."""
    entries = returned if isinstance(returned, list) else [returned]
    return [entry for entry in entries if isinstance(entry, dist.Work)]


def numbers(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        found: list[float] = value.tolist()
        return found
    return [number for entry in value for number in numbers(entry)] if isinstance(value, list) else [value]


def outcome(returned: Any, output: Any) -> list[float]:
    """Wait for the handles of a call, if it gave any; the values of its output."""
    works = handles(returned)
    for work in works:
        assert work.wait()
    if output is None:
        output = works[0].result() if works else returned
    return numbers(output)


def check_world() -> None:
    tensor = mine()
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3]


@contextlib.contextmanager
def observed(on: bool) -> Iterator[None]:
    """With the comms logger on, or not."""
    if on:
        dist.configure(enabled=True)
    try:
        yield
    finally:
        dist.configure(enabled=False)
        dist.reset_log()


NOT_COLLECTIVES = ("get_", "new_", "register_")


def test_the_table_is_complete() -> None:
    functions = {name for name in dist.__all__ if inspect.isroutine(getattr(dist, name))}
    timed = {name for name in functions if parameter(name, "timeout")}
    communicating = {name for name in functions if parameter(name, "group") and not name.startswith(NOT_COLLECTIVES)}
    assert timed - MAKING_GROUPS == set(CALLS)
    settings = {"set_compression", "set_deterministic_reductions", "set_hierarchical"}
    assert communicating - {"destroy_process_group", "empty_shared", *settings} <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_timeout_is_given_by_name(name: str) -> None:
    found = parameter(name, "timeout")
    assert found is not None
    assert found.default is None
    by_position = ("barrier", MONITORED)  # as in DeepSpeed
    assert found.kind is (found.POSITIONAL_OR_KEYWORD if name in by_position else found.KEYWORD_ONLY)


# --- a rank that does not take part


def run_alone(name: str, logging: bool) -> None:
    """Rank 0 calls, rank 1 does not; once as it is, and once with async_op where there is one."""
    with observed(logging):
        forms: list[dict[str, Any]] = [{}, {"async_op": True}] if name in ASYNC else [{}]
        limits = [CALL_S, timedelta(seconds=CALL_S)]
        for form, limit in zip(forms, limits, strict=False):
            group = dist.new_group([0, 1], timeout=GROUP_S)
            dist.barrier()
            if dist.get_rank() == 0:
                end_in_time(name, group, limit, form)
            dist.barrier()
            dist.destroy_process_group(group)
            check_world()


def end_in_time(name: str, group: Any, limit: float | timedelta, form: dict[str, Any]) -> None:
    call, _ = CALLS[name]
    start = time.monotonic()
    with pytest.raises(dist.CommTimeoutError) as raised:
        outcome(*call(group=group, timeout=limit, **form))
    took_s = time.monotonic() - start
    assert CALL_S * 0.9 < took_s < GROUP_S / 4
    text = str(raised.value)
    if name == MONITORED:
        assert text.startswith(f"monitored_barrier: rank 1 did not arrive within {CALL_S:g} s: rank 1 (pid ")
        return
    asked = {"send": "isend", "recv": "irecv"}.get(name, name) if form else name
    assert text.startswith(
        f"{CANONICAL.get(asked, asked)} on the group of ranks [0, 1] timed out after {CALL_S:g} s, as seen by rank 0: "
    )
    with pytest.raises(dist.BrokenGroupError, match=r"^all_reduce: the group of ranks \[0, 1\] failed earlier"):
        dist.all_reduce(mine(), group=group)


@pytest.mark.parametrize("logging", [False, True], ids=["plain", "logged"])
@pytest.mark.parametrize("name", CALLS)
def test_call_ends_after_its_own_time(pools: Pools, name: str, logging: bool) -> None:
    pools(2).run(run_alone, name, logging, timeout_s=25)


def run_on_the_fast_path() -> None:
    """A call that takes the fast path has its timeout all the same."""
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "barrier"):
        group = dist.new_group([0, 1], timeout=GROUP_S)
        call, expected = CALLS[name]
        for _ in range(2):
            assert outcome(*call(group=group)) == expected[dist.get_rank()]
        dist.barrier()
        if dist.get_rank() == 0:
            end_in_time(name, group, CALL_S, {})
        dist.barrier()
        dist.destroy_process_group(group)


def test_call_ends_after_its_own_time_on_the_fast_path(pools: Pools) -> None:
    pools(2).run(run_on_the_fast_path, timeout_s=25)


def run_tiny_timeout(name: str) -> float:
    """Less than the millisecond in which libraries count."""
    group = dist.new_group([0, 1], timeout=GROUP_S)
    dist.barrier()
    took_s = 0.0
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(dist.CommTimeoutError):
            outcome(*CALLS[name][0](group=group, timeout=0.0004))
        took_s = time.monotonic() - start
    dist.barrier()
    dist.destroy_process_group(group)
    return took_s


@pytest.mark.parametrize("name", ["all_reduce", "irecv", "recv", "barrier", "allgather_object"])
def test_timeout_below_a_millisecond_ends_too(pools: Pools, name: str) -> None:
    took_s, _ = pools(2).run(run_tiny_timeout, name, timeout_s=15)
    assert took_s < 5 * patience()


# --- calls that succeed


def run_successes(name: str, logging: bool) -> None:
    call, expected = CALLS[name]
    group = dist.new_group([0, 1], timeout=GROUP_S)
    forms: list[dict[str, Any]] = [{}, {"async_op": True}] if name in ASYNC else [{}]
    with observed(logging):
        for form in forms:
            for options in ({}, {"timeout": 20}, {"timeout": timedelta(seconds=20)}, {"timeout": 20.5, "group": group}):
                assert outcome(*call(**options, **form)) == expected[dist.get_rank()]
    dist.destroy_process_group(group)
    check_world()


@pytest.mark.parametrize("logging", [False, True], ids=["plain", "logged"])
@pytest.mark.parametrize("name", CALLS)
def test_call_with_a_timeout_gives_the_same_result(pools: Pools, name: str, logging: bool) -> None:
    pools(2).run(run_successes, name, logging, timeout_s=25)


def run_timeout_of_one_call() -> None:
    """The next call on the group has the group's time again."""
    group = dist.new_group([0, 1], timeout=GROUP_S)
    for name in ("all_reduce", "inference_all_reduce", "broadcast", "irecv", "barrier", "all_gather"):
        call, expected = CALLS[name]
        dist.barrier()
        assert outcome(*call(group=group, timeout=0.25)) == expected[dist.get_rank()]
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.3)
        assert outcome(*call(group=group)) == expected[dist.get_rank()]
    dist.destroy_process_group(group)


def test_timeout_is_of_one_call(pools: Pools) -> None:
    pools(2).run(run_timeout_of_one_call)


# --- wrong timeouts

WRONG: list[tuple[Any, type[Exception]]] = [
    (0, dist.ArgumentError),
    (0.0, dist.ArgumentError),
    (-1, dist.ArgumentError),
    (timedelta(0), dist.ArgumentError),
    (timedelta(seconds=-1), dist.ArgumentError),
    (math.nan, dist.ArgumentError),
    (math.inf, dist.ArgumentError),
    ("5", ArgumentTypeError),
    ([5], ArgumentTypeError),
    (True, ArgumentTypeError),
    (False, ArgumentTypeError),
]


#: What one rank calls while the other calls its counterpart.
PAIRS = [("send", "recv"), ("isend", "irecv"), ("send_object_list", "recv_object_list")]


def run_wrong(name: str) -> None:
    """Refused the first time, and where the call takes the fast path."""
    call, expected = CALLS[name]
    told = next((pair for pair in PAIRS if name in pair), (CANONICAL.get(name, name),))
    for _ in range(2):
        for limit, error in WRONG:
            with pytest.raises(error) as raised:
                outcome(*call(timeout=limit))
            assert type(raised.value) is error
            assert str(raised.value).startswith(tuple(f"{one}: timeout: got " for one in told)), raised.value
            assert "expected seconds or a timedelta" in str(raised.value)
        assert outcome(*call()) == expected[dist.get_rank()]
    check_world()


@pytest.mark.parametrize("name", CALLS)
def test_wrong_timeout(pools: Pools, name: str) -> None:
    pools(2).run(run_wrong, name)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "new_group": lambda timeout: dist.new_group([0, 1], timeout=timeout),
    "new_subgroups": lambda timeout: dist.new_subgroups(2, timeout=timeout)[0],
    "new_subgroups_by_enumeration": lambda timeout: dist.new_subgroups_by_enumeration([[1, 0]], timeout=timeout)[0],
    "split_group": lambda timeout: dist.split_group(None, [[0, 1]], timeout=timeout),
}


def run_wrong_group(name: str) -> None:
    for limit, error in WRONG:
        with pytest.raises(error) as raised:
            MAKERS[name](limit)
        assert str(raised.value).startswith(f"{name}: timeout: got "), raised.value
    group = MAKERS[name](GROUP_S)
    assert outcome(*CALLS["all_reduce"][0](group=group)) == [3, 3]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("name", MAKERS)
def test_wrong_timeout_of_a_group(pools: Pools, name: str) -> None:
    pools(2).run(run_wrong_group, name)


# --- the timeout of a group


def run_group(name: str, limit: float | timedelta) -> None:
    group = MAKERS[name](limit)
    assert outcome(*CALLS["all_reduce"][0](group=group)) == [3, 3]
    dist.barrier()
    if dist.get_rank() == 0:
        start = time.monotonic()
        with pytest.raises(
            dist.CommTimeoutError, match=r"^all_reduce on the group of ranks \[0, 1\] timed out"
        ) as raised:
            dist.all_reduce(mine(), group=group)
        assert 0.3 * 0.9 < time.monotonic() - start < 10 * patience()
        assert " after 0.3 s, " in str(raised.value)
    dist.barrier()
    dist.destroy_process_group(group)
    check_world()


@pytest.mark.parametrize("limit", [0.3, timedelta(seconds=0.3)], ids=["seconds", "timedelta"])
@pytest.mark.parametrize("name", MAKERS)
def test_timeout_of_a_group(pools: Pools, name: str, limit: float | timedelta) -> None:
    pools(2).run(run_group, name, limit, timeout_s=25)


def run_longer_call() -> None:
    """A call may also take longer than its group allows."""
    group = dist.new_group([0, 1], timeout=0.3)
    for name in ("all_reduce", "irecv", "barrier"):
        call, expected = CALLS[name]
        dist.barrier()
        if dist.get_rank() == 1:
            time.sleep(0.6)
        assert outcome(*call(group=group, timeout=20)) == expected[dist.get_rank()]
    dist.destroy_process_group(group)


def test_timeout_of_a_call_may_be_longer(pools: Pools) -> None:
    pools(2).run(run_longer_call, timeout_s=25)


def run_endless_waits() -> None:
    for timeout in (timedelta.max, 1e300, float("inf"), 10**400):
        tensor = torch.ones(3)
        for work in (
            dist.all_reduce(tensor, async_op=True),
            dist.all_reduce_coalesced([tensor, tensor.double()], async_op=True),
            dist.all_gather(tensor, async_op=True),
            dist.isend(tensor, 1) if dist.get_rank() == 0 else dist.irecv(tensor, 0),
        ):
            assert work is not None
            assert work.wait(timeout)


def test_waits_may_be_endless(pools: Pools) -> None:
    pools(2).run(run_endless_waits)
