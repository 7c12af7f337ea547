"""What another rank raised is the cause of a failed call only where it can be."""

from __future__ import annotations

import selectors
from dataclasses import replace

import pytest

from comm_utils.errors import CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.calls import Call, Failure, RingGroup, RingHeader, Stack
from comm_utils.flight_recorder.findings import Finding, FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.watch.explanation import (
    addressed,
    age_of_failed_call,
    all_in_call,
    cause_of_others,
    combined,
    for_others,
    last_to_come,
    until_failed_call,
)
from comm_utils.watch.trouble import Trouble

_GROUP = RingGroup("here", (0, 1))
_S = 10**9
_CALL = Call(0, 1, 0, 0, False, _GROUP, "barrier", "barrier", "", "", -1, -1, 0, 0, 1, 0)


def _known(group: str, age_ns: int, clock_ns: int) -> dict[int, RankSnapshot]:
    """Return a rank 1 that raised an error so long before it was looked at, by the clock of its host."""
    failure = Failure(group, "CommTimeoutError", "rank 0 is late", clock_ns - age_ns, (0,))
    return {1: RankSnapshot(RingHeader(1, 2, 1, 0, 0, 0), "running", (), (failure,), taken_ns=clock_ns)}


@pytest.mark.parametrize("clock_ns", [10 * _S, 10**6 * _S, 10**9 * _S])
def test_the_clock_of_another_host_does_not_matter(clock_ns: int) -> None:
    found = cause_of_others(0, _GROUP, _known("there", 2 * _S, clock_ns), False, 3 * _S)
    assert found is not None
    assert found.kind is CommTimeoutError
    assert found.text == "rank 1 gave up in another group: rank 0 is late"
    assert cause_of_others(0, _GROUP, _known("there", 4 * _S, clock_ns), False, 3 * _S) is None


def test_a_failure_in_the_group_itself_counts_whenever_it_was() -> None:
    assert cause_of_others(0, _GROUP, _known("here", 4 * _S, 10 * _S), False, 3 * _S) is not None


def test_a_rank_that_was_interrupted_is_the_cause() -> None:
    failure = Failure("here", "BrokenGroupError", "rank 1 was interrupted (SIGINT) in a call", 1, (1,))
    known = {1: RankSnapshot(RingHeader(1, 2, 1, 0, 0, 0), "running", (), (failure,), taken_ns=2)}
    assert cause_of_others(0, _GROUP, known, True, 3 * _S) == Trouble(PeerLostError, failure.text, (1,))


def test_the_failed_call_is_the_open_one_or_else_the_last() -> None:
    ended = replace(_CALL, begin_ns=3 * _S, end_ns=4 * _S)
    other = replace(_CALL, begin_ns=6 * _S, group=RingGroup("there", (0, 1)))
    of_calls = RankSnapshot(RingHeader(0, 2, 1, 0, 0, 0), "running", (ended, other))
    assert age_of_failed_call(of_calls, _GROUP, 10 * _S) == 7 * _S
    opened = replace(of_calls, calls=(replace(ended, begin_ns=2 * _S), replace(_CALL, begin_ns=3 * _S), other))
    assert age_of_failed_call(opened, _GROUP, 10 * _S) == 7 * _S
    assert age_of_failed_call(None, _GROUP, 10 * _S) == 30 * _S


def test_only_the_late_rank_itself_is_told_that_it_came_late() -> None:
    late = Trouble(CommTimeoutError, "rank 1 has not called barrier", (1,))
    assert addressed(0, late) == late
    assert addressed(1, late).text.endswith(". That is this rank, which came too late")
    assert for_others(addressed(1, late)) == late
    assert addressed(1, addressed(1, late)) == addressed(1, late)  # the watch has noted it, and a call fails of it


def _in_call(rank: int, begin_ns: int, identity: str = "host") -> RankSnapshot:
    header = RingHeader(rank, 2, 7, 0, 0, 0, host="here", identity=identity)
    return RankSnapshot(header, "running", (replace(_CALL, begin_ns=begin_ns),), taken_ns=14 * _S)


