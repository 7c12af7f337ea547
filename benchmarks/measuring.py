"""What the benchmarks of this folder have in common; nothing here needs torch to be imported."""

from __future__ import annotations

import mmap
import os
import platform
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

__all__ = [
    "KIB",
    "LEAST_ROUNDS",
    "MIB",
    "PERIOD",
    "Meeting",
    "Ratio",
    "Run",
    "Table",
    "Verdict",
    "cores",
    "fill",
    "free_memory_bytes",
    "free_port",
    "instruction_sets",
    "interval",
    "judged",
    "machine",
    "named",
    "output_file",
    "positive",
    "put_between",
    "running",
    "targets_table",
    "timed_run",
]

KIB, MIB = 2**10, 2**20
# Elements after which the data repeats: a prime, so that no two parts of a power of two are alike.
PERIOD = 1048573
# Of an interval.
LEAST_ROUNDS = 4
# Of the bootstrap.
_DRAWS = 400


def positive(text: str) -> int:
    """Return the value of an option that is a count.

    Raises:
        ArgumentTypeError: it is no number, or below 1.
    """
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"got {text!r}, expected a number of at least 1")
    return int(text)


def output_file(text: str) -> Path:
    """Return the path that an option names; a file can be written there, as far as can be seen before the measurement.

    Raises:
        ArgumentTypeError: none can.
    """
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ArgumentTypeError(f"cannot write {text}: name a file in a folder that exists and can be written")
    return path


class Meeting:
    """Where the ranks of a peer wait for one another, outside of what is measured.

    ``fd``: a page of zeros that all of them have; each writes to a line of its own. ``oversubscribed``: there are more
    ranks than cores, so that one that only spins keeps off the one that it waits for.
    """

    def __init__(self, fd: int, rank: int, ranks: int, oversubscribed: bool = False) -> None:
        self.memory = mmap.mmap(fd, mmap.PAGESIZE)
        self.met, self.mine = 0, 64 * rank
        self.others = [64 * other for other in range(ranks) if other != rank]
        self.oversubscribed = oversubscribed

    def __call__(self) -> None:
        """Return when the other ranks are here too; they may be at the next meeting already."""
        memory = self.memory
        met = self.met = (self.met + 1) % 256
        memory[self.mine] = met
        for other in self.others:
            while (memory[other] - met) % 256 > 1:
                if self.oversubscribed:
                    os.sched_yield()


def fill(parts: Sequence[Any], values: Any) -> None:
    """Write ``values`` to the beginning of each tensor of ``parts``."""
    for part in parts:
        part.copy_(values[: part.numel()])


def interval(of_rounds: Callable[[Sequence[int]], float], rounds: int) -> tuple[float, float]:
    """The 95 % interval of a statistic of some rounds, by bootstrap over rounds.

    ``of_rounds``: the statistic of the rounds of these numbers. Of fewer rounds than ``LEAST_ROUNDS``, it is its own
    interval.
    """
    if rounds < LEAST_ROUNDS:
        whole = of_rounds(range(rounds))
        return whole, whole
    random = Random(0)
    found = sorted(of_rounds(random.choices(range(rounds), k=rounds)) for _ in range(_DRAWS))
    return found[_DRAWS // 40], found[-1 - _DRAWS // 40]


@dataclass(frozen=True)
class Ratio:
    """A ratio of two statistics of rounds, and the ends of its 95 % interval."""

    value: float
    lower: float
    upper: float

    @classmethod
    def of(
        cls,
        of: Sequence[float],
        to: Sequence[float],
        statistic: Callable[[Iterator[float]], float] = statistics.median,
    ) -> Ratio:
        """Return the statistic of some rounds over that of others, round by round measured after one another."""

        def of_rounds(some: Sequence[int]) -> float:
            return statistic(of[one] for one in some) / statistic(to[one] for one in some)

        count = min(len(of), len(to))
        return cls(of_rounds(range(count)), *interval(of_rounds, count))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.lower:.2f} to {self.upper:.2f})"


@dataclass(frozen=True)
class Verdict:
    """A target of a benchmark, and what was found where it is hardest: ``found`` is a ratio, as it is printed."""

    target: str
    where: str
    found: str
    met: bool

    @classmethod
    def at_least(cls, target: str, least: float, ratios: Mapping[str, Ratio]) -> Verdict:
        """Judge ratios, by where they were found: the lower end of each interval is at least ``least``."""
        where, ratio = min(ratios.items(), key=lambda one: one[1].lower)
        return cls(target, where, str(ratio), ratio.lower >= least)

    @classmethod
    def never_below(cls, target: str, ratios: Mapping[str, Ratio]) -> Verdict:
        """Judge ratios of what may be equal: each interval reaches 1."""
        where, ratio = min(ratios.items(), key=lambda one: one[1].upper)
        return cls(target, where, str(ratio), ratio.upper >= 1)

    @classmethod
    def within(cls, target: str, share: float, shares: Mapping[str, float], less: bool = False) -> Verdict:
        """Judge what was counted over what was expected: it is off by at most ``share``; ``less``: or below it."""
        where, found = max(shares.items(), key=lambda one: one[1] - 1 if less else abs(one[1] - 1))
        return cls(target, where, f"{found:.3f}", found <= 1 + share and (less or found >= 1 - share))


