"""Processes that record calls in rings as a plan says: for tests of what reads rings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from comm_utils.flight_recorder import FlightRecorder, FlightRecorderSettings
from comm_utils.flight_recorder.layout import IN_BACKGROUND
from comm_utils.flight_recorder.recorder import WAITED_FOR

__all__ = ["Plan", "Writer", "call", "main", "writers"]

#: The steps of a rank: what :func:`call` returns, ``["group", name, ranks]``, ``["failure", group, cause, *ranks]``,
#: ``["stack", text]``, ``["wait", seconds]``, and ``["repeat", pause_s, call]``, which goes on in a thread.
Plan: TypeAlias = Sequence[Sequence[Any]]


def call(state: str, operation: str, elements: int = 4, group: str = "world", **kind: Any) -> list[Any]:
    """Return a step of a plan: a call.

    Args:
        state: ``"done"``, ``"open"``, or ``"failed"``.
        kind: as :meth:`FlightRecorder.kind` takes it; ``sent``, ``received`` and ``background`` as ``begin`` does;
            ``caller`` is the name of the function that calls.
    """
    return ["call", state, operation, elements, group, kind]


class Writer:
    """A process that records, as rank ``rank``."""

    def __init__(self, process: subprocess.Popen[str], rank: int) -> None:
        self.process, self.rank, self.pid = process, rank, process.pid

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def leave(self) -> None:
        """Let the process end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextmanager
def writers(
    directory: Path, plans: Mapping[int, Plan], job: str = "job", world_size: int | None = None, **settings: Any
) -> Iterator[list[Writer]]:
    """Start a process for each rank; yield them when all have recorded what their plan says.

    Args:
        directory: for the folder of the job.
        plans: by rank.
        world_size: as many as there are plans, unless other ranks are started otherwise.
        settings: of the flight recorder.
    """
    started: list[Writer] = []
    try:
        for rank, plan in plans.items():
            given = {"rank": rank, "plan": plan, "world_size": world_size or len(plans), "job": job}
            given["settings"] = {"directory": str(directory), **settings}
            command = [sys.executable, "-m", "comm_utils.testing.recording", json.dumps(given)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(Writer(subprocess.Popen(command, text=True, **pipes), rank))  # type: ignore[call-overload]
        for one in started:
            assert one.process.stdout is not None
            if one.process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the process that records as rank {one.rank} ended with {one.process.wait()}")
        yield started
    finally:
        for one in started:
            one.process.kill()
            with one.process:  # which waits, and closes its pipes
                pass


def _follow(recorder: FlightRecorder, step: Sequence[Any], world_size: int) -> None:
    what, *values = step
    if what == "group":
        name, ranks = values
        recorder.group_index(name, ranks, name, "gloo")
    elif what == "failure":
        group, text, *ranks = values
        recorder.failure(group, "CommTimeoutError" if group else "ValueError", text, ranks)
    elif what in ("looked_at", "signal"):
        recorder.memory.set_word(what, values[0])
    elif what == "stack":
        recorder.memory.set_stack(values[0])
    elif what == "wait":
        time.sleep(values[0])
    elif what == "repeat":
        pause_s, repeated = values
        threading.Thread(target=_repeat, args=(recorder, repeated, world_size, pause_s), daemon=True).start()
    else:
        state, operation, elements, group, kind = values
        index = recorder.group_index(group, range(world_size), group, "gloo")
        caller, sent, received = kind.pop("caller", "program"), kind.pop("sent", None), kind.pop("received", None)
        background = kind.pop("background", False)
        described = recorder.kind(index, operation, kind.pop("call", operation), kind.pop("dtype", "float32"), **kind)
        begin = partial(described.begin, elements, 0, sent, received, IN_BACKGROUND if background else WAITED_FOR)
        # The module of the frame decides whether it is a caller.
        names: dict[str, Any] = {"begin": begin, "__name__": "train"}
        exec(compile(f"def {caller}():\n    return begin()\n", "train.py", "exec"), names)
        number = names[caller]()
        if state != "open":
            (described.end if state == "done" else described.fail)(number)


def _repeat(recorder: FlightRecorder, step: Sequence[Any], world_size: int, pause_s: float) -> None:
    while True:
        _follow(recorder, [*step[:-1], dict(step[-1])], world_size)
        time.sleep(pause_s)


def main() -> None:
    """Record what the plan in the arguments says, then wait for the end of standard input."""
    given = json.loads(sys.argv[1])
    recorder = FlightRecorder()
    recorder.settings = FlightRecorderSettings(**given["settings"])
    recorder.open(given["rank"], given["world_size"], given["job"])
    for step in given["plan"]:
        _follow(recorder, step, given["world_size"])
    print("ready", flush=True)
    sys.stdin.read()
    recorder.close()


if __name__ == "__main__":
    main()
