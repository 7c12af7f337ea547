"""The comms logger counts every call once, by whichever way it travels, and its times agree with another clock."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.recorded import clocks
from comm_collectives.recorded.backend import RecordingBackend
from comm_utils import operations
from comm_utils.active import active_backend
from comm_utils.observability.traces.alignment import aligned
from comm_utils.observability.traces.file import load
from comm_utils.observability.traces.waiting import account
from comm_utils.testing import RankPool, patience, run_ranks, run_ranks_outcomes

Pools: TypeAlias = Callable[[int], RankPool]

CALLS = 7


@contextlib.contextmanager
def recording() -> Iterator[None]:
    dist.reset_log()
    dist.configure(enabled=True)
    try:
        yield
    finally:
        dist.configure(enabled=False)
        dist.reset_log()


def recorded() -> dict[str, dict[int, dict[str, Any]]]:
    with contextlib.redirect_stdout(None):
        found = dist.log_summary(return_dict=True)
    assert found is not None
    summary: dict[str, dict[int, dict[str, Any]]] = found["summary"]
    return summary


def run_calls() -> None:
    W, me = dist.get_world_size(), dist.get_rank()
    part, whole = torch.ones(64), torch.ones(64 * W)  # 256 B a rank
    expected: dict[str, tuple[Callable[[], Any], int]] = {
        "all_reduce": (lambda: dist.all_reduce(part), 256),
        "inference_all_reduce": (lambda: dist.inference_all_reduce(part), 256),
        "broadcast": (lambda: dist.broadcast(part, 1), 256),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, part), 256 * W),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(part, whole), 256 * W),
        "all_to_all_single": (lambda: dist.all_to_all_single(whole, whole.clone()), 256 * W),
        "all_gather": (lambda: dist.all_gather(list(whole.view(W, 64).unbind()), part), 256 * W),
        "reduce": (lambda: dist.reduce(part, 0), 256),
        "gather": (lambda: dist.gather(part, list(whole.view(W, 64).unbind()) if me == 1 else None, 1), 256 * W),
        "scatter": (lambda: dist.scatter(part, list(whole.view(W, 64).unbind()) if me == 0 else None), 256 * W),
        "barrier": (dist.barrier, 0),
        "send" if me == 0 else "recv": (lambda: (dist.send if me == 0 else dist.recv)(part, 1 - me), 256),
    }
    for call, _ in expected.values():  # what is prepared without the logger is not what is prepared with it
        call()
    for again in range(2):
        with recording():
            for name, (call, size) in expected.items():
                before, start = recorded(), time.perf_counter()
                assert name not in before, (name, again)
                for _ in range(CALLS):
                    call()
                took_ms = (time.perf_counter() - start) * 1e3
                row = recorded()[name][size]
                assert row["count"] == CALLS, (name, row)
                assert 0 < CALLS * row["min_latency_ms"] <= row["total_latency_ms"] <= took_ms, (name, row, took_ms)


def test_each_call_counts_once(pools: Pools) -> None:
    pools(2).run(run_calls)


def run_parts_of_different_sizes() -> None:
    me = dist.get_rank()
    out, parts = torch.zeros(30 * (me + 1)), [torch.ones(30), torch.ones(60)]
    for again in range(2):
        with recording():
            dist.reduce_scatter(out, parts)
            found = {name: {size: row["count"] for size, row in rows.items()} for name, rows in recorded().items()}
            assert found == {"reduce_scatter": {360: 1}}, (again, found)  # the whole, on every rank


def test_the_size_of_a_reduce_scatter_in_different_parts(pools: Pools) -> None:
    pools(2).run(run_parts_of_different_sizes)


@pytest.mark.parametrize("name", ["enabled", "prof_all", "verbose", "debug", "ranges"])
@pytest.mark.parametrize("value", ["no", "off", 2, 0.5, []])
def test_switches_are_on_or_off(name: str, value: object) -> None:
    with pytest.raises(dist.ArgumentTypeError, match=rf"^configure: {name}: got .*; expected True or False"):
        dist.configure(**{name: value})


def run_without_waiting() -> None:
    """gloo calls back, so an operation is in the log when it has ended, whoever waits and when."""
    if dist.get_backend() != "gloo":
        return
    tensor = torch.ones(8)

    def ended(rows: Callable[[], list[Any]], calls: int) -> bool:
        return [(row.operation, row.calls) for row in rows()] == [("all_reduce", calls)]

    with recording():
        with dist.log_window() as window:
            work = dist.all_reduce(tensor, async_op=True)
            eventually(lambda: ended(window.rows, 1))
        with dist.log_window() as later:
            work.wait()
            assert not later.rows()
        dist.all_reduce(tensor, async_op=True)  # nobody holds it
        eventually(lambda: ended(dist.log_rows, 2))


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_has_ended_is_recorded_before_anybody_waits(pools: Pools) -> None:
    pools(2).run(run_without_waiting)


def run_many_groups(folder: Path) -> None:
    """Python's states of the threads of gloo that are kept are few, as faulthandler shows a hundred threads."""
    with recording():
        for _ in range(60):
            group = dist.new_group([0, 1], backend="gloo")
            for work in [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(4)]:
                work.wait()
            dist.destroy_process_group(group)
    with (folder / str(dist.get_rank())).open("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        shown = file.read()
    assert "run_many_groups" in shown
    assert shown.count("<no Python frame>") <= 40, shown


def test_groups_that_come_and_go_leave_few_threads(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(run_many_groups, tmp_path)


def run_losing() -> list[tuple[int, int]]:
    dist.init_distributed("gloo", verbose=False, timeout=20.0)
    dist.configure(enabled=True)
    dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        os._exit(0)
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    assert work is not None
    future = work.get_future()  # as hooks of DDP do
    del work
    while not future.done():
        time.sleep(0.01)
    time.sleep(0.1)
    return [(row.size_bytes, row.calls) for row in dist.log_rows()]


def test_an_operation_that_failed_is_not_recorded() -> None:
    survivor, _ = run_ranks_outcomes(run_losing, 2)
    assert survivor.value == [(16, 1)], survivor


def run_groups() -> str:
    me = dist.get_rank()
    group = dist.new_group([0, 2])
    tensor, out = torch.ones(16), io.StringIO()
    with recording():
        for _ in range(3):
            dist.all_reduce(tensor)
            if me in (0, 2):
                dist.all_reduce(tensor, "sum", group)
        with contextlib.redirect_stdout(out):
            dist.log_summary()
    if me in (0, 2):
        dist.destroy_process_group(group)
    return out.getvalue()


def test_groups_are_kept_apart(pools: Pools) -> None:
    lines = pools(4).run(run_groups)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()][:4] for line in lines]
    assert cells == [["all_reduce", "64 B", "2 [0, 2]", "3"], ["all_reduce", "64 B", "4", "3"]]


