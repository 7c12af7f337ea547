"""Native code writes the calls of shared memory into the ring of the flight recorder, as Python reads it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from comm_backend_ccl import CclBackend, shared_memory, tables
from comm_backend_ccl.engine_call import Call as EngineCall
from comm_utils import ReduceOp
from comm_utils.flight_recorder import RECORDER, Call, FlightRecorderSettings, open_ring
from comm_utils.flight_recorder import layout as ring_layout
from comm_utils.testing import run_ranks

pytestmark = pytest.mark.skipif(
    shared_memory.unavailable_reason() is not None, reason=str(shared_memory.unavailable_reason())
)
HEADER = Path(__file__).resolve().parents[1] / "native" / "shared_memory" / "recorder" / "layout.hpp"
SUM = ReduceOp.SUM


def both_sides(index: int = 0) -> list[shared_memory.Group]:
    """Return both ranks of a group, in this process."""
    memory = shared_memory.create(2)
    pids = [os.getpid()] * 2
    sides = [shared_memory.join(pids[0], memory, rank, pids, oversubscribed=True) for rank in range(2)]
    shared_memory.close_descriptor(memory[0])
    for side in sides:
        shared_memory.record_as(side, index)
    return sides


def start(
    side: shared_memory.Group,
    tensor: torch.Tensor,
    operation: tables.Operation = tables.Operation.ALL_REDUCE,
    root: int = -1,
    watched: bool = False,
    tag: int = 0,
) -> Any:
    call = EngineCall(operation, tensor, tensor, tensor.numel(), SUM, root, watched, tag=tag)
    return shared_memory.start(side, call)


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Path]:
    before, RECORDER.settings = RECORDER.settings, FlightRecorderSettings(directory=str(tmp_path), records=64)
    RECORDER.open(0, 1, "job")
    assert RECORDER.path is not None
    yield RECORDER.path
    RECORDER.close()
    RECORDER.settings = before
    shared_memory.record_to(-1)


def recorded(path: Path) -> list[Call]:
    """Return the calls in the lane of native code."""
    reader = open_ring(path)
    try:
        return reader.calls(1)
    finally:
        reader.close()


def test_native_code_has_the_layout_of_python() -> None:
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    constants = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)[,;]", text)}
    assert f'"{ring_layout.MAGIC.decode()}"' in text
    assert constants["header_bytes"] == ring_layout.HEADER_BYTES
    assert constants["largest_records"] == ring_layout.LARGEST_RECORDS
    assert constants["lanes"] == ring_layout.LANES
    assert constants["clock_offset"] == ring_layout.LANE_OFFSETS[constants["own_lane"]]
    assert constants["python_clock_offset"] == ring_layout.LANE_OFFSETS[0]
    for name, (begin, bits) in ring_layout.CODES.items():
        assert (constants[f"{name}_at"], constants[f"{name}_bits"]) == (begin, bits), name
    assert 1 << constants["native_at"] == ring_layout.NATIVE_KIND
    bits = {name: int(bit) for name, bit in re.findall(r"(\w+) = uint64_t\{1\} << (\d+)", text)}
    assert 1 << bits["failed_bit"] == ring_layout.FAILED
    assert 1 << bits["in_background"] == ring_layout.IN_BACKGROUND
    assert "sizeof(Record) == 64" in text
    assert ring_layout.RECORD_BYTES == 64


def test_codes_fit_into_a_kind() -> None:
    for name, codes in (("operation", tables.Operation), ("dtype", tables.DTYPES), ("op", tables.OPS)):
        assert len(codes) <= 1 << ring_layout.CODES[name][1]


def test_python_reads_what_native_code_wrote(ring: Path) -> None:
    index = RECORDER.group_index("pair", [4, 7], "both", "ccl")
    first, second = both_sides(index)
    before = time.perf_counter_ns()
    handle = start(first, torch.ones(10))
    (call,) = recorded(ring)
    assert call.is_open
    assert call.is_waited_for
    assert start(second, torch.ones(10)) is None
    assert shared_memory.wait(handle, 10.0) == 1
    after = time.perf_counter_ns()
    for call in recorded(ring):
        assert (call.operation, call.dtype, call.op, call.elements) == ("all_reduce", "float32", "sum", 10)
        assert (call.group.name, call.group.ranks) == ("pair", (4, 7))
        assert (call.in_series, call.root, call.caller) == (1, -1, "")
        assert not call.failed
        # Of the clock that converts ticks of the processor.
        assert before - 1_000_000 < call.begin_ns < call.end_ns < after + 1_000_000

    started = [start(first, torch.ones(3, dtype=torch.int64), tables.Operation.BROADCAST, 1, watched=True)]
    started += [start(first, torch.ones(5), tables.Operation.RECEIVE, 1, tag=3)]
    broadcast, message = recorded(ring)[2:]
    assert (broadcast.operation, broadcast.dtype, broadcast.root, broadcast.in_series) == ("broadcast", "int64", 7, 2)
    assert broadcast.is_open
    assert not broadcast.is_waited_for
    assert (message.operation, message.peer, message.tag, message.is_message) == ("recv", 7, 3, True)
    shared_memory.begin_wait(started[0], RECORDER.caller(0), False)
    waited_for = recorded(ring)[2]
    assert waited_for.is_waited_for
    assert waited_for.caller.startswith(f"{__file__}:")
    for side in (first, second):
        shared_memory.close(side)
    assert [call.failed for call in recorded(ring)] == [False, False, True, True]


def test_nothing_is_recorded_of_what_is_refused(ring: Path) -> None:
    first, second = both_sides()
    with pytest.raises(RuntimeError):
        start(first, torch.ones(3), tables.Operation.BROADCAST, 5)
    for side in (first, second):
        shared_memory.close(side)
    with pytest.raises(RuntimeError, match="destroyed"):
        start(first, torch.ones(3))
    assert recorded(ring) == []


def test_a_ring_keeps_the_last_calls(ring: Path) -> None:
    first, second = both_sides()
    for size in range(1, 101):
        handle = start(first, torch.ones(size), watched=True)
        start(second, torch.ones(size))
        assert shared_memory.wait(handle, 10.0) == 1
    calls = recorded(ring)
    assert 48 <= len(calls) <= 64
    assert [call.number for call in calls] == list(range(201 - len(calls), 201))
    assert all(call.elements == (call.number + 1) // 2 == call.in_series and not call.is_open for call in calls)


def test_recording_ends_with_the_ring(ring: Path) -> None:
    first, second = both_sides()
    handle = start(first, torch.ones(3))
    reader = open_ring(ring)
    RECORDER.close()
    start(second, torch.ones(3))
    assert shared_memory.wait(handle, 10.0) == 1
    assert [call.is_open for call in reader.calls(1)] == [True]
    reader.close()


def test_a_file_that_is_no_ring_is_refused(ring: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 10_000)
    with other.open("r+b") as file, pytest.raises(RuntimeError, match="not the file of a flight recorder"):
        shared_memory.record_to(file.fileno())
    start(both_sides()[0], torch.ones(3))
    assert len(recorded(ring)) == 1


def test_an_index_that_is_too_large_is_unknown(ring: Path) -> None:
    sides = both_sides(5000)
    start(sides[0], torch.ones(3))
    assert recorded(ring)[0].group.name == ""


def ranks_that_are_recorded(folder: str) -> None:
    c10d.init_process_group("ccl")
    rank = c10d.get_rank()
    RECORDER.settings = FlightRecorderSettings(enabled=False)
    backend = CclBackend()
    tensor = torch.ones(4)
    backend.all_reduce(tensor)  # before there is a ring
    RECORDER.settings = FlightRecorderSettings(directory=folder)
    RECORDER.open(rank, 2, "job")
    assert RECORDER.path is not None
    reader = open_ring(RECORDER.path)
    path = backend.fast_path("all_reduce", "sum")
    assert path is not None
    for _ in range(5):
        path(tensor)
    if rank == 1:
        time.sleep(0.3)
    path(tensor)  # the other rank waits long
    backend.all_reduce(tensor, async_op=True).wait()
    pair = backend.create_group([0, 1], "pair", group_desc="both")
    backend.broadcast(tensor, group=pair, group_src=1)
    reader.refresh()
    calls = reader.calls(1)
    assert [(call.operation, call.in_series, call.root) for call in calls] == [
        *(("all_reduce", number, -1) for number in range(2, 9)),
        ("broadcast", 1, 1),
    ], [str(call) for call in calls]
    assert not any(call.is_open or call.failed for call in calls)
    assert [str(call.group) for call in calls[-2:]] == ["the group of ranks [0, 1]", "the group of ranks [0, 1] (both)"]
    assert calls[-1].group.name == "pair" == pair.group_name
    waited = calls[5]
    if rank == 0:
        assert waited.end_ns - waited.begin_ns > 200e6
        assert re.fullmatch(rf"{__file__}:\d+ ranks_that_are_recorded", waited.caller), waited.caller
    else:
        assert waited.end_ns - waited.begin_ns < 200e6
    reader.close()
    c10d.destroy_process_group()
    RECORDER.close()


def test_calls_of_ranks_are_recorded(tmp_path: Path) -> None:
    run_ranks(ranks_that_are_recorded, 2, str(tmp_path))
    assert not list(tmp_path.glob("*/*.ring"))


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import torch
from test_native_recorder import RECORDER, FlightRecorderSettings, both_sides, start, shared_memory

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1])
RECORDER.open(0, 1, "job")
first, second = both_sides(RECORDER.group_index("pair", [0, 1], "", "ccl"))
for size in (1, 2, 3):
    handle = start(first, torch.ones(size))
    start(second, torch.ones(size))
    assert shared_memory.wait(handle, 10.0) == 1
start(first, torch.ones(4))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_records_survive_their_process(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    (path,) = tmp_path.glob("job/*.ring")
    calls = recorded(path)
    assert [(call.elements, call.is_open) for call in calls[::2]] == [(1, False), (2, False), (3, False), (4, True)]
    assert calls[-1].group.name == "pair"
