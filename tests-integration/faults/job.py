"""Run one cell, or one schedule: start the ranks, wait for their end, and see what they leave."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comm_utils.testing.environment import PortReservation
from faults.cells import BACKENDS, Cell
from faults.host import Host
from faults.record import Record, read_rank
from faults.scene import Spec
from faults.scenes.rings import is_ring
from faults.table import WORLD_SIZE

__all__ = ["STRICT", "run_cell", "run_job"]

#: What makes checks strict.
STRICT = {"COMM_CHECKS__MISMATCH": "strict"}
_DEADLINE_S = 40.0
_INTERVAL_S = 0.02
_STACKS_S = 0.3
# Scenes with a process behind the ranks.
_BESIDE = ("starting:port_taken", "starting:store_killed")


def run_cell(cell: Cell, hosts: Sequence[Host]) -> Record:
    """Run a cell on so many hosts as its row asks for."""
    row = cell.row
    _, backend, environ = BACKENDS[cell.backend]
    spec = Spec(
        scene=row.scene,
        moment=cell.moment,
        backend=backend,
        rank=0,
        world_size=WORLD_SIZE,
        culprit=row.culprit,
        survivors=[rank for rank in range(WORLD_SIZE) if not (row.dies and rank == row.culprit)],
        folder="",
        ports=[],
    )
    return run_job(spec, {**environ, **(STRICT if cell.strict else {})}, hosts)


def run_job(spec: Spec, environ: dict[str, str], hosts: Sequence[Host]) -> Record:
    """Start the ranks of a job, of which the last host has the last, and wait for their end."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(3):
            reservation = PortReservation()
            stack.callback(reservation.close)
            ports.append(reservation.port)
        folder = hosts[0].folder / "job"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        job = _Job(Spec(**{**asdict(spec), "folder": str(folder), "ports": ports}), environ, hosts)
        try:
            return job.run()
        finally:
            for host in hosts:
                host.clear()


class _Job:
    def __init__(self, spec: Spec, environ: dict[str, str], hosts: Sequence[Host]) -> None:
        self._spec, self._environ, self._hosts = spec, environ, hosts
        self._folder = Path(spec.folder)
        self._ranks = spec.world_size + (spec.scene in _BESIDE)
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}

    def run(self) -> Record:
        begin = time.monotonic()
        for rank in range(self._ranks):
            self._start(rank)
        while (running := self._running()) and time.monotonic() < begin + _DEADLINE_S:
            self._cut_the_link()
            time.sleep(_INTERVAL_S)
        for rank in running:
            self._signal(rank, signal.SIGUSR1)  # writes its stacks
        if running:
            time.sleep(_STACKS_S)
        codes = dict(self._codes)
        self._end_all()
        left: dict[str, Any] = {"processes": {}, "files": [], "rings": [], "listening": []}
        for host in self._hosts:
            found = host.left()
            left["processes"] |= found["processes"]
            for file in found["files"]:
                left["rings" if is_ring(file) else "files"].append(file)
            left["listening"] += found["listening"]
        told = [
            read_rank(self._folder, rank, self._pids[rank], codes.get(rank)) for rank in range(self._spec.world_size)
        ]
        return Record(told, time.monotonic() - begin, running, **left, postmortem=self._postmortem(codes))

    def _host(self, rank: int) -> Host:
        return self._hosts[-1 if rank == self._spec.world_size - 1 else 0]

    def _start(self, rank: int) -> None:
        host = self._host(rank)
        two = len(self._hosts) > 1
        alone = two and rank == self._spec.world_size - 1
        environ = host.environment(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._spec.world_size),
                "LOCAL_RANK": "0" if alone else str(rank),
                "LOCAL_WORLD_SIZE": str(1 if alone else self._spec.world_size - two),
                "MASTER_ADDR": self._hosts[0].name if two else "127.0.0.1",
                **self._environ,
            }
        )
        spec = {**asdict(self._spec), "rank": rank}
        self._pids[rank] = host.ask("start", environ, str(self._folder / f"rank{rank}.out"), spec)

    def _running(self) -> list[int]:
        """Return the ranks whose end is waited for: neither one that stays stopped nor a process behind the ranks."""
        for host in self._hosts:
            ended = host.ask("poll")["ended"]
            for rank, pid in self._pids.items():
                if rank not in self._codes and self._host(rank) is host and str(pid) in ended:
                    self._codes[rank] = ended[str(pid)]
                    (self._folder / f"told-gone-{rank}").touch()
        waited_for = range(self._spec.world_size) if self._stays() else self._spec.survivors
        return [rank for rank in waited_for if rank not in self._codes]

    def _stays(self) -> bool:
        return not self._spec.scene.endswith(":stopped")

    def _cut_the_link(self) -> None:
        if (self._folder / "told-cut").exists() and not (self._folder / "told-is-cut").exists():
            self._hosts[0].ask("run", ["ip", "link", "set", "eth0", "down"])
            (self._folder / "told-is-cut").touch()

    def _end_all(self) -> None:
        for rank in self._pids:
            if rank not in self._codes:
                self._signal(rank, signal.SIGKILL)
        end = time.monotonic() + 5
        while time.monotonic() < end and len(self._codes) < len(self._pids):
            self._running()
            time.sleep(_INTERVAL_S)
        if len(self._hosts) > 1:
            self._hosts[0].ask("run", ["ip", "link", "set", "eth0", "up"])

    def _signal(self, rank: int, number: int) -> None:
        self._host(rank).ask("signal", self._pids[rank], int(number))

    def _postmortem(self, codes: dict[int, int]) -> str:
        """Return the verdict of ``commctl postmortem`` where the library has aborted a rank."""
        if -signal.SIGABRT not in codes.values():
            return ""
        folders = {str(Path(file).parent) for file in self._hosts[0].left()["files"] if is_ring(file)}
        if not folders:
            return "there is no ring"
        return str(
            self._hosts[0].ask("run", [sys.executable, "-m", "comm_orchestrator", "postmortem", max(folders, key=len)])[
                "output"
            ]
        )