def run_against_a_clock(asynchronous: bool) -> None:
    tensor = torch.ones(2**24)  # 64 MiB: long enough that the calls themselves are nothing
    dist.all_reduce(tensor, async_op=asynchronous)
    # Of three blocks: between the readings of two clocks, other processes may have had their turn.
    found = [compare_clocks(tensor, asynchronous) for _ in range(3)]
    assert any(logged == pytest.approx(clock, rel=0.05) for logged, clock in found), found


def compare_clocks(tensor: torch.Tensor, asynchronous: bool) -> tuple[float, float]:
    """Return the least time of a few calls, in ms, as it was logged and as another clock shows it."""
    dist.barrier()
    took_ms = []
    with recording():
        for _ in range(5):
            ends: list[float] = []
            start = time.perf_counter()
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if work is None:
                ends.append(time.perf_counter())
            elif not hasattr(work, "get_future"):
                while not work.is_completed():
                    pass
                ends.append(time.perf_counter())
                time.sleep(0.01)  # which is not the operation's
                work.wait()
            else:
                work.get_future().add_done_callback(lambda _, ends=ends: ends.append(time.perf_counter()))
                work.wait()
                while not ends:  # the library's thread is about to
                    time.sleep(1e-4)
            took_ms.append((ends[0] - start) * 1e3)
        row = recorded()["all_reduce"][2**26]
    assert row["count"] == 5
    return row["min_latency_ms"], min(took_ms)


