"""The comms logger: counts are exact, quantiles within their bins, memory does not grow, threads lose nothing."""

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

DURATIONS_NS = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)
# A bin is at most an eighth of what is in it; its middle is at most half of that away.
HALF_A_BIN = 1 / 16 + 1e-9
US, MS = 10**3, 10**6


def recorded(durations_ns: list[int], operation: str = "all_reduce", size: int = 4096, world_size: int = 4) -> Row:
    log = CommsLogger()
    for duration_ns in durations_ns:
        log.record(operation, size, duration_ns, world_size)
    (row,) = log.rows()
    return row


@given(DURATIONS_NS)
def test_counts_and_sums(durations_ns: list[int]) -> None:
    row = recorded(durations_ns)
    assert (row.operation, row.size_bytes, row.world_size, row.ranks, row.caller) == ("all_reduce", 4096, 4, (), "")
    assert row.calls == len(durations_ns)
    assert row.total_bytes == 4096 * len(durations_ns)
    assert row.total_s == sum(durations_ns) * 1e-9
    assert (row.min_s, row.max_s) == (min(durations_ns) * 1e-9, max(durations_ns) * 1e-9)


@given(DURATIONS_NS)
def test_quantiles_are_within_their_bins(durations_ns: list[int]) -> None:
    row = recorded(durations_ns)
    for share, found_s in ((0.5, row.median_s), (0.95, row.p95_s)):
        exact_s = sorted(durations_ns)[math.ceil(share * len(durations_ns)) - 1] * 1e-9
        assert abs(found_s - exact_s) <= HALF_A_BIN * exact_s
        assert row.min_s <= found_s <= row.max_s


def test_bins_are_an_eighth_of_a_doubling() -> None:
    for duration_ns in (*range(300), 10**6 - 1, 10**6, 2**40 - 1, 2**40, 2**40 + 1):
        log = CommsLogger()
        # Extremes that do not bound what is in between.
        for other_ns in (0, duration_ns, duration_ns, 2**62):
            log.record("send", 8, other_ns, 2)
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

    def record(calls: int) -> None:
        for call in range(calls):
            log.record("all_gather", 2**20, US * (1 + call % 1000), 8)

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
            log.record("all_reduce", 2 ** (call % 3), MS, 2, f"thread {thread % 2}")
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
        log.record(key[0], key[1], MS, key[2], key[3])
    keys = [(row.operation, row.size_bytes, row.world_size, row.caller) for row in log.rows()]
    assert keys == [
        ("all_reduce", 8, 2, ""),
        ("all_reduce", 8, 4, "b"),
        ("all_reduce", 1024, 4, ""),
        ("send", 8, 2, ""),
    ]


def test_reset_forgets() -> None:
    log = CommsLogger()
    log.record("barrier", 0, MS, 2)
    series = log.series("barrier", 0, 2)
    log.reset()
    assert log.rows() == []
    series.add(5)  # somebody still has it
    assert [row.calls for row in log.rows()] == [1]


def test_groups_are_kept_apart() -> None:
    log = CommsLogger()
    for ranks in ((0, 1), (2, 3), (2, 3), tuple(range(1, 13))):
        log.record("broadcast", 8, MS, len(ranks), ranks=ranks)
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
    log.record("all_reduce", 8, MS, 2, name="gradients")
    log.record("all_reduce", 8, MS, 2)
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
        CommsLogger().record("all_reduce", 1536, 2 * MS, 2)
        assert caplog.messages == []
        CommsLogger(verbose=True).record("all_reduce", 1536, 2 * MS, 2, "step")
    (line,) = caplog.messages
    assert line.startswith("all_reduce from step | size: 1.5 KiB | time: 2.000 ms | algbw: ")


def test_table() -> None:
    log = CommsLogger()
    for duration_ms in (1, 1, 4):
        log.record("all_reduce", 2**20, duration_ms * MS, 4)
    log.record("broadcast", 8, 5 * US, 4, "setup")
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


def test_table_with_one_more_column() -> None:
    log = CommsLogger()
    log.record("send", 8, MS, 2)
    heading, _, row = format_table(log.rows(), ("straggler ms", ["0.25"])).splitlines()
    assert heading.endswith("straggler ms")
    assert row.endswith("0.25")
    with pytest.raises(ValueError, match="zip"):
        format_table(log.rows(), ("straggler ms", []))


def test_table_of_nothing_has_a_heading() -> None:
    assert len(format_table([]).splitlines()) == 2