def test_a_rank_that_came_when_the_time_was_almost_over_is_named() -> None:
    known = {0: _in_call(0, 10 * _S), 1: _in_call(1, 14 * _S - _S // 10)}
    found = last_to_come(known[0], _GROUP, known)
    assert found == Trouble(CommTimeoutError, "rank 1 (pid 7 on here) called barrier 3.90 s after rank 0 had", (1,))
    assert last_to_come(known[0], _GROUP, {**known, 1: _in_call(1, 11 * _S)}) is None
    assert last_to_come(known[0], _GROUP, {**known, 1: _in_call(1, 14 * _S, "another")}) is None
    assert last_to_come(known[0], _GROUP, {0: known[0]}) is None
    assert last_to_come(None, _GROUP, known) is None


def test_of_ranks_that_are_all_in_a_call_the_network_or_a_late_one_is_the_cause() -> None:
    def on_host(host: str, begin_ns: int, clock_ns: int) -> RankSnapshot:
        rank = int(host[-1])
        header = RingHeader(rank, 2, 7, 0, 0, 0, host=host, identity=host)
        return RankSnapshot(header, "running", (replace(_CALL, begin_ns=begin_ns),), taken_ns=clock_ns)

    own, other_clock = on_host("host-0", 10 * _S, 16 * _S), 10**6 * _S
    known = {0: own, 1: on_host("host-1", other_clock - 5 * _S, other_clock)}
    found = all_in_call(own, _GROUP, known)
    assert found is not None
    assert found.text == (
        "all ranks of the group are in barrier, so what some of them send does not arrive; check the network between "
        "the hosts (host-0, host-1)"
    )
    late = all_in_call(own, _GROUP, {0: own, 1: on_host("host-1", other_clock - _S, other_clock)})
    text = "rank 1 (pid 7 on host-1) called barrier about 5.0 s after rank 0 had"
    assert late == Trouble(CommTimeoutError, text, (1,))
    assert all_in_call(own, _GROUP, {0: own}) is None
    assert all_in_call(own, _GROUP, {0: own, 1: replace(known[1], calls=())}) is None
    assert all_in_call(own, _GROUP, {0: own, 1: replace(known[1], process="ended")}) is None
    assert all_in_call(None, _GROUP, known) is None
    assert all_in_call(own, _GROUP, {0: own, 1: _in_call(1, 10 * _S)}) is not None
    assert all_in_call(_in_call(0, _S), _GROUP, {0: _in_call(0, _S), 1: _in_call(1, _S)}) is None


def test_ranks_that_are_missing_in_a_later_call_are_no_cause() -> None:
    own = _in_call(0, 10 * _S)
    missing, lost = (Finding(kind, _GROUP, (1,), "", 2) for kind in (FindingKind.MISSING, FindingKind.LOST))
    in_this = replace(missing, number=1)
    assert until_failed_call([missing, lost, in_this], own, _GROUP) == [lost, in_this]
    assert until_failed_call([missing], None, _GROUP) == [missing]


def test_a_stack_has_a_line_of_the_program() -> None:
    program, library = "/home/me/train.py:7 train", "/opt/env/lib/python3.11/site-packages/torch/utils/data.py:3 get"
    wait = f"{selectors.__file__}:415 select"
    header, missing = RingHeader(1, 2, 7, 0, 0, 0), Finding(FindingKind.MISSING, _GROUP, (1,), "rank 1 is missing")

    def told(*lines: str) -> str:
        known = {1: RankSnapshot(header, "running", (), stack=Stack("\n".join(lines), 0))}
        return combined(0, [missing], known).text.partition("The Python stack of rank 1: ")[2]

    assert told("main", program, wait) == f"{wait} < {program} < main"
    assert told("main", program, library, *[wait] * 4) == f"{' < '.join([wait] * 4)} < ... < {program}"
    assert told("main", program, *[wait] * 4) == f"{' < '.join([wait] * 4)} < {program}"
    assert told(*[wait] * 5) == " < ".join([wait] * 4)
    codec = "/opt/env/lib/python3.11/site-packages/codec/encode.py:5 encode"
    assert told(program, codec, *[library] * 4).endswith(f"get < {codec}")
