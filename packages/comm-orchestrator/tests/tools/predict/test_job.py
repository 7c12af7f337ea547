"""Recorded jobs with other times: what waits for what, what overlaps, which groups grow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_orchestrator.tools.predict.job import predict
from comm_orchestrator.tools.predict.placement import Placement
from comm_orchestrator.tools.predict.simulation import programs, simulate
from comm_utils.errors import ArgumentError
from comm_utils.observability.cost_model import Estimator, Key, Link, Model, Point, Shape, fit_all
from comm_utils.observability.cost_model.pieces import term_of
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait

MS = 1_000_000
WORLD = (0, 1)


def operation(
    name: str = "all_reduce", size: int = 1 << 20, ranks: tuple[int, ...] = WORLD, **more: object
) -> Operation:
    return Operation(name, name, size, ranks, group=str(ranks), dtype="float32", op="sum", **more)  # type: ignore[arg-type]


def event(
    what: Operation, sequence: int, begin_ms: float, end_ms: float, returned_ms: float | None = None, *waits
) -> Event:  # type: ignore[no-untyped-def]
    waited = [Wait(int(begin * MS), int(end * MS)) for begin, end in waits]
    returned = end_ms if returned_ms is None else returned_ms
    return Event(what, sequence, int(begin_ms * MS), int(end_ms * MS), int(returned * MS), waited)


def job(*ranks: Sequence[Event], hosts: Sequence[str] = ()) -> list[RankTrace]:
    names = hosts or ["a"] * len(ranks)
    return [
        RankTrace(rank, len(ranks), host=names[rank], backend="gloo", events=list(events))
        for rank, events in enumerate(ranks)
    ]


def wall_ms(traces: list[RankTrace], each_ms: float) -> float:
    steps, exchanges = programs(traces)
    return simulate(steps, {id(one): each_ms * MS for one in exchanges}).wall_ns / MS


def test_gaps_stay_and_calls_take_what_they_are_given() -> None:
    events = [event(operation(), 0, 10, 14), event(operation(), 1, 20, 25)]
    traces = job(events, events)
    # From the first call: 6 ms of computing between the two.
    assert wall_ms(traces, 0) == 6
    assert wall_ms(traces, 1) == 8
    assert wall_ms(traces, 100) == 206


def test_everybody_waits_for_the_last() -> None:
    fast = [event(operation(), 0, 0, 12), event(operation(), 1, 12, 24)]
    slow = [event(operation(), 0, 10, 12), event(operation(), 1, 22, 24)]
    # The slow rank computes 10 ms before each; the fast one waits, and its waiting is no computing.
    assert wall_ms(job(fast, slow), 2) == 24
    assert wall_ms(job(fast, slow), 5) == 30


def test_asynchronous_operations_run_beside_computing() -> None:
    started = operation(asynchronous=True)
    events = [event(started, 0, 0, 5, 1, (11, 11)), event(operation(size=8), 1, 20, 21)]
    traces = job(events, events)
    # Up to the 11 ms until the wait, its time does not count.
    assert wall_ms(traces, 0) == 20
    assert wall_ms(traces, 11) == 20 + 11
    assert wall_ms(traces, 15) == 20 + 4 + 15


def test_operations_of_one_group_go_one_after_another() -> None:
    started = operation(asynchronous=True)
    events = [event(started, 0, 0, 5, 0, (1, 5)), event(started, 1, 0.5, 6, 0.5, (5, 6))]
    assert wall_ms(job(events, events), 10) == 20
    # Nobody waits: the job ends when all is over.
    lazy = [event(started, 0, 0, 5, 0), event(started, 1, 0.5, 6, 0.5)]
    assert wall_ms(job(lazy, lazy), 10) == 20


def test_the_recorded_time_of_operations_that_overlap_counts_once() -> None:
    started, last = operation(asynchronous=True), operation(size=8)
    events = [event(started, number, number, 5 + number, number) for number in range(4)]
    steps, exchanges = programs(job(events, [*events, event(last, 4, 10, 11)]))
    assert [one.transfer_ns / MS for one in exchanges] == [5, 1, 1, 1, 1]
    assert simulate(steps, {id(one): one.transfer_ns for one in exchanges}).wall_ns == 11 * MS


def test_groups_go_beside_each_other() -> None:
    started = operation(asynchronous=True)
    other = Operation("all_reduce", "all_reduce", 8, WORLD, group="other", asynchronous=True)
    events = [event(started, 0, 0, 5, 0, (2, 5)), event(other, 0, 1, 6, 1, (5, 6))]
    assert wall_ms(job(events, events), 10) == 11


def test_threads_of_a_rank_go_beside_each_other() -> None:
    """Two threads, each with a group of its own, compute 4 ms before each call; then one thread ends the job."""
    one, other = operation(ranks=WORLD), Operation("all_reduce", "all_reduce", 8, WORLD, group="other")
    first = [event(one, number, 5 * number + 4, 5 * number + 5) for number in range(3)]
    second = [event(other, number, 5 * number + 4.5, 5 * number + 5.5) for number in range(3)]
    events = [*sorted([*first, *second], key=lambda each: each.begin_ns), event(one, 3, 20, 21)]
    traces = job(events, events)
    assert wall_ms(traces, 1) == 17
    assert wall_ms(traces, 11) == 17 + 4 * 10
    assert wall_ms(traces, 0) == 17 - 4


def test_a_thread_does_not_call_before_its_own_last_call_has_ended() -> None:
    """Two threads, each with a group of its own, compute 10 ms before each call; one of the groups becomes slow."""
    one, other = operation(), Operation("all_reduce", "all_reduce", 8, WORLD, group="other")
    first = [event(one, number, 11 * number + 10, 11 * number + 11) for number in range(3)]
    second = [event(other, number, 11 * number + 10.5, 11 * number + 11.5) for number in range(3)]
    events = sorted([*first, *second], key=lambda each: each.begin_ns)
    steps, exchanges = programs(job(events, events))
    run = simulate(steps, {id(each): (100 if each.operation is one else 1) * MS for each in exchanges})
    # Both threads were seen to compute for 9.5 ms between two calls of a group.
    assert run.wall_ns == (3 * 100 + 2 * 9.5) * MS


def test_threads_that_call_in_another_order_on_each_rank_do_not_wait_for_each_other() -> None:
    one, other = operation(), Operation("all_reduce", "all_reduce", 8, WORLD, group="other")
    first = [event(one, 0, 0, 3), event(other, 0, 2, 3)]
    second = [event(other, 0, 0, 3), event(one, 0, 2, 3)]
    steps, exchanges = programs(job(first, second))
    run = simulate(steps, {id(each): 1 * MS for each in exchanges})
    assert (run.wall_ns, run.lonely) == (3 * MS, 0)


def test_each_of_many_exchanges_that_cannot_end_costs_as_much_as_one() -> None:
    """Ranks of a damaged trace call two groups in turns, each rank the other one first."""
    one, other = operation(), Operation("all_reduce", "all_reduce", 8, WORLD, group="other")
    first, second = (
        [event(pair[number % 2], number // 2, number, number) for number in range(40_000)]
        for pair in ((one, other), (other, one))
    )
    steps, exchanges = programs(job(first, second))
    durations = {id(each): 1 * MS for each in exchanges}
    begin_s = time.process_time()
    assert simulate(steps, durations).lonely == 20_000
    assert time.process_time() - begin_s < 4


def test_messages_are_sent_whether_or_not_somebody_receives() -> None:
    """Both send before they receive, which would hang if a send waited for its receiver."""
    send, receive = operation("send", 8, root=1), operation("recv", 8, root=1)
    back, from_zero = operation("send", 8, root=0), operation("recv", 8, root=0)
    first = [event(send, 0, 0, 1), event(receive, 0, 1, 2)]
    second = [event(back, 0, 0, 1), event(from_zero, 0, 1, 2)]
    assert wall_ms(job(first, second), 3) == 3
    assert wall_ms(job([event(send, 0, 7, 8)], [event(from_zero, 0, 0, 8)]), 3) == 10


def test_messages_of_different_groups_are_not_taken_for_one() -> None:
    def calls(name: str, other: int) -> list[Event]:
        groups = [replace(operation(name, root=other), group=group) for group in ("0", "1")]
        return [event(what, 0, 20 * number, 20 * number + 10) for number, what in enumerate(groups)]

    traces = job(calls("send", 1), calls("recv", 0))
    assert len(programs(traces)[1]) == 2
    assert wall_ms(traces, 10) == 30


def test_a_receive_from_anybody_and_records_of_one_side_do_not_hang() -> None:
    anybody = operation("recv", 8, root=-1)
    assert wall_ms(job([event(anybody, 0, 0, 1)], [event(operation("send", 8, root=0), 0, 0, 1)]), 3) == 3
    assert wall_ms(job([event(operation(), 0, 0, 1)], []), 3) == 3


def test_records_that_contradict_each_other_do_not_hang() -> None:
    one, other = operation(ranks=(0, 1)), Operation("b", "barrier", 0, WORLD, group="b")
    traces = job([event(one, 0, 0, 1), event(other, 0, 1, 2)], [event(other, 0, 0, 1), event(one, 0, 1, 2)])
    steps, exchanges = programs(traces)
    run = simulate(steps, {id(exchange): float(MS) for exchange in exchanges})
    assert run.lonely >= 1
    assert run.wall_ns >= 2 * MS


GAPS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.booleans()), min_size=1, max_size=12)


@settings(deadline=None)
@given(
    gaps=GAPS,
    ranks=st.integers(1, 4),
    slower=st.integers(0, 9),
    times=st.lists(st.integers(0, 99), min_size=2, max_size=4),
)
def test_longer_communication_is_never_faster_and_never_hides_computing(
    gaps: list[tuple[int, int, bool]], ranks: int, slower: int, times: list[int]
) -> None:
    members = tuple(range(ranks))
    traces = []
    for rank in members:
        now, events = 0.0, []
        for number, (gap, took, asynchronous) in enumerate(gaps):
            now += gap + slower * (rank == 0)
            what = operation(size=8, ranks=members, asynchronous=asynchronous)
            waits = [(now + took, now + took)] if asynchronous else []
            events.append(event(what, number, now, now + took, now if asynchronous else None, *waits))
            now += took
        traces.append(events)
    found = [wall_ms(job(*traces), each) for each in sorted(times)]
    assert found == sorted(found)
    bare = wall_ms(job(*traces), 0)
    assert all(one >= bare - 1e-6 for one in found)
    assert all(one <= bare + each * len(gaps) + 1e-6 for one, each in zip(found, sorted(times), strict=True))


def model(*operations: str) -> Model:
    points = {}
    for name in operations:
        key = Key(name, "ours", "gloo", "intra", "in_place", "float32", "sum")
        points[key] = []
        for shape in (Shape(2), Shape(4)):
            for size in (8 * 8**i for i in range(8)):
                messages, volume, _ = term_of(name, "ring", shape, size, None)
                points[key].append(Point(shape, size, messages * 10 + volume * 1e-3))
    return Model("", "", "median", tuple(fit_all(points)))


NETWORK = Link(5.0, 1e-3)


def test_a_recorded_job_on_other_hosts() -> None:
    events = [event(operation(), number, 10 * number, 10 * number + 2) for number in range(5)]
    traces = job(events, events)
    found = predict(traces, Estimator(model("all_reduce"), network=NETWORK), Placement.of(traces, 4, 8))
    (row,) = found.rows
    assert (row.calls, row.shape, row.recorded_shape) == (5, Shape(32, 4), Shape(2))
    each_s = (62 * 15 + 62 / 32 * (1 << 20) * 1e-3) / 1e6
    assert row.predicted.value_s == pytest.approx(5 * each_s)
    assert found.communication.value_s == pytest.approx(5 * each_s)
    assert found.wall.value_s == pytest.approx(4 * 0.008 + 5 * each_s)
    assert found.wall.low_s < found.wall.value_s < found.wall.high_s
    assert found.without_communication_s == pytest.approx(0.032)
    assert found.recorded_wall_s == pytest.approx(0.042)
    assert row.recorded_s == pytest.approx(5 * 0.002)


def test_parts_or_whole_arrays_stay() -> None:
    what = operation("all_gather_into_tensor", 1 << 20)
    traces = job([event(what, 0, 0, 1)], [event(what, 0, 0, 1)])
    estimator = Estimator(model("all_gather_into_tensor"))
    sizes = [
        predict(traces, estimator, Placement.of(traces, 1, 8), keep_parts=parts).rows[0].size_bytes
        for parts in (False, True)
    ]
    assert sizes == [1 << 20, 4 << 20]


def test_what_the_model_lacks_is_refused_or_kept() -> None:
    barrier = Operation("barrier", "barrier", 0, WORLD, group="w")
    events = [event(operation(), 0, 0, 2), event(barrier, 1, 5, 8)]
    traces = job(events, events)
    estimator = Estimator(model("all_reduce"))
    with pytest.raises(ArgumentError, match=r"no fit of barrier within a host.*--keep-recorded"):
        predict(traces, estimator, Placement.of(traces, None, None))
    found = predict(traces, estimator, Placement.of(traces, None, None), keep_recorded=True)
    kept = {row.operation: row for row in found.rows if row.kept}
    assert kept["barrier"].predicted.value_s == pytest.approx(0.003)


def test_an_empty_trace_is_refused() -> None:
    traces = job([], [])
    with pytest.raises(ArgumentError, match="without communication"):
        predict(traces, Estimator(model("all_reduce")), Placement.of(traces, None, None))


def test_a_damaged_trace_is_refused() -> None:
    events = [event(operation(ranks=(0, 7)), 0, 0, 1)]
    traces = job(events, events)
    with pytest.raises(ArgumentError, match="the trace is damaged"):
        predict(traces, Estimator(model("all_reduce")), Placement.of(traces, None, None))


def placement(hosts: str, nodes: int | None = None, per_node: int | None = None, subgroups: str = "keep") -> Placement:
    return Placement.of(
        [RankTrace(rank, len(hosts), host=host) for rank, host in enumerate(hosts)], nodes, per_node, subgroups
    )


@pytest.mark.parametrize(
    ("found", "ranks", "expected"),
    [
        (placement("aabb"), (0, 1, 2, 3), Shape(4, 2)),
        (placement("abab"), (0, 2), Shape(2, 1)),
        (placement("abab"), (0, 1), Shape(2, 2)),
        (placement("aaaa", 2, 4), (0, 1, 2, 3), Shape(8, 2)),
        (placement("aaaa", 2, 4), (0, 2), Shape(2, 1)),
        (placement("aaaa", 4, 1), (0, 2), Shape(2, 2)),
        (placement("aaaa", 4, 4, "mesh"), (0, 2), Shape(8, 4)),
        (placement("aaaa", 4, 4, "mesh"), (1, 3), Shape(8, 4)),
        (placement("aaaa", 4, 4, "mesh"), (0, 1), Shape(2, 1)),
        (placement("aa", 1, 1), (0, 1), Shape(1, 1)),
    ],
)
def test_where_groups_are(found: Placement, ranks: tuple[int, ...], expected: Shape) -> None:
    assert found.shape(ranks) == expected


def test_hosts_with_different_numbers_of_ranks_are_kept_unless_others_are_given() -> None:
    recorded = placement("aaabb")
    assert (recorded.world_size, recorded.as_recorded, str(recorded)) == (5, True, "5 ranks on 2 hosts")
    assert [recorded.shape(ranks) for ranks in ((0, 1, 2, 3, 4), (0, 2), (2, 3))] == [
        Shape(5, 2),
        Shape(2, 1),
        Shape(2, 2),
    ]
    assert (str(placement("aaabb", 2)), str(placement("aaabb", per_node=2))) == ("2 x 3 ranks", "2 x 2 ranks")


def test_groups_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expected at least 4, because the recorded group"):
        placement("aaaa", 1, 2).shape((2, 3))
    with pytest.raises(ArgumentError, match="multiple of 2 ranks"):
        placement("aaaa", 3, 3, "mesh").shape((0, 2))


def test_compressed_calls_cost_what_their_bytes_cost() -> None:
    plain = operation()
    int8 = replace(plain, method="int8(block_size=256)", wire_bytes=plain.size_bytes // 4)
    int4 = replace(plain, method="int4(block_size=256)", wire_bytes=plain.size_bytes // 8)
    events = [event(one, number, 10 * number, 10 * number + 2) for number, one in enumerate((plain, int8, int4))]
    traces = job(events, events)
    found = predict(traces, Estimator(model("all_reduce"), network=NETWORK), Placement.of(traces, 4, 8))
    each = {row.codec.partition("(")[0]: row for row in found.rows}
    assert {name: row.size_bytes for name, row in each.items()} == dict.fromkeys(("", "int8", "int4"), 1 << 20)
    # Two ranks send once the size each: a quarter and an eighth of it; so do 32.
    for name, share in (("", 1), ("int8", 1 / 4), ("int4", 1 / 8)):
        each_s = (62 * 15 + 62 / 32 * share * (1 << 20) * 1e-3) / 1e6
        assert each[name].predicted.value_s == pytest.approx(each_s)
        assert ("codec" in each[name].estimate.marks) == bool(name)