def run_late_waits() -> None:
    tensor = torch.ones(16)
    with recording():
        for _ in range(5):
            work = dist.all_reduce(tensor, async_op=True)
            time.sleep(0.1)
            assert work is not None
            work.wait()
        assert recorded()["all_reduce"][64]["min_latency_ms"] < 50


def test_an_operation_ends_before_somebody_waits(pools: Pools) -> None:
    pools(2).run(run_late_waits)
    pools(1).run(run_late_waits)  # complete before there is a handle


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_times_agree_with_another_clock(pools: Pools, asynchronous: bool) -> None:
    pools(2).run(run_against_a_clock, asynchronous)


# --- every operation


def calls_of_the_api() -> dict[str, tuple[Callable[[], Any], dict[str, int]]]:
    """Function -> a call on two ranks, and under which names it is recorded how often."""
    W, me = dist.get_world_size(), dist.get_rank()
    other = 1 - me
    part, whole = torch.ones(8), torch.ones(8 * W)
    parts = [torch.ones(8) for _ in range(W)]

    def p2p(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], Any]:
        return first if me == 0 else second

    def exchange() -> None:
        ops = [dist.P2POp(dist.isend, part, other), dist.P2POp(dist.irecv, part.clone(), other)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    def messages() -> None:
        works = [dist.isend(part, other), dist.irecv(part.clone(), other)]
        for work in works:
            work.wait()

    send_or_recv = p2p(lambda: dist.send(part, 1), lambda: dist.recv(part, 0))
    return {
        "all_gather": (lambda: dist.all_gather(parts, part), {"all_gather": 1}),
        "all_gather_coalesced": (
            lambda: dist.all_gather_coalesced([torch.ones(8 * W)], [part]),
            {"all_gather_coalesced": 1},
        ),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(whole, part), {"all_gather_into_tensor": 1}),
        "all_reduce": (lambda: dist.all_reduce(part), {"all_reduce": 1}),
        "all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([part, whole]), {"all_reduce_coalesced": 1}),
        "all_to_all": (lambda: dist.all_to_all([torch.ones(8) for _ in parts], parts), {"all_to_all": 1}),
        "all_to_all_single": (lambda: dist.all_to_all_single(whole, whole.clone()), {"all_to_all_single": 1}),
        "barrier": (dist.barrier, {"barrier": 1}),
        "batch_isend_irecv": (exchange, {"isend": 1, "irecv": 1}),
        "broadcast": (lambda: dist.broadcast(part, 0), {"broadcast": 1}),
        "gather": (lambda: dist.gather(part, parts if me == 0 else None), {"gather": 1}),
        "inference_all_reduce": (lambda: dist.inference_all_reduce(part), {"inference_all_reduce": 1}),
        "irecv": (messages, {"isend": 1, "irecv": 1}),
        "isend": (messages, {"isend": 1, "irecv": 1}),
        "recv": (send_or_recv, {"recv" if me else "send": 1}),
        "reduce": (lambda: dist.reduce(part, 0), {"reduce": 1}),
        "reduce_scatter": (lambda: dist.reduce_scatter(part, parts), {"reduce_scatter": 1}),
        "reduce_scatter_coalesced": (
            lambda: dist.reduce_scatter_coalesced([torch.ones(8 * W)]),
            {"reduce_scatter_coalesced": 1},
        ),
        "reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(part, whole), {"reduce_scatter_tensor": 1}),
        "scatter": (lambda: dist.scatter(part, parts if me == 0 else None), {"scatter": 1}),
        "send": (send_or_recv, {"recv" if me else "send": 1}),
    }


def run_every_operation() -> list[str]:
    calls = calls_of_the_api()
    for name, (call, names) in calls.items():
        for again in range(3):  # the first in full, the second remembered, the third asynchronous where there is such
            with recording():
                call()
                found = {row.name: row.calls for row in dist.log_rows()}
            assert found == names, (name, again, found)
    return sorted(calls)


