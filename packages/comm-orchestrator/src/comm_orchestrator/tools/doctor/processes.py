"""Check that ranks see each other's processes in ``/proc``."""

from __future__ import annotations

import os
from pathlib import Path

from comm_orchestrator.tools.doctor.finding import Finding

__all__ = ["check_processes"]

_SHOWS_ALL = ("0", "off")
_FIELDS_OF_MOUNT = 4


def check_processes(proc: Path = Path("/proc")) -> list[Finding]:
    """Return whether this process sees those of others, of which errors say that they have ended or are stopped."""
    if not (proc / "self" / "stat").exists():
        text = f"{proc} is not mounted: ccl cannot use shared memory, and errors do not say which rank has ended"
        return [_finding("warning", text, f"mount it: mount -t proc proc {proc}")]
    hidden = _hides(proc)
    if hidden is not None and os.geteuid() != 0:
        text = (
            f"{proc} hides processes (hidepid={hidden}): errors do not say whether a rank has ended or is stopped "
            "where it runs as another user, or may not be traced"
        )
        return [_finding("warning", text, f"mount -o remount,hidepid=0 {proc}, or run all ranks as one user")]
    return [_finding("ok", f"{proc} shows the processes of this host")]


def _hides(proc: Path) -> str | None:
    """Return how the newest mount of ``proc`` hides processes; None where it shows all, or does not say."""
    options: list[str] = []
    try:
        mounts = (proc / "self" / "mounts").read_text(errors="replace")
    except OSError:
        return None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) >= _FIELDS_OF_MOUNT and fields[1:3] == [str(proc), "proc"]:
            options = fields[3].split(",")
    found = next((one.partition("=")[2] for one in options if one.startswith("hidepid=")), None)
    return None if found in _SHOWS_ALL else found


def _finding(level: str, text: str, remedy: str = "") -> Finding:
    return Finding(level, "processes", text, remedy, of_host=True)  # type: ignore[arg-type]
