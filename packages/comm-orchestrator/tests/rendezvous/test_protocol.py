"""The meeting, with a thread for each rank and torch's in-memory store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from comm_orchestrator.rendezvous import protocol
from comm_orchestrator.rendezvous.authentication import Seal
from comm_orchestrator.rendezvous.protocol import Deadline, RendezvousPoint, rendezvous
from comm_orchestrator.rendezvous.records import RankRecord, Refusal
from comm_utils.errors import BackendUnavailableError, CommError, CommTimeoutError, LaunchError, PeerLostError
from comm_utils.process_state import start_time
from comm_utils.testing import patience


def arrival(rank: int, world_size: int, **changes: Any) -> RankRecord:
    return RankRecord(rank, world_size, "host", "host-id", 100 + rank, **changes)


def names(records: Sequence[RankRecord]) -> Any:
    return {"ranks": [one.rank for one in records]}


def together(
    records: Sequence[RankRecord],
    limit_s: float = 10.0,
    judge: Callable[[Sequence[RankRecord]], Any] = names,
    store: Store | None = None,
) -> list[Any]:
    """What ``meet`` returned or raised in each thread."""
    shared = store or HashStore()
    outcomes: list[Any] = [None] * len(records)

    def rank(place: int) -> None:
        try:
            outcomes[place] = rendezvous(
                records[place], Deadline(limit_s), judge, RendezvousPoint(shared, hosted=store is None and place == 0)
            )
        except CommError as error:
            outcomes[place] = error

    threads = [threading.Thread(target=rank, args=(place,)) for place in range(len(records))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s + 10)
    return outcomes


def ended_rank(rank: int, world_size: int) -> RankRecord:
    """The record of a process of this host that was killed after it came."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(process.pid)
    process.kill()
    process.communicate()
    return replace(arrival(rank, world_size, pid_space="here", started=started), pid=process.pid)


def test_a_rank_that_was_killed_while_others_are_still_to_come() -> None:
    mine = replace(arrival(0, 3, pid_space="here", started=start_time()), pid=os.getpid())
    lost, store = ended_rank(1, 3), HashStore()
    found: list[str] = []

    def host() -> None:
        with pytest.raises(PeerLostError) as caught:
            rendezvous(mine, Deadline(10), names, RendezvousPoint(store, hosted=True))
        found.append(str(caught.value))

    thread, begin = threading.Thread(target=host), time.monotonic()
    thread.start()
    while not store.check(["record/1"]):  # who comes first compares the records
        time.sleep(0.001)
    together([lost], store=store)
    thread.join(20)
    assert time.monotonic() - begin < 2 * patience()
    (first,) = found
    assert first == f"init_distributed: {lost} has ended while the others waited for rank 2; see what it printed"


def test_a_rank_that_was_killed_before_it_had_compared_the_records() -> None:
    lost, store = ended_rank(1, 2), HashStore()
    store.add("ranks", 1)
    store.set("record/1", Seal().sign("record/1", lost.to_plain()))
    begin = time.monotonic()
    mine = replace(arrival(0, 2, pid_space="here", started=start_time()), pid=os.getpid())
    with pytest.raises(PeerLostError, match=rf"rank 1 \(pid {lost.pid} on host\) has ended; see what it printed"):
        rendezvous(mine, Deadline(10), names, RendezvousPoint(store))
    assert time.monotonic() - begin < 2 * patience()


def test_a_verdict_that_an_earlier_start_may_have_left() -> None:
    store = HashStore()
    (first,) = together([arrival(0, 2)], 0.2, store=store)
    assert isinstance(first, CommTimeoutError)
    assert str(first).endswith("what it printed")
    said = (
        r"rank 1 of 2 did not come .*; that was decided before rank 1 .* came: if an earlier start left it, remove it$"
    )
    with pytest.raises(CommTimeoutError, match=said):
        rendezvous(arrival(1, 2), Deadline(10), names, RendezvousPoint(store, renewal="remove it"))


