"""Groups and who is in them, barriers, meshes, backends, the comms logger, and what handles promise."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as c10d
from world_helpers import logged

import comm_orchestrator as dist
from comm_collectives.recorded.backend import RecordingBackend
from comm_utils import active, operations
from comm_utils.testing import RankPool, patience

Pools: TypeAlias = Callable[[int], RankPool]


def caught(error: type[Exception] | tuple[type[Exception], ...], call: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(error) as raised:
        call(*args)
    return raised.value


def check_world(group: Any = None) -> None:
    W = dist.get_world_size(group)
    tensor = torch.full((3,), dist.get_rank(group) + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [W * (W + 1) / 2] * 3


# --- groups


def run_queries() -> dict[str, Any]:
    group = dist.new_group([2, 0])
    unsorted = dist.new_group([2, 0], sort_ranks=False)
    member = dist.get_rank() in (0, 2)
    found = {
        "world": (dist.get_rank(), dist.get_world_size(), dist.get_all_ranks_from_group(), dist.get_backend()),
        "group": (dist.get_rank(group), dist.get_world_size(group)),
        "unsorted": (dist.get_rank(unsorted), dist.get_world_size(unsorted)),
    }
    world = dist.get_world_group()
    assert isinstance(world, dist.ProcessGroup)
    assert dist.get_rank(world) == dist.get_rank(dist.GroupMember.WORLD) == dist.get_rank()
    assert [dist.get_global_rank(None, rank) for rank in range(3)] == [0, 1, 2]
    assert [dist.get_group_rank(world, rank) for rank in range(3)] == [0, 1, 2]
    if member:
        check_world(group)
        check_world(unsorted)
        found["ranks"] = dist.get_all_ranks_from_group(group), dist.get_process_group_ranks(unsorted)
        found["global"] = dist.get_global_rank(group, 1), dist.get_global_rank(unsorted, 1)
        found["local"] = dist.get_group_rank(group, 2), dist.get_group_rank(unsorted, 2)
        found["backend"] = dist.get_backend(group)
        for one in (group, unsorted):
            dist.destroy_process_group(one)
    else:
        assert dist.get_all_ranks_from_group(group) == []
        for query in (dist.get_process_group_ranks, dist.get_backend):
            assert "not a member" in str(caught(dist.ArgumentError, query, group))
        assert "not a member" in str(caught(dist.ArgumentError, dist.get_global_rank, group, 0))
        assert "not a member" in str(caught(dist.ArgumentError, dist.get_group_rank, group, 0))
    return found


@pytest.mark.gloo("it names the library")
def test_queries(pools: Pools) -> None:
    first, second, third = pools(3).run(run_queries)
    assert [found["world"] for found in (first, second, third)] == [(rank, 3, [0, 1, 2], "gloo") for rank in range(3)]
    assert [found["group"] for found in (first, second, third)] == [(0, 2), (-1, -1), (1, 2)]
    assert [found["unsorted"] for found in (first, second, third)] == [(1, 2), (-1, -1), (0, 2)]
    for found in (first, third):
        assert found["ranks"] == ([0, 2], [2, 0])
        assert found["global"] == (2, 0)
        assert found["local"] == (1, 0)
        assert found["backend"] == "gloo"


def test_local_rank(pools: Pools) -> None:
    assert pools(3).run("comm_orchestrator:get_local_rank") == [0, 1, 2]


def run_groups_of_members() -> list[float]:
    """Each rank makes only the groups that it is in, and so another number of them."""
    rank, found = dist.get_rank(), []
    for members in ([0, 1], [1, 2], [0, 2], [0, 1], [0], [0, 1, 2]):
        if rank in members:
            group = dist.new_group(members)
            tensor = torch.tensor([2.0**rank])
            dist.all_reduce(tensor, group=group)
            found.append(tensor.item())
            dist.destroy_process_group(group)
    return found


def test_groups_made_by_their_members_alone(pools: Pools) -> None:
    assert pools(3).run(run_groups_of_members) == [[3, 5, 3, 1, 7], [3, 6, 3, 7], [6, 5, 7]]


def run_groups_of_all() -> list[float]:
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2], [0, 2], [0, 1], None)]
    found = []
    for group in reversed(groups):  # they work at the same time, in any order of use
        tensor = torch.tensor([2.0 ** dist.get_rank()])
        dist.all_reduce(tensor, group=group)
        found.append(tensor.item())
    for group in groups:
        dist.destroy_process_group(group)
    return found


def test_groups_made_by_all(pools: Pools) -> None:
    assert pools(3).run(run_groups_of_all) == [[7, 3, 5, 1, 3], [7, 3, 2, 6, 3], [7, 4, 5, 6, 4]]


def run_mixed_forms(times: int) -> int:
    """Both forms in turn, the same ranks again and again, kept and destroyed."""
    rank, kept = dist.get_rank(), []
    for time_ in range(times):
        if rank == 1 and time_ % 2:
            continue  # no member, and this time it does not call
        group = dist.new_group([0, 2])
        if rank != 1:
            tensor = torch.tensor([float(rank + time_)])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2.0 + 2 * time_
            dist.all_reduce(tensor, "avg", group)
            if time_ % 3:
                dist.destroy_process_group(group)
            else:
                kept.append(group)
    for group in kept:
        check_world(group)
        dist.destroy_process_group(group)
    check_world()
    return len(kept)


def test_same_ranks_many_times(pools: Pools) -> None:
    assert pools(3).run(run_mixed_forms, 24) == [8, 0, 8]


def run_torchs_groups() -> None:
    """Groups of both APIs are the same thing."""
    theirs = c10d.new_group([0, 1])
    tensor = torch.ones(1)
    calls = {
        "all_reduce": lambda **how: dist.all_reduce(tensor, group=theirs, **how),
        "broadcast": lambda **how: dist.broadcast(tensor, 0, theirs, **how),
        "barrier": lambda **how: dist.barrier(theirs, **how),
        "all_gather": lambda **how: dist.all_gather([torch.empty(1), torch.empty(1)], tensor, theirs, **how),
    }
    for call in (*calls.values(), *calls.values()):  # the second time by the shorter way
        call()
    check_world(theirs)
    c10d.destroy_process_group(theirs)
    for name, call in calls.items():
        for how in ({}, {"async_op": True}):
            with pytest.raises(dist.NotInitializedError, match=f"^{name}: .* no longer exists"):
                call(**how)
    with pytest.raises(dist.NotInitializedError, match=r"^destroy_process_group: .* no longer exists"):
        dist.destroy_process_group(theirs)
    ours = dist.new_group([0, 1])
    tensor = torch.ones(1)
    c10d.all_reduce(tensor, group=ours)
    assert tensor.item() == 2.0
    c10d.destroy_process_group(ours)
    check_world()


def test_groups_of_torch(pools: Pools) -> None:
    pools(2).run(run_torchs_groups)


# --- barriers


def run_barrier(late: int, asynchronous: bool) -> tuple[float, float]:
    if dist.get_rank() == late:
        time.sleep(0.3)
    called = time.monotonic()
    if asynchronous:
        work = dist.barrier(async_op=True)
        if dist.get_rank() != late:
            assert not work.is_completed()
        assert work.wait()
    else:
        assert dist.barrier() is None
    return called, time.monotonic()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_barrier(pools: Pools, asynchronous: bool) -> None:
    for late in (0, 2):
        found = pools(3).run(run_barrier, late, asynchronous)
        assert min(done for _, done in found) >= max(called for called, _ in found)


def run_monitored(
    missing: list[int], all_ranks: bool, limit_s: float = 0.4
) -> tuple[str, float, list[tuple[str, str]]]:
    start, found = time.monotonic(), "passed"
    with logged(logging.INFO) as log:
        if dist.get_rank() not in missing:
            try:
                dist.monitored_barrier(timeout=limit_s, wait_all_ranks=all_ranks)
            except dist.CommTimeoutError as error:
                found = str(error)
    took_s = time.monotonic() - start
    dist.barrier()
    check_world()  # it stays usable
    if dist.get_rank() in missing:
        with contextlib.suppress(dist.CommTimeoutError):
            dist.monitored_barrier(timeout=0.001)  # it has to be called as often everywhere
    dist.barrier()
    dist.monitored_barrier(timeout=20)
    return found, took_s, log.lines


def test_monitored_barrier(pools: Pools) -> None:
    assert [found[0] for found in pools(3).run(run_monitored, [], False, 30)] == ["passed"] * 3


def test_monitored_barriers_after_some_that_failed(pools: Pools) -> None:
    pool = pools(2)
    for _ in range(2):
        first, second = pool.run(run_barriers_late)
        assert len(first) == 3
        for text in first:
            assert text.startswith("monitored_barrier: rank 1 did not arrive within 0.1 s: rank 1 (pid ")
        assert second == []


def run_barriers_late() -> list[str]:
    found = []
    if dist.get_rank() == 0:
        for _ in range(3):
            try:
                dist.monitored_barrier(timeout=0.1)
            except dist.CommTimeoutError as error:
                found.append(str(error))
    dist.barrier()
    for _ in range(3):
        dist.monitored_barrier(timeout=30)
    return found


@pytest.mark.parametrize(
    ("missing", "all_ranks", "named"),
    [
        ([1], False, "rank 1 did not arrive within {limit_s:g} s (wait_all_ranks=True names all that are missing)"),
        ([1, 3], False, "rank 1 did not arrive within {limit_s:g} s (wait_all_ranks=True names all that are missing)"),
        ([1], True, "rank 1 did not arrive within {limit_s:g} s"),
        ([1, 3], True, "ranks 1, 3 did not arrive within {limit_s:g} s"),
        ([0, 1, 2], True, "ranks 0, 1, 2 did not arrive within {limit_s:g} s"),
    ],
)
def test_monitored_barrier_names_missing_ranks(pools: Pools, missing: list[int], all_ranks: bool, named: str) -> None:
    limit_s = round(1.0 * patience(), 1)
    found = pools(4).run(run_monitored, missing, all_ranks, limit_s)
    for rank, (text, took_s, lines) in enumerate(found):
        if rank in missing:
            assert (text, lines) == ("passed", [])
        else:
            assert text.startswith(f"monitored_barrier: {named.format(limit_s=limit_s)}: rank ")
            assert "has not called monitored_barrier: it is in " in text
            assert 0.85 * limit_s < took_s < 5 * patience()
            assert [level for level, _ in lines] == ["ERROR"]


def run_monitored_in_group() -> tuple[str, str]:
    group = dist.new_group([1, 2])
    first = second = ""
    if dist.get_rank() == 2:
        dist.monitored_barrier(group, timeout=20)
        try:
            dist.monitored_barrier(group, timeout=0.2)
        except dist.CommTimeoutError as error:
            second = str(error)
    elif dist.get_rank() == 1:
        dist.monitored_barrier(group, timeout=20)
    else:
        assert dist.monitored_barrier(group) is None
    dist.barrier()
    dist.destroy_process_group(group)
    return first, second


def test_monitored_barrier_names_global_ranks(pools: Pools) -> None:
    found = pools(3).run(run_monitored_in_group)
    assert found[2][1].startswith("monitored_barrier: rank 1 did not arrive within 0.2 s: rank 1 (pid ")


# --- meshes


def run_mesh() -> tuple[list[int], list[int], float, float]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    data, model = mesh.get_group("data"), mesh.get_group("model")
    by_data, by_model = torch.tensor([2.0 ** dist.get_rank()]), torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(by_data, group=data)
    dist.all_reduce(by_model, group=model)
    found = dist.get_all_ranks_from_group(data), dist.get_all_ranks_from_group(model), by_data.item(), by_model.item()
    for group in (data, model):
        dist.destroy_process_group(group)
    return found


def test_device_mesh(pools: Pools) -> None:
    assert pools(4).run(run_mesh) == [
        ([0, 2], [0, 1], 5, 3),
        ([1, 3], [0, 1], 10, 3),
        ([0, 2], [2, 3], 5, 12),
        ([1, 3], [2, 3], 10, 12),
    ]


def run_mesh_by_deepspeeds_name() -> tuple[str, tuple[str, ...], int]:
    mesh = dist.initialize_mesh_device((1, 2), ("data", "sequence"))
    group = mesh.get_group("sequence")
    check_world(group)
    return mesh.device_type, mesh.mesh_dim_names, dist.get_world_size(group)


def test_initialize_mesh_device(pools: Pools) -> None:
    assert pools(2).run(run_mesh_by_deepspeeds_name) == [("cpu", ("data", "sequence"), 2)] * 2


# --- backends


def run_backends() -> None:
    assert dist.get_backend() == "gloo"
    assert dist.set_backend("gloo") is dist.set_backend("GLOO") is dist.set_backend() is None
    raised = caught(dist.ArgumentError, dist.set_backend, "nccl")
    for text in (
        "name: got 'nccl' while 'gloo' is active",
        "destroy_process_group()",
        "init_distributed(dist_backend='nccl')",
        "new_group(backend='nccl')",
    ):
        assert text in str(raised)
    group = dist.new_group(backend="gloo")
    assert dist.get_backend(group) == "gloo"
    check_world(group)
    dist.destroy_process_group(group)


@pytest.mark.gloo("it names the library")
def test_set_backend(pools: Pools) -> None:
    pools(2).run(run_backends)


def test_available_backends() -> None:
    found = dist.available_backends()
    assert {"gloo", "nccl", "mpi", "ucc", "xccl", "ccl"} <= set(found)
    assert found["gloo"].usable
    assert f"torch {torch.__version__} has gloo" in found["gloo"].reason
    assert found["mpi"].usable == c10d.is_mpi_available()
    assert found["nccl"].usable == (c10d.is_nccl_available() and torch.cuda.is_available())
    for availability in found.values():
        assert availability.reason
        assert availability.usable or availability.remedy


# --- the comms logger


@contextlib.contextmanager
def observing(**settings: Any) -> Iterator[None]:
    dist.reset_log()
    dist.configure(enabled=True, **settings)
    try:
        yield
    finally:
        dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)
        dist.reset_log()


def run_wrapper() -> list[str]:
    """Off means that the wrapper does not exist."""
    bare = active.slot.backend
    found = [type(bare).__name__]
    dist.configure(enabled=True)
    found.append(type(active.slot.backend).__name__)
    dist.configure(enabled=True)  # not around itself
    assert isinstance(active.slot.backend, RecordingBackend)
    assert active.slot.backend.inner is bare
    dist.configure(verbose=False)  # leaves it on
    found.append(type(active.slot.backend).__name__)
    dist.configure(enabled=False)
    assert active.slot.backend is bare
    dist.configure({"comms_logger": {"enabled": True}})
    found.append(type(active.slot.backend).__name__)
    dist.configure({"comms_logger": {"enabled": True}}, enabled=False)  # the argument wins
    assert active.slot.backend is bare
    dist.configure({"comms_logger": {"enabled": True}})
    dist.configure({"comms_logger": {}})
    assert active.slot.backend is bare
    return found


@pytest.mark.gloo("it names the class")
def test_off_means_that_there_is_no_wrapper(pools: Pools) -> None:
    assert (
        pools(2).run(run_wrapper) == [["TorchBackend", "RecordingBackend", "RecordingBackend", "RecordingBackend"]] * 2
    )


def recorded() -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):
        found = dist.log_summary(return_dict=True)
    assert found is not None
    summary: dict[str, Any] = found["summary"]
    return summary


def run_summary() -> dict[str, Any]:
    W = dist.get_world_size()
    tensor = torch.ones(256)  # 1 KiB
    dist.all_reduce(tensor)  # before: not recorded
    with observing():
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(512))
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(256 * W), tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            table = dist.log_summary(return_dict=True)
            assert dist.log_summary() is None
            again = dist.log_summary(show_straggler=True, return_dict=True)
        assert table is not None
        assert again is not None
        assert again["summary"] == table["summary"] == recorded()  # a summary is in no summary
        assert (table["straggler_analysis"], "stragglers" in table) == (None, False)
        assert (dist.has_comm_data(), dist.get_comm_operation_count()) == (True, 8)
        names = dist.get_logged_comm_ops()
        dist.reset_log()
        assert recorded() == {}
    dist.all_reduce(tensor)  # afterwards: not recorded
    assert recorded() == {}
    assert (dist.has_comm_data(), dist.get_comm_operation_count(), dist.get_logged_comm_ops()) == (False, 0, [])
    return {"table": again, "names": names, "printed": out.getvalue()}


def test_log_summary(pools: Pools) -> None:
    found = pools(2).run(run_summary)
    for rank, one in enumerate(found):
        table = one["table"]["summary"]
        assert set(table) == {"all_reduce", "all_gather_into_tensor", "broadcast", "barrier"}
        assert one["names"] == sorted(table)
        row = table["all_reduce"][1024]
        assert (row["count"], row["msg_size_bytes"], row["msg_size_str"]) == (4, 1024, "1 KiB")
        assert table["all_reduce"][2048]["count"] == 1
        assert set(table["all_gather_into_tensor"]) == {2048}  # the whole array
        assert row["total_latency_ms"] == pytest.approx(4 * row["avg_latency_ms"])
        assert row["median_latency_ms"] >= row["min_latency_ms"] > 0
        assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"])  # 2 (W - 1) / W is 1 for two ranks
        waited = one["table"]["straggler_analysis"]["all_reduce"][1024]
        assert waited["count"] == 4
        assert waited["total_comm_lat_ms"] + waited["total_straggler_ms"] == pytest.approx(row["total_latency_ms"])
        metadata = one["table"]["metadata"]
        assert (metadata["world_size"], metadata["rank"]) == (2, rank)
        datetime.fromisoformat(metadata["timestamp"])
        lines = one["printed"].splitlines()
        if rank == 0:
            assert lines[0].split()[:4] == ["operation", "size", "ranks", "calls"]
            # Two sizes, three times; and once more, apart from asynchronous ones or not.
            assert sum(line.startswith("all_reduce ") for line in lines) == 8
            assert "waiting ms" in one["printed"]
        else:
            assert lines == []


def run_empty_summary() -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        dist.reset_log()
        dist.log_summary()
        with observing():
            dist.log_summary(show_straggler=True)
    return out.getvalue().splitlines()


def test_a_summary_of_nothing_says_so(pools: Pools) -> None:
    first, second = pools(2).run(run_empty_summary)
    assert first == [
        "The comms logger is off and has recorded nothing; configure(enabled=True) turns it on.",
        "The comms logger is on, and rank 0 has recorded no operation that it is to record.",
    ]
    assert second == []


def test_every_operation_that_is_recorded_has_a_known_name() -> None:
    methods = {name for name in vars(RecordingBackend) if name in operations.recorded()}
    moving = {
        name for name, value in inspect.getmembers(RecordingBackend, inspect.isfunction) if not name.startswith("_")
    }
    assert moving - methods == {"around", "during", "fast_path", "batch_isend_irecv", "observe_composed"}
    assert {row.name for row in operations.rows() if row.recorded and methods & set(row.travels_as)} == (
        operations.recorded()
    )


def run_unknown_operation() -> None:
    """DeepSpeed has names that we have not: a configuration of its works, with a word."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("comm").addHandler(handler)
    try:
        dist.configure({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["allreduce"]}})
        dist.configure(prof_ops=["all_reduce"])
    finally:
        logging.getLogger("comm").removeHandler(handler)
        dist.configure(enabled=False, prof_all=True, prof_ops=[])
    assert said == [
        "prof_ops: 'allreduce' is no operation: only calls with that log_name are recorded; did you mean 'all_reduce'?"
    ]


