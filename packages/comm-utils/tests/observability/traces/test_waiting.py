"""Waiting and transfer make up the whole, and the rank that was late is the one that is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_utils.observability.log_table import format_account
from comm_utils.observability.sequence import EPOCH
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait
from comm_utils.observability.traces.alignment import aligned, on_first_clock
from comm_utils.observability.traces.waiting import account, split

MS = 10**6
WORLD = (0, 1, 2)
ALL_REDUCE = Operation("all_reduce", "all_reduce", 8, WORLD, "0", "float32", "sum")


def event(operation: Operation, begin: int, end: int, sequence: int = 0) -> Event:
    return Event(operation, sequence, begin, end, end)


def rooted(name: str, root: int) -> Operation:
    return replace(ALL_REDUCE, name=name, operation=name, root=root)


def message(name: str, other: int, tag: int = 0) -> Operation:
    return replace(ALL_REDUCE, name=name, operation=name, op="", root=other, tag=tag)


def waited(*calls: Event) -> dict[int, tuple[int, int]]:
    return split(dict(enumerate(calls)))


def test_everybody_waits_for_the_last() -> None:
    found = waited(event(ALL_REDUCE, 0, 100), event(ALL_REDUCE, 60, 100), event(ALL_REDUCE, 40, 110))
    assert found == {0: (60, 1), 1: (0, 1), 2: (20, 1)}


def test_of_a_broadcast_only_the_root_is_waited_for() -> None:
    what = rooted("broadcast", 1)
    assert waited(event(what, 0, 100), event(what, 30, 50), event(what, 90, 120)) == {0: (30, 1), 1: (0, 1), 2: (0, 2)}


def test_the_root_of_a_reduce_waits_for_all_and_others_for_the_root() -> None:
    what = rooted("reduce", 0)
    assert waited(event(what, 10, 100), event(what, 0, 50), event(what, 70, 100)) == {0: (60, 2), 1: (10, 0), 2: (0, 2)}
    # Whose data were kept has not waited for the root.
    assert waited(event(what, 60, 100), event(what, 0, 50), event(what, 70, 100))[1] == (0, 1)


def test_nobody_waits_for_nothing() -> None:
    empty = replace(ALL_REDUCE, size_bytes=0)
    assert waited(event(empty, 0, 5), event(empty, 60, 70), event(empty, 20, 25)) == {0: (0, 0), 1: (0, 1), 2: (0, 2)}


def test_messages() -> None:
    send, receive = message("send", 1), message("recv", 0)
    assert waited(event(send, 0, 100), event(receive, 60, 110)) == {0: (60, 1), 1: (0, 1)}
    assert waited(event(send, 0, 50), event(receive, 60, 110)) == {0: (0, 0), 1: (0, 1)}
    assert waited(event(message("isend", 1), 70, 80), event(message("irecv", 0), 60, 110)) == {0: (0, 0), 1: (10, 0)}


def test_only_operations_that_every_rank_needed_has_recorded() -> None:
    assert waited(event(ALL_REDUCE, 0, 100), event(ALL_REDUCE, 0, 100)) == {}
    assert waited(event(rooted("broadcast", 1), 0, 100), event(rooted("broadcast", 1), 5, 100)) == {
        0: (5, 1),
        1: (0, 1),
    }
    assert split({2: event(rooted("broadcast", 1), 0, 100)}) == {}
    assert waited(event(ALL_REDUCE, 0, 100), event(rooted("reduce", 0), 0, 100), event(ALL_REDUCE, 0, 1)) == {}


JOBS = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "broadcast", "reduce", "gather", "barrier", "message"]),
        st.lists(st.integers(0, 5 * MS), min_size=3, max_size=3),
        st.integers(0, 2),
    ),
    max_size=30,
)


def made(job: list[tuple[str, list[int], int]]) -> list[RankTrace]:
    """Every rank computes for a while, then calls; a call ends 1000 ns after those that it needs have begun."""
    now, sequence, sent = [0, 0, 0], 0, 0
    traces = [RankTrace(rank, 3, "node01", 100 + rank) for rank in WORLD]
    for name, computing, root in job:
        begins = [time + more for time, more in zip(now, computing, strict=True)]
        if name == "message":
            other = (root + 1) % 3
            end = max(begins[root], begins[other]) + 1000
            traces[root].events.append(event(message("send", other, root), begins[root], end, sent))
            traces[other].events.append(event(message("recv", root, root), begins[other], end, sent))
            now = [end if rank in (root, other) else time for rank, time in enumerate(now)]
            sent += 1
            continue
        rank_root = root if name in ("broadcast", "reduce", "gather") else -1
        for rank in WORLD:
            needed = [root] if name == "broadcast" else [*WORLD] if rank_root in (-1, rank) else [rank]
            end = max(begins[one] for one in {*needed, rank}) + 1000
            what = rooted(name, rank_root)
            traces[rank].events.append(event(what, begins[rank], end, sequence))
            now[rank] = end
        sequence += 1
    return traces


@settings(max_examples=60)
@given(JOBS)
def test_waiting_and_transfer_make_up_the_whole(job: list[tuple[str, list[int], int]]) -> None:
    traces = made(job)
    found = account(aligned(traces))
    for trace in traces:
        shares = found.shares[trace.rank].values()
        assert sum(share.waiting_ns + share.transfer_ns for share in shares) == sum(
            one.duration_ns for one in trace.events
        )
        assert all(share.waiting_ns >= 0 and share.transfer_ns > 0 for share in shares)
    assert found.unmatched == 0
    assert found.operations == len(job)
    caused_ns = sum(one.caused_ns for one in found.stragglers)
    assert caused_ns == sum(share.waiting_ns for shares in found.shares.values() for share in shares.values())


@settings(max_examples=40)
@given(JOBS, st.lists(st.integers(-(10**15), 10**15), min_size=3, max_size=3), st.floats(-1e-4, 1e-4))
def test_clocks_that_differ_change_nothing(
    job: list[tuple[str, list[int], int]], offsets: list[int], drift: float
) -> None:
    traces, offsets = made(job), [0, *offsets[1:]]
    expected = account(aligned(traces))
    drifts = [0.0, drift, -drift]
    moved = []
    for trace, offset, gained in zip(traces, offsets, drifts, strict=True):

        def there(time: int, offset: int = offset, gained: float = gained) -> int:
            return time + offset + round(gained * time)

        events = [event(one.operation, there(one.begin_ns), there(one.end_ns), one.sequence) for one in trace.events]
        # The clock is told as it is measured: at some moment of its own, with the gain per second of its own.
        moved.append(replace(trace, events=events, offset_ns=offset, offset_at_ns=offset, drift=gained / (1 + gained)))
    found = account(aligned(moved))
    assert found.operations == expected.operations
    for rank in WORLD:
        for key, share in expected.shares[rank].items():
            got = found.shares[rank][key]
            assert got.calls == share.calls
            assert got.waiting_ns == pytest.approx(share.waiting_ns, abs=10 * share.calls)


def job_of(length: int) -> list[RankTrace]:
    random.seed(3)
    names = [random.choice(["all_reduce", "barrier", "broadcast"]) for _ in range(length)]
    return made([(name, [random.randrange(MS) for _ in WORLD], 1) for name in names])


@pytest.mark.parametrize("missed", [(0, 0, 0), (0, 3, 40), (5, 0, 1), (60, 60, 0)])
def test_ranks_that_began_to_record_at_different_calls(missed: tuple[int, ...]) -> None:
    """They count from their own first call; who began later has fewer operations, and they are the right ones."""
    whole = job_of(100)
    expected = account(aligned([replace(trace, events=trace.events[max(missed) :]) for trace in whole]))
    late = []
    for trace, missing in zip(whole, missed, strict=True):
        events = [replace(one, sequence=one.sequence - missing) for one in trace.events[missing:]]
        late.append(replace(trace, events=events))
    found = account(aligned(late))
    everything = account(aligned(whole))
    assert expected.operations <= found.operations <= everything.operations
    full = {rank: sum(s.waiting_ns for k, s in expected.shares[rank].items() if k[1] == "all_reduce") for rank in WORLD}
    got = {rank: sum(s.waiting_ns for k, s in found.shares[rank].items() if k[1] == "all_reduce") for rank in WORLD}
    assert got == full


def test_a_rank_that_stops_is_named() -> None:
    steps = [("all_reduce", [MS, MS, 51 * MS], 0), ("all_reduce", [MS, 2 * MS, MS], 0)] * 20
    found = account(aligned(made(steps)))
    worst = found.stragglers[0]
    assert (worst.rank, worst.last) == (2, 20)
    assert worst.typical_late_ns == pytest.approx(50 * MS, rel=0.01)
    assert worst.caused_ns == pytest.approx(2 * 20 * 50 * MS, rel=0.05)
    text = format_account(found)
    assert "rank 2 (node01, pid 102) was waited for: the last in 20 of 40 operations, typically 50 ms after" in text
    assert "98% of all waiting" in text


def test_blame_is_passed_on_along_a_pipeline() -> None:
    """Rank 0 sends to rank 1, which sends to rank 2; only rank 0 takes its time."""
    traces = [RankTrace(rank, 3) for rank in WORLD]
    now = [0, 0, 0]
    for step in range(10):
        for source, computing in ((0, 20 * MS), (1, MS)):
            target = source + 1
            begin, waiting = now[source] + computing, now[target]
            end = max(begin, waiting) + 1000
            traces[source].events.append(event(message("send", target), begin, end, step))
            traces[target].events.append(event(message("recv", source), waiting, end, step))
            now[source] = now[target] = end
    found = account(aligned(traces))
    caused = {one.rank: one.caused_ns for one in found.stragglers}
    waited = sum(share.waiting_ns for shares in found.shares.values() for share in shares.values())
    assert sum(caused.values()) == waited
    # Rank 2 waits for rank 1, which computes for 1 ms and waits for the rest of the time itself.
    assert caused[1] == pytest.approx(10 * MS, rel=0.1)
    assert caused[0] == waited - caused[1] > 300 * MS


def test_the_table_adds_up_and_says_when_nobody_was_late() -> None:
    found = account([])
    assert format_account(found).splitlines()[-1] == "no rank was waited for"
    text = format_account(account(aligned(made([("all_reduce", [0, MS, 2 * MS], 0)]))))
    cells = [cell.strip() for cell in text.splitlines()[2].split("  ") if cell.strip()]
    assert cells == ["all_reduce", "8 B", "3", "3", "3.00", "3.00", "0.00", "100%"]


def test_on_first_clock_keeps_waits() -> None:
    one = Event(replace(ALL_REDUCE, asynchronous=True), 0, 1100, 1300, 1150, [Wait(1200, 1310)])
    moved = on_first_clock(RankTrace(1, 2, offset_ns=1000, events=[one]))
    assert moved.events == [Event(one.operation, 0, 100, 300, 150, [Wait(200, 310)])]
    assert one.begin_ns == 1100


def test_a_rank_that_paused_its_recording() -> None:
    """It counts anew afterwards; both stretches are brought to the calls that they are of."""
    whole = job_of(100)
    gap = range(40, 47)
    kept = [one for number, one in enumerate(whole[1].events) if number not in gap]
    expected = account(aligned([whole[0], replace(whole[1], events=kept), whole[2]]))
    assert 93 <= expected.operations < 100
    anew = [
        replace(one, sequence=EPOCH + one.sequence - gap.stop if one.sequence >= gap.stop else one.sequence)
        for one in kept
    ]
    for counted_together in (False, True):
        traces = [whole[0], replace(whole[1], events=anew), whole[2]]
        found = account(aligned([replace(trace, counted_together=counted_together) for trace in traces]))
        assert found.operations == expected.operations
        assert found.shares == expected.shares


def test_what_cannot_be_one_call_is_left_out() -> None:
    broadcast, bigger = rooted("broadcast", 1), replace(rooted("broadcast", 1), size_bytes=16)
    assert waited(event(broadcast, 0, 100), event(bigger, 30, 50)) == {1: (0, 1)}
    # It was through before the root had begun.
    assert waited(event(broadcast, 0, 20), event(broadcast, 30, 50)) == {1: (0, 1)}
    assert waited(event(ALL_REDUCE, 0, 20), event(ALL_REDUCE, 30, 50), event(ALL_REDUCE, 0, 40)) == {2: (30, 1)}
    assert waited(event(message("send", 1), 50, 60), event(message("recv", 0), 0, 40)) == {}


@pytest.mark.parametrize("name", ["broadcast", "message"])
def test_late_recording_of_what_only_one_side_waits_for(name: str) -> None:
    """Rank 1 waits 20 ms for each of rank 0's calls, and turned its log on after 15 of them."""
    traces, now = [RankTrace(rank, 2) for rank in (0, 1)], [0, 0]
    for step in range(30):
        begin, waiting = now[0] + 20 * MS, now[1]
        what = (rooted("broadcast", 0),) * 2 if name == "broadcast" else (message("send", 1), message("recv", 0))
        for rank, start, end in ((0, begin, begin + 1000), (1, waiting, max(begin, waiting) + 5000)):
            ranked = replace(what[rank], ranks=(0, 1))
            if rank == 0 or step >= 15:
                traces[rank].events.append(event(ranked, start, end, step - 15 * rank))
            now[rank] = end
    found = account(aligned(traces))
    assert sum(share.waiting_ns for share in found.shares[1].values()) > 14 * 19 * MS
    assert [one.rank for one in found.stragglers] == [0]
