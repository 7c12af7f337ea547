"""Rings as their process writes them, and what is left of them when it has ended."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from comm_utils.flight_recorder import (
    FlightRecorder,
    FlightRecorderSettings,
    RingReader,
    default_directory,
    open_ring,
    rings_in,
)
from comm_utils.flight_recorder.directory import prune
from comm_utils.flight_recorder.kinds import Kind
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.memory import ring_bytes
from comm_utils.flight_recorder.recorder import own_identity
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.testing.recording import call, writers


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[FlightRecorder]:
    """A recorder with small rings in ``tmp_path``; not the one of this process."""
    made = FlightRecorder()
    made.settings = FlightRecorderSettings(directory=str(tmp_path), records=16)
    yield made
    made.close()


def opened(recorder: FlightRecorder, job: str = "job") -> RingReader:
    recorder.open(0, 2, job)
    assert recorder.path is not None
    return open_ring(recorder.path)


def kind(recorder: FlightRecorder, operation: str = "all_reduce", **described: object):  # type: ignore[no-untyped-def]
    group = recorder.group_index("world", (0, 1), "of all", "gloo")
    return recorder.kind(group, operation, operation, "float32", **described)  # type: ignore[arg-type]


# --- calls


def test_what_is_recorded_of_a_call(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder, op="sum")
    begun = time.perf_counter_ns()
    number = summing.begin(1000, 0)
    reader.refresh()
    (made,) = reader.open_calls()
    assert begun <= made.begin_ns <= time.perf_counter_ns()
    assert (made.number, made.operation, made.dtype, made.op, made.elements) == (
        1,
        "all_reduce",
        "float32",
        "sum",
        1000,
    )
    assert (made.group.name, made.group.ranks, made.group.description) == ("world", (0, 1), "of all")
    assert made.caller.partition(":")[0] == __file__
    assert made.caller.endswith(" test_what_is_recorded_of_a_call")
    assert made.in_series == 1
    summing.end(number)
    (ended,) = reader.calls()
    assert made.begin_ns == ended.begin_ns <= ended.end_ns <= time.perf_counter_ns()
    assert not ended.failed
    failing = kind(recorder, op="max")
    failing.fail(failing.begin(7, 0))
    reader.refresh()
    assert [(one.failed, one.is_open, one.in_series) for one in reader.calls()] == [(False, False, 1), (True, False, 2)]
    header = reader.header
    assert (header.rank, header.world_size, header.pid, header.job) == (0, 2, os.getpid(), "job")
    reader.close()


def ask(calls, module: str):  # type: ignore[no-untyped-def]
    """Return a function of that module which makes the calls on behalf of who calls it."""
    namespace = {"calls": calls, "__name__": module}
    exec("def on_behalf():\n    for call in calls:\n        call()\n", namespace)
    return namespace["on_behalf"]


def test_the_caller_is_whoever_is_outside_of_these_packages(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    through_ours = ask([lambda: summing.begin(1, 1)] * 2, "comm_collectives.composed")

    def first() -> None:
        through_ours()

    def second() -> None:
        through_ours()

    for user in (first, second, first):
        user()
    for _ in range(2):
        summing.begin(1, 0)
    reader.refresh()
    names = [one.caller.rpartition(" ")[2] for one in reader.calls()]
    here = "test_the_caller_is_whoever_is_outside_of_these_packages"
    assert names == ["first"] * 2 + ["second"] * 2 + ["first"] * 2 + [here] * 2


@contextmanager
def timed_range() -> Iterator[None]:
    yield


def test_a_function_that_wraps_any_other_is_no_caller(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    through_ours = ask([lambda: summing.begin(1, 1)], "comm_collectives.composed")
    timed_range()(through_ours)()
    ask([through_ours], "deepspeed.utils.nvtx")()
    reader.refresh()
    names = [one.caller.rpartition(" ")[2] for one in reader.calls()]
    assert names == ["test_a_function_that_wraps_any_other_is_no_caller"] * 2
    reader.close()


def test_the_caller_is_known_with_its_first_call(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    reader.refresh()
    summing.begin(1, 0)
    (call,) = reader.calls()
    assert call.caller.endswith(" test_the_caller_is_known_with_its_first_call")
    reader.close()


@pytest.mark.parametrize(("timeout_s", "is_limited"), [(0.3, True), (1.0, False), (None, False)])
def test_calls_of_a_group_with_a_short_timeout_end_by_themselves(
    recorder: FlightRecorder, timeout_s: float | None, is_limited: bool
) -> None:
    reader = opened(recorder)
    group = recorder.group_index("short", (0, 1), "", "gloo", timeout_s)
    summing = recorder.kind(group, "all_reduce", "all_reduce", "float32", "sum")
    number = summing.begin(1, 0)
    reader.refresh()
    assert [one.is_limited for one in reader.calls()] == [is_limited]
    summing.end(number)
    assert [one.is_limited for one in reader.calls()] == [False]


def test_calls_that_nobody_waits_for_yet(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    number = summing.begin(1, 0, None, None, IN_BACKGROUND)
    reader.refresh()
    assert [(one.is_open, one.is_waited_for) for one in reader.calls()] == [(True, False)]
    summing.wait(number)
    assert [(one.is_open, one.is_waited_for) for one in reader.calls()] == [(True, True)]
    summing.end(number)
    summing.wait(number)  # too late to matter
    assert [(one.is_open, one.is_waited_for) for one in reader.calls()] == [(False, True)]
    reader.close()


def test_the_same_calls_have_the_same_digests(recorder: FlightRecorder, tmp_path: Path) -> None:
    steps = [call("done", "all_reduce", 8), call("done", "broadcast", 8, root=1)]
    others = [call("done", "all_reduce", 8), call("done", "broadcast", 9, root=1)]
    with writers(tmp_path, {0: steps, 1: steps, 2: others}):
        digests = []
        for path in rings_in(tmp_path):
            reader = open_ring(path)
            digests.append([one.digest for one in reader.calls()])
            reader.close()
    assert digests[0] == digests[1]
    assert digests[0][0] == digests[2][0]
    assert digests[0][1] != digests[2][1]
    assert 0 not in digests[0]


def test_messages_are_counted_by_pair_direction_and_tag(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    for operation, peer, tag in (("send", 1, 0), ("send", 1, 0), ("send", 1, 7), ("recv", 1, 0), ("all_reduce", -1, 0)):
        one = kind(recorder, operation, peer=peer, tag=tag)
        one.end(one.begin(1, 0))
    reader.refresh()
    assert [one.in_series for one in reader.calls()] == [1, 2, 1, 1, 1]
    reader.close()


def test_the_ring_wraps_around(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    first = summing.begin(0, 0)
    for elements in range(1, 100):
        summing.end(summing.begin(elements, 0))
    reader.refresh()
    kept = reader.calls()
    assert [one.elements for one in kept] == [one.number - 1 for one in kept]
    assert kept[-1].number == 100
    assert 8 <= len(kept) <= 16
    assert [one.number for one in reader.backwards()] == list(range(100, 84, -1))
    assert [one.number for one in reader.calls(after=97)] == [98, 99, 100]
    assert [one.number for one in reader.calls(most=2)] == [99, 100]
    before = [one.end_ns for one in kept]
    summing.end(first)  # its record is another call's now
    summing.fail(first)
    assert [(one.end_ns, one.failed) for one in reader.calls()] == [(end, False) for end in before]
    reader.close()


def test_split_sizes_wrap_around(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    group = recorder.group_index("many", range(1000), "", "gloo")
    exchange = recorder.kind(group, "all_to_all_single", "all_to_all_single", "float32")
    for number in range(20):
        sizes = [number, *range(999)]
        exchange.end(exchange.begin(1, 0, sizes, [7] * 1000))
    reader.refresh()
    kept = reader.calls()
    # Each takes 2,002 of 8,192 words.
    assert [one.number for one in kept if one.sent is not None] == [17, 18, 19, 20]
    for one in kept[-4:]:
        assert one.sent == (one.number - 1, *range(999))
        assert one.received == (7,) * 1000
    exchange.end(exchange.begin(5, 0, [1] * 5000, [1] * 5000))  # has no room at all
    assert reader.calls()[-1].sent is None
    assert reader.calls()[-1].elements == 5
    reader.close()


def test_full_tables(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    known = kind(recorder)
    for number in range(2000):
        recorder.group_index(f"group {number} {'x' * 100}", (0, 1), "", "gloo")
    for number in range(200):
        recorder.group_index(f"{number}", (), "", "")
    assert recorder.group_index("one more " + "x" * 200, (0, 1), "", "gloo") == 0
    unknown = kind(recorder, "broadcast", root=1)
    unknown.end(unknown.begin(1, 0))
    known.end(known.begin(2, 0))
    for number in range(200):
        recorder.failure("world", "PeerLostError", f"failure {number}")
    reader.refresh()
    assert [one.elements for one in reader.calls()] == [2]  # what has no description is left out
    assert reader.failures[0].text == "failure 0"  # which find room nevertheless
    assert 20 < len(reader.failures) < 200
    reader.close()


def test_long_texts_are_cut(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    recorder.failure("world", "PeerLostError", "x" * 100_000)
    recorder.memory.set_stack("begin " + "é" * 100_000 + " end")
    reader.refresh()
    assert reader.failures[0].text == "x" * 2000
    stack = reader.stack()
    assert stack is not None
    assert stack.text.endswith("éé end")
    assert "begin" not in stack.text
    reader.close()


@contextmanager
def changing_places() -> Iterator[None]:
    """Let threads change places as often as they can."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


