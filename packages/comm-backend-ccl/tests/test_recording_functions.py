"""What native code records of the calls of Python is what Python records of them itself."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from comm_backend_ccl import native_module
from comm_utils import kernels
from comm_utils.flight_recorder import Call, FlightRecorder, FlightRecorderSettings, RingReader, open_ring
from comm_utils.flight_recorder.kinds import Kind
from comm_utils.flight_recorder.layout import IN_BACKGROUND, LIMITED

pytestmark = pytest.mark.skipif(not native_module.has_kernels(), reason="built without native code")
RECORDS = 16
WORD = 1 << 64


class Both:
    """Two recorders, of which one records natively, and readers of their rings."""

    def __init__(self, folder: Path) -> None:
        self.recorders, self.readers = [], []
        for name in ("native", "python"):
            recorder = FlightRecorder()
            recorder.settings = FlightRecorderSettings(directory=str(folder / name), records=RECORDS)
            recorder.open(0, 3, "job")
            assert recorder.path is not None
            self.recorders.append(recorder)
            self.readers.append(open_ring(recorder.path))

    def kinds(self, operation: str, dtype: str = "float32", **described: object) -> list[Kind]:
        """Return one kind of both recorders."""
        made = []
        with pytest.MonkeyPatch.context() as patched:
            for recorder in self.recorders:
                group = recorder.group_index("world", (0, 1, 2), "of all", "gloo")
                made.append(recorder.kind(group, operation, operation, dtype, **described))  # type: ignore[arg-type]
                patched.setattr(kernels, "recording_functions", lambda *_: None)
        assert [type(one.begin) is BuiltinFunctionType for one in made] == [True, False]
        return made

    def calls(self) -> list[list[Call]]:
        """Return what both rings have, without the times."""
        return [list(map(without_times, refreshed(reader).calls())) for reader in self.readers]

    def close(self) -> None:
        for reader, recorder in zip(self.readers, self.recorders, strict=True):
            reader.close()
            recorder.close()


def refreshed(reader: RingReader) -> RingReader:
    reader.refresh()
    return reader


def without_times(call: Call) -> Call:
    assert call.begin_ns > 0
    assert call.end_ns == 0 or call.end_ns >= call.begin_ns
    return replace(call, begin_ns=0, end_ns=min(call.end_ns, 1))


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    made = Both(tmp_path)
    yield made
    made.close()


def test_calls_of_every_kind(both: Both) -> None:
    summing = both.kinds("all_reduce", op="sum")
    kinds = [
        (summing, 5, (), "end"),
        (summing, 7, (), "fail"),
        (both.kinds("broadcast", root=2), 7, (), "complete"),
        (both.kinds("all_to_all_single"), 4, ([1, 2, 9], [3, 4, 5]), "end"),
        (both.kinds("all_to_all_single"), 4, (None, None), "end"),
        (both.kinds("barrier", ""), 0, (), "end"),
        (both.kinds("send", peer=1, tag=7), 3, (), "end"),
        (both.kinds("recv", peer=-1), 3, (), "end"),
        (both.kinds("all_reduce_coalesced", op="max", joined=2 << 48 | 77), 6, (), "end"),
        (summing, 5, (None, None, IN_BACKGROUND), None),
    ]
    for kind, elements, others, end in kinds:
        for one in kind:
            number = one.begin(elements, 0, *others)
            if end is not None:
                getattr(one, end)(number)
    native, python = both.calls()
    assert native == python
    assert len(native) == len(kinds)


def test_waiting_changes_what_is_under_way_alone(both: Both) -> None:
    for kind in both.kinds("all_reduce", op="sum"):
        in_background, waited_for, limited, ended = [kind.begin(1, 0, None, None, IN_BACKGROUND) for _ in range(4)]
        assert in_background == 1
        kind.wait(waited_for)
        kind.wait(limited, LIMITED)
        kind.wait(limited)  # which has said so already
        kind.end(ended)
        kind.wait(ended)
    native, python = both.calls()
    assert native == python
    assert [(one.is_open, one.is_waited_for, one.is_limited) for one in native] == [
        (True, False, False),
        (True, True, False),
        (True, True, True),
        (False, True, False),
    ]


def test_the_end_of_a_call_whose_record_was_overwritten_changes_nothing(both: Both) -> None:
    for kind in both.kinds("all_reduce", op="sum"):
        first = kind.begin(1, 0)
        for _ in range(RECORDS):
            kind.begin(1, 0)
        kind.end(first)
        kind.fail(first)
        kind.wait(first, LIMITED)
    native, python = both.calls()
    assert native == python
    assert all(one.is_open and not one.is_limited for one in native)


def test_the_caller_is_the_place_in_the_program(both: Both) -> None:
    native, python = both.kinds("all_reduce", op="sum")
    for begin in (native.begin, python.begin):
        begin(1, 0)

        def of_library(depth: int = 1, begin: Callable[..., int] = begin) -> None:
            begin(1, depth)

        for _ in range(2):
            of_library()
        (lambda of_library=of_library: of_library(2))()
        begin(1, 10_000)
    found = [[one.caller.rpartition(" ")[2] for one in calls] for calls in both.calls()]
    here = "test_the_caller_is_the_place_in_the_program"
    assert found[0] == found[1] == [here, here, here, here, ""]


def test_threads_count_in_one_series(both: Both) -> None:
    for kind in both.kinds("all_reduce", op="sum"):
        start = threading.Barrier(2)

        def make_calls(kind: Kind = kind, start: threading.Barrier = start) -> None:
            start.wait()
            for _ in range(200):
                kind.end(kind.begin(8, 0))
            start.wait()  # an identifier is another thread's afterwards

        threads = [threading.Thread(target=make_calls) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kind.begin(8, 0)
    native, python = both.calls()
    assert native[-1].in_series == native[-1].number == python[-1].number == 401
    assert native[-1].digest == python[-1].digest
    assert [reader.word("threads") for reader in both.readers] == [3, 3]


def test_a_kind_of_python_and_a_native_one_share_their_numbers(both: Both, tmp_path: Path) -> None:
    recorder = both.recorders[0]
    native = both.kinds("all_reduce", op="sum")[0]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kernels, "recording_functions", lambda *_: None)
        other = recorder.kind(recorder.group_index("world", (0, 1, 2), "", "gloo"), "broadcast", "broadcast", root=1)
    assert [native.begin(1, 0), other.begin(1, 0), native.begin(1, 0)] == [1, 2, 3]
    assert [one.in_series for one in refreshed(both.readers[0]).calls()] == [1, 2, 3]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(elements=st.lists(st.integers(0, WORD - 1), min_size=1, max_size=8), dtype=st.text(max_size=8))
@example(elements=[(1 << 61) - 1, (1 << 61) - 2, 1 << 61, WORD - 1, 0], dtype="int8")
def test_digests(both: Both, elements: list[int], dtype: str) -> None:
    kinds = both.kinds("all_reduce", dtype, op="sum")
    for kind in kinds:
        for one in elements:
            kind.begin(one, 0)
    native, python = ([one.digest for one in calls] for calls in both.calls())
    assert native == python


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((1,), TypeError),
        (("1", 0), TypeError),
        ((-1, 0), OverflowError),
        ((WORD, 0), OverflowError),
        ((1, None), TypeError),
        ((1, 0, [1]), TypeError),
        ((1, 0, 1, [1]), TypeError),
        ((1, 0, None, None, None), TypeError),
        ((1, 0, None, None, 0, 0), TypeError),
    ],
)
def test_wrong_arguments_raise(both: Both, arguments: tuple[object, ...], error: type[Exception]) -> None:
    kind = both.kinds("all_to_all_single")[0]
    with pytest.raises(error):
        kind.begin(*arguments)
    number = kind.begin(1, 0)
    for function in (kind.end, kind.fail, kind.wait):
        with pytest.raises(TypeError):
            function(None)  # type: ignore[arg-type]
    kind.end(number)
    assert refreshed(both.readers[0]).calls()[-1].elements == 1


def test_memory_that_is_no_ring_is_refused() -> None:
    memory = bytearray(8192)
    recorder = (iter(()), len, len, {}, len)
    with pytest.raises(RuntimeError, match="not that of a flight recorder"):
        native_module.NATIVE.recording_functions(id(memory), len(memory), memory, *recorder, None, 1, 2, True, 0)


def test_the_memory_of_a_ring_stays_as_long_as_its_functions() -> None:
    recorder = FlightRecorder()
    kind = recorder.kind(recorder.group_index("world", (0, 1), "", "gloo"), "barrier", "barrier")
    assert type(kind.begin) is BuiltinFunctionType
    kept = weakref.ref(recorder)
    recorder.close()
    del recorder
    gc.collect()
    number = kind.begin(0, 0)
    kind.end(number)
    del kind
    gc.collect()
    assert kept() is None


OUTLIVING = """
import sys, threading, time
import torch
from comm_utils.flight_recorder import FlightRecorder

recorder = FlightRecorder()
kind = recorder.kind(recorder.group_index("world", (0, 1), "", ""), "all_to_all_single", "all_to_all_single", "int8")
begin = kind.begin
assert type(begin) is type(len)
# Two places, so that each call asks the recorder for its entry; far into a function, whose places are no small numbers.
lines = ["def make_calls():", " while True:", *["  0 .real"] * 300, *["  begin(1, 0, [1], [1])"] * 2]
exec("\\n".join(lines))
sys.setswitchinterval(1e-5)
threading.Thread(target=make_calls, daemon=True).start()
time.sleep(0.1)
"""


@pytest.mark.parametrize("attempt", range(2))
def test_a_daemon_thread_may_make_calls_while_the_interpreter_ends(attempt: int) -> None:
    done = subprocess.run([sys.executable, "-c", OUTLIVING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