def test_every_operation_of_the_api_is_recorded(pools: Pools) -> None:
    """Walks the table of operations: a new one has to be added here."""
    (found, _) = pools(2).run(run_every_operation)
    assert set(found) - {"batch_isend_irecv"} == operations.recorded()
    functions = {name for name in dist.__all__ if inspect.isfunction(getattr(dist, name))}
    prefixes = "get is has in init new log start stop set destroy split register patch mpi enable initialize"
    elsewhere = re.compile("|".join(f"{prefix}_" for prefix in prefixes.split()))
    others = {name for name in functions - set(found) if not elsewhere.match(name)}
    assert others == {
        # Objects travel by operations of the table, under their names.
        "all_gather_object",
        "allgather_object",
        "broadcast_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "reduce_object",
        "scatter_object_list",
        "send_object_list",
        # Other names of what is in the table.
        "all_gather_single",
        "allgather_fn",
        "reduce_scatter_fn",
        "reduce_scatter_single",
        # Through the store.
        "monitored_barrier",
        # Which do not communicate.
        "available_backends",
        "coalescing",  # whose calls are recorded as what they become
        "configure",
        "empty_shared",
        "shared_memory_stats",
        "export_log",
        "reset_log",
    }


# --- who waited for whom


def run_stopped_rank(pause_s: float) -> tuple[dict[str, Any], str]:
    """Rank 1 is stopped for ``pause_s`` at each step; rank 2 makes more calls than the others, in its own group."""
    me, tensor = dist.get_rank(), torch.ones(256)
    own = dist.new_group([2, 3])
    out = io.StringIO()
    with recording():
        for _ in range(8):
            if me == 1:
                time.sleep(pause_s)
            dist.all_reduce(tensor)
            if me in (2, 3):
                dist.all_reduce(tensor, "sum", own)
            dist.broadcast(tensor, 0)
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
        with contextlib.redirect_stdout(out):
            found = dist.log_summary(show_straggler=True, return_dict=True)
        rows = dist.log_rows()
    if me in (2, 3):
        dist.destroy_process_group(own)
    assert found is not None
    # What this rank recorded divides into waiting and transfer, and nothing is left over.
    split = [numbers for sizes in found["straggler_analysis"].values() for numbers in sizes.values()]
    divided_ms = sum(one["total_comm_lat_ms"] + one["total_straggler_ms"] for one in split)
    assert divided_ms == pytest.approx(sum(row.total_s for row in rows) * 1e3)
    assert sum(one["count"] for one in split) == sum(row.calls for row in rows)
    return found, out.getvalue()


def test_a_stopped_rank_is_named(pools: Pools) -> None:
    pause_s = 0.05 * patience()
    least_ms = 800 * pause_s
    results = pools(4).run(run_stopped_rank, pause_s)
    waiting_ms = [found["straggler_analysis"]["all_reduce"][1024]["total_straggler_ms"] for found, _ in results]
    # On a busy machine, others are late now and then as well.
    stopped_ms = waiting_ms.pop(1)
    assert min(waiting_ms) > max(8 * least_ms, stopped_ms)
    for rank, (found, printed) in enumerate(results):
        worst = found["stragglers"][0]
        assert worst["rank"] == 1
        assert worst["last"] >= 6
        assert worst["caused_ms"] > 3 * 8 * least_ms
        assert worst["typical_late_ms"] > 0.75 * least_ms
        assert found["stragglers"] == results[0][0]["stragglers"]
        assert printed.count("rank 1 (") == (rank == 0)
    assert f"pid {worst['pid']}) was waited for: the last in" in results[0][1]


def run_turned_on_at_different_calls() -> dict[str, Any]:
    me, tensor = dist.get_rank(), torch.ones(256)
    dist.reset_log()
    for step in range(12):
        if step == 4 * me:
            dist.configure(enabled=True)
        if me == 1:
            time.sleep(0.02)
        dist.all_reduce(tensor)
    try:
        with contextlib.redirect_stdout(None):
            found = dist.log_summary(show_straggler=True, return_dict=True)
    finally:
        dist.configure(enabled=False)
        dist.reset_log()
    assert found is not None
    return found