def test_operations_that_do_not_exist_are_worth_a_word(pools: Pools) -> None:
    pools(1).run(run_unknown_operation)


def run_names() -> list[str]:
    """What calls that are built from other operations are called when they fail."""
    rank, found = dist.get_rank(), []
    uneven = [torch.ones(2), torch.ones(3)]
    calls = [
        lambda group: dist.all_gather(uneven, torch.ones(2), group),
        lambda group: dist.all_gather(torch.ones(2), group),
        lambda group: dist.all_gather(torch.ones(2), group, async_op=True).result(),
        lambda group: dist.all_reduce_coalesced([torch.ones(2)], group=group),
        lambda group: dist.allgather_object(1, group),
        lambda group: dist.all_gather_object([None] * 2, 1, group),
        lambda group: dist.reduce_object(1, 1, group=group),
        lambda group: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * 2, group=group),
        lambda group: dist.inference_all_reduce(torch.ones(2), group=group),
        lambda group: dist.irecv(torch.ones(2), 1, group).wait(),
    ]
    for observed in (False, True):
        # With the logger, one of each way to be built.
        calls = calls[::3] if observed else calls
        with observing() if observed else contextlib.nullcontext():
            dist.barrier()  # so that the ranks begin to make the groups within their short timeout
            groups = [dist.new_group([0, 1], timeout=0.4) for _ in calls]
            dist.barrier()
            if rank == 0:
                found += [
                    str(caught(dist.CommTimeoutError, call, group)) for call, group in zip(calls, groups, strict=True)
                ]
            dist.barrier()
            for group in groups:
                dist.destroy_process_group(group)
    return found


