"""The comms logger: counts are exact, quantiles within their bins, memory does not grow, threads lose nothing."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils.errors import ArgumentError
from comm_utils.observability.comms_logger import EVENTS_KEPT, SERIES_KEPT, CommsLogger, Row
from comm_utils.observability.log_table import format_table
from comm_utils.observability.sequence import SequenceCounters, epoch_of
from comm_utils.observability.series import Histogram
from comm_utils.observability.traces import Operation, RankTrace
from comm_utils.observability.traces.file import TraceWriter, load_rank
from comm_utils.sizes import bandwidth

DURATIONS_NS = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)
# A bin is at most a sixteenth of what is in it; its middle is at most half of that away.
HALF_A_BIN = 1 / 32 + 1e-9
US, MS = 10**3, 10**6


def record(
    log: CommsLogger,
    operation: str,
    size: int,
    duration_ns: int,
    world_size: int = 2,
    caller: str = "",
    name: str = "",
    ranks: tuple[int, ...] = (),
) -> None:
    ranks = ranks or tuple(range(world_size))
    what = Operation(name or operation, operation, size, ranks, caller=caller)
    log.series(what).add(next(log.sequences.counter(ranks)), 1000, 1000 + duration_ns)
    log.line(what, duration_ns)


def recorded(durations_ns: list[int], operation: str = "all_reduce", size: int = 4096, world_size: int = 4) -> Row:
    log = CommsLogger()
    for duration_ns in durations_ns:
        record(log, operation, size, duration_ns, world_size)
    (row,) = log.rows()
    return row


@given(DURATIONS_NS)
def test_counts_and_sums(durations_ns: list[int]) -> None:
    row = recorded(durations_ns)
    assert (row.operation, row.size_bytes, row.world_size, row.ranks, row.caller) == (
        "all_reduce",
        4096,
        4,
        (0, 1, 2, 3),
        "",
    )
    assert row.calls == len(durations_ns)
    assert row.total_bytes == 4096 * len(durations_ns)
    assert row.total_s == sum(durations_ns) * 1e-9
    assert (row.min_s, row.max_s) == (min(durations_ns) * 1e-9, max(durations_ns) * 1e-9)


@given(st.lists(st.integers(0, 2**53), min_size=1, max_size=200))
def test_counting_many_is_counting_each(durations_ns: list[int]) -> None:
    together, one_by_one = Histogram(), Histogram()
    together.count_all(durations_ns)
    for duration_ns in durations_ns:
        one_by_one.count(duration_ns)
    for name in Histogram.__slots__:
        assert getattr(together, name) == getattr(one_by_one, name), name


@given(DURATIONS_NS)
def test_quantiles_are_within_their_bins(durations_ns: list[int]) -> None:
    row = recorded(durations_ns)
    for share, found_s in ((0.5, row.median_s), (0.95, row.p95_s)):
        exact_s = sorted(durations_ns)[math.ceil(share * len(durations_ns)) - 1] * 1e-9
        assert abs(found_s - exact_s) <= HALF_A_BIN * exact_s
        assert row.min_s <= found_s <= row.max_s


def test_bins_are_a_sixteenth_of_a_doubling() -> None:
    for duration_ns in (*range(300), 10**6 - 1, 10**6, 2**40 - 1, 2**40, 2**40 + 1):
        log = CommsLogger()
        # Extremes that do not bound what is in between.
        for other_ns in (0, duration_ns, duration_ns, 2**62):
            record(log, "send", 8, other_ns, 2)
        assert abs(log.rows()[0].median_s * 1e9 - duration_ns) <= HALF_A_BIN * duration_ns


@given(DURATIONS_NS)
def test_bandwidths_are_of_the_median(durations_ns: list[int]) -> None:
    row = recorded(durations_ns)
    rate = bandwidth("all_reduce", 4096, row.median_s, 4)
    assert (row.algbw_gb_per_s, row.busbw_gb_per_s) == (rate.algbw_gb_per_s, rate.busbw_gb_per_s)


def test_durations_of_zero() -> None:
    row = recorded([0, 0])
    assert (row.calls, row.total_s, row.min_s, row.median_s, row.max_s) == (2, 0.0, 0.0, 0.0, 0.0)


def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    log = CommsLogger()

    def make(calls: int) -> None:
        for call in range(calls):
            record(log, "all_gather", 2**20, US * (1 + call % 1000), 8)
        log.rows()  # counts what waits

    tracemalloc.start()
    make(EVENTS_KEPT + 100)
    before, _ = tracemalloc.get_traced_memory()
    make(20_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 4096
    assert after < 2**21
    assert log.rows()[0].calls == EVENTS_KEPT + 20_100
    assert len(log.recent()[1]) == EVENTS_KEPT


def test_threads_lose_nothing() -> None:
    log = CommsLogger()
    barrier = threading.Barrier(8)

    def make(thread: int) -> None:
        barrier.wait()
        for call in range(500):
            record(log, "all_reduce", 2 ** (call % 3), MS, 2, f"thread {thread % 2}")
            if call % 100 == 0:
                log.rows()

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(row.calls for row in log.rows()) == 8 * 500
    assert len(log.rows()) == 6


def test_rows_are_sorted_and_kept_apart() -> None:
    log = CommsLogger()
    for key in (("send", 8, 2, ""), ("all_reduce", 1024, 4, ""), ("all_reduce", 8, 4, "b"), ("all_reduce", 8, 2, "")):
        record(log, key[0], key[1], MS, key[2], key[3])
    keys = [(row.operation, row.size_bytes, row.world_size, row.caller) for row in log.rows()]
    assert keys == [
        ("all_reduce", 8, 2, ""),
        ("all_reduce", 8, 4, "b"),
        ("all_reduce", 1024, 4, ""),
        ("send", 8, 2, ""),
    ]


def test_reset_forgets() -> None:
    log = CommsLogger()
    record(log, "barrier", 0, MS, 2)
    series = log.series(Operation("barrier", "barrier", 0, (0, 1)))
    log.reset()
    assert log.rows() == []
    series.add(0, 5, 10)  # somebody still has it
    assert [row.calls for row in log.rows()] == [1]


def test_groups_are_kept_apart() -> None:
    log = CommsLogger()
    for ranks in ((0, 1), (2, 3), (2, 3), tuple(range(1, 13))):
        record(log, "broadcast", 8, MS, len(ranks), ranks=ranks)
    assert [(row.ranks, row.calls) for row in log.rows()] == [
        ((0, 1), 1),
        ((2, 3), 2),
        (tuple(range(1, 13)), 1),
    ]
    groups = [line.split("  ") for line in format_table(log.rows()).splitlines()[2:]]
    assert [[cell.strip() for cell in cells if cell.strip()][2] for cells in groups] == [
        "2",
        "2 [2, 3]",
        "12 [1 ... 12]",
    ]


def test_names_of_calls_keep_their_operation() -> None:
    log = CommsLogger()
    record(log, "all_reduce", 8, MS, 2, name="gradients")
    record(log, "all_reduce", 8, MS, 2)
    assert [(row.name, row.operation, row.calls) for row in log.rows()] == [
        ("all_reduce", "all_reduce", 1),
        ("gradients", "all_reduce", 1),
    ]


def test_what_is_recorded() -> None:
    assert CommsLogger().wants("all_reduce")
    some = CommsLogger(prof_all=False, prof_ops=["all_gather"])
    assert some.wants("all_gather")
    assert not some.wants("all_reduce")


@pytest.mark.parametrize(
    ("name", "meant"), [("allreduce", "all_reduce"), ("Broadcast", "broadcast"), ("recieve", "recv"), ("xyzzy", "")]
)
def test_operations_that_do_not_exist(name: str, meant: str, caplog: pytest.LogCaptureFixture) -> None:
    log = CommsLogger(prof_ops=["send"])
    with caplog.at_level(logging.WARNING, logger="comm"):
        log.choose(prof_ops=["all_reduce", name])
    (record,) = caplog.records
    assert f"{name!r} is no operation: only calls with that log_name are recorded" in record.getMessage()
    assert (f"; did you mean {meant!r}?" if meant else "recorded") in record.getMessage()
    assert log.prof_ops == {"all_reduce", name}
    with pytest.raises(ArgumentError, match="got 3;"):
        CommsLogger(prof_ops=[3])  # type: ignore[list-item]


def test_verbose_logs_a_line_for_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="comm"):
        record(CommsLogger(), "all_reduce", 1536, 2 * MS)
        assert caplog.messages == []
        record(CommsLogger(verbose=True), "all_reduce", 1536, 2 * MS, 2, "step")
    (line,) = caplog.messages
    assert line.startswith("all_reduce from step | size: 1.5 KiB | time: 2.000 ms | algbw: ")


def test_table() -> None:
    log = CommsLogger()
    for duration_ms in (1, 1, 4):
        record(log, "all_reduce", 2**20, duration_ms * MS, 4)
    record(log, "broadcast", 8, 5 * US, 4, "setup")
    heading, line, first, second = format_table(log.rows()).splitlines()
    assert heading.split("  ")[0] == "operation"
    for title in (
        "size",
        "ranks",
        "calls",
        "bytes",
        "total ms",
        "min us",
        "median us",
        "p95 us",
        "algbw GB/s",
        "busbw GB/s",
    ):
        assert title in heading
    assert set(line) == {"-", " "}
    assert len({len(heading), len(line), len(first), len(second)}) == 1
    cells = [cell.strip() for cell in first.split("  ") if cell.strip()]
    assert cells[:7] == ["all_reduce", "1 MiB", "4", "3", "3 MiB", "6.00", "1000.0"]
    assert float(cells[7]) == pytest.approx(1000, rel=0.07)
    assert float(cells[8]) == pytest.approx(4000, rel=0.07)
    assert float(cells[10]) == pytest.approx(1.5 * float(cells[9]), abs=2e-3)
    assert second.startswith("broadcast (setup)")


def test_table_of_nothing_has_a_heading() -> None:
    assert len(format_table([]).splitlines()) == 2


def test_what_is_plain_follows_the_settings() -> None:
    log = CommsLogger()
    for name in ("verbose", "debug", "ranges"):
        assert log.is_plain
        log.choose(**{name: True})  # type: ignore[arg-type]
        assert not log.is_plain
        log.choose(**{name: False})  # type: ignore[arg-type]
    log.choose(prof_all=False)
    assert not log.is_plain


CALLS = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 10**9), st.sampled_from(["", "open", "close", "close below"])),
    max_size=60,
)


@given(CALLS)
def test_windows_hold_what_was_recorded_in_them(calls: list[tuple[str, int, str]]) -> None:
    """Also where they lie within each other, or are closed in another order than opened."""
    log = CommsLogger()
    everything: list[tuple[str, int]] = []
    open_now: list[tuple[object, list[tuple[str, int]]]] = []
    for name, duration_ns, then in calls:
        record(log, "send", 8, duration_ns, name=name)
        everything.append((name, duration_ns))
        for _, seen in open_now:
            seen.append((name, duration_ns))
        if then == "open":
            open_now.append((log.window(), []))
        elif then and open_now:
            window, seen = open_now.pop(-1 if then == "close" else len(open_now) // 2)
            assert exact(window.rows()) == exact_of(seen)  # type: ignore[attr-defined]
            window.close()  # type: ignore[attr-defined]
            assert exact(window.rows()) == exact_of(seen)  # type: ignore[attr-defined]
        assert exact(log.rows()) == exact_of(everything)
        for window, seen in open_now:
            assert exact(window.rows()) == exact_of(seen)  # type: ignore[attr-defined]


def exact(rows: list[Row]) -> list[tuple[str, int, float, float, float]]:
    return [(row.name, row.calls, round(row.total_s * 1e9), row.min_s, row.max_s) for row in rows]


def exact_of(seen: list[tuple[str, int]]) -> list[tuple[str, int, float, float, float]]:
    found: dict[str, list[int]] = {}
    for name, duration_ns in seen:
        found.setdefault(name, []).append(duration_ns)
    return [(k, len(v), sum(v), min(v) * 1e-9, max(v) * 1e-9) for k, v in sorted(found.items())]


def test_a_window_that_is_reset() -> None:
    log = CommsLogger()
    with log.window("step") as window:
        record(log, "send", 8, MS)
        assert window.total_s == pytest.approx(1e-3)
        log.reset()
    assert window.rows() == []
    assert window.name == "step"
    elapsed_s = window.elapsed_s
    assert elapsed_s > 0
    assert window.elapsed_s == elapsed_s


def test_a_window_that_was_reset_can_be_read() -> None:
    log = CommsLogger()
    with log.window() as window:
        record(log, "send", 8, MS)
        log.reset()
        record(log, "send", 8, MS)
        assert window.rows() == []
        assert window.total_s == 0


def test_many_different_operations_are_taken_together(caplog: pytest.LogCaptureFixture) -> None:
    log = CommsLogger()
    with caplog.at_level(logging.WARNING, logger="comm"):
        for size in range(3, SERIES_KEPT + 3):
            record(log, "send", size, US)
        assert caplog.messages == []
        for number in range(1000):
            record(log, "send", 10_000 + number, US, caller=f"caller {number}", name=f"name {number}")
            record(log, "send", 17_000, US)
        record(log, "barrier", 0, US)
    (message,) = caplog.messages
    assert "more than 4096 different operations" in message
    sizes = {row.size_bytes: row.calls for row in log.rows()}
    assert (sizes[16384], sizes[32768]) == (1000, 1000)
    assert sizes[0] == 1
    assert sum(sizes.values()) == SERIES_KEPT + 2001
    assert len(list(log.recent()[0])) == SERIES_KEPT + 3


def test_calls_that_are_taken_together_are_of_no_group() -> None:
    """Each group counts its own calls, so equal numbers of two groups are not one call."""
    log = CommsLogger()
    for size in range(SERIES_KEPT):
        record(log, "send", size, US)
    for ranks in ((0, 1), (0, 2)):
        log.series(Operation("all_reduce", "all_reduce", 10_000, ranks, f"group {ranks}")).add(7, 0, US)
    kinds, events = log.recent(3)
    assert [(kinds[number].operation, sequence) for number, sequence, _, _ in events] == [
        ("send", SERIES_KEPT - 1),
        ("all_reduce", -1),
        ("all_reduce", -1),
    ]


def test_tags_and_groups_make_no_end_of_channels() -> None:
    sequences = SequenceCounters()
    tracemalloc.start()
    for tag in range(140_000):
        next(sequences.counter(("world", tag)))
    before, _ = tracemalloc.get_traced_memory()
    for tag in range(140_000, 210_000):
        next(sequences.counter(("world", tag)))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 2**20
    assert next(sequences.counter(("world", 209_999))) == 1


def test_eras_are_told_apart() -> None:
    sequences = SequenceCounters()
    first = [next(sequences.counter("x")) for _ in range(3)]
    sequences.begin_epoch(7)
    second = next(sequences.counter("x"))
    assert [epoch_of(number) for number in (*first, second)] == [0, 0, 0, 7]
    assert sequences.make_vague("y")
    assert not sequences.make_vague("y")
    assert [next(sequences.counter("z", "y")) for _ in range(2)] == [-1, -1]
    assert next(sequences.counter("x", "other")) == second + 1


def test_what_was_forgotten_counts_in_totals() -> None:
    log = CommsLogger()
    for _ in range(3):
        with log.window():
            record(log, "send", 8, 5)
            log.reset()
        record(log, "send", 8, 7)
    ((key, (calls, total_ns)),) = log.totals().items()
    assert key[:3] == ("send", "send", 8)
    assert (calls, total_ns) == (6, 36)


def test_a_forked_child_leaves_the_trace_alone(tmp_path: Path) -> None:
    log = CommsLogger()
    writer = TraceWriter(tmp_path, 0)
    writer.begin(RankTrace(0, 1))
    log.start_writing(writer)
    for _ in range(5):
        record(log, "send", 8, MS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads
        child = os.fork()
    if child == 0:
        record(log, "send", 8, MS)
        gc.collect()
        writer.write("x")
        writer.close()
        os._exit(log.writes)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    record(log, "send", 8, MS)
    assert log.stop_writing() is writer
    writer.close()
    assert len(load_rank(writer.path).events) == 6


def test_sequence_numbers_go_on_after_a_reset() -> None:
    log = CommsLogger()
    record(log, "send", 8, MS)
    log.reset()
    record(log, "send", 8, MS)
    assert [sequence for _, sequence, _, _ in log.recent()[1]] == [1]
    log.forget_events()
    assert log.recent()[1] == []
    assert log.rows()[0].calls == 1


_HANGS = """
import os, sys, time
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.traces import Operation, RankTrace
from comm_utils.observability.traces.file import TraceWriter
from comm_utils.watch import WATCH

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1] + "/rings")
RECORDER.open(0, 2, "job")
WATCH.start(0, 2)
log, writer = CommsLogger(), TraceWriter(sys.argv[1], 0)
writer.begin(RankTrace(0, 2))
log.start_writing(writer)
series = log.series(Operation("send", "send", 8, (0, 1)))
for sequence in range(500):
    now = time.perf_counter_ns()
    series.add(sequence, now, now)
