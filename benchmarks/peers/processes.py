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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from peers.catalogue import Peer
from peers.rank import LIMIT_S
from peers.tasks import Block

__all__ = ["Ranks", "started"]

PROGRAM = Path(__file__).with_name("__main__.py")
# By which everything that was started is found again, whichever launcher is between.
MARK = "BENCH_PEERS_RUN"


@dataclass
class Ranks:
    """All ranks of one peer; ``sockets`` and ``pids`` by rank."""

    peer: Peer
    number: int
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

    def start(self, folder: Path, mark: str, memory_bytes: tuple[int, int]) -> None:
        meeting, path = folder / "meeting", str(folder / "socket")
        meeting.write_bytes(bytes(mmap.PAGESIZE))
        options = {"module": self.peer.module, "ranks": self.number, "meeting": str(meeting), "socket": path}
        options |= dict(zip(("source_bytes", "target_bytes"), memory_bytes, strict=True))
        program = [sys.executable, str(PROGRAM), "--serve", json.dumps(options)]
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
        for answer in self.answers():
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
            answers = sock.makefile("r")
            hello = json.loads(answers.readline())
            found[hello["rank"]] = sock, answers
        self.sockets = [found[rank][0] for rank in range(self.number)]
        self.answers_from = [found[rank][1] for rank in range(self.number)]

    def answers(self) -> list[dict[str, Any]]:
        """A line of each rank.

        Raises:
            SystemExit: a rank has ended; with what the peer wrote.
        """
        lines = [""] * self.number
        awaited = {sock: rank for rank, sock in enumerate(self.sockets)}
        while awaited:
            for sock in select.select(list(awaited), [], [])[0]:
                rank = awaited.pop(sock)
                lines[rank] = self.answers_from[rank].readline()
                if not lines[rank]:
                    raise SystemExit(self.obituary(f"has lost rank {rank}"))
        return [json.loads(line) for line in lines]

    def obituary(self, what: str) -> str:
        time.sleep(0.5)  # for what the others, and a launcher, have to say
        self.output.seek(0)
        return f"{self.peer.name} {what}\n{self.output.read().decode(errors='replace')[-4000:]}"

    def run(self, block: Block) -> tuple[list[float], int, str]:
        """Let all ranks run a block: µs a call of the slowest rank for each loop, wrong parts, and why not at all."""
        if self.idle_from_ns:
            self.idle_s += time.monotonic() - self.idle_since_s
        question = (json.dumps(block.to_json()) + "\n").encode()
        for sock in self.sockets:
            try:
                sock.sendall(question)
            except OSError:
                raise SystemExit(self.obituary("has lost a rank")) from None
        found = self.answers()
        self.idle_since_s = time.monotonic()
        if self.idle_from_ns:
            pairs = zip(found, self.idle_from_ns, strict=True)
            self.idle_cpu_s += sum(one["cpu_ns"][0] - before_ns for one, before_ns in pairs) / 1e9
        self.idle_from_ns = [one["cpu_ns"][1] for one in found]
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
    peers: Sequence[Peer], ranks: int, memory_bytes: tuple[int, int], note: Callable[[str], None]
) -> Iterator[list[Ranks]]:
    """Those of ``peers`` that there can be, ready; nothing of them is left afterwards, however the block ends."""
    mark = secrets.token_hex(8)
    # A short path: sockets of launchers are in there too. Memory, so that nothing is written to a disk meanwhile.
    folder = Path(tempfile.mkdtemp(prefix="peers-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    sets: list[Ranks] = []
    try:
        for number, peer in enumerate(peers):
            if missing := peer.missing():
                note(f"{peer.name} is left out: {missing}")
                continue
            own = folder / str(number)
            own.mkdir()
            sets.append(Ranks(peer, ranks))
            sets[-1].start(own, mark, memory_bytes)
        yield sets
        shared = set().union(*(shared_by(pid) for pid in marked(mark)))
        for one in sets:
            one.end()
        remove(shared)
    finally:
        with undisturbed():
            kill(mark, [process for one in sets for process in one.launchers])
            for one in sets:
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