def test_failures_name_the_call_that_was_made(pools: Pools) -> None:
    found, _ = pools(2).run(run_names)
    names = "all_gather all_gather all_gather all_reduce_coalesced allgather_object all_gather_object reduce_object"
    names += " reduce_scatter inference_all_reduce irecv"
    assert [text.split()[0] for text in found] == [*names.split(), *names.split()[::3]]
    assert all(" on the group of ranks [0, 1] timed out after 0.4 s, as seen by rank 0: " in text for text in found)


def run_straggler() -> tuple[bool, str]:
    with observing():
        if dist.get_rank() == 1:
            time.sleep(0.3)
        dist.all_reduce(torch.ones(4))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            table = dist.log_summary(show_straggler=True, return_dict=True)
    assert table is not None
    return table["summary"]["all_reduce"][16]["total_latency_ms"] > 200, out.getvalue()


def test_stragglers_make_the_others_wait(pools: Pools) -> None:
    (waited, printed), (waited_1, _) = pools(2).run(run_straggler)
    assert waited
    assert not waited_1
    line = [line.split() for line in printed.splitlines() if line.startswith("all_reduce")][1]
    total_ms, waiting_ms, transfer_ms = (float(cell) for cell in line[-4:-1])
    assert waiting_ms > 200
    assert total_ms == pytest.approx(waiting_ms + transfer_ms, abs=0.02)
    assert "\nrank 1 (" in printed
    assert "was waited for: the last in 1 of 1 operations" in printed