def record_on_two_threads(pairs: Sequence[tuple[Kind, int]]) -> None:
    def record(one: Kind, elements: int) -> None:
        for _ in range(1000):
            one.end(one.begin(elements, 0))

    threads = [threading.Thread(target=record, args=pair) for pair in pairs]
    with changing_places():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_two_threads_record(recorder: FlightRecorder) -> None:
    recorder.settings = FlightRecorderSettings(directory=recorder.settings.directory, records=4096)
    reader = opened(recorder)
    record_on_two_threads([(kind(recorder), 1), (kind(recorder, "broadcast", root=0), 2)])
    reader.refresh()
    calls = reader.calls()
    assert [one.number for one in calls] == list(range(1, 2001))
    assert not [one for one in calls if one.is_open]
    for operation, elements in (("all_reduce", 1), ("broadcast", 2)):
        assert [one.elements for one in calls if one.operation == operation] == [elements] * 1000
    reader.close()


def test_equal_calls_of_two_threads_agree_with_those_of_one(recorder: FlightRecorder) -> None:
    recorder.settings = FlightRecorderSettings(directory=recorder.settings.directory, records=4096)
    found = []
    for threads in (1, 2):
        reader = opened(recorder)
        for _ in range(5):
            one = kind(recorder)
            if threads == 2:
                record_on_two_threads([(one, 1), (one, 1)])
            else:
                for _ in range(2000):
                    one.end(one.begin(1, 0))
        reader.refresh()
        last = max(reader.calls(), key=lambda call: call.in_series)
        found.append((last.in_series, last.digest))
        reader.close()
        recorder.close()
    assert found[0] == found[1]
    assert found[0][0] == 10_000