def test_processes_that_cannot_be_seen_from_here_have_not_ended() -> None:
    lost = ended_rank(1, 2)
    assert lost.has_ended(lost)
    assert not lost.has_ended(replace(lost, pid_space="elsewhere"))
    assert not replace(lost, pid_space="").has_ended(replace(lost, pid_space=""))


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_all_hear_the_same(world_size: int) -> None:
    found = together([arrival(rank, world_size) for rank in reversed(range(world_size))])
    assert found == [{"ranks": list(range(world_size))}] * world_size


def test_a_judge_may_refuse_them() -> None:
    refusal = Refusal("BackendUnavailableError", "none for all")
    found = together([arrival(rank, 3) for rank in range(3)], judge=lambda _: refusal)
    assert [type(one) for one in found] == [BackendUnavailableError] * 3
    assert {str(one) for one in found} == {"init_distributed: none for all"}


def test_a_judge_that_breaks_leaves_nobody_waiting() -> None:
    def broken(records: Sequence[RankRecord]) -> Any:
        raise KeyError("judge")

    start = time.monotonic()
    found = together([arrival(rank, 3) for rank in range(3)], judge=broken)
    assert [type(one) for one in found] == [LaunchError] * 3
    assert all("KeyError: 'judge'" in str(one) for one in found)
    assert time.monotonic() - start < 5 * patience()


def test_who_came_first_and_went_away() -> None:
    """It arrived and will never compare: the others say so when their time is up, all at once."""
    store = HashStore()
    store.set("record/1", json.dumps(arrival(0, 3).to_plain()))
    store.add("ranks", 1)
    start = time.monotonic()
    found = together([arrival(1, 3), arrival(2, 3)], limit_s=0.6, store=store)
    assert [type(one) for one in found] == [CommTimeoutError] * 2
    assert len({str(one) for one in found}) == 1
    assert "rank 0 (pid 100 on host), who came first and compares the ranks, said nothing" in str(found[0])
    assert time.monotonic() - start < 0.6 + 2 * patience()


def test_one_who_arrived_without_a_record() -> None:
    """Killed between two steps."""
    store = HashStore()
    store.add("ranks", 1)
    (found,) = together([arrival(1, 2)], limit_s=0.4, store=store)
    assert isinstance(found, CommTimeoutError)
    assert "rank 0 of 2 did not come within 0.4 s (rank 1 on host came)" in str(found)


def test_one_who_comes_after_the_others_gave_up_hears_why() -> None:
    store = HashStore()
    (first,) = together([arrival(0, 2)], limit_s=0.2, store=store)
    (second,) = together([arrival(1, 2)], store=store)
    assert str(first) == str(second)
    assert "rank 1 of 2 did not come" in str(second)


@pytest.mark.parametrize(
    ("late", "text"),
    [
        (arrival(1, 2, program="late.py"), "two processes have rank 1: pid 101 on host "),
        (arrival(2, 3), "the ranks disagree on the world size"),
    ],
)
def test_one_who_comes_to_a_world_that_is_complete(late: RankRecord, text: str) -> None:
    store = HashStore()
    assert together([arrival(0, 2), arrival(1, 2)], store=store) == [{"ranks": [0, 1]}] * 2
    (found,) = together([late], store=store)
    assert isinstance(found, LaunchError)
    assert text in str(found)


def test_rank_0_waits_for_the_others_to_hear_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_GRACE_S", 0.3)
    start = time.monotonic()
    (found,) = together([arrival(0, 2, problem=("LaunchError", "no"))], limit_s=0.6)
    assert "rank 0 (pid 100 on host) cannot go on: no" in str(found)
    assert 0.5 <= time.monotonic() - start < 2 * patience()


def test_a_record_that_nobody_can_read() -> None:
    store = HashStore()
    store.add("ranks", 1)
    store.set("record/1", '{"rank": 1}')
    (found,) = together([arrival(1, 2)], limit_s=0.3, store=store)
    assert isinstance(found, LaunchError)
    assert "the record of a rank has no 'world_size'" in str(found)


def test_one_finding_is_not_lost_while_others_are_waited_for() -> None:
    found = together([arrival(0, 3), arrival(0, 3)], limit_s=0.5)
    assert all("two processes have rank 0" in str(one) for one in found)