def some_function() -> None:
    dist.all_reduce(torch.ones(4))


def another_function() -> None:
    dist.all_reduce(torch.ones(4))


def wrapped_function() -> None:
    """Call in ways that leave frames of other packages between this function and the call."""
    with contextlib.ExitStack() as stack:
        stack.callback(dist.all_reduce, torch.ones(4))
    dist.reduce_scatter_coalesced([torch.ones(4)])


def run_settings() -> tuple[list[str], list[tuple[str, int]], list[str]]:
    with observing(prof_all=False, prof_ops=["broadcast"]):
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(4), 0)
        dist.all_reduce(torch.ones(4), log_name="mine")
        dist.all_reduce(torch.ones(4), log_name="chosen", prof=True)
        dist.reduce_scatter_tensor(torch.ones(1), tensor=torch.ones(2), prof=True)
        dist.broadcast(torch.ones(4), 0, None, False, None, False, "mine", "ignored")  # in DeepSpeed's order
        dist.configure(prof_ops=["mine"])
        dist.all_reduce(torch.ones(4), log_name="mine", async_op=True).wait()
        chosen = sorted(recorded())
    with observing(debug=True):
        some_function()
        another_function()
        another_function()
        wrapped_function()
        callers = [(name.partition(" | ")[2], sizes[16]["count"]) for name, sizes in recorded().items()]
        assert dist.get_logged_comm_ops() == sorted(recorded())
    with observing(verbose=True), logged(logging.INFO) as log:
        some_function()
    return chosen, callers, [message for _, message in log.lines]