# --- processes that end


def test_the_ring_survives_sigkill(tmp_path: Path) -> None:
    steps = [call("done", "all_reduce", 5), ["stack", "line 1\nline 2"], call("open", "broadcast", 6, root=1)]
    with writers(tmp_path, {0: steps}) as ranks:
        ranks[0].kill()
        (path,) = rings_in(tmp_path)
        reader = open_ring(path)
    assert [(one.operation, one.is_open) for one in reader.calls()] == [("all_reduce", False), ("broadcast", True)]
    assert reader.header.state == 0
    stack = reader.stack()
    assert stack is not None
    assert stack.text == "line 1\nline 2"
    reader.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1, signal.SIGALRM])
def test_the_signal_that_has_ended_a_rank_shows_until_its_parent_waits(tmp_path: Path, number: signal.Signals) -> None:
    with writers(tmp_path, {0: [call("open", "all_reduce")]}) as ranks:
        (path,) = rings_in(tmp_path)
        reader = open_ring(path)
        ranks[0].process.send_signal(number)
        os.waitid(os.P_PID, ranks[0].pid, os.WEXITED | os.WNOWAIT)
        before = take_snapshot(reader)
        ranks[0].process.wait()
        after = take_snapshot(reader)
    reader.close()
    assert (before.end, after.end) == (f"has ended by {number.name}", "has ended")
    assert before.is_lost