def test_ranks_that_turn_it_on_at_different_calls(pools: Pools) -> None:
    """Their own counts differ by 4; only what all have recorded is compared, and with the right call."""
    first, second = pools(2).run(run_turned_on_at_different_calls)
    assert [found["summary"]["all_reduce"][1024]["count"] for found in (first, second)] == [12, 8]
    for found in (first, second):
        assert found["straggler_analysis"]["all_reduce"][1024]["count"] == 8
        assert found["stragglers"][0]["rank"] == 1
        assert found["stragglers"][0]["last"] >= 6  # of 8; a busy machine may delay rank 0 as well
    assert first["straggler_analysis"]["all_reduce"][1024]["total_straggler_ms"] > 8 * 15


def run_paused(folder: str) -> dict[str, Any]:
    """Rank 1 is late at every call, and pauses its log meanwhile."""
    me, tensor = dist.get_rank(), torch.ones(256)
    with recording():
        if folder:
            dist.start_trace(folder)
        for step in range(30):
            if me == 1 and step in (8, 15):
                dist.configure(enabled=step == 15)
            if me == 1:
                time.sleep(0.02)
            dist.all_reduce(tensor)
        with contextlib.redirect_stdout(None):
            found = dist.log_summary(show_straggler=True, return_dict=True)
        if folder:
            dist.stop_trace()
    assert found is not None
    return found


def test_a_rank_that_pauses_its_log(pools: Pools, tmp_path: Path) -> None:
    for folder in ("", str(tmp_path)):
        (found, *_) = pools(3).run(run_paused, folder)
        assert found["stragglers"][0]["rank"] == 1
        assert found["stragglers"][0]["last"] >= 18
        assert found["straggler_analysis"]["all_reduce"][1024]["total_straggler_ms"] > 22 * 18
    account_of_trace = account(aligned(load(tmp_path)))
    assert account_of_trace.stragglers[0].rank == 1
    assert account_of_trace.stragglers[0].last >= 18


def run_clocks(apart_s: float) -> list[tuple[int, int, int]]:
    me = dist.get_rank()
    offset_ns = round(me * apart_s * 1e9)
    pending = dist.irecv(torch.ones(4), 0) if me == 1 else None  # is not to get what clocks are compared by
    found = clocks.measure(active_backend(), "cpu", lambda: time.perf_counter_ns() + offset_ns)
    if me == 0:
        dist.send(torch.ones(4), 1)
    if pending is not None:
        pending.wait()
    return [(one.rank, one.offset_ns, one.uncertainty_ns) for one in found]


@pytest.mark.parametrize("apart_s", [0.0, -3600.0, 0.25])
def test_clocks_are_compared(pools: Pools, apart_s: float) -> None:
    """Processes of one machine have one clock, so what is found has to be what was put in."""
    found, *others = pools(3).run(run_clocks, apart_s)
    assert others == [found, found]
    assert [rank for rank, _, _ in found] == [0, 1, 2]
    for rank, offset_ns, uncertainty_ns in found:
        assert abs(offset_ns - rank * apart_s * 1e9) <= uncertainty_ns
        assert uncertainty_ns < 1e9


# --- windows, settings, traces


def run_windows() -> None:
    tensor = torch.ones(16)
    with recording():
        dist.all_reduce(tensor)
        with dist.log_window("epoch") as epoch:
            for _ in range(3):
                with dist.log_window("step") as step:
                    dist.all_reduce(tensor)
                    dist.all_reduce(tensor, async_op=True).wait()  # type: ignore[union-attr]
                assert sum(row.calls for row in step.rows()) == 2
                assert step.total_s > 0
                assert step.elapsed_s > 0
        dist.all_reduce(tensor)
        assert sum(row.calls for row in epoch.rows()) == 6
        assert [row.name for row in epoch.rows()] == ["all_reduce"]
        assert dist.get_comm_operation_count() == 8