def test_settings_of_the_logger(pools: Pools) -> None:
    for chosen, callers, lines in pools(2).run(run_settings):
        assert chosen == ["broadcast", "chosen", "mine", "reduce_scatter_tensor"]
        assert callers == [
            ("[Caller Func: another_function]", 2),
            ("[Caller Func: some_function]", 1),
            ("[Caller Func: wrapped_function]", 1),
            ("[Caller Func: wrapped_function]", 1),
        ]
        (line,) = lines
        assert line.startswith("all_reduce | size: 16 B | time: ")
        assert "algbw: " in line
        assert "busbw: " in line


# --- handles


def go(name: str) -> None:
    active.active_backend().get_store(None).set(name, "1")


def wait_for(name: str) -> None:
    active.active_backend().get_store(None).wait([name])


Start: TypeAlias = Callable[[int], "tuple[Any, Callable[[], None]]"]


def _all_reduce(op: str, dtype: torch.dtype) -> Start:
    def start(rank: int) -> tuple[Any, Callable[[], None]]:
        tensor = torch.full((4,), rank + 1, dtype=dtype)
        work = dist.all_reduce(tensor, op, async_op=True)

        def check() -> None:
            assert work.result() is tensor
            assert tensor.tolist() == [{"sum": 3, "avg": 1.5}[op]] * 4

        return work, check

    return start


