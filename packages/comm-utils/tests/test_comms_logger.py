"""The comms logger: counts are exact, the median is within its bin, memory does not grow, threads lose nothing."""

from __future__ import annotations

import logging
import math
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils.comms_logger import CommsLogger, Row, format_table
from comm_utils.errors import ArgumentError
from comm_utils.sizes import bandwidth

DURATIONS = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=200)
# A bin spans an eighth of a doubling; its middle is at most half of that away.
HALF_A_BIN = 2 ** (1 / 16) * (1 + 1e-9)


def recorded(durations: list[float], operation: str = "all_reduce", size: int = 4096, world_size: int = 4) -> Row:
    log = CommsLogger()
    for duration_s in durations:
        log.record(operation, size, duration_s, world_size)
    (row,) = log.rows()
    return row


@given(DURATIONS)
def test_counts_and_sums(durations: list[float]) -> None:
    row = recorded(durations)
    assert (row.operation, row.size_bytes, row.world_size, row.caller) == ("all_reduce", 4096, 4, "")
    assert row.calls == len(durations)
    assert row.total_bytes == 4096 * len(durations)
    assert math.isclose(row.total_s, math.fsum(durations), rel_tol=1e-9)
    assert row.min_s == min(durations)


@given(DURATIONS)
def test_median_is_within_its_bin(durations: list[float]) -> None:
    row = recorded(durations)
    exact = sorted(durations)[(len(durations) - 1) // 2]
    assert exact / HALF_A_BIN <= row.median_s <= exact * HALF_A_BIN
    assert row.median_s >= row.min_s


@given(DURATIONS)
def test_bandwidths_are_of_the_median(durations: list[float]) -> None:
    row = recorded(durations)
    rate = bandwidth("all_reduce", 4096, row.median_s, 4)
    assert (row.algbw_gb_per_s, row.busbw_gb_per_s) == (rate.algbw_gb_per_s, rate.busbw_gb_per_s)


def test_durations_of_zero() -> None:
    row = recorded([0.0, 0.0])
    assert (row.calls, row.total_s, row.min_s) == (2, 0.0, 0.0)
    assert 0 <= row.median_s < 1.1e-9


def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    log = CommsLogger()

    def record(calls: int) -> None:
        for call in range(calls):
            log.record("all_gather", 2**20, 1e-6 * (1 + call % 1000), 8)

    record(2000)
    tracemalloc.start()
    record(20_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 4096
    assert log.rows()[0].calls == 22_000


def test_threads_lose_nothing() -> None:
    log = CommsLogger()
    barrier = threading.Barrier(8)

    def record(thread: int) -> None:
        barrier.wait()
        for call in range(500):
            log.record("all_reduce", 2 ** (call % 3), 1e-3, 2, f"thread {thread % 2}")
            if call % 100 == 0:
                log.rows()

    threads = [threading.Thread(target=record, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(row.calls for row in log.rows()) == 8 * 500
    assert len(log.rows()) == 6


def test_rows_are_sorted_and_kept_apart() -> None:
    log = CommsLogger()
    for key in (("send", 8, 2, ""), ("all_reduce", 1024, 4, ""), ("all_reduce", 8, 4, "b"), ("all_reduce", 8, 2, "")):
        log.record(key[0], key[1], 1e-3, key[2], key[3])
    keys = [(row.operation, row.size_bytes, row.world_size, row.caller) for row in log.rows()]
    assert keys == [
        ("all_reduce", 8, 2, ""),
        ("all_reduce", 8, 4, "b"),
        ("all_reduce", 1024, 4, ""),
        ("send", 8, 2, ""),
    ]


def test_reset_forgets() -> None:
    log = CommsLogger()
    log.record("barrier", 0, 1e-3, 2)
    log.reset()
    assert log.rows() == []


def test_names_of_calls_keep_their_operation() -> None:
    log = CommsLogger()
    log.record("all_reduce", 8, 1e-3, 2, name="gradients")
    log.record("all_reduce", 8, 1e-3, 2)
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
        log.prof_ops = ["all_reduce", name]  # type: ignore[assignment]
    (record,) = caplog.records
    assert f"{name!r} is no operation: only calls with that log_name are recorded" in record.getMessage()
    assert (f"; did you mean {meant!r}?" if meant else "recorded") in record.getMessage()
    assert log.prof_ops == {"all_reduce", name}
    with pytest.raises(ArgumentError, match="got 3;"):
        CommsLogger(prof_ops=[3])  # type: ignore[list-item]


def test_verbose_logs_a_line_for_each(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="comm"):
        CommsLogger().record("all_reduce", 1536, 2e-3, 2)
        assert caplog.messages == []
        CommsLogger(verbose=True).record("all_reduce", 1536, 2e-3, 2, "step")
    (line,) = caplog.messages
    assert line.startswith("all_reduce from step | size: 1.5 KiB | time: 2.000 ms | algbw: ")


def test_table() -> None:
    log = CommsLogger()
    for duration_s in (1e-3, 1e-3, 4e-3):
        log.record("all_reduce", 2**20, duration_s, 4)
    log.record("broadcast", 8, 5e-6, 4, "setup")
    heading, line, first, second = format_table(log.rows()).splitlines()
    assert heading.split("  ")[0] == "operation"
    for title in ("size", "ranks", "calls", "bytes", "total ms", "min us", "median us", "algbw GB/s", "busbw GB/s"):
        assert title in heading
    assert set(line) == {"-", " "}
    assert len({len(heading), len(line), len(first), len(second)}) == 1
    cells = [cell.strip() for cell in first.split("  ") if cell.strip()]
    assert cells[:7] == ["all_reduce", "1 MiB", "4", "3", "3 MiB", "6.00", "1000.0"]
    assert float(cells[7]) == pytest.approx(1000, rel=0.05)
    assert float(cells[9]) == pytest.approx(1.5 * float(cells[8]), abs=2e-3)
    assert second.startswith("broadcast (setup)")


def test_table_with_one_more_column() -> None:
    log = CommsLogger()
    log.record("send", 8, 1e-3, 2)
    heading, _, row = format_table(log.rows(), ("straggler ms", ["0.25"])).splitlines()
    assert heading.endswith("straggler ms")
    assert row.endswith("0.25")
    with pytest.raises(ValueError, match="zip"):
        format_table(log.rows(), ("straggler ms", []))


def test_table_of_nothing_has_a_heading() -> None:
    assert len(format_table([]).splitlines()) == 2
