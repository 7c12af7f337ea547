"""Signals act as without the watch: a handler of the program decides, the default ends the process."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.watch import interruptions
from comm_utils.watch.interruptions import Interruptions
from comm_utils.watch.signals import SignalPipe

_CALL = Call(0, 1, 0, 0, False, RingGroup("g", (0, 1)), "barrier", "barrier", "", "", -1, -1, 0, 0, 1, 0)


@contextmanager
def _handler(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _came(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what happens when ``number`` comes during a call that goes on."""
    happened: list[str] = []
    monkeypatch.setattr(interruptions, "end_by", lambda number: happened.append(f"ended by {number}"))
    seen = Interruptions(
        lambda: [_CALL],
        lambda call, age_s, name: happened.append(f"reported {name}"),
        lambda call: happened.append(f"interrupted {call.name}"),
    )
    seen.came(number, threading.Event())
    return happened


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("handler", [lambda number, frame: None, signal.SIG_IGN])
def test_a_handler_of_the_program_decides(
    number: signal.Signals, handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _handler(number, handler):
        assert _came(number, monkeypatch) == [f"reported {number.name}"]


def test_python_s_own_handler_of_ctrl_c_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with _handler(signal.SIGINT, signal.default_int_handler):
        assert _came(signal.SIGINT, monkeypatch) == ["reported SIGINT", "interrupted barrier"]


def test_sigterm_without_a_handler_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with _handler(signal.SIGTERM, signal.SIG_DFL):
        pipe = SignalPipe(True)
        try:
            assert _came(signal.SIGTERM, monkeypatch) == ["reported SIGTERM", f"ended by {signal.SIGTERM}"]
        finally:
            pipe.close()


_WATCHED = """
import ctypes, os, signal, sys, time
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.watch import WATCH

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1])
RECORDER.open(0, 2, "job")
WATCH.start(0, 2)
"""

_FORKS = """
barrier = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "barrier", "barrier")
barrier.begin(0, 1)
child = os.fork()
if child == 0:
    try:
        time.sleep(20)
    finally:
        os._exit(0)
time.sleep(0.5)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
time.sleep(1)
WATCH.stop()
print(status, flush=True)
"""


def _run(program: str, folder: Path, wrapper: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    command = [*wrapper, sys.executable, "-c", _WATCHED + program, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


def test_sigterm_of_a_forked_child_leaves_the_parent_alone(tmp_path: Path) -> None:
    ended = _run(_FORKS, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, f"{signal.SIGTERM.value}\n"), ended.stderr


# pthread_mutex_lock goes on after a signal, as gloo's waits do.
_BLOCKED = """
mutex = ctypes.create_string_buffer(64)
lock = ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
if os.fork() == 0:
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGTERM)
    os._exit(0)
lock(mutex)
"""


def test_sigterm_ends_a_wait_in_a_library_that_is_no_call_of_ours(tmp_path: Path) -> None:
    assert _run(_BLOCKED, tmp_path).returncode == -signal.SIGTERM


_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
# The kernel ignores a signal that has the default action for the first process of a pid namespace.
_ENDS_IN_CONTAINER = {
    "the handler": "os.kill(os.getpid(), signal.SIGTERM); time.sleep(10); print('goes on')",
    "the watch": _BLOCKED,
}


@pytest.mark.parametrize("ended_by", _ENDS_IN_CONTAINER)
def test_sigterm_ends_process_1_of_a_container(ended_by: str, tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*_PID_NAMESPACE, "true"], check=False).returncode != 0:
        pytest.skip("needs a pid namespace of its own")
    ended = _run(_ENDS_IN_CONTAINER[ended_by], tmp_path, _PID_NAMESPACE)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, ""), ended.stderr


_HAS_FAULTHANDLER = """
import faulthandler

WATCH.stop()
shown = open(sys.argv[1] + "/shown", "w+")
faulthandler.register(signal.SIGTERM, shown, all_threads=False)
WATCH.start(0, 2)
os.kill(os.getpid(), signal.SIGTERM)
WATCH.stop()
os.kill(os.getpid(), signal.SIGTERM)
shown.seek(0)
print(shown.read().count("most recent call first"))
"""


def test_a_faulthandler_of_the_program_stays(tmp_path: Path) -> None:
    ended = _run(_HAS_FAULTHANDLER, tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "2\n"), ended.stderr


# Ways to lose the descriptor by which the interpreter tells of signals, each before the main thread waits.
_LOST = {
    "asyncio": """
import asyncio

async def main():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, print)
    loop.remove_signal_handler(signal.SIGUSR1)

asyncio.run(main())
""",
    "a watch that ended in another thread": """
import threading

ending = threading.Thread(target=WATCH.stop)
ending.start()
ending.join()
WATCH.start(0, 2)
""",
    "no further watch": """
import threading

ending = threading.Thread(target=WATCH.stop)
ending.start()
ending.join()
""",
}


@pytest.mark.parametrize("lost", _LOST)
def test_sigterm_ends_a_wait_after_the_descriptor_of_signals_was_lost(lost: str, tmp_path: Path) -> None:
    assert _run(_LOST[lost] + _BLOCKED, tmp_path).returncode == -signal.SIGTERM


_STARTS_IN_THREADS = """
import threading

def descriptors():
    for one in threading.enumerate():
        if one is not threading.main_thread():
            one.join(20)  # what looks at other hosts has a descriptor of its own, and ends by itself
    return len(os.listdir("/proc/self/fd"))

def run(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()

WATCH.stop()
counts = []
for _ in range(4):
    run(lambda: WATCH.start(0, 2))
    run(WATCH.stop)
    WATCH.start(0, 2)
    run(WATCH.stop)
    counts.append(descriptors())
WATCH.start(0, 2)
WATCH.stop()
print(len(set(counts)), descriptors() - counts[0], signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGTERM).name)
"""


def test_worlds_that_end_in_other_threads_keep_no_descriptors(tmp_path: Path) -> None:
    """One pipe is kept while the interpreter still writes into it."""
    ended = _run(_STARTS_IN_THREADS, tmp_path)
    assert ended.stdout == "1 -2 -1 SIG_DFL\n", ended.stderr


_CTRL_C_BEFORE = """
kill_in = "import os, sys, time; time.sleep(0.5); os.kill(int(sys.argv[1]), int(sys.argv[2]))"

def sends(number):
    subprocess.Popen([sys.executable, "-c", kill_in, str(os.getpid()), str(number)])

import subprocess
sends(int(signal.SIGINT))
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.5)
barrier = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "barrier", "barrier")
barrier.begin(0, 1)
time.sleep(0.6)
sends(int(signal.SIGTERM))
time.sleep(60)
"""


def test_sigterm_after_a_ctrl_c_that_was_caught_reports_the_call_under_way(tmp_path: Path) -> None:
    ended = _run(_CTRL_C_BEFORE, tmp_path)
    assert ended.returncode == -signal.SIGTERM
    assert "SIGTERM came while " in ended.stderr


@pytest.mark.parametrize("moves", [False, True])
def test_ctrl_c_ends_calls_on_a_device_while_the_host_waits_for_it(moves: bool) -> None:
    """Where Python's own handler has run, the host is elsewhere."""
    calls = [replace(_CALL, number=number, is_on_device=True) for number in (1, 2, 3)]
    interrupted: list[int] = []
    places = iter((1, 2 if moves else 1))
    seen = Interruptions(
        lambda: calls, lambda *_: None, lambda call: interrupted.append(call.number), place=lambda: next(places)
    )
    with _handler(signal.SIGINT, signal.default_int_handler):
        seen.came(signal.SIGINT, threading.Event())
    assert interrupted == ([] if moves else [1])


_THREAD_WAITS = """
import threading

signal.signal(signal.SIGINT, signal.default_int_handler)
mutex, told = ctypes.create_string_buffer(64), []
lock, unlock = ctypes.CDLL(None).pthread_mutex_lock, ctypes.CDLL(None).pthread_mutex_unlock
lock(mutex)
WATCH.when_in_trouble(lambda group, trouble: (told.append(group), unlock(mutex)))
main, other = (
    RECORDER.kind(RECORDER.group_index(name, (0, 1), "", "none"), "barrier", "barrier") for name in ("main", "other")
)

def wait():
    other.begin(0, 0)
    time.sleep(60)

threading.Thread(target=wait, daemon=True).start()
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
"""
_MAIN_THREADS = {
    "waits": "main.begin(0, 0), lock(mutex)",
    "handles it and goes on": "time.sleep(60)",
    "handles it and stays": """
for _ in range(30):
    try:
        time.sleep(0.05)
    except KeyboardInterrupt:
        pass
raise KeyboardInterrupt
""",
}


@pytest.mark.parametrize("does", _MAIN_THREADS)
def test_ctrl_c_ends_the_call_of_the_main_thread_alone(does: str, tmp_path: Path) -> None:
    """Another thread waits in a call all the time."""
    body = "".join(f"    {line}\n" for line in _MAIN_THREADS[does].splitlines())
    then = "    time.sleep(0 if told else 1)\nWATCH.stop()\nprint(told)\n"
    ended = _run(f"{_THREAD_WAITS}try:\n{body}except KeyboardInterrupt:\n{then}", tmp_path)
    assert ended.stdout == ("['main']\n" if does == "waits" else "[]\n"), ended.stderr
