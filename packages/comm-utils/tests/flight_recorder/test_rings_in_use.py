"""Rings stay as long as their process lives, also where it cannot be seen by those that remove others."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from comm_utils.flight_recorder import directory
from comm_utils.flight_recorder.directory import create_folder, default_directory, prune, remove_rings_of
from comm_utils.flight_recorder.reader import open_ring
from comm_utils.flight_recorder.recorder import own_identity

_IN_A_PID_NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

_RECORDS = """
import sys
from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings

recorder = FlightRecorder()
recorder.settings = FlightRecorderSettings(directory=sys.argv[1], records=16)
recorder.open(0, 1, "job")
print(recorder.path, flush=True)
sys.stdin.read()
"""

_CREATES = """
import sys
from pathlib import Path
from comm_utils.flight_recorder.directory import create_folder, create_ring

folder, _ = create_folder(Path(sys.argv[1]), "job")
print(create_ring(folder, 0, 1 << 16)[0], flush=True)
sys.stdin.read()
"""

_FORKS = r"""
import os, signal, sys
from comm_utils.flight_recorder import FlightRecorderSettings
from comm_utils.flight_recorder.recorder import RECORDER

RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1], records=16)
RECORDER.open(0, 1, "job")
path = RECORDER.path
child = os.fork()
if child:
    os.write(1, f"{path}\n".encode())
    signal.pause()
os.write(1, b"child\n")
sys.stdin.read()
"""

_LACKS_ROOM = """
import json, sys
from comm_utils.flight_recorder.directory import create_folder, create_ring, default_directory

numbers = set()
print("begins", flush=True)
sys.stdin.readline()
for _ in range(2000):
    try:
        folder, _ = create_folder(default_directory(), "job")
        create_ring(folder, int(sys.argv[1]), 2 << 20)
    except OSError as error:
        numbers.add(error.errno)
print(json.dumps(sorted(numbers)))
"""

_LACKS_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from comm_utils.flight_recorder.directory import create_folder, create_ring

folder, _ = create_folder(Path(sys.argv[1]), "job")
resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    create_ring(folder, 0, 1 << 16)
except OSError as error:
    print(error.errno, folder.exists(), flush=True)
"""

_TWO_RANKS = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'

_BOTH = """
import subprocess, sys

command = [sys.executable, "-c", sys.argv[1]]
pipe = subprocess.PIPE
ranks = [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe, text=True) for rank in range(2)]
for one in ranks:
    one.stdout.readline()
for one in ranks:
    one.stdin.write("go\\n")
    one.stdin.flush()
for one in ranks:
    print(one.communicate()[0].strip())
"""

_PRUNES = """
import sys
from pathlib import Path
from comm_utils.flight_recorder.directory import prune

print("prunes", flush=True)
while True:
    prune(Path(sys.argv[1]), 0, "nobody")
"""


def test_a_process_without_a_descriptor_leaves_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LACKS_DESCRIPTORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{errno.EMFILE} False\n", done.stderr


