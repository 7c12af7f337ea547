"""The ranks of the peers, as the measuring process sees them: started, asked, and ended without a trace."""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from peers.catalogue import Peer
from peers.rank import LIMIT_S
from peers.tasks import Block

__all__ = ["Late", "Ranks", "started"]

PROGRAM = Path(__file__).with_name("__main__.py")
# By which everything that was started is found again, whichever launcher is between.
MARK = "BENCH_PEERS_RUN"


class Late(Exception):
    """The ranks of a peer were not ready in time."""


@dataclass
class Ranks:
    """All ranks of one peer; ``sockets`` and ``pids`` by rank."""

    peer: Peer
    number: int
    program: Path = PROGRAM
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    sockets: list[socket.socket] = field(default_factory=list)
    answers_from: list[IO[str]] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    #: Since when the ranks have been idle, in s, and their CPU time then, in ns; what they used of both so far, in s.
    idle_since_s: float = 0.0
    idle_from_ns: list[int] = field(default_factory=list)
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0

    def start(self, folder: Path, mark: str, options: Mapping[str, Any], limit_s: float | None = None) -> None:
        """Start the ranks and wait until they are ready.

        Raises:
            Late: they were not ready within ``limit_s`` after their start.
            SystemExit: a rank has ended.
        """
        meeting, path = folder / "meeting", str(folder / "socket")
        meeting.write_bytes(bytes(mmap.PAGESIZE))
        own = {"module": self.peer.module, "ranks": self.number, "meeting": str(meeting), "socket": path}
        program = [sys.executable, str(self.program), "--serve", json.dumps({**options, **own})]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(self.number)
            listener.settimeout(0.2)
            for command, environ in self.peer.commands(program, self.number):
                # In sessions of their own: Ctrl-C is for the process that measures.
                process = subprocess.Popen(
                    command,
                    env={**environ, MARK: mark, "TMPDIR": str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=self.output,
                    start_new_session=True,
                )
                self.launchers.append(process)
            self.accept(listener)
        for answer in self.answers(limit_s):
            self.facts = answer

    def accept(self, listener: socket.socket) -> None:
        found: dict[int, tuple[socket.socket, IO[str]]] = {}
        late_s = time.monotonic() + LIMIT_S
        while len(found) < self.number:
            try:
                sock, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > late_s or any(one.poll() is not None for one in self.launchers):
                    raise SystemExit(self.obituary("did not start")) from None
                continue
            sock.settimeout(None)
            # No further than its line: select() does not see what has been read already.
            hello = bytearray()
            while not hello.endswith(b"\n"):
                if not (byte := sock.recv(1)):
                    raise SystemExit(self.obituary("has lost a rank"))
                hello += byte
            found[json.loads(hello)["rank"]] = sock, sock.makefile("r")
        self.sockets = [found[rank][0] for rank in range(self.number)]
        self.answers_from = [found[rank][1] for rank in range(self.number)]

    def answers(self, limit_s: float | None = None) -> list[dict[str, Any]]:
        """A line of each rank.

        Raises:
            Late: not all ranks have answered within ``limit_s``.
            SystemExit: a rank has ended; with what the peer wrote.
        """
        late_s = None if limit_s is None else time.monotonic() + limit_s
        lines = [""] * self.number
        awaited = {sock: rank for rank, sock in enumerate(self.sockets)}
        while awaited:
            left_s = None if late_s is None else max(0.0, late_s - time.monotonic())
            ready = select.select(list(awaited), [], [], left_s)[0]
            if not ready:
                raise Late(f"{self.peer.name} was not ready after {limit_s:.0f} s")
            for sock in ready:
                rank = awaited.pop(sock)
                lines[rank] = self.answers_from[rank].readline()
                if not lines[rank]:
                    raise SystemExit(self.obituary(f"has lost rank {rank}"))
        return [json.loads(line) for line in lines]

    def obituary(self, what: str) -> str:
        time.sleep(0.5)  # for what the others, and a launcher, have to say
        self.output.seek(0)
        return f"{self.peer.name} {what}\n{self.output.read().decode(errors='replace')[-4000:]}"

    def ask(self, question: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Let all ranks do something, and return their answers."""
        if self.idle_from_ns:
            self.idle_s += time.monotonic() - self.idle_since_s
        line = (json.dumps(question) + "\n").encode()
        for sock in self.sockets:
            try:
                sock.sendall(line)
            except OSError:
                raise SystemExit(self.obituary("has lost a rank")) from None
        found = self.answers()
        self.idle_since_s = time.monotonic()
        if self.idle_from_ns:
            pairs = zip(found, self.idle_from_ns, strict=True)
            self.idle_cpu_s += sum(one["cpu_ns"][0] - before_ns for one, before_ns in pairs) / 1e9
        self.idle_from_ns = [one["cpu_ns"][1] for one in found]
        return found

    def run(self, block: Block) -> tuple[list[float], int, str]:
        """Let all ranks run a block: µs a call of the slowest rank for each loop, wrong parts, and why not at all."""
        found = self.ask(block.to_json())
        if reasons := [one["unsupported"] for one in found if "unsupported" in one]:
            return [], 0, reasons[0]
        times_us = [max(of_all) / 1e3 for of_all in zip(*(one["times_ns"] for one in found), strict=True)]
        return times_us, sum(one["wrong"] for one in found), ""

    def idle_cpu(self) -> float:
        """Of one core, what all ranks together used while they were to be idle."""
        return self.idle_cpu_s / self.idle_s if self.idle_s else 0.0

    def end(self) -> None:
        """Ask the ranks to end, and wait for them and their launchers."""
        for sock in self.sockets:
            sock.sendall(b"\n")
        late_s = time.monotonic() + 20
        for process in self.launchers:
            try:
                process.wait(max(0.0, late_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"{self.peer.name} did not end within 20 s", file=sys.stderr)

    def close(self) -> None:
        for answers in self.answers_from:
            answers.close()
        for sock in self.sockets:
            sock.close()
        self.output.close()


@contextmanager
def started(
    peers: Sequence[Peer],
    ranks: int,
    options: Mapping[str, Any],
    note: Callable[[str], None],
    program: Path = PROGRAM,
    attempts: int = 1,
    limit_s: float | None = None,
) -> Iterator[list[Ranks]]:
    """Those of ``peers`` that there can be, ready; nothing of them is left afterwards, however the block ends.

    ``options``: for each rank of ``program``. A peer that is not ready after ``limit_s`` is ended and started again.
    """
    # A short path: sockets of launchers are in there too. Memory, so that nothing is written to a disk meanwhile.
    folder = Path(tempfile.mkdtemp(prefix="peers-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    sets: list[Ranks] = []
    marks: dict[str, Ranks] = {}

    def start(peer: Peer, attempt: int) -> Ranks | None:
        own = folder / str(len(marks))
        own.mkdir()
        mark, one = secrets.token_hex(8), Ranks(peer, ranks, program)
        marks[mark] = one
        try:
            one.start(own, mark, options, limit_s)
        except Late as error:
            if attempt == attempts:
                raise SystemExit(one.obituary(f"did not start: {error}")) from None
            note(f"{error}, and was started again")
            kill(mark, one.launchers)
            return None
        return one

    try:
        for peer in peers:
            if missing := peer.missing():
                note(f"{peer.name} is left out: {missing}")
                continue
            tries = (start(peer, attempt) for attempt in range(1, attempts + 1))
            sets.append(next(filter(None, tries)))
        yield sets
        shared = set().union(*(shared_by(pid) for mark in marks for pid in marked(mark)))
        for one in sets:
            one.end()
        remove(shared)
    finally:
        with undisturbed():
            for mark, one in marks.items():
                kill(mark, one.launchers)
                one.close()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """While this lasts, Ctrl-C and SIGTERM are put off for good: what they ask for is being done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def marked(mark: str) -> list[int]:
    """The processes that were started with this mark and are still there, ranks and launchers alike."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def shared_by(pid: int) -> set[Path]:
    """The files of shared memory that a process has mapped, and those that libfabric names after it."""
    found = set(Path("/dev/shm").glob(f"{pid}:*"))
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return found
    return found | {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", maps, re.M)}


def remove(shared: set[Path]) -> None:
    for path in shared:
        path.unlink(missing_ok=True)


def kill(mark: str, launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left with this mark, and remove the shared memory that it had."""
    late_s = time.monotonic() + 10
    while (left := marked(mark)) and time.monotonic() < late_s:
        shared = set().union(*(shared_by(pid) for pid in left))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in launchers:
            process.poll()
        time.sleep(0.05)
        remove(shared)
    for process in launchers:
        process.wait()