def _all_gather(rank: int) -> tuple[Any, Callable[[], None]]:
    work = dist.all_gather(torch.full((2,), float(rank)), async_op=True)

    def check() -> None:
        assert [tensor.tolist() for tensor in work.result()] == [[0.0, 0.0], [1.0, 1.0]]

    return work, check


def _reduce_scatter(rank: int) -> tuple[Any, Callable[[], None]]:
    output = torch.zeros(2)
    work = dist.reduce_scatter(output, torch.arange(4.0), async_op=True)

    def check() -> None:
        assert work.result() is output
        assert output.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]

    return work, check


def _strided_broadcast(rank: int) -> tuple[Any, Callable[[], None]]:
    tensor = torch.full((2, 3), float(rank)).t()
    work = dist.broadcast(tensor, 1, async_op=True)

    def check() -> None:
        assert work.result() is tensor
        assert tensor.tolist() == [[1.0, 1.0]] * 3

    return work, check


def _all_to_all(rank: int) -> tuple[Any, Callable[[], None]]:
    outputs = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_to_all(outputs, [torch.tensor([rank * 10.0]), torch.tensor([rank * 10.0 + 1])], async_op=True)

    def check() -> None:
        assert work.result() is outputs
        assert [tensor.item() for tensor in outputs] == [rank, 10.0 + rank]

    return work, check


