"""A thread that makes the calls of a rank shows where it is, and the exception that ended it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Others read the ring: the program that runs the test is not the rank.
_TRAINS_IN_A_THREAD = """
import sys, threading, time
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.flight_recorder.reader import open_ring
from comm_utils.watch import WATCH
from comm_utils.watch.uncaught import note_uncaught_exceptions

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1])
RECORDER.open(0, 2, "job")
note_uncaught_exceptions()
WATCH.start(0, 2)
barrier = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "barrier", "barrier")
barrier.end(barrier.begin(0, 0))
reader, may_end = open_ring(RECORDER.path), threading.Event()

def wait_until(done):
    until = time.monotonic() + 30
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
        reader.refresh()

def stack_ends(text):
    wait_until(lambda: (stack := reader.stack()) is not None and stack.text.endswith(text))
    return reader.stack().text.splitlines()[-1].rpartition("/")[2]

def load_batch():
    while not may_end.is_set():
        time.sleep(0.01)
    raise ValueError("step 3 has NaN")

def train():
    all_reduce = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "all_reduce", "all_reduce")
    all_reduce.end(all_reduce.begin(10, 0))
    load_batch()

def saves_once():
    broadcast = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "broadcast", "broadcast")
    broadcast.end(broadcast.begin(10, 0))

def saves():
    saves_once()
    may_end.wait()

threading.Thread(target=saves, name="saves").start()
print(stack_ends(" wait_until"))
thread = threading.Thread(target=train, name="trainer")
thread.start()
print(stack_ends("in thread 'trainer'"))
may_end.set()
thread.join()
print(stack_ends(" wait_until"))
wait_until(lambda: reader.failures)
print(*((one.error, one.text) for one in reader.failures))
other = threading.Thread(target=lambda: 1 / 0, name="of the program")
other.start()
other.join()
reader.refresh()
print(len(reader.failures))
"""


def test_a_thread_that_makes_calls_shows_its_place_and_its_exception(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_TRAINS_IN_A_THREAD)
    command = [sys.executable, str(program), str(tmp_path / "rings")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    idle, place, place_of_main, failures, count = ended.stdout.splitlines() or [ended.stderr] * 5
    assert idle.endswith(" wait_until")  # not where the other thread waits, which made the last call
    assert place.startswith("train.py:")
    assert place.endswith(" load_batch, in thread 'trainer'")
    assert place_of_main.startswith("train.py:")
    assert place_of_main.endswith(" wait_until")
    assert failures == "('ValueError', \"step 3 has NaN, in thread 'trainer'\")"
    assert count == "1"
    assert "ValueError: step 3 has NaN" in ended.stderr  # printed as before
    assert "ZeroDivisionError" in ended.stderr
