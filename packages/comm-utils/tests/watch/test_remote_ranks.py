"""Ranks of other hosts are asked through a store, which may be slow, gone or back again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from comm_utils.errors import CommTimeoutError
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.flight_recorder.calls import Call, RingGroup, RingHeader
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.testing.ring import Ring
from comm_utils.watch import Watch, remote_observer, remote_ranks
from comm_utils.watch.causes import find_cause
from comm_utils.watch.remote_ranks import Notice, RemoteRanks, decode_answer, encode_answer
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView


class Box:
    """A store in this process.

    Attributes:
        gets: so many values were asked for.
        error: what every call raises.
        answers: calls wait until it is set.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gets = 0
        self.counters: dict[str, int] = {}
        self.error: Exception | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.is_used = threading.Event()

    def _use(self) -> None:
        self.is_used.set()
        self.answers.wait()
        if self.error is not None:
            raise self.error

    def set(self, key: str, value: bytes) -> None:
        self._use()
        self.values[key] = value

    def get(self, key: str) -> bytes | None:
        self._use()
        self.gets += 1
        return self.values.get(key)

    def add(self, key: str, amount: int) -> int:
        self._use()
        self.counters[key] = self.counters.get(key, 0) + amount
        return self.counters[key]

    def close(self) -> None:
        pass


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.answers.set()


def _snapshot(rank: int, taken_ns: int = 1) -> RankSnapshot:
    return RankSnapshot(RingHeader(rank, 3, 1, 0, 0, 0), "running", (), taken_ns=taken_ns)


