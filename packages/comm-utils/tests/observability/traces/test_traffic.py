"""Bytes from rank to rank, against programs that move element by element."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import operations
from comm_utils.observability.traces import Event, Operation, RankTrace
from comm_utils.observability.traces.traffic import traffic
from comm_utils.observability.traces.traffic_model import element_bytes, received, sent

Moves = Counter[tuple[int, int]]
SIZES = {"float32": 4, "bfloat16": 2, "uint8": 1, "complex128": 16}
ALL = {"all_reduce", "all_reduce_coalesced", "inference_all_reduce"}
GATHER = {"all_gather", "all_gather_coalesced", "all_gather_into_tensor"}
SCATTER = {"reduce_scatter", "reduce_scatter_coalesced", "reduce_scatter_tensor"}


def owners(count: int, ranks: tuple[int, ...]) -> list[int]:
    """Whose part each element is: all parts are as even as can be, the first ones larger."""
    W = len(ranks)
    held = [0] * W
    for element in range(count):
        held[element % W] += 1
    return [rank for rank, number in zip(ranks, held, strict=True) for _ in range(number)]


def moved(operation: Operation, unit: int) -> Moves:
    """Every element that a direct algorithm sends, one by one."""
    name, ranks, root = operation.operation, operation.ranks, operation.root
    count = operation.size_bytes // unit
    moves: Moves = Counter()

    def move(source: int, target: int) -> None:
        if source != target:
            moves[source, target] += unit

    for element, owner in enumerate(owners(count, ranks)):
        for other in ranks:
            if name in ALL | SCATTER:
                move(other, owner)  # a contribution, to be added up
            if name in ALL | GATHER:
                move(owner, other)
            if name == "gather" and other == root:
                move(owner, root)
            if name == "scatter" and other == owner:
                move(root, owner)
            if name == "broadcast":
                move(root, other)
            if name == "reduce":
                move(other, root)
            if name in ("all_to_all", "all_to_all_single"):
                # element of `other`'s input, for the owner of its place
                move(other, owner)
        del element
    return moves


@st.composite
def collectives(draw: st.DrawFn) -> Operation:
    ranks = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True))
    dtype = draw(st.sampled_from(sorted(SIZES)))
    name = draw(st.sampled_from(sorted(operations.recorded() - {"send", "recv", "isend", "irecv"})))
    count = 0 if name == "barrier" else draw(st.integers(0, 23))
    rooted = name in ("broadcast", "reduce", "gather", "scatter")
    return Operation(
        name, name, count * SIZES[dtype], tuple(ranks), "g", dtype, root=draw(st.sampled_from(ranks)) if rooted else -1
    )


@given(collectives())
def test_collectives_move_what_a_direct_algorithm_moves(operation: Operation) -> None:
    expected = moved(operation, SIZES[operation.dtype])
    assert Counter(by_pair(operation, "sent")) == expected
    assert Counter(by_pair(operation, "received")) == expected


def by_pair(operation: Operation, side: str) -> dict[tuple[int, int], int]:
    if side == "sent":
        return {(rank, other): size for rank in operation.ranks for other, size in sent(operation, rank).items()}
    return {(other, rank): size for rank in operation.ranks for other, size in received(operation, rank).items()}


@given(
    st.integers(1, 5).flatmap(
        lambda W: st.lists(st.lists(st.integers(0, 7), min_size=W, max_size=W), min_size=W, max_size=W)
    )
)
def test_all_to_all_goes_by_the_splits_also_where_one_side_is_even(table: list[list[int]]) -> None:
    W = len(table)
    traces = []
    for rank in range(W):
        gives, gets = table[rank], [row[rank] for row in table]
        size = 4 * max(sum(gives), sum(gets))
        # A side that is even is recorded without splits.
        inputs = () if len(set(gives)) == 1 else tuple(gives)
        outputs = () if len(set(gets)) == 1 else tuple(gets)
        operation = Operation(
            "x", "all_to_all_single", size, tuple(range(W)), "g", "float32", input_splits=inputs, output_splits=outputs
        )
        traces.append(RankTrace(rank, W, events=[Event(operation, 0, 1, 2, 2)]))
    expected = [[4 * table[i][j] * (i != j) for j in range(W)] for i in range(W)]
    assert traffic(traces).bytes_sent == expected
    for lost in range(W):  # its part is known from the others' splits
        kept = [replace(trace, events=[]) if trace.rank == lost else trace for trace in traces]
        wanted = [[expected[i][j] if not (i == lost and j == lost) else 0 for j in range(W)] for i in range(W)]
        assert traffic(kept).bytes_sent == wanted


def test_totals_by_hand() -> None:
    world = tuple(range(4))
    operation = Operation("all_reduce", "all_reduce", 4096, world, "0", "float32", "sum")
    # 2 (W - 1) S in total, the bytes that a ring sends as well
    assert sum(by_pair(operation, "sent").values()) == 2 * 3 * 4096
    assert sent(operation, 2) == {0: 2048, 1: 2048, 3: 2048}
    assert sent(replace(operation, operation="broadcast", root=2), 2) == {0: 4096, 1: 4096, 3: 4096}
    assert sent(replace(operation, operation="broadcast", root=2), 1) == {}
    assert received(replace(operation, operation="reduce", root=2), 2) == {0: 4096, 1: 4096, 3: 4096}


def message(rank: int, other: int, size: int, number: int, name: str, begin: int = 0) -> Event:
    return Event(Operation(name, name, size, (0, 1, 2), "g", "uint8", root=other, tag=7), number, begin, 1, 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 99)).filter(lambda m: m[0] != m[1]), max_size=12
    ),
    st.integers(0, 2),
    st.data(),
)
def test_a_message_counts_once_also_where_the_senders_record_is_cut_off(
    messages: list[tuple[int, int, int]], cut: int, data: st.DataObject
) -> None:
    numbers: Counter[tuple[int, int]] = Counter()
    traces = [RankTrace(rank, 3) for rank in range(3)]
    expected = [[0] * 3 for _ in range(3)]
    for source, target, size in messages:
        number = numbers[source, target]
        numbers[source, target] += 1
        expected[source][target] += size
        traces[source].events.append(
            message(source, target, size, number, data.draw(st.sampled_from(["send", "isend"])))
        )
        traces[target].events.append(
            message(target, source, size, number, data.draw(st.sampled_from(["recv", "irecv"])))
        )
    assert traffic(traces).bytes_sent == expected
    # Only what it sent itself is gone from the record of one rank.
    traces[cut].events = [event for event in traces[cut].events if event.operation.operation in ("recv", "irecv")]
    assert traffic(traces).bytes_sent == expected


def test_receives_that_do_not_know_their_sender() -> None:
    traces = [RankTrace(rank, 3) for rank in range(3)]
    traces[0].events = [message(0, 2, 50, 0, "send")]
    traces[2].events = [message(2, -1, 50, -1, "recv"), message(2, -1, 30, -1, "recv")]
    found = traffic(traces)
    assert found.bytes_sent[0][2] == found.total_bytes == 50
    assert found.without_source_bytes == 30


def test_receives_without_a_number() -> None:
    traces = [RankTrace(rank, 3) for rank in range(3)]
    traces[0].events = [message(0, 2, 50, 0, "send"), message(0, 2, 50, 1, "send")]
    traces[2].events = [message(2, 0, 50, -1, "recv") for _ in range(3)]
    assert traffic(traces).bytes_sent[0][2] == 150


def test_collectives_that_a_rank_has_not_recorded() -> None:
    gather = Operation("gather", "gather", 40, (0, 1), "g", "uint8", root=1)
    traces = [RankTrace(0, 2), RankTrace(1, 2, events=[Event(gather, 0, 1, 2, 2)])]
    assert traffic(traces).bytes_sent == [[0, 20], [0, 0]]


def test_nothing_at_all() -> None:
    assert traffic([]).total_bytes == 0
    assert traffic([RankTrace(0, 1)]).bytes_sent == [[0]]


@pytest.mark.parametrize("name", sorted(operations.recorded()))
def test_every_operation_is_defined(name: str) -> None:
    operation = Operation(name, name, 0 if name == "barrier" else 64, (0, 1), "g", "uint8", root=1)
    assert sent(operation, 0) or received(operation, 0) or name in ("barrier", "scatter")
    assert (
        sent(operation, 1) or received(operation, 1) or name == "barrier" or name in ("send", "recv", "isend", "irecv")
    )


def test_unknown_elements_divide_anywhere() -> None:
    assert element_bytes("float8_e4m3fn") == 1
    assert element_bytes("something new") == 1
