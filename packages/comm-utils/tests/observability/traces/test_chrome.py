"""Chrome traces: each event by a schema of the Trace Event Format, and what viewers need of them together."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_utils.observability.traces import Event, Operation, RankTrace, Wait, chrome
from comm_utils.observability.traces.labels import labels, shortened

# Written from "Trace Event Format", section by section; strict: nothing that it does not name may be there.
_NUMBER, _TEXT, _WHOLE = {"type": "number"}, {"type": "string"}, {"type": "integer", "minimum": 0}
_COMMON = {"name": _TEXT, "cat": _TEXT, "ts": {"type": "number", "minimum": 0}, "pid": _WHOLE, "tid": _WHOLE}


def _phase(phase: str, **more: Any) -> dict[str, Any]:
    optional = {"args"} if phase in "be" else set()
    properties = {"ph": {"const": phase}, **_COMMON, **more}
    required = sorted(properties.keys() - optional)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _metadata(name: str, key: str, value: Any) -> dict[str, Any]:
    args = {"type": "object", "properties": {key: value}, "required": [key], "additionalProperties": False}
    return _phase("M", name={"const": name}, args=args)


_ARGS = {"type": "object", "minProperties": 1}
EVENT = {
    "oneOf": [
        _phase("X", dur={"type": "number", "minimum": 0}, args=_ARGS),
        _phase("b", id={"type": "string", "minLength": 1}, args=_ARGS),
        _phase("e", id={"type": "string", "minLength": 1}),
        _phase("s", id=_WHOLE),
        _phase("f", id=_WHOLE, bp={"const": "e"}),
        _metadata("process_name", "name", _TEXT),
        _metadata("process_sort_index", "sort_index", _WHOLE),
        _metadata("thread_name", "name", _TEXT),
        _metadata("thread_sort_index", "sort_index", _WHOLE),
    ]
}
TRACE = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "traceEvents": {"type": "array", "items": EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": {"type": "object"},
    },
    "required": ["displayTimeUnit", "otherData", "traceEvents"],
    "additionalProperties": False,
}

GROUPS = [("0", (0, 1, 2)), ("a", (0, 2)), ("b", (0, 2)), ("c", (1,))]


def merged(traces: list[RankTrace], more: chrome.More | None = None) -> dict[str, Any]:
    file = io.StringIO()
    chrome.write(file, traces, more)
    document: dict[str, Any] = json.loads(file.getvalue())
    return document


def check(traces: list[RankTrace]) -> dict[str, Any]:
    """The merged trace, with everything asserted that a viewer relies on."""
    document = merged(traces)
    jsonschema.Draft202012Validator(TRACE).validate(document)
    by: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        by[event["ph"]].append(event)
    slices = check_slices(by["X"])
    check_spans(by["b"], by["e"])
    check_arrows(by["s"], by["f"], slices)
    named = {(event["pid"], event["tid"]) for event in by["M"] if event["name"] == "thread_name"}
    used = {(event["pid"], event["tid"]) for phase in "Xbesf" for event in by[phase]}
    assert used == named, "each thread that is used has a name"
    names = [(event["pid"], event["args"]["name"]) for event in by["M"] if event["name"] == "thread_name"]
    assert len(set(names)) == len(names)
    assert {event["pid"] for event in by["M"] if event["name"] == "process_name"} == {trace.rank for trace in traces}
    events = [event for trace in traces for event in trace.events]
    asynchronous = [event for event in events if event.operation.asynchronous]
    assert len(by["X"]) == len(events) + sum(len(event.waits) for event in asynchronous)
    assert len(by["b"]) == len(asynchronous)
    return document


def ns(event: dict[str, Any], key: str = "ts") -> int:
    return round(event[key] * 1000)


def check_slices(slices: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in slices:
        assert abs(event["ts"] * 1000 - ns(event)) < 1e-3, "whole nanoseconds"
        threads[event["pid"], event["tid"]].append((ns(event), ns(event) + ns(event, "dur")))
    for found in threads.values():
        found.sort()
        for (_, end), (begin, _) in pairwise(found):
            assert begin >= end, "slices of one thread do not overlap"
    return threads


def check_spans(begun: list[dict[str, Any]], ended: list[dict[str, Any]]) -> None:
    def key(event: dict[str, Any]) -> tuple[Any, ...]:
        return event["cat"], event["id"], event["name"], event["pid"], event["tid"]

    begins = {key(event): ns(event) for event in begun}
    ends = {key(event): ns(event) for event in ended}
    assert begins.keys() == ends.keys()
    assert len(begins) == len(begun) == len(ended), "no id is used twice"
    assert len({event["id"] for event in begun}) == len(begun), "nor by another process"
    assert all(begins[one] <= ends[one] for one in begins)


def check_arrows(
    starts: list[dict[str, Any]],
    ends: list[dict[str, Any]],
    slices: dict[tuple[int, int], list[tuple[int, int]]],
) -> None:
    first = {event["id"]: event for event in starts}
    last = {event["id"]: event for event in ends}
    assert first.keys() == last.keys()
    assert len(first) == len(starts) == len(ends), "an arrow has two ends"
    for number, start in first.items():
        end = last[number]
        assert (start["cat"], start["name"]) == (end["cat"], end["name"])
        assert ns(start) <= ns(end), "no arrow points backwards in time"
        for one in (start, end):
            within = slices[one["pid"], one["tid"]]
            assert any(begin <= ns(one) <= stop for begin, stop in within), "an arrow's ends are on slices"


@st.composite
def operations(draw: st.DrawFn, rank: int) -> Operation:
    group, ranks = draw(st.sampled_from([one for one in GROUPS if rank in one[1]]))
    name = draw(st.sampled_from(["all_reduce", "broadcast", "send", "recv", "isend", "irecv", "barrier"]))
    messages = name in ("send", "recv", "isend", "irecv")
    root = draw(st.sampled_from([*ranks, -1])) if messages else ranks[0] if name == "broadcast" else -1
    asynchronous = name in ("isend", "irecv") or (name != "send" and name != "recv" and draw(st.booleans()))
    size = 0 if name == "barrier" else draw(st.integers(0, 5000))
    return Operation(name, name, size, ranks, group, "float32", root=root, asynchronous=asynchronous)


@st.composite
def jobs(draw: st.DrawFn) -> list[RankTrace]:
    """Anything: calls that overlap, end before they begin, miss their other side, or have a number twice."""
    traces = []
    time = st.integers(-50, 5000)
    for rank in range(3):
        trace = RankTrace(rank, 3, "host", 100 + rank, dropped=draw(st.integers(0, 2)), complete=draw(st.booleans()))
        for _ in range(draw(st.integers(0, 8))):
            operation = draw(operations(rank))
            begin, took = draw(time), draw(st.integers(0, 800))
            event = Event(operation, draw(st.integers(-1, 3)), begin, begin + took, begin + took)
            if operation.asynchronous:
                event.returned_ns = begin + draw(st.integers(0, 100))
                for _ in range(draw(st.integers(0, 2))):
                    start = begin + draw(st.integers(0, 900))
                    event.waits.append(Wait(start, start + draw(st.integers(0, 300))))
                event.waits.sort(key=lambda wait: wait.begin_ns)
            trace.events.append(event)
        trace.events.sort(key=lambda event: event.begin_ns)
        traces.append(trace)
    return traces


@settings(deadline=None)
@given(jobs())
def test_whatever_was_recorded_is_a_trace_that_viewers_can_show(traces: list[RankTrace]) -> None:
    check(traces)


def test_of_two_receives_with_one_number_the_first_has_the_arrow() -> None:
    first = call("irecv", 0, 0, 1, asynchronous=True)
    first.waits = [Wait(2, 2)]
    document = check(
        [RankTrace(0, 2, events=[first, call("recv", 1, 1, 1)]), RankTrace(1, 2, events=[call("send", 0, 0, 0)])]
    )
    (end,) = phases(document, "f")
    (wait,) = (one for one in phases(document, "X") if one["cat"] == "wait")
    assert (end["tid"], end["ts"]) == (wait["tid"], wait["ts"])


def call(name: str, begin: int, end: int, rank_or_root: int = -1, number: int = 0, **fields: Any) -> Event:
    operation = Operation(
        name, name, 4096, fields.pop("ranks", (0, 1)), fields.pop("group", "0"), "float32", root=rank_or_root, **fields
    )
    return Event(operation, number, begin, end, end)


def phases(document: dict[str, Any], *wanted: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] in wanted]


def test_what_is_said_of_an_operation() -> None:
    traces = [
        RankTrace(0, 2, "here", 11, "gloo", events=[call("all_reduce", 5_000, 9_096, op="sum")]),
        RankTrace(1, 2, "there", 12, "gloo", uncertainty_ns=1500, dropped=3, complete=False),
    ]
    document = merged(traces, lambda rank, event: {"waiting_us": 1.5, "waited_for": rank})
    (found,) = phases(document, "X")
    assert (found["ts"], found["dur"], found["pid"], found["name"]) == (0, 4.096, 0, "all_reduce")
    assert found["args"] == {
        "operation": "all_reduce",
        "size": "4 KiB",
        "size_bytes": 4096,
        "dtype": "float32",
        "op": "sum",
        "group": "world",
        "ranks": 2,
        "sequence": 0,
        "algbw_gb_per_s": 1.0,
        "busbw_gb_per_s": 1.0,
        "waiting_us": 1.5,
        "waited_for": 0,
    }
    names = {event["pid"]: event["args"]["name"] for event in phases(document, "M") if event["name"] == "process_name"}
    assert names == {0: "rank 0 (here, pid 11)", 1: "rank 1 (there, pid 12)"}
    other = document["otherData"]
    assert other["clock_uncertainty_us"] == {"0": 0, "1": 1.5}
    assert other["dropped_events"] == {"1": 3}
    assert other["cut_off_ranks"] == [1]
    assert other["groups"] == {"world": [0, 1]}


def test_overlapping_asynchronous_operations_have_spans_of_their_own_and_their_waits() -> None:
    events = [call("all_reduce", begin, begin + 1000, asynchronous=True, number=n) for n, begin in enumerate((0, 100))]
    for event in events:
        event.returned_ns = event.begin_ns + 20
        event.waits = [Wait(500 + event.begin_ns, 1100 + event.begin_ns)]
    events[1].waits = [Wait(1100, 1200)]
    document = check([RankTrace(0, 2, events=events), RankTrace(1, 2)])
    spans = [(event["ph"], event["ts"], event["id"]) for event in phases(document, "b", "e")]
    assert spans == [("b", 0, "0.1"), ("e", 1, "0.1"), ("b", 0.1, "0.2"), ("e", 1.1, "0.2")]
    slices = [(event["name"], event["cat"], event["ts"], event["dur"]) for event in phases(document, "X")]
    assert slices == [
        ("all_reduce", "call", 0, 0.02),
        ("all_reduce", "call", 0.1, 0.02),
        ("wait for all_reduce", "wait", 0.5, 0.6),
        ("wait for all_reduce", "wait", 1.1, 0.1),
    ]


def test_a_message_points_from_its_send_to_where_it_arrived() -> None:
    receive = call("irecv", 0, 900, 0, asynchronous=True)
    receive.returned_ns, receive.waits = 10, [Wait(200, 910)]
    traces = [RankTrace(0, 2, events=[call("send", 400, 800, 1)]), RankTrace(1, 2, events=[receive])]
    document = check(traces)
    (start,), (end,) = phases(document, "s"), phases(document, "f")
    assert (start["pid"], start["ts"]) == (0, 0.4)
    assert (end["pid"], end["ts"]) == (1, 0.909)
    # Clocks that say that it arrived before it was sent: no arrow, and the trace says so.
    traces[0].events[0].begin_ns = 2000
    document = check(traces)
    assert not phases(document, "s", "f")
    assert document["otherData"]["arrows_left_out"] == 1


def test_each_group_has_a_thread_and_messages_have_another() -> None:
    events = [
        call("all_reduce", 0, 5, ranks=(0, 1, 2)),
        call("all_reduce", 5, 9, ranks=(0, 2), group="a"),
        call("all_reduce", 9, 12, ranks=(0, 2), group="b"),
        call("all_reduce", 10, 13, ranks=(0, 2), group="b"),
        call("send", 13, 14, 1, ranks=(0, 1, 2)),
    ]
    document = check([RankTrace(0, 3, events=events), RankTrace(1, 3), RankTrace(2, 3)])
    threads = {event["args"]["name"]: event["tid"] for event in phases(document, "M") if event["name"] == "thread_name"}
    orders = {
        event["tid"]: event["args"]["sort_index"]
        for event in phases(document, "M")
        if event["name"] == "thread_sort_index"
    }
    wanted = ["world", "group [0, 2]", "group [0, 2] (2)", "group [0, 2] (2), thread 2", "messages"]
    assert sorted(threads, key=lambda name: orders[threads[name]]) == wanted


def test_labels_are_short_and_never_alike() -> None:
    even, uneven = tuple(range(0, 64, 2)), (0, 1, 3, 4, 5, 6, 7, 8, 62)
    assert shortened(even) == "[0, 2 ... 62]"
    assert shortened(uneven) == "[0, 1, 3, 4, 5, 6, ... 62]"
    traces = [RankTrace(0, 2, events=[call("all_reduce", 0, 1, group=name) for name in "abc"])]
    assert sorted(labels(traces).values()) == ["world", "world (2)", "world (3)"]


@pytest.mark.parametrize("traces", [[], [RankTrace(0, 1)]])
def test_nothing_recorded(traces: list[RankTrace]) -> None:
    document = check(traces)
    assert not phases(document, "X", "b", "e", "s", "f")


def test_events_are_written_one_by_one() -> None:
    class Parts(io.StringIO):
        longest = 0

        def write(self, text: str) -> int:
            self.longest = max(self.longest, len(text))
            return super().write(text)

    file = Parts()
    traces = [RankTrace(0, 1, events=[call("all_reduce", n, n + 1, number=n, ranks=(0,)) for n in range(2000)])]
    chrome.write(file, traces)
    assert file.longest < 1000
    assert len(json.loads(file.getvalue())["traceEvents"]) == 2004


def test_calls_with_a_method_name_it() -> None:
    operation = Operation("all_reduce", "all_reduce", 4096, (0,), method="int8(block_size=256)", wire_bytes=1100)
    trace = RankTrace(0, 1, events=[Event(operation, 0, 0, 10, 10)])
    (span,) = [one for one in merged([trace])["traceEvents"] if one["ph"] == "X"]
    assert (span["args"]["method"], span["args"]["wire_bytes"]) == ("int8(block_size=256)", 1100)