def _coalesced(rank: int) -> tuple[Any, Callable[[], None]]:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.int64)]
    work = dist.all_reduce_coalesced(tensors, async_op=True)

    def check() -> None:
        assert [tensor.tolist() for tensor in work.result()] == [[2.0, 2.0], [2, 2, 2]]

    return work, check


def _irecv(rank: int) -> tuple[Any, Callable[[], None]]:
    tensor = torch.full((2,), float(rank))
    # The first rank receives: sending alone may be done before anybody receives.
    work = dist.irecv(tensor, 1) if rank == 0 else dist.isend(tensor, 0)

    def check() -> None:
        assert work.result() is tensor
        assert tensor.tolist() == [1.0, 1.0]

    return work, check


HANDLES: dict[str, Start] = {
    "all_reduce": _all_reduce("sum", torch.float32),
    "all_reduce avg": _all_reduce("avg", torch.float64),
    "all_reduce int16": _all_reduce("sum", torch.int16),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast of a strided tensor": _strided_broadcast,
    "all_to_all": _all_to_all,
    "all_reduce_coalesced": _coalesced,
    "irecv": _irecv,
}


def run_handle(name: str, turn: int) -> float:
    """The first rank starts alone; the other follows when the first has seen that nothing is complete."""
    rank = dist.get_rank()
    key = f"handle/{name}/{turn}"
    if rank == 1:
        wait_for(key)
    work, check = HANDLES[name](rank)
    assert isinstance(work, dist.Work)
    took_s = 0.0
    if rank == 0:
        assert work.is_completed() is False
        assert work.exception() is None
        start = time.monotonic()
        raised = caught(dist.CommTimeoutError, work.wait, 0.1)
        assert isinstance(raised, TimeoutError)
        assert "did not finish within 0.1 s" in str(raised)
        took_s = time.monotonic() - start
        assert work.is_completed() is False
        assert work.exception() is None
        go(key)
    assert work.wait(timeout=20) is True
    check()
    assert work.is_completed() is True
    assert work.exception() is None
    assert work.wait() is True  # once more changes nothing
    check()
    check_world()
    return took_s