def test_windows(pools: Pools) -> None:
    pools(2).run(run_windows)


def run_profiling_calls() -> None:
    tensor = torch.ones(16)
    dist.reset_log()
    try:
        dist.start_profiling_comms()
        dist.all_reduce(tensor)
        dist.stop_profiling_comms()
        dist.all_reduce(tensor)
        assert dist.get_comm_operation_count() == 1
        dist.configure(enabled=True, prof_all=False)
        dist.start_profiling_op(["broadcast"])
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        assert dist.get_logged_comm_ops() == ["all_reduce", "broadcast"]
        assert dist.get_comm_operation_count() == 2
        dist.stop_profiling_op(["broadcast"])
        dist.broadcast(tensor, 0)
        assert dist.get_comm_operation_count() == 2
        with pytest.raises(TypeError, match="start_profiling_op: op_name_list: got 'send'; expected a list"):
            dist.start_profiling_op("send")
    finally:
        dist.configure(enabled=False, prof_all=True, prof_ops=[])
        dist.reset_log()


def test_profiling_by_deepspeeds_calls(pools: Pools) -> None:
    pools(2).run(run_profiling_calls)


def run_trace(folder: str) -> None:
    me, tensor = dist.get_rank(), torch.ones(16)
    assert not isinstance(active_backend(), RecordingBackend)
    path = dist.start_trace(folder)
    assert path == Path(folder, f"rank{me}.jsonl")
    assert isinstance(active_backend(), RecordingBackend)
    with pytest.raises(dist.ArgumentError, match=r"start_trace: on rank 0: a trace is being written already"):
        dist.start_trace(folder)
    dist.all_reduce(tensor, log_name="mine")
    work = dist.all_reduce(tensor, "max", async_op=True)
    assert work is not None
    work.wait()
    dist.broadcast(tensor.double(), 1)
    if me == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    rows = [1, 2] if me == 0 else [2, 1]
    dist.all_to_all_single(torch.ones(3, 2), torch.ones(3, 2), [1, 2] if me == 0 else [2, 1], rows)
    assert dist.stop_trace() == path
    assert not isinstance(active_backend(), RecordingBackend)
    dist.all_reduce(tensor)
    assert dist.stop_trace() is None
    dist.reset_log()


def test_a_trace(pools: Pools, tmp_path: Path) -> None:
    pools(4).run(run_stopped_world, str(tmp_path / "trace"))  # leaves the files of more ranks
    assert len(list((tmp_path / "trace").iterdir())) == 4
    pools(2).run(run_trace, str(tmp_path / "trace"))
    traces = load(tmp_path / "trace")
    backend = os.environ.get("TESTS_BACKEND", "gloo")
    for rank, trace in enumerate(traces):
        assert (trace.rank, trace.world_size, trace.complete, trace.dropped) == (rank, 2, True, 0)
        assert backend in trace.backend
        what = [(event.operation.name, event.operation.op, event.operation.root) for event in trace.events]
        message = ("send", "", 1) if rank == 0 else ("recv", "", 0)
        last = ("all_to_all_single", "", -1)
        assert what == [("mine", "sum", -1), ("all_reduce", "max", -1), ("broadcast", "", 1), message, last]
        first = trace.events[0].sequence
        assert [event.sequence - first for event in trace.events] == [0, 1, 2, 0, 3]
        assert [event.operation.dtype for event in trace.events] == ["float32"] * 2 + ["float64"] + ["float32"] * 2
        assert [event.operation.asynchronous for event in trace.events] == [False, True, False, False, False]
        assert len(trace.events[1].waits) == 1
        splits = trace.events[-1].operation
        assert splits.input_splits == ((2, 4) if rank == 0 else (4, 2))
        assert splits.output_splits == ((2, 4) if rank == 0 else (4, 2))
        assert splits.size_bytes == 24
        for event in trace.events:
            assert event.begin_ns <= event.returned_ns
            assert event.begin_ns < event.end_ns
    found = account(aligned(traces))
    assert (found.operations, found.unmatched) == (5, 0)


