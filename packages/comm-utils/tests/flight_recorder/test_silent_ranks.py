"""A rank whose watch gives no sign: what its ring has of it is old, and others say so."""

from __future__ import annotations

import re
import time

import pytest

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.snapshot import RankSnapshot, decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch import stacks
from comm_utils.watch.explanation import combined
from comm_utils.watch.stacks import StackInRing

_S = 10**9
_SILENCE = "its watch has given no sign for 5.0 s: native code holds the GIL, or the process is frozen or gets no core"


def _idle(*, looked_before_s: int) -> RankSnapshot:
    """Return a rank that has written its stack after its last call, and whose watch looked so long ago."""
    ring = Ring(1)
    ring.call()
    ring.recorder.memory.set_stack("train.py:12 main\ndata.py:34 load")
    ring.recorder.memory.set_word("looked_at", time.perf_counter_ns() - looked_before_s * _S)
    return take_snapshot(ring.reader)


def test_a_stack_older_than_the_last_call_is_none() -> None:
    ring = Ring(1)
    ring.call()
    ring.recorder.memory.set_stack("train.py:12 main\ndata.py:34 load")
    assert describe_rank(take_snapshot(ring.reader)).startswith("is in none of its calls, at data.py:34 load; its last")
    ring.call()
    snapshot = take_snapshot(ring.reader)
    assert snapshot.stack is None
    assert describe_rank(snapshot).startswith("is in none of its calls; its last one was ")


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        ("/x/comm_utils/testing/worker.py:9 main\ntrain.py:12 main\n/lib/python3.11/threading.py:3 wait", "threading"),
        ("train.py:12 main\n/x/comm_collectives/collectives.py:3 f\n/x/comm_utils/watch/causes.py:5 look", "train"),
        ("train.py:12 main\n/x/comm_utils/watch/causes.py:5 look\n/lib/python3.11/threading.py:3 wait", "train"),
        ("/x/comm_utils/testing/worker.py:9 main", "worker"),
    ],
)
def test_the_place_of_a_rank_that_looks_for_why_its_call_failed_is_that_of_its_program(frames: str, place: str) -> None:
    ring = Ring(1)
    ring.recorder.kind(ring.group(), "all_reduce", "all_reduce").fail(ring.begin())
    ring.recorder.memory.set_stack(frames)
    said = describe_rank(take_snapshot(ring.reader))
    assert re.search(rf"^is in none of its calls, at \S*{place}.* which failed \d", said), said


def test_the_place_of_a_rank_without_a_sign_is_said_to_be_an_earlier_one() -> None:
    snapshot = _idle(looked_before_s=5)
    expected = f"is in none of its calls, and {_SILENCE} (until then, it was at data.py:34 load); its last one was "
    for one in (snapshot, decode_snapshot(encode_snapshot(snapshot))):
        assert describe_rank(one).startswith(expected)
    missing = Finding(FindingKind.MISSING, RingGroup("world", (0, 1)), (1,), "rank 1 is missing")
    assert combined(0, [missing], {1: snapshot}).text == "rank 1 is missing"
    assert "The Python stack of rank 1" in combined(0, [missing], {1: _idle(looked_before_s=0)}).text


def test_a_rank_in_a_call_without_a_sign() -> None:
    ring = Ring(1)
    ring.begin()
    ring.recorder.memory.set_word("looked_at", time.perf_counter_ns() - 5 * _S)
    assert describe_rank(take_snapshot(ring.reader)).endswith(f", and {_SILENCE}")


def test_a_rank_without_a_sign_is_the_cause_where_all_are_in_a_call() -> None:
    rings = {rank: Ring(rank) for rank in (0, 1)}
    for rank, ring in rings.items():
        ring.begin()
        ring.recorder.memory.set_word("looked_at", time.perf_counter_ns() - 5 * rank * _S)
    known = {rank: take_snapshot(ring.reader) for rank, ring in rings.items()}
    (group,) = {call.group for one in known.values() for call in one.calls}
    (finding,) = diagnose_group(known, group)
    assert (finding.kind, finding.ranks, finding.number) == (FindingKind.MISSING, (1,), 1)
    assert finding.text.startswith(f"rank 1 ({known[1].where}) does not go on: it is in all_reduce(4 elements ")
    assert finding.text.endswith(f", and {_SILENCE}")


def test_a_rank_that_idles_at_the_same_place_again_writes_its_stack_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, calls_at = Ring(1), []
    monkeypatch.setattr(stacks, "RECORDER", ring.recorder)
    monkeypatch.setattr(stacks, "_IDLE_S", 0.0)
    monkeypatch.setattr(stacks, "_place_of", lambda frame: "the same place")
    stack = StackInRing()
    for calls in (1, 0, 0, 1, 0):
        ring.call(times=calls)
        stack.update(ring.reader)
        found = ring.reader.stack()
        calls_at.append(0 if found is None else found.at_ns)
    assert calls_at[0] == 0 < calls_at[1] == calls_at[2] == calls_at[3] < calls_at[4]
