"""The operation of a handle that is released after its end is recorded, whatever goes on at that moment."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from comm_collectives.recorded.work import ObservedWork, RecordedKind
from comm_utils.observability.comms_logger import CommsLogger
from comm_utils.observability.traces.events import Operation, RankTrace
from comm_utils.observability.traces.file import TraceWriter, load_rank

OPERATION = Operation("all_reduce", "all_reduce", 4, (0,), asynchronous=True)


class Ended:
    """An operation that ended at 5 ns, as that of a library which records the end itself."""

    def ended_ns(self) -> int:
        return 5


def released(log: CommsLogger) -> ObservedWork:
    return ObservedWork(
        Ended(), log, RecordedKind(log.series(OPERATION), itertools.count(), None, OPERATION), (0, 1, 2)
    )


@pytest.fixture
def log(tmp_path: Path) -> Iterator[CommsLogger]:
    """Yield a log that writes a trace."""
    log, writer = CommsLogger(), TraceWriter(tmp_path, 0)
    writer.begin(RankTrace(0, 1))
    log.start_writing(writer)
    yield log
    log.stop_writing()
    writer.close()


def test_it_is_in_the_log_and_in_the_trace(log: CommsLogger, tmp_path: Path) -> None:
    released(log)
    assert [row.calls for row in log.rows()] == [1]
    released(log)
    released(log)  # records what was released before
    assert len(log.recorder.released) == 1
    writer = log.stop_writing()
    assert writer is not None
    assert writer.under_way == 0
    writer.flush()
    assert [event.duration_ns for event in load_rank(tmp_path / "rank0.jsonl").events] == [4, 4, 4]


def test_it_does_not_wait_for_who_reads(log: CommsLogger) -> None:
    handles = [released(log)]
    with log.recorder.lock:
        thread = threading.Thread(target=handles.clear)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    assert [row.calls for row in log.rows()] == [1]


class Cycle:
    def __init__(self, work: ObservedWork) -> None:
        self.work, self.itself = work, self


@pytest.fixture
def collecting() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(100)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collecting")
def test_it_may_be_released_while_events_are_read(log: CommsLogger) -> None:
    series = log.series(OPERATION)
    for number in range(5000):
        series.add(number, 1, 5)
    for again in range(1, 10):
        gc.disable()
        Cycle(released(log))
        log.recorder.settle()
        gc.enable()
        assert len(log.recent()[1]) >= 5000
        gc.collect()
        assert log.rows()[0].calls == 5000 + again
