"""A rank whose threads wait for each other's locks shows the stacks of all of them, and others name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Others read the ring: the program that runs the test is not the rank.
_LOCKED = """
import queue, sys, threading, time
from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.findings import Finding, FindingKind, describe_rank
from comm_utils.flight_recorder.reader import open_ring
from comm_utils.flight_recorder.snapshot import decode_snapshot, encode_snapshot, take_snapshot
from comm_utils.watch import WATCH
from comm_utils.watch.explanation import combined

sys.path.insert(0, sys.argv[2])
import monitors
for number in range(8):
    threading.Thread(target=monitors.watch, name=f"monitor {number}", daemon=True).start()

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1])
RECORDER.open(0, 2, "job")
WATCH.start(0, 2)
barrier = RECORDER.kind(RECORDER.group_index("g", (0, 1), "", "none"), "barrier", "barrier")
barrier.end(barrier.begin(0, 0))
model, batches, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

def load():
    with batches:
        both.wait()
        with model:
            pass

def train():
    with model:
        both.wait()
        with batches:
            pass

def report():
    reader, until = open_ring(RECORDER.path), time.monotonic() + 30
    complete = False
    while not complete and time.monotonic() < until:
        time.sleep(0.01)
        reader.refresh()
        text = "" if reader.stack() is None else reader.stack().text
        complete = "load, in thread 'loader'" in text and text.endswith(" train")
    seen = decode_snapshot(encode_snapshot(take_snapshot(reader)))
    print(describe_rank(seen))
    print(combined(1, [Finding(FindingKind.MISSING, RingGroup("g", (0, 1)), (0,), "missing")], {0: seen}).text)
    for stack in seen.stack.by_thread:
        print(len(stack.splitlines()), stack.splitlines()[-1])
    sys.stdout.flush()
    batches.release()

threading.Thread(target=load, name="loader", daemon=True).start()
threading.Thread(target=queue.Queue().get, name="idle in a library", daemon=True).start()
threading.Thread(target=report, name="reporter").start()
try:
    train()
except RuntimeError:
    pass
"""


def test_threads_that_wait_for_each_other_are_all_shown(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(_LOCKED)
    lines = program.read_text().splitlines()
    loads, trains = lines.index("        with model:") + 1, lines.index("        with batches:") + 1
    installed = tmp_path / "lib/python3/site-packages"
    installed.mkdir(parents=True)
    (installed / "monitors.py").write_text("import threading\n\ndef watch():\n    threading.Event().wait()\n")
    command = [sys.executable, str(program), str(tmp_path / "rings"), str(installed)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    doing, told, *stacks = ended.stdout.splitlines() or [ended.stderr] * 2
    assert doing.startswith(f"is in none of its calls, at {program}:{trains} train; its last one was barrier")
    first, _, others = told.partition("; of other threads: ")
    assert first.startswith(f"missing. The Python stack of rank 0: {program}:{trains} train < {program}:")
    assert f"{program}:{loads} load, in thread 'loader' < " in others
    assert stacks[0] == f"2 {program}:{trains} train"
    names = [one.rpartition(", in thread ")[2] for one in stacks[1:]]
    assert names == ["'loader'", "'reporter'", *(f"'monitor {number}'" for number in range(6))], ended.stderr