def test_a_clean_end_leaves_nothing(tmp_path: Path) -> None:
    with writers(tmp_path, {0: [call("done", "all_reduce")], 1: []}) as ranks:
        ranks[0].leave()
        assert [path.name for path in rings_in(tmp_path)] == ["rank-1.ring"]
        ranks[1].leave()
    assert list(tmp_path.iterdir()) == []


def test_a_ring_stays_after_a_failure_and_where_it_is_asked_for(tmp_path: Path) -> None:
    failed = [["failure", "world", "no route to host"]]
    with (
        writers(tmp_path, {0: failed, 1: []}) as ranks,
        writers(tmp_path, {0: []}, job="kept", keep_clean=True) as kept,
    ):
        for one in (*ranks, *kept):
            one.leave()
    assert [str(path.relative_to(tmp_path)) for path in rings_in(tmp_path)] == ["job/rank-0.ring", "kept/rank-0.ring"]
    states = []
    for path in rings_in(tmp_path):
        reader = open_ring(path)
        states.append((reader.header.state, [one.text for one in reader.failures]))
        reader.close()
    assert states == [(2, ["no route to host"]), (1, [])]


def test_a_forked_child_does_not_write(recorder: FlightRecorder) -> None:
    reader = opened(recorder)
    summing = kind(recorder)
    summing.end(summing.begin(1, 0))
    child = os.fork()
    if child == 0:
        try:
            recorder.leave_to_parent()  # as the one of the process does by itself
            again = kind(recorder)
            again.end(again.begin(2, 0))
            recorder.failure("world", "PeerLostError", "of the child")
            recorder.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    reader.refresh()
    assert [one.elements for one in reader.calls()] == [1]
    assert reader.failures == []
    assert recorder.path is not None
    assert recorder.path.exists()
    reader.close()