@contextmanager
def running(program: str, directory: Path, wrapper: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """Run a program on a directory; it ends with the block, and so do its children."""
    command = [*wrapper, sys.executable, "-c", program, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process
        finally:
            process.kill()
            process.stdin.close()
            process.stdout.read()  # to its end: the program itself may be a child of a wrapper


def ring_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    ring = Path(process.stdout.readline().strip())
    assert ring.is_file()
    return ring


def pid_namespace() -> Sequence[str]:
    if shutil.which("unshare") is None or subprocess.run([*_IN_A_PID_NAMESPACE, "true"], check=False).returncode != 0:
        pytest.skip("needs a pid namespace of its own")
    return _IN_A_PID_NAMESPACE


@pytest.mark.parametrize("program", [_RECORDS, _CREATES], ids=["written", "just created"])
def test_the_ring_of_a_process_in_another_pid_namespace_stays_while_it_lives(program: str, tmp_path: Path) -> None:
    # A world of one rank has no watch, so nothing but the lock of the ring says that its process lives.
    with running(program, tmp_path, pid_namespace()) as process:
        ring = ring_of(process)
        prune(tmp_path, 0, own_identity())
        assert ring.exists()
    prune(tmp_path, 0, own_identity())
    assert list(tmp_path.iterdir()) == []


def test_pruning_in_another_pid_namespace_leaves_the_rings_of_this_one(tmp_path: Path) -> None:
    prunes = "import sys; from pathlib import Path; from comm_utils.flight_recorder.directory import prune; "
    command = [*pid_namespace(), sys.executable, "-c", prunes + "prune(Path(sys.argv[1]), 0, 'another')", str(tmp_path)]
    with running(_RECORDS, tmp_path) as process:
        ring = ring_of(process)
        subprocess.run(command, check=True, timeout=60)
        assert ring.exists()
    subprocess.run(command, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


_ENDS_WORLDS = """
import sys
from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings

recorder = FlightRecorder()
recorder.settings = FlightRecorderSettings(directory=sys.argv[1], records=16, keep=2)
for number in range(6):
    recorder.open(0, 1, f"job-{number}")
    recorder.failure("", "ValueError", "a step that fails")
    recorder.close()
"""


def test_a_process_that_goes_on_does_not_keep_the_rings_of_its_worlds_that_failed(tmp_path: Path) -> None:
    program = _ENDS_WORLDS + 'print(recorder.path or "done", flush=True); sys.stdin.read()'
    with running(program, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        assert {ring.parent.name for ring in tmp_path.glob("*/*.ring")} == {"job-3", "job-4", "job-5"}


_WITHOUT_PROC = 'mount --bind "$0" /proc && exec "$@"'
_DIES = """
import os, sys
from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings
from comm_utils.flight_recorder.directory import prune
from comm_utils.flight_recorder.recorder import own_identity
from pathlib import Path

folder = Path(sys.argv[1])
recorder = FlightRecorder()
recorder.settings = FlightRecorderSettings(directory=folder, records=16)
child = os.fork()
if child == 0:
    recorder.open(0, 1, "job-of-child")
    os._exit(0)
os.waitpid(child, 0)
recorder.open(0, 1, "job")
prune(folder, 0, own_identity())
print(*(one.name for one in folder.iterdir()))
os._exit(0)
"""


def test_without_proc_the_rings_of_processes_that_have_ended_go(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("an empty /proc needs root and unshare")
    empty, rings = tmp_path / "empty", tmp_path / "rings"
    empty.mkdir()
    command = ["unshare", "--mount", "sh", "-c", _WITHOUT_PROC, str(empty), sys.executable, "-c", _DIES, str(rings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "mount" in done.stderr:
        pytest.skip("this machine does not let root replace /proc")
    assert done.stdout == "job\n", done.stderr


def test_a_forked_child_does_not_keep_the_ring_of_its_parent(tmp_path: Path) -> None:
    with running(_FORKS, tmp_path) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert "child" in lines
        ring = next(Path(line) for line in lines if line != "child")
        prune(tmp_path, 0, own_identity())
        assert ring.exists()
        process.kill()
        process.wait(timeout=60)
        prune(tmp_path, 0, own_identity())  # the child reads its input until the end of the block
        assert list(tmp_path.iterdir()) == []


def test_rings_are_created_while_others_are_removed(tmp_path: Path) -> None:
    creates = """
import os, sys
from pathlib import Path
from comm_utils.flight_recorder.directory import create_folder, create_ring, remove_ring

gone = 0
for number in range(500):
    folder, _ = create_folder(Path(sys.argv[1]), f"job-{number % 3}")
    path, *descriptors = create_ring(folder, 0, 1 << 16)
    gone += not path.exists() or not os.path.samestat(os.fstat(descriptors[0]), path.stat())
    remove_ring(path)
    for descriptor in descriptors:
        os.close(descriptor)
print(gone)
"""
    with running(_PRUNES, tmp_path) as first, running(_PRUNES, tmp_path) as second:
        for process in (first, second):
            assert process.stdout is not None
            process.stdout.readline()
        done = subprocess.run(
            [sys.executable, "-c", creates, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_ranks_that_have_no_room_for_their_rings_name_that_and_not_each_other() -> None:
    # Who has no room removes the folder, in which the other one is about to create its file.
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("a small /dev/shm needs root and unshare")
    command = ["unshare", "--mount", "sh", "-c", _TWO_RANKS, "sh", sys.executable, "-c", _BOTH, _LACKS_ROOM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if "mount" in done.stderr:
        pytest.skip("this machine does not let root mount a small /dev/shm")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[errno.ENOSPC]] * 2, done.stderr


def test_rings_of_another_container_stay_where_a_pid_is_the_same() -> None:
    # Both have ended; only one of them is a rank of this process.
    folder, _ = create_folder(default_directory(), f"test-{os.getpid()}")
    try:
        with running(_RECORDS, folder) as here, running(_RECORDS, folder, pid_namespace()) as elsewhere:
            rings = ring_of(here), ring_of(elsewhere)
        own, other = (writer_of(ring) for ring in rings)
        remove_rings_of({own, other}, own_identity())
        assert [ring.exists() for ring in rings] == [False, True]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            default_directory().rmdir()


def writer_of(ring: Path) -> int:
    reader = open_ring(ring)
    pid = reader.header.pid
    reader.close()
    return pid


_IS_INTERRUPTED = """
import gc, json, os, sys
from itertools import count
from pathlib import Path
import comm_utils.flight_recorder
from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings

PACKAGE = str(Path(comm_utils.flight_recorder.__file__).parent)
what, directory = sys.argv[2], Path(sys.argv[1])


def descriptors():
    found = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd")]
    return [os.readlink(one) for one in found if os.path.islink(one)]


def interrupted(call, nth):
    calls = count()

    def interrupt(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and next(calls) == nth:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


recorder = FlightRecorder()
recorder.settings = FlightRecorderSettings(directory=str(directory), records=16)
nth, left, goes_on = 0, [], True
while goes_on:
    if what == "close":
        recorder.open(0, 1, "job")
    goes_on = interrupted(recorder.close if what == "close" else lambda: recorder.open(0, 1, "job"), nth)
    recorder.close()
    gc.collect()
    left += [f"{nth}: {one}" for one in descriptors() if one.startswith(str(directory))]
    left += [f"{nth}: {one.name}" for one in directory.glob("*/*")] if what == "open" else []
    nth += 1
print(json.dumps([nth, left]))
"""


@pytest.mark.parametrize("what", ["open", "close"])
def test_an_interrupt_at_any_call_leaves_no_ring(tmp_path: Path, what: str) -> None:
    command = [sys.executable, "-c", _IS_INTERRUPTED, str(tmp_path), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    interrupts, left = json.loads(done.stdout)
    assert interrupts > 5
    assert left == []


def test_old_empty_folders_of_the_default_directory_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "default_directory", lambda: tmp_path / "default")
    for parent in (tmp_path / "default", tmp_path / "configured"):
        for name in ("old", "new"):
            create_folder(parent, name)
        os.utime(parent / "old", (0, 0))
        prune(parent, 4, own_identity())
    left = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.glob("*/*"))
    assert left == ["configured/new", "configured/old", "default/new"]
