"""Peers compared while the cores are placed alike, on machines whose cores move between complexes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from measuring import cores

from peers.processes import Ranks
from peers.rank import CORES
from peers.results import Results, row
from peers.tasks import Block, Task, ways

__all__ = ["Placements", "measure_by_placement", "round_trip"]

SOURCE = Path(__file__).resolve().parents[1] / "native" / "latency.cpp"
ROUND_TRIPS = 300
# Round trips are of one placement where the longer takes less than so many times the shorter.
ALIKE = 1.5
# How long the blocks of a task may take, whether or not each placement had all of them.
LIMIT_S = 40.0


def round_trip() -> Callable[[], float]:
    """Compile the measurement of a round trip between the two cores of the ranks, in ns.

    Raises:
        SystemExit: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("--placements: there is no C++ compiler (Debian: apt-get install g++)")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "latency.so"
        command = [compiler, "-O2", "-std=c++17", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    measured = loaded.round_trip_ns
    measured.restype = ctypes.c_double
    first, second = cores(CORES)[:2]
    return lambda: float(measured(first, second, ROUND_TRIPS))


@dataclass
class Placements:
    """Results for each placement, by the round trip that was seen first in it."""

    of: dict[float, Results] = field(default_factory=dict)

    def find(self, round_trip_ns: float) -> float:
        """Return the placement, by its round trip in ns; a new one where none is alike."""

        def ratio(known_ns: float) -> float:
            return max(known_ns, round_trip_ns) / min(known_ns, round_trip_ns)

        nearest = min(self.of, key=ratio, default=None)
        if nearest is None or ratio(nearest) >= ALIKE:
            self.of[round_trip_ns] = Results()
            return round_trip_ns
        return nearest

    def blocks(self, placement: float, task: Task, name: str) -> int:
        return len(self.of[placement].rounds_us.get(task.by(""), {}).get(name, []))


def measure_by_placement(
    sets: Sequence[Ranks],
    tasks: Sequence[Task],
    placements: Placements,
    rounds: int,
    quick: bool,
    note: Callable[[str], None],
) -> None:
    """Let the peers run blocks in turns until each has had ``rounds`` of them in every placement that was seen.

    A block counts where the round trips before and after it are of one placement.

    Raises:
        SystemExit: a result is wrong, or a rank has ended.
    """
    measured = round_trip()
    for task in tasks:
        turns = [(task.by(way), one) for one in sets for way in ways(one.peer.name, task)]
        began_s, first, seen = time.monotonic(), True, set[float]()
        while turns and time.monotonic() - began_s < LIMIT_S:
            for turn in list(turns):
                asked, one = turn
                before = placements.find(measured())
                times_us, wrong, unsupported = one.run(Block.of(asked, first, quick, slow=one.peer.apart))
                if unsupported:
                    turns.remove(turn)
                    continue
                if wrong:
                    raise SystemExit(f"{one.peer.name}, {asked}: {wrong} parts of the results are wrong")
                if placements.find(measured()) == before and not first:
                    placements.of[before].add(asked, one.peer.name, times_us)
                    seen.add(before)
            first = False
            if seen and all(
                placements.blocks(where, asked, row(one.peer.name, asked.way)) >= rounds
                for where in seen
                for asked, one in turns
            ):
                break
        else:
            note(f"{task.operation}, {task.size_bytes} B: after {LIMIT_S:.0f} s, some placement has fewer blocks")