def test_the_recorder_of_a_process_knows_of_forks(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from comm_utils.flight_recorder import RECORDER, FlightRecorderSettings, rings_in, open_ring\n"
        "RECORDER.settings = FlightRecorderSettings(directory=sys.argv[1])\n"
        "RECORDER.open(0, 1, 'job')\n"
        "def record(elements):\n"
        "    kind = RECORDER.kind(RECORDER.group_index('g', [0], '', 'gloo'), 'all_reduce', 'all_reduce', 'int8')\n"
        "    kind.end(kind.begin(elements, 0))\n"
        "record(1)\n"
        "if os.fork() == 0:\n"
        "    record(2)\n"
        "    sys.exit()\n"  # with all that is called at the end of a process
        "os.wait()\n"
        "from pathlib import Path\n"
        "reader = open_ring(rings_in(Path(sys.argv[1]))[0])\n"
        "print([call.elements for call in reader.calls()], reader.header.state)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "[1] 0\n"
    assert list(tmp_path.iterdir()) == []


# --- files


def test_modes(recorder: FlightRecorder, tmp_path: Path) -> None:
    before = os.umask(0)  # which must not matter
    try:
        recorder.settings = FlightRecorderSettings(directory=str(tmp_path / "new"), records=16)
        opened(recorder).close()
    finally:
        os.umask(before)
    assert recorder.path is not None
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(recorder.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(recorder.path.parent.parent.stat().st_mode) == 0o700


def assert_private(recorder: FlightRecorder, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """Opening warns once and records to memory that nobody else sees."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "comm"):
        recorder.open(0, 2, "job")
    (warning,) = caplog.messages
    assert "the flight recorder has no file" in warning
    assert reason in warning
    assert "set flight_recorder.directory to a folder with" in warning
    assert recorder.path is None
    assert recorder.descriptor == -1
    summing = kind(recorder)
    summing.end(summing.begin(3, 0))
    assert [one.elements for one in RingReader(recorder.memory.memory).calls()] == [3]


def test_a_folder_that_others_may_enter_is_refused(
    recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job").chmod(0o750)
    assert_private(recorder, caplog, "not a folder of this user alone")
    assert list((tmp_path / "job").iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused(
    recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "job").symlink_to(tmp_path / "elsewhere")
    assert_private(recorder, caplog, "not a folder of this user alone")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(
    recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job").mkdir(mode=0o700)
    os.chown(tmp_path / "job", 12345, -1)
    assert_private(recorder, caplog, "not a folder of this user alone")


def test_a_directory_that_is_a_file(recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder.settings = FlightRecorderSettings(directory=str(tmp_path / "file"))
    assert_private(recorder, caplog, os.strerror(errno.EEXIST))


def test_no_room(recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ring_bytes(16) - 1, limits[1]))
        assert_private(recorder, caplog, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert rings_in(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_full_disk(recorder: FlightRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        assert_private(recorder, caplog, os.strerror(errno.ENOSPC))
        assert rings_in(tmp_path) == []
    finally:
        recorder.close()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_in_the_way_is_not_touched(recorder: FlightRecorder, tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o700)
    old = tmp_path / "job" / "rank-0.ring"
    old.write_bytes(b"of an earlier world")
    opened(recorder).close()
    assert recorder.path == tmp_path / "job" / "rank-0.1.ring"
    assert old.read_bytes() == b"of an earlier world"


def test_the_name_of_a_job_stays_in_the_directory(recorder: FlightRecorder, tmp_path: Path) -> None:
    for job in ("../../escape", "..", "", "a/b c\0d", "x" * 500):
        opened(recorder, job).close()
        assert recorder.path is not None
        assert recorder.path.parent.parent == tmp_path
        assert len(recorder.path.parent.name) <= 80


def test_old_jobs_are_pruned_but_not_those_that_run(tmp_path: Path) -> None:
    with writers(tmp_path, {0: []}, job="runs"):
        for number in range(5):
            with writers(tmp_path, {0: []}, job=f"ended-{number}", keep=100) as ranks:
                ranks[0].kill()
            os.utime(tmp_path / f"ended-{number}", (number, number))
        (tmp_path / "not-a-job").mkdir()
        prune(tmp_path, 2, own_identity())
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ended-3", "ended-4", "not-a-job", "runs"]


def test_a_new_job_prunes(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.settings = FlightRecorderSettings(directory=str(tmp_path), records=16, keep=1)
    for number in range(3):
        with writers(tmp_path, {0: []}, job=f"ended-{number}") as ranks:
            ranks[0].kill()
        os.utime(tmp_path / f"ended-{number}", (number, number))
    opened(recorder).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ended-2", "job"]


_IN_A_SMALL_FILE_SYSTEM = """
import os, sys
from pathlib import Path
from comm_utils.flight_recorder import FlightRecorderSettings
from comm_utils.flight_recorder.directory import prune
from comm_utils.flight_recorder.recorder import FlightRecorder

here = Path(sys.argv[1])
room = os.statvfs(here).f_blocks * os.statvfs(here).f_frsize
for number in range(4):
    folder = here / f"ended-{number}"
    folder.mkdir()
    (folder / "rank-0.ring").write_bytes(bytes(room // 20))
    os.utime(folder, (number, number))
prune(here, 4, "nobody")
print(sorted(path.name for path in here.iterdir()))
(here / "ended-3" / "rank-1.ring").write_bytes(bytes(os.statvfs(here).f_bavail * os.statvfs(here).f_frsize - 4096))
recorder = FlightRecorder()
recorder.settings = FlightRecorderSettings(directory=str(here), records=16)
recorder.open(0, 1, "job")
print(sorted(str(path.relative_to(here)) for path in here.rglob("*.ring")))
"""


def mounted(mounting: str, *program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program where a shell command has mounted something for it alone."""

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        line = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounting} && exec "$@"', "sh"]
        return subprocess.run([*line, *command], capture_output=True, text=True, timeout=60)

    if shutil.which("unshare") is None or run("true").returncode != 0:
        pytest.skip("needs a mount namespace of its own")
    found = run(sys.executable, "-c", *program)
    assert found.returncode == 0, found.stderr
    return found


def test_kept_jobs_leave_room_in_a_small_file_system(tmp_path: Path) -> None:
    found = mounted(f"mount -t tmpfs -o size=4m tmpfs {tmp_path}", _IN_A_SMALL_FILE_SYSTEM, str(tmp_path))
    # A twentieth of the file system each, of which an eighth stays; then none, as the new job has no room otherwise.
    assert found.stdout.splitlines() == ["['ended-2', 'ended-3']", "['job/rank-0.ring']"]


_ON_A_READ_ONLY_HOST = """
import os
from comm_utils.flight_recorder.recorder import FlightRecorder

os.chdir("/proc")  # where no file can be made, either
recorder = FlightRecorder()
recorder.open(0, 1, "job")
print(recorder.path, recorder.memory.word("recorded"))
"""


def test_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(variable, raising=False)
    read_only = "mount --bind $place $place && mount -o remount,bind,ro $place"
    found = mounted(f"for place in /dev/shm /tmp /var/tmp; do {read_only} || exit; done", _ON_A_READ_ONLY_HOST)
    assert found.stdout == "None 1\n"
    assert "the flight recorder has no file" in found.stderr
    assert "No usable temporary directory" in found.stderr


_IN_SHARED_MEMORY = """
import os
from pathlib import Path
from comm_utils.flight_recorder.recorder import FlightRecorder

recorder = FlightRecorder()
recorder.open(0, 1, "job")
print(recorder.path, recorder.memory.word("recorded"), sorted(os.listdir(f"/dev/shm/comm-flight-{os.getuid()}")))
recorder.close()
"""


@pytest.mark.parametrize(
    "made",
    [
        "mkdir -m 777 $own && chown 12345 $own",
        "mkdir -m 700 $own && chown 12345 $own",
        "mkdir -m 755 $own",
        "mkdir -m 700 /dev/shm/elsewhere && ln -s elsewhere $own",
    ],
)
def test_the_default_directory_of_another_user_is_refused(made: str) -> None:
    own = f"own=/dev/shm/comm-flight-{os.getuid()}"
    found = mounted(f"mount -t tmpfs tmpfs /dev/shm && {own} && {made}", _IN_SHARED_MEMORY)
    assert found.stdout == "None 1 []\n"
    assert found.stderr.count("the flight recorder has no file") == 1
    assert f"not a folder of this user alone: '/dev/shm/comm-flight-{os.getuid()}'" in found.stderr


def test_a_job_of_another_container_is_not_pruned(tmp_path: Path) -> None:
    # Its process cannot be seen from here, as if it had ended, but its watch has just looked around.
    for job, age_s in (("elsewhere", 5), ("ended", 100)):
        looked_at = max(1, time.perf_counter_ns() - age_s * 10**9)
        with writers(tmp_path, {0: [["looked_at", looked_at]]}, job=job) as ranks:
            ranks[0].kill()
    prune(tmp_path, 0, "another container")
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    prune(tmp_path, 0, own_identity())  # from where it could be seen
    assert list(tmp_path.iterdir()) == []


def test_turned_off(recorder: FlightRecorder, tmp_path: Path) -> None:
    recorder.settings = FlightRecorderSettings(enabled=False, directory=str(tmp_path))
    recorder.open(0, 2, "job")
    summing = kind(recorder)
    summing.end(summing.begin(1, 0))
    assert recorder.path is None
    assert RingReader(recorder.memory.memory).word("recorded") == 0
    assert list(tmp_path.iterdir()) == []


def test_listeners_learn_of_each_memory(recorder: FlightRecorder) -> None:
    seen: list[int] = []
    recorder.when_opened(seen.append)
    opened(recorder).close()
    recorder.close()
    assert len(seen) == 2
    assert seen[0] >= 0
    assert seen[1] == -1


def test_the_default_directory_is_this_users() -> None:
    assert default_directory().name == f"comm-flight-{os.getuid()}"