def _ranks(box: Box, rank: int) -> RemoteRanks:
    return RemoteRanks(rank, lambda: box, lambda: _snapshot(rank))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def test_a_process_without_memory_for_a_thread_asks_nobody(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert _ranks(box, 0).ask_within([1, 2], 1.0) == {}
    _ranks(box, 0).tell_within("world", "PeerLostError", "rank 2 has ended", 1.0)


# --- questions


def test_one_answer_serves_all_that_asked_before_it(box: Box) -> None:
    found: dict[int, dict[int, RankSnapshot]] = {}
    askers = [
        threading.Thread(target=lambda rank=rank: found.update({rank: _ranks(box, rank).ask([2], 5.0)}))  # type: ignore[misc]
        for rank in (0, 1)
    ]
    for asker in askers:
        asker.start()
    while box.counters.get("comm-flight/asked") != 2:
        time.sleep(0.01)
    _ranks(box, 2).answer()
    for asker in askers:
        asker.join()
    assert found == {0: {2: _snapshot(2)}, 1: {2: _snapshot(2)}}


def test_a_rank_that_does_not_answer_does_not_hide_the_others(box: Box) -> None:
    asked: list[dict[int, RankSnapshot]] = []
    asker = threading.Thread(target=lambda: asked.append(_ranks(box, 0).ask_within([1, 2], 2.0)))
    asker.start()
    while box.counters.get("comm-flight/asked") != 1:
        time.sleep(0.01)
    _ranks(box, 1).answer()
    asker.join()
    assert asked == [{1: _snapshot(1)}]


def test_an_answer_to_an_earlier_question_is_not_taken(box: Box) -> None:
    box.counters["comm-flight/asked"] = 1
    _ranks(box, 2).answer()
    assert _ranks(box, 0).ask([2], 0.2) == {}


def test_a_rank_answers_while_it_asks(box: Box) -> None:
    busy = _ranks(box, 0)
    asking = threading.Thread(target=lambda: busy.ask([5], 2.0, busy.answer))
    asking.start()
    assert _ranks(box, 1).ask([0], 1.5) == {0: _snapshot(0)}
    asking.join()


def test_a_cause_in_a_large_group_takes_a_bounded_number_of_questions(box: Box) -> None:
    """Rank 77 of 100, each on a host of its own, does not come; all others fail at once."""
    group = RingGroup("world", tuple(range(100)))
    call = Call(0, 1, 1, 0, False, group, "all_reduce", "all_reduce", "float32", "sum", -1, -1, 0, 4, 1, 1)
    states = {rank: replace(_snapshot(rank), calls=() if rank == 77 else (call,)) for rank in group.ranks}
    for rank, one in states.items():
        box.values[f"comm-flight/state/{rank}"] = encode_answer(1000, one)
    said = Trouble(CommTimeoutError, "another rank gave up earlier: rank 77")
    for rank in set(group.ranks) - {77}:
        ring = Ring(rank, world_size=100)
        ring.begin()
        view = WorldView(rank, 100, ring.reader, connect=lambda: box)
        found = find_cause(view, {}, {"world": said}, group, timed_out=True)
        assert found is not None
        assert "rank 77" in found.text
    assert box.gets <= 10 * len(group.ranks)


def test_answers_replace_each_other_in_the_store(box: Box) -> None:
    ranks = _ranks(box, 2)
    for number in range(1, 4):
        box.counters["comm-flight/asked"] = number
        ranks.answer()
    assert list(box.values) == ["comm-flight/state/2"]


@pytest.mark.parametrize("data", [b"", b"1", b"x\n{}", b"-1\n{}", b"1\n{}", b"9" * 5000 + b"\n{}"])
def test_a_malformed_answer_is_none(data: bytes) -> None:
    assert decode_answer(data) is None


def test_an_answer_says_which_questions_it_is_to() -> None:
    assert decode_answer(encode_answer(7, _snapshot(2))) == (7, _snapshot(2))


# --- notices


def _heard(ranks: RemoteRanks) -> list[Notice]:
    """Return what is heard in all looks until one hears nothing."""
    found: list[Notice] = []
    while new := ranks.notices():
        found += new
    return found


def test_notices_are_heard_however_many_there_were_before(box: Box) -> None:
    teller, hears = _ranks(box, 0), _ranks(box, 1)
    said = [Notice(f"group {number}", "PeerLostError", "rank 2 has ended") for number in range(1200)]
    for one in said:
        teller.tell(*one)
    assert _heard(hears) == said
    last = Notice("world", "BrokenGroupError", "rank 2 was interrupted", 7)
    teller.tell(*last)
    assert _heard(hears) == [last]


def test_a_look_reads_a_part_of_very_many_notices(box: Box) -> None:
    teller, hears = _ranks(box, 0), _ranks(box, 1)
    for number in range(1000):
        teller.tell(f"group {number}", "PeerLostError", "rank 2 has ended")
    assert 0 < len(hears.notices()) <= remote_ranks._MOST_NOTICES


def test_few_members_tell_of_the_failure_of_their_group(box: Box) -> None:
    for rank in range(50):
        _ranks(box, rank).tell("world", "PeerLostError", f"rank 50 has ended, says rank {rank}")
    _ranks(box, 0).tell("world", "CollectiveMismatchError", "the ranks' calls differ")
    heard = _heard(_ranks(box, 60))
    assert heard[0] == Notice("world", "PeerLostError", "rank 50 has ended, says rank 0")
    assert heard[-1] == Notice("world", "CollectiveMismatchError", "the ranks' calls differ")
    assert len(heard) == remote_ranks._MOST_TELLERS + 1


def test_a_rank_that_ends_before_its_notice_is_written_hides_no_other(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    hears, teller, written = _ranks(box, 2), _ranks(box, 1), []
    with monkeypatch.context() as ending:
        ending.setattr(box, "set", lambda *late: written.append(late))
        _ranks(box, 0).tell("late", "PeerLostError", "rank 3 has ended")
        _ranks(box, 0).tell("never", "PeerLostError", "rank 3 has ended")
    said = [Notice(f"group {number}", "PeerLostError", "rank 3 has ended") for number in range(4)]
    for one in said:
        teller.tell(*one)
    assert _heard(hears) == said
    box.set(*written[0])
    assert _heard(hears) == [Notice("late", "PeerLostError", "rank 3 has ended")]
    for _ in range(2 * remote_ranks._MOST_LOOKS):
        hears.notices()
    before = box.gets
    assert hears.notices() == []
    assert box.gets == before


# --- a store that does not answer, or raises


def test_nothing_with_a_limit_waits_for_a_store_that_does_not_answer(box: Box) -> None:
    box.answers.clear()
    ranks = _ranks(box, 0)
    assert _seconds(lambda: ranks.ask_within([1], 0.2)) < 1
    assert _seconds(lambda: ranks.tell_within("g", "CommError", "text", 0.2)) < 1
    assert _seconds(ranks.close) < 1


def test_a_store_that_never_answers_is_warned_of_once(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("comm"), "propagate", True)
    box.answers.clear()
    ranks = _ranks(box, 2)
    for _ in range(2):
        assert not ranks.ask_within([1], 0.2)
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "rank 2 cannot reach the store (no answer within 0.2 s)" in record.getMessage()


def test_the_watch_of_this_host_goes_on_and_ends_while_the_store_does_not_answer(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_observer, "_FIRST_POLL_S", 0.1)
    monkeypatch.setattr(RECORDER, "settings", FlightRecorderSettings(directory=str(tmp_path)))
    box.answers.clear()
    RECORDER.open(0, 2, "job")
    watch = Watch()
    watch.start(0, 2, lambda: box)
    try:
        assert box.is_used.wait(10)
        before = RECORDER.memory.word("looked_at")
        time.sleep(1)
        assert RECORDER.memory.word("looked_at") > before
        assert _seconds(watch.stop) < 1.5
    finally:
        watch.stop()
        RECORDER.close()


def test_a_store_that_answers_again_is_used_again_after_one_warning(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote_ranks, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(logging.getLogger("comm"), "propagate", True)
    ranks = _ranks(box, 2)
    box.error = RuntimeError("connection reset")
    for _ in range(4):
        ranks.answer()
        time.sleep(0.05)
    assert not caplog.records  # the rank with the store may be done
    for _ in range(2):
        assert not ranks.ask([1], 0.1)
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "cannot reach the store (RuntimeError: connection reset)" in record.getMessage()
    box.error = None
    box.counters["comm-flight/asked"] = 1
    time.sleep(0.2)
    ranks.answer()
    assert list(box.values) == ["comm-flight/state/2"]


def test_a_world_without_a_store_is_not_asked_again() -> None:
    asked: list[None] = []
    ranks = RemoteRanks(0, lambda: asked.append(None), lambda: None)
    ranks.answer()
    ranks.answer()
    assert len(asked) == 1


def test_the_store_is_not_used_while_python_ends(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_observer, "_FIRST_POLL_S", 0.05)
    monkeypatch.setattr(remote_observer, "_POLL_S", 0.05)
    monkeypatch.setattr(RECORDER, "settings", FlightRecorderSettings(directory=str(tmp_path)))
    RECORDER.open(0, 2, "job")
    watch = Watch()
    watch.start(0, 2, lambda: box)
    try:
        assert box.is_used.wait(10)
        watch.before_exit()
        box.is_used.clear()
        assert not box.is_used.wait(0.5)
    finally:
        watch.stop()
        RECORDER.close()