def judged(met: bool) -> str:
    """Return the word for a target on a page."""
    return "met" if met else "**missed**"


@dataclass(frozen=True)
class Table:
    """A table for a terminal and for a page of Markdown."""

    title: str
    head: list[str]
    lines: list[list[str]]

    def text(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.head, *self.lines, strict=True)]
        lines = [
            "  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])))
            for line in (self.head, *self.lines)
        ]
        return "\n".join((self.title, *(f"  {line}" for line in lines)))

    def markdown(self) -> str:
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = "\n".join(f"| {' | '.join(line)} |" for line in (self.head, rule, *self.lines))
        return f"{self.title}:\n\n{lines}"


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a line for each target."""
    head = ["target", "hardest at", "ratio (95 % interval)", ""]
    return Table("Targets", head, [[one.target, one.where, one.found, judged(one.met)] for one in verdicts])


def cores(number: int) -> list[int]:
    """The first ``number`` cores that this process may use.

    Raises:
        SystemExit: there are fewer.
    """
    found = sorted(os.sched_getaffinity(0))
    if len(found) < number:
        raise SystemExit(f"got {len(found)} core, expected {number}")
    return found[:number]


@dataclass
class Run:
    """A run of a program that compares libraries.

    Attributes:
        notes: the texts of :meth:`note`, each once.
        wall_s: how long the measurement took, once it is over.
    """

    notes: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def note(self, text: str) -> None:
        """Print a text, and keep it for the page."""
        if text not in self.notes:
            self.notes.append(text)
            print(text, flush=True)


@contextmanager
def timed_run(number: int) -> Iterator[Run]:
    """Time the block, which takes ``number`` cores; Ctrl-C and SIGTERM end the program without a traceback."""
    cores(number)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run, started_s = Run(), time.monotonic()
    try:
        yield run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run.wall_s = time.monotonic() - started_s


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def put_between(page: Path, begin: str, end: str, make: Callable[[str], str]) -> None:
    """Replace the lines between two marks of a page by ``make`` of them; it is never seen half written.

    Raises:
        SystemExit: the page does not have both marks.
    """
    from comm_utils.atomic_write import replacing

    before, begun, rest = page.read_text(encoding="utf-8").partition(f"{begin}\n")
    old, ended, after = rest.partition(end)
    if not begun or not ended:
        raise SystemExit(f"got no lines {begin!r} and {end!r} in {page}, expected both; put them back")
    with replacing(page) as file:
        file.write(f"{before}{begun}{make(old)}{end}{after}")


@contextmanager
def running(starts: Mapping[str, Callable[[], subprocess.Popen[str]]]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Start a process for each name, and wait for their end after the block; none is left, also after SIGTERM.

    Raises:
        SystemExit: a process failed. The others are killed at once, as they may wait for it.
    """
    found: dict[str, subprocess.Popen[str]] = {}
    failed: list[str] = []
    ended, end = os.pipe()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def watch() -> None:
        by_fd = {os.pidfd_open(process.pid): name for name, process in found.items()}
        waiting = select.poll()
        for fd in (ended, *by_fd):
            waiting.register(fd, select.POLLIN)
        over = False
        while not over:
            for fd, _ in waiting.poll():
                over |= fd == ended
                if fd in by_fd:
                    waiting.unregister(fd)
                    name = by_fd[fd]
                    if (status := found[name].wait()) and not failed:
                        failed.append(f"{name} ended with exit status {status}, expected 0")
                        kill_all()
        for fd in by_fd:
            os.close(fd)

    def kill_all() -> None:
        for process in found.values():
            process.kill()

    watcher = Thread(target=watch, daemon=True)
    try:
        for name, start in starts.items():
            found[name] = start()
        watcher.start()
        yield found
        for process in found.values():
            process.wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what it asks for is being done
        os.close(end)  # which the thread sees, after the processes that have ended by now
        if watcher.ident is not None:
            watcher.join()
        os.close(ended)
        kill_all()
        for process in found.values():
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
                pipe.close()
        signal.signal(signal.SIGTERM, before)
        if failed:
            raise SystemExit(failed[0])


def free_memory_bytes() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * KIB


def named(size_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes} B"


def _first_processor() -> dict[str, str]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    # Of the first processor; others follow.
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(info))}


def instruction_sets() -> frozenset[str]:
    """The optional instruction sets of this processor, under the kernel's names (``avx512bw``)."""
    return frozenset(_first_processor().get("flags", "").split())


def machine() -> dict[str, Any]:
    facts = _first_processor()
    cpu = facts.get("model name") or platform.processor() or platform.machine()
    family, model = facts.get("cpu family"), facts.get("model")
    return {
        "cpu": cpu,
        # Virtual machines hide the product behind a name of their own.
        "processor": f"{cpu}, family {family}, model {model}" if family and model else cpu,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
    }