def run_stopped_world(folder: str) -> None:
    dist.start_trace(folder)
    dist.barrier()
    dist.stop_trace()
    dist.reset_log()


CHOSEN_OPERATIONS = """
import sys
import torch
import comm_orchestrator as dist

def recorded(expected):
    dist.reset_log()
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0)
    found = dist.get_logged_comm_ops()
    assert found == expected, (found, expected)

dist.configure(enabled=False, prof_all=False, prof_ops=["broadcast"])
dist.init_distributed("gloo", verbose=False)
dist.start_trace(sys.argv[1])
recorded(["all_reduce", "broadcast"])
dist.destroy_process_group()  # ends the trace

dist.configure(enabled=False)
dist.init_distributed("gloo", verbose=False)
dist.start_trace(sys.argv[1])
dist.configure(enabled=True)
recorded(["all_reduce", "broadcast"])  # as the trace has all
dist.stop_trace()
recorded(["broadcast"])

dist.configure(enabled=False)
dist.start_trace(sys.argv[1])
dist.configure(prof_all=True)
dist.stop_trace()
dist.configure(enabled=True)
recorded(["all_reduce", "broadcast"])
dist.destroy_process_group()
"""


def test_a_trace_leaves_the_choice_of_operations_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(CHOSEN_OPERATIONS)
    run_ranks(str(script), 1, str(tmp_path / "trace"))


def run_trace_elsewhere(folder: str) -> str:
    place = Path(folder, "file") if dist.get_rank() == 1 else Path(folder, "trace")
    if dist.get_rank() == 1:
        place.write_text("in the way")
    with pytest.raises(dist.ArgumentError) as caught:
        dist.start_trace(place)
    assert not isinstance(active_backend(), RecordingBackend)
    dist.all_reduce(torch.ones(1))
    return str(caught.value)


def test_a_trace_that_one_rank_cannot_write(pools: Pools, tmp_path: Path) -> None:
    found = pools(2).run(run_trace_elsewhere, str(tmp_path))
    assert found == [f"start_trace: on rank 1: {tmp_path / 'file'}: File exists"] * 2
    assert list((tmp_path / "trace").iterdir()) == []


TRACED = """
import sys
import torch
import comm_orchestrator as dist

dist.init_distributed(sys.argv[1], verbose=False)
for _ in range(3):
    dist.all_reduce(torch.ones(16))
if sys.argv[2] == "end":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["end", "exit"])
def test_a_trace_without_a_line_in_the_program(tmp_path: Path, end: str) -> None:
    """The variable is enough, and the trace ends with the world or with the process."""
    script = tmp_path / "program.py"
    script.write_text(TRACED)
    folder = tmp_path / "trace"
    environ = {"COMM_COMMS_LOGGER__TRACE": str(folder)}
    backend = os.environ.get("TESTS_BACKEND", "gloo")
    run_ranks(str(script), 2, backend, end, env=environ, timeout_s=60)
    for trace in load(folder):
        assert trace.complete
        assert [event.operation.name for event in trace.events] == ["all_reduce"] * 3


def run_exports(folder: str) -> None:
    me = dist.get_rank()
    with recording():
        dist.all_reduce(torch.ones(16))
        for ending in ("jsonl", "csv", "prom"):
            dist.export_log(f"{folder}/rank{me}.{ending}")
        with pytest.raises(dist.ArgumentError):
            dist.export_log(f"{folder}/log.xml")


def test_exports(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(run_exports, str(tmp_path))
    for rank in range(2):
        (line,) = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        found = json.loads(line)
        assert (found["name"], found["size_bytes"], found["calls"], found["rank"]) == ("all_reduce", 64, 1, rank)
        assert len((tmp_path / f"rank{rank}.csv").read_text().splitlines()) == 2
        assert "comm_operations_total{" in (tmp_path / f"rank{rank}.prom").read_text()
    assert len(list(tmp_path.iterdir())) == 6
