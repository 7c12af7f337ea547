"""What is replayed, what is left out and what is refused; the order of a rank's steps; and the comparison."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_config import CommConfig, load_config
from comm_orchestrator.tools import devices
from comm_orchestrator.tools.devices import devices_of
from comm_orchestrator.tools.trace import comparison, replay_calls, replay_rank
from comm_orchestrator.tools.trace.comparison import Tally, compare, tally, together_with
from comm_orchestrator.tools.trace.matching import matched
from comm_orchestrator.tools.trace.replay_calls import Calls
from comm_orchestrator.tools.trace.replay_options import Options, check_files, peak_bytes
from comm_orchestrator.tools.trace.replay_order import one_after_another
from comm_orchestrator.tools.trace.replay_plan import WORLD, plan, type_of, without_tags
from comm_orchestrator.tools.trace.replay_player import steps
from comm_utils.errors import ArgumentError
from comm_utils.observability.traces import Event, Operation, RankTrace, Wait
from comm_utils.observability.traces.file import load_rank, path_of, save


def call(name: str, number: int = 0, begin: int = 0, **fields: Any) -> Event:
    given_fields: dict[str, Any] = {"size_bytes": 48, "ranks": (0, 1, 2), "group": "0", "dtype": "float32", **fields}
    return Event(Operation(name, name, **given_fields), number, begin, begin + 10, begin + 10)


def three(*events: Event) -> list[RankTrace]:
    """The same calls on three ranks."""
    return [RankTrace(rank, 3, backend="gloo", events=[replace(one) for one in events]) for rank in range(3)]


def message(rank: int, name: str, other: int, number: int, begin: int, size: int = 8, tag: int = 0) -> Event:
    return call(name, number, begin, root=other, size_bytes=size, tag=tag)


def kinds(trace: RankTrace) -> list[tuple[str, int]]:
    return [(event.operation.operation, event.sequence) for event in trace.events]


def test_what_all_have_is_kept_whole() -> None:
    traces = three(call("all_reduce"), call("barrier", 1, 20, dtype="", size_bytes=0))
    traces[0].events.append(message(0, "send", 2, 0, 40))
    traces[2].events.append(message(2, "recv", 0, 0, 35))
    found = plan(traces)
    assert [kinds(trace) for trace in found.traces] == [kinds(trace) for trace in traces]
    assert found.notes == []
    assert found.backend == "gloo"
    assert {event.operation.group for trace in found.traces for event in trace.events} == {WORLD}


def test_calls_with_a_method_are_said_to_be_repeated_without() -> None:
    traces = three(call("all_reduce", method="int8(block_size=256)", wire_bytes=16), call("all_reduce", 1, 20))
    (note,) = plan(traces).notes
    assert note.startswith("3 calls were made as int8(block_size=256); they are repeated without compression")


def test_what_a_rank_lacks_is_left_out_and_said() -> None:
    traces = three(*(call("all_reduce", number, number * 20) for number in range(4)))
    traces[1] = replace(traces[1], events=traces[1].events[1:3], complete=False)
    traces[2] = replace(traces[2], dropped=2)
    found = plan(traces)
    assert [kinds(trace) for trace in found.traces] == [[("all_reduce", 1), ("all_reduce", 2)]] * 3
    assert found.notes == [
        "4 of 10 calls are left out, on ranks 0, 2: other ranks that they need have no record of them (the recording "
        "of rank 1 was cut off; rank 2 dropped events)"
    ]


@given(st.data())
def test_whatever_is_lost_the_rest_belongs_together(data: st.DataObject) -> None:
    groups = [("0", (0, 1, 2)), ("a", (0, 2)), ("b", (1, 2))]
    traces = [RankTrace(rank, 3) for rank in range(3)]
    counts: dict[Any, int] = {}
    for number in range(data.draw(st.integers(0, 12))):
        if data.draw(st.booleans()):
            name, ranks = data.draw(st.sampled_from(groups))
            sequence = counts[name] = counts.get(name, -1) + 1
            for rank in ranks:
                traces[rank].events.append(call("all_reduce", sequence, number * 20, ranks=ranks, group=name))
        else:
            source, target = data.draw(st.permutations([0, 1, 2]))[:2]
            sequence = counts[source, target] = counts.get((source, target), -1) + 1
            traces[source].events.append(message(source, "send", target, sequence, number * 20))
            anybody = data.draw(st.booleans())
            traces[target].events.append(
                message(target, "irecv", -1 if anybody else source, -1 if anybody else sequence, number * 20 + 1)
            )
    whole = matched(traces)
    assert [len(trace.events) for trace in whole] == [len(trace.events) for trace in traces]
    for trace in traces:
        trace.events = [event for event in trace.events if data.draw(st.booleans())]
    kept = matched(traces)
    seen: dict[Any, list[int]] = {}
    balance: dict[tuple[int, int], int] = {}
    for trace in kept:
        for event in trace.events:
            operation = event.operation
            if operation.operation == "all_reduce":
                seen.setdefault((operation.group, event.sequence), []).append(trace.rank)
            elif operation.operation == "send":
                balance[trace.rank, operation.root] = balance.get((trace.rank, operation.root), 0) + 1
            else:
                assert operation.root >= 0, "who sent it is known now"
                balance[operation.root, trace.rank] = balance.get((operation.root, trace.rank), 0) - 1
    assert all(tuple(ranks) == dict(groups)[name] for (name, _), ranks in seen.items())
    assert not any(balance.values())
    for trace, before in zip(kept, traces, strict=True):
        times = [event.begin_ns for event in trace.events]
        assert times == [event.begin_ns for event in before.events if event.begin_ns in times], "in their order"


def test_receives_from_anybody_get_a_sender_of_their_size() -> None:
    traces = three()
    traces[0].events.append(message(0, "send", 2, 0, 5, size=16))
    traces[1].events.append(message(1, "send", 2, 0, 5, size=8))
    traces[2].events += [message(2, "irecv", -1, 0, 0, size=8), message(2, "irecv", -1, 1, 0, size=16)]
    (_, _, last) = plan(traces).traces
    assert [event.operation.root for event in last.events] == [1, 0]


def test_messages_go_without_tags_where_their_order_is_enough() -> None:
    traces = three()
    traces[0].events += [message(0, "send", 1, 0, 0, tag=1), message(0, "isend", 1, 0, 20, tag=2)]
    traces[1].events += [message(1, "recv", 0, 0, 5, tag=1), message(1, "recv", 0, 0, 25, tag=2)]
    made = plan(traces)
    assert without_tags(made, "gloo") is made
    plain = without_tags(made, "cpu:gloo,cuda:nccl")
    assert [event.operation.tag for trace in plain.traces for event in trace.events] == [0, 0, 0, 0]
    assert "has no tags: messages are sent without" in plain.notes[0]
    first, second = traces[1].events
    traces[1].events = [replace(first, operation=second.operation), replace(second, operation=first.operation)]
    with pytest.raises(ArgumentError, match="rank 1 receives the messages of rank 0 in another order"):
        without_tags(plan(traces), "nccl")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"size_bytes": 96}, "96 B"),
        ({"dtype": "int32"}, "int32"),
        ({"op": "max"}, "max"),
    ],
)
def test_calls_that_differ_between_ranks_are_refused(fields: dict[str, Any], expected: str) -> None:
    traces = three(call("all_reduce", op="sum"))
    traces[2].events[0] = replace(traces[2].events[0], operation=replace(traces[2].events[0].operation, **fields))
    with pytest.raises(ArgumentError, match="do not match up") as caught:
        plan(traces)
    assert expected in str(caught.value)
    assert "rank 0" in str(caught.value)
    assert "rank 2" in str(caught.value)


def test_two_calls_with_one_number_are_refused() -> None:
    with pytest.raises(ArgumentError, match="two calls with the number 0"):
        plan(three(call("all_reduce"), call("all_reduce", 0, 20)))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (call("all_reduce", dtype="float33"), "has no dtype 'float33'"),
        (call("all_reduce", dtype=""), "has no dtype ''"),
        (call("all_reduce", dtype="Tensor"), "has no dtype 'Tensor'"),
        (call("all_reduce", dtype="float8_e4m3fn", op="sum"), "cannot be reduced"),
        (call("all_reduce", op="median"), "'median' is unknown"),
        (call("all_gather", size_bytes=40), "40 bytes are no whole number of float32 on 3 ranks"),
        (call("broadcast", size_bytes=7, root=0), "7 bytes are no whole number of float32"),
        (call("all_to_all_single", size_bytes=40), "cannot be split evenly among 3"),
        (call("all_to_all_single", size_bytes=40, input_splits=(9, 9, 9)), "more than its 40 bytes"),
    ],
)
def test_what_cannot_be_made_again_is_refused(event: Event, expected: str) -> None:
    with pytest.raises(ArgumentError, match="on rank 0 cannot be replayed") as caught:
        plan(three(event))
    assert expected in str(caught.value)


def test_nothing_to_replay_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no operations"):
        plan(three())
    lonely = three()
    lonely[0].events.append(call("all_reduce"))
    with pytest.raises(ArgumentError, match=r"nothing to replay: 1 of 1 calls is left out, on rank 0"):
        plan(lonely)


def test_groups_are_named_alike_on_all_ranks_and_the_world_is_the_first_of_all_ranks() -> None:
    traces = three(
        call("barrier", 0, 0, dtype="", size_bytes=0, group="late"),
        call("barrier", 0, 20, dtype="", size_bytes=0, group="0"),
    )
    for rank in (0, 2):
        traces[rank].events.append(call("all_reduce", 0, 40, ranks=(2, 0), group="pair"))
    found = plan(traces)
    assert [[event.operation.group for event in trace.events] for trace in found.traces] == [
        ["000001", WORLD, "000002"],
        ["000001", WORLD],
        ["000001", WORLD, "000002"],
    ]


def test_a_plan_survives_its_files(tmp_path: Path) -> None:
    event = call("all_to_all_single", input_splits=(1, 2, 3), output_splits=(1, 1, 1), size_bytes=24, asynchronous=True)
    event = replace(event, returned_ns=5, waits=[Wait(6, 10)])
    for trace in plan(three(event)).traces:
        save(tmp_path, trace)
        assert load_rank(path_of(tmp_path, trace.rank)).events == trace.events


def test_steps_are_calls_and_first_waits_with_what_lay_between() -> None:
    later = replace(
        call("all_reduce", asynchronous=True),
        begin_ns=100,
        returned_ns=110,
        end_ns=150,
        waits=[Wait(140, 155), Wait(160, 161)],
    )
    between = replace(call("barrier", 1), begin_ns=120, returned_ns=130, end_ns=130)
    overlapping = replace(call("barrier", 2), begin_ns=125, returned_ns=135, end_ns=135)
    found = steps([later, between, overlapping], 60)
    assert [(step.event, step.waits, step.gap_ns) for step in found] == [
        (0, False, 40),
        (1, False, 10),
        (2, False, 0),
        (0, True, 5),
    ]


def test_calls_of_threads_are_made_in_one_order_on_all_ranks() -> None:
    def between(group: str, begin: int, end: int) -> Event:
        one = call("all_reduce", 0, begin, group=group, ranks=(0, 1))
        return replace(one, end_ns=end, returned_ns=end)

    first = RankTrace(0, 2, events=[between("a", 0, 30), between("b", 10, 31), between("c", 40, 50)])
    other = RankTrace(1, 2, events=[between("b", 5, 32), between("a", 20, 33), between("c", 45, 50)])
    found = one_after_another([first, other])
    for trace in found:
        taken = [trace.events[step.event].operation.group for step in steps(trace.events, 0)]
        assert taken == ["b", "a", "c"]
    assert [[event.end_ns for event in trace.events] for trace in found] == [[31, 30, 50], [32, 33, 50]]


def test_calls_of_one_thread_stay_as_they_are() -> None:
    late = RankTrace(0, 3, events=[replace(call("all_reduce"), end_ns=100), call("barrier", 1, 100)])
    traces = [
        late,
        *(RankTrace(rank, 3, events=[call("all_reduce", 0, 90), call("barrier", 1, 101)]) for rank in (1, 2)),
    ]
    assert one_after_another(traces) == traces


def test_memory_is_of_what_is_in_use_at_once() -> None:
    big = replace(call("all_reduce", size_bytes=100), end_ns=5)
    first = replace(call("all_reduce", 1, 10, size_bytes=30, asynchronous=True), waits=[Wait(50, 60)])
    second = replace(call("all_reduce", 2, 20, size_bytes=20, asynchronous=True), end_ns=40)
    third = replace(call("all_reduce", 3, 70, size_bytes=40, asynchronous=True), end_ns=90)
    assert peak_bytes(RankTrace(0, 3, events=[big, first, second, third])) == 2 * (100 + 30 + 20)


def test_types() -> None:
    assert type_of("bfloat16").itemsize == 2
    with pytest.raises(ArgumentError):
        type_of("nn")


def test_a_comparison_counts_calls_and_bytes() -> None:
    recorded = three(call("all_reduce_coalesced"), call("all_reduce", 1, 20))
    same = compare(recorded, tally(three(call("all_reduce"), call("all_reduce", 1, 90))), 100, "ccl", False, ["a note"])
    assert same.same
    (row,) = same.rows
    assert (row.operation, row.recorded_calls, row.replayed_calls, row.replayed_bytes) == ("all_reduce", 6, 6, 288)
    assert row.recorded_waiting_s is not None
    assert row.recorded_transfer_s is not None
    assert row.recorded_waiting_s + row.recorded_transfer_s == pytest.approx(row.recorded_s)
    shown = " ".join(comparison.format_comparison(same, io.StringIO()).split())  # however wide the terminal is
    for wanted in ("recorded on gloo, replayed on ccl without pauses", "a note", "moved exactly the recorded bytes"):
        assert wanted in shown
    other = compare(recorded, tally(three(call("all_reduce"))), 100, "ccl", True, [])
    assert not other.same
    shown = " ".join(comparison.format_comparison(other, io.StringIO()).split())
    assert "recorded 6 calls with 288 bytes, replayed 3 with 144" in shown
    assert "6 -> 3" in shown
    assert other.to_json()["rows"][0]["same"] is False


def test_tallies_of_ranks_add_up() -> None:
    traces = three(call("all_reduce"))
    apart = together_with([tally([trace]) for trace in traces])
    (one,), (other,) = apart.values(), tally(traces).values()
    assert (one.calls, one.size_bytes, one.total_ns) == (other.calls, other.size_bytes, other.total_ns)
    assert together_with([]) == {}
    assert Tally() == Tally(0, 0, 0, 0, 0)


@pytest.mark.parametrize("timeout", [-1, 0.5, float("inf"), float("nan"), 1e6])
def test_time_limits(timeout: float) -> None:
    with pytest.raises(ArgumentError, match="--timeout"):
        Options("x", timeout_s=timeout)
    assert Options("x").limit_s(1) == 60
    assert Options("x").limit_s(100) == 300
    assert Options("x", timeout_s=2).limit_s(100) == 2
    assert Options.loads(Options("x", "gloo", "y", True, "z", 3).dumps()) == Options("x", "gloo", "y", True, "z", 3)


def test_files_that_cannot_be_written_are_refused_and_none_is_made(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace", tmp_path / "file"
    trace.mkdir()
    file.write_text("kept")
    wrong = [
        Options(str(trace), output=str(trace)),
        Options(str(trace), output=str(file)),
        Options(str(trace), output=str(file / "below")),
        Options(str(trace), json=str(tmp_path / "no" / "x.json")),
        Options(str(trace), json=str(trace)),
    ]
    for options in wrong:
        with pytest.raises(ArgumentError, match=r"--output|--json"):
            check_files(options)
    check_files(Options(str(trace), output=str(tmp_path / "a" / "b"), json=str(tmp_path / "new.json")))
    before = file.stat()
    check_files(Options(str(trace), json=str(file)))
    assert file.stat() == before, "it is written when there is something to write"
    assert file.read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "trace"]


def test_calls_are_made_on_the_device_where_they_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``meta`` stands for the accelerator, which need not be here."""

    def made(_rank: int, _what: Operation, tensors: list[torch.Tensor], *_: object) -> Callable[[], object]:
        return lambda: tensors[0].device.type

    monkeypatch.setattr(devices, "_ACCELERATORS", {"nccl": "meta"})
    monkeypatch.setattr(torch, "meta", SimpleNamespace(current_device=lambda: 0), raising=False)
    monkeypatch.setattr(replay_calls, "_call", made)
    expected = {"gloo": ["cpu", "cpu"], "nccl": ["meta", "meta"]}
    expected |= {"cpu:gloo,cuda:nccl": ["cpu", "meta"], "cuda:nccl,cpu:gloo": ["cpu", "meta"]}
    for backend, kinds_of_devices in expected.items():
        calls = Calls(0, {}, devices_of(backend))
        both = [replace(call("all_reduce", group=WORLD).operation, on_device=one) for one in (False, True)]
        calls.prepare(both)
        assert [calls._synchronous[one]() for one in both] == kinds_of_devices
        issued = [calls.issue(replace(one, asynchronous=True)) for one in both]
        assert [device for device, _ in issued] == kinds_of_devices


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COMM_COMPRESS_COMMUNICATION", "true"),
        ("COMM_COMMUNICATION_DATA_TYPE", "bf16"),
        ("COMM_REDUCTIONS__DETERMINISTIC", "1"),
        ("COMM_HIERARCHICAL__MIN_SIZE_BYTES", "0"),
        ("COMM_CHECKS", '{"mismatch": "strict"}'),
        ("COMM_COMMS_LOGGER__ENABLED", "1"),
    ],
)
def test_how_calls_are_made_does_not_depend_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    def init_distributed(*_: object, config: Any, **__: object) -> None:
        in_effect.append(load_config(config))

    in_effect: list[CommConfig] = []
    monkeypatch.setattr(replay_rank.facade, "init_distributed", init_distributed)
    replay_rank.set_up(Options("trace"), 60.0)
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("COMM_NETWORK__NCCL__DEBUG", "INFO")
    replay_rank.set_up(Options("trace"), 60.0)
    usual, with_variables = in_effect
    assert with_variables.network.nccl.debug == "INFO"
    assert with_variables.model_copy(update={"network": usual.network}) == usual