until = time.monotonic() + 30
while writer.path.read_text().count("\\n") < 502 and time.monotonic() < until:
    time.sleep(0.01)
os.kill(os.getpid(), 9)
"""


def test_the_trace_of_a_rank_that_hangs_has_all_that_ended_before(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HANGS, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == -9, killed.stderr
    assert len(load_rank(tmp_path / "rank0.jsonl").events) == 500


def test_a_trace_has_every_operation(tmp_path: Path) -> None:
    log = CommsLogger()
    record(log, "send", 8, MS)  # known before the trace began
    writer = TraceWriter(tmp_path, 0)
    writer.begin(RankTrace(0, 1))
    log.start_writing(writer)
    record(log, "send", 8, 5)
    record(log, "barrier", 0, 6)
    what = Operation("x", "all_to_all_single", 12, (0, 1), asynchronous=True)
    log.series(what).add_event(7, 1, 20, 3, {"input_splits": [1, 2], "size_bytes": 13})
    log.series(what).add_wait(1, 5, 22)
    assert log.writes
    assert log.stop_writing() is writer
    assert not log.writes
    record(log, "send", 8, 7)
    writer.close()
    trace = load_rank(writer.path)
    assert trace.complete
    assert [(event.operation.operation, event.duration_ns) for event in trace.events] == [
        ("all_to_all_single", 19),
        ("send", 5),
        ("barrier", 6),
    ]
    event = trace.events[0]
    assert (event.operation.size_bytes, event.operation.input_splits) == (13, (1, 2))
    assert [(wait.begin_ns, wait.end_ns) for wait in event.waits] == [(5, 22)]
    assert (event.sequence, event.returned_ns) == (7, 3)


def test_a_trace_that_is_cut_off_lacks_a_tenth_of_a_second(tmp_path: Path) -> None:
    log = CommsLogger()
    writer = TraceWriter(tmp_path, 0)
    writer.begin(RankTrace(0, 1))
    log.start_writing(writer)
    series = log.series(Operation("send", "send", 8, (0, 1)))
    ends_ms = [1, 50, 99, 300, 301]
    for sequence, end_ms in enumerate(ends_ms):
        series.add(sequence, 0, end_ms * MS)
    found = load_rank(writer.path)
    assert [event.end_ns // MS for event in found.events] == ends_ms[:-1]
    assert not found.complete
    log.stop_writing()
    writer.close()
    assert len(load_rank(writer.path).events) == len(ends_ms)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank0.begins").symlink_to("/dev/full")
    log = CommsLogger()
    writer = TraceWriter(tmp_path, 0)
    log.start_writing(writer)
    with caplog.at_level(logging.WARNING, logger="comm"):
        for _ in range(10_000):
            record(log, "send", 8, MS)
    (message,) = caplog.messages
    assert "the trace ends here" in message
    assert "No space left on device" in message
    assert log.rows()[0].calls == 10_000
    assert not log.writes