@pytest.mark.parametrize("name", HANDLES)
def test_handle(pools: Pools, name: str) -> None:
    for turn in range(2):
        took_s, _ = pools(2).run(run_handle, name, turn)
        assert 0.09 < took_s < 5 * patience()


def run_handle_that_completes_by_itself() -> None:
    """``is_completed()`` becomes true although nobody waits."""
    for start in (HANDLES["all_reduce"], HANDLES["irecv"]):
        work, check = start(dist.get_rank())
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        check()


def test_handle_completes_by_itself(pools: Pools) -> None:
    pools(2).run(run_handle_that_completes_by_itself)


def run_out_of_order() -> list[float]:
    tensors = [torch.full((2,), float(value)) for value in range(6)]
    works = [dist.all_reduce(tensor, ("sum", "avg")[value % 2], async_op=True) for value, tensor in enumerate(tensors)]
    order = range(6) if dist.get_rank() == 0 else reversed(range(6))
    for position in order:
        assert works[position].wait()
    return [tensor[0].item() for tensor in tensors]


def test_handles_waited_for_in_different_orders(pools: Pools) -> None:
    assert pools(2).run(run_out_of_order) == [[0.0, 1.0, 4.0, 3.0, 8.0, 5.0]] * 2


def run_two_waiters() -> list[float]:
    """What is added after the library's part happens once, whoever waits."""
    tensor = torch.full((4,), dist.get_rank() + 1.0)
    work = dist.all_reduce(tensor, "avg", async_op=True)
    threads = [threading.Thread(target=work.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensor.tolist()


def test_several_threads_wait_for_one_handle(pools: Pools) -> None:
    assert pools(2).run(run_two_waiters) == [[1.5] * 4] * 2


def run_failed_handle(kind: str) -> tuple[str, str, str]:
    dist.barrier()
    group = dist.new_group([0, 1], timeout=0.6)
    if dist.get_rank() == 1:
        wait_for(f"failed/{kind}")
        dist.destroy_process_group(group)
        return "", "", ""
    tensor = torch.ones(4)
    work = dist.irecv(tensor, 1, group) if kind == "irecv" else dist.all_reduce(tensor, kind, group, async_op=True)
    raised = [caught((dist.CommTimeoutError, dist.PeerLostError), work.wait) for _ in range(2)]
    assert work.is_completed() is True
    failure = work.exception()
    broken = caught(dist.BrokenGroupError, dist.all_reduce, tensor, "sum", group)
    go(f"failed/{kind}")
    dist.destroy_process_group(group)
    return *(str(error) for error in raised), f"{type(failure).__name__}: {broken}"


@pytest.mark.parametrize("kind", ["sum", "avg", "irecv"])
def test_handle_that_fails(pools: Pools, kind: str) -> None:
    (first, second, rest), _ = pools(2).run(run_failed_handle, kind)
    assert first == second
    assert first.startswith(f"{'irecv' if kind == 'irecv' else 'all_reduce'} on the group of ranks [0, 1] ")
    assert ", as seen by rank 0: " in first
    assert rest.startswith(("CommTimeoutError: all_reduce: ", "PeerLostError: all_reduce: "))
    assert "failed earlier" in rest
    pools(2).run(check_world)
