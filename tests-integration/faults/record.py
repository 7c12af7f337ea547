"""What came of a cell: read from what the ranks wrote down, and from what they left."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Record", "Told", "read_rank"]


@dataclass(frozen=True)
class Told:
    """What became of one rank.

    Attributes:
        pid: its process id.
        exit_code: negative for a signal; None where the runner had to kill it.
        events: as it wrote them down.
        output: its stdout and stderr.
    """

    rank: int
    pid: int
    exit_code: int | None
    events: list[dict[str, Any]]
    output: str

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of this name."""
        return [one for one in self.events if one["event"] == event]

    @property
    def error(self) -> dict[str, Any] | None:
        """The first call that raised after the rank was ready."""
        ready = self.of("ready")
        found = [one for one in self.of("raised") if ready and one["t"] >= ready[0]["t"]]
        return found[0] if found else (self.of("raised") or [None])[0]  # type: ignore[list-item]

    def begun_after(self, moment: float) -> float:
        """Return when its first affected call began: the fault, or the first call after the rank was ready."""
        ready = self.of("ready")
        begun = [one["t"] for one in self.of("begin") if ready and one["t"] >= ready[0]["t"]]
        return max(moment, begun[0]) if begun else moment


@dataclass(frozen=True)
class Record:
    """All ranks of a cell, the seconds it took, and what was left behind."""

    ranks: list[Told]
    seconds: float
    hung: list[int]
    processes: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    rings: list[str] = field(default_factory=list)
    listening: list[int] = field(default_factory=list)
    postmortem: str = ""

    @property
    def is_clean(self) -> bool:
        """True where no call failed and every rank ended well."""
        return all(told.exit_code == 0 and not told.of("raised") for told in self.ranks)

    @property
    def fault_at(self) -> float:
        """When it happened; a cell without it has not come that far."""
        found = [one["t"] for told in self.ranks for one in told.of("fault")]
        return min(found) if found else 0.0

    def seconds_of(self, told: Told) -> float | None:
        """Return the seconds from the fault, or from the call that had to fail, to the error."""
        if told.error is None:
            return None
        return float(told.error["t"]) - told.begun_after(self.fault_at)


def read_rank(folder: Path, rank: int, pid: int, exit_code: int | None) -> Told:
    """Return what a rank has written into the folder of its cell."""
    log, output = folder / f"rank{rank}.jsonl", folder / f"rank{rank}.out"
    lines = log.read_text().splitlines() if log.exists() else []
    said = output.read_text(errors="replace") if output.exists() else ""
    return Told(rank, pid, exit_code, [json.loads(line) for line in lines], said)
