"""Check the limits of a host: open files, where every connection to a rank is one, and shared memory."""

from __future__ import annotations

import os
import resource
import stat
import tempfile
from pathlib import Path

from comm_orchestrator.tools.doctor.finding import Finding
from comm_utils.process_limits import GLOO_DESCRIPTORS, descriptors_to_start, free_descriptors

__all__ = [
    "FULL_BYTES_PER_RANK",
    "MIN_BYTES_PER_RANK",
    "check_open_files",
    "check_shared_memory",
    "enough_open_files",
    "least_open_files",
]


def least_open_files(rank: int, world_size: int, local_size: int) -> int:
    """Return the number of files below which ``init_distributed()`` refuses to start, beside those that are open."""
    return max(descriptors_to_start(rank, world_size, local_size, ""), GLOO_DESCRIPTORS + world_size)


def enough_open_files(world_size: int) -> int:
    """Return the resources that suffice for several groups and data loaders."""
    return max(1024, 512 + 8 * world_size)


def check_open_files(rank: int, world_size: int, local_size: int) -> list[Finding]:
    """Return the limit of this process, against what it needs as a rank of a world, with so many on this host."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} open files allowed, {_number(hard)} at most"
    wanted = enough_open_files(world_size)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return [Finding("ok", "open_files", text)]
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    free, least = free_descriptors(), least_open_files(rank, world_size, local_size)
    if free is not None and free < least:
        opened = f"{soft - free} are open"
        level, text = "problem", f"{text}, and {opened}; {ranks} cannot connect with less than {soft - free + least}"
    else:
        text = f"{text}; {ranks} can connect, but rank 0 of many ranks, or a program with several groups"
        level, text = "warning", f"{text}, may need {wanted}"
    remedy = f"ulimit -n {wanted}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        remedy = (
            f"raise the hard limit to {wanted}: 'nofile' in /etc/security/limits.conf, LimitNOFILE= of whatever "
            f"starts the ranks, or docker run --ulimit nofile={wanted}"
        )
    return [Finding(level, "open_files", text, remedy)]  # type: ignore[arg-type]


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


_MIB = 1024**2
#: below this, libraries run short of it under load
MIN_BYTES_PER_RANK = 64 * _MIB
#: below this, they end with a bus error at the start
FULL_BYTES_PER_RANK = 8 * _MIB


def check_shared_memory(local_ranks: int, folder: Path = Path("/dev/shm")) -> list[Finding]:
    """Return whether ``local_ranks`` processes can share memory."""
    try:
        mode, size = stat.S_IMODE(folder.stat().st_mode), os.statvfs(folder)
    except OSError as error:
        text = f"{folder} cannot be used ({error.strerror})"
        return [_finding("problem", text, f"mount it: mount -t tmpfs -o mode=1777 shm {folder}")]
    findings = []
    rights = f"chmod 1777 {folder}"
    if (why := _refusal(folder)) is not None:
        findings.append(_finding("problem", f"{folder} (mode {mode:04o}) cannot be written to: {why}", rights))
    elif mode != 0o1777:
        findings.append(_finding("warning", f"{folder} has mode {mode:04o} instead of 1777", rights))
    free, total = size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize
    ranks = f"{local_ranks} rank{'s' if local_ranks != 1 else ''}"
    text = f"{folder}: {_mib(free)} of {_mib(total)} free, for {ranks} here"
    wanted = MIN_BYTES_PER_RANK * local_ranks
    if free >= wanted:
        return findings or [_finding("ok", text)]
    level = "problem" if free < FULL_BYTES_PER_RANK * local_ranks else "warning"
    text += f"; less than the {_mib(MIN_BYTES_PER_RANK)} a rank that should be"
    size_mib = max(1024, -(-2 * wanted // _MIB))
    if total >= 2 * wanted:
        remedy = f"remove what dead processes left in {folder} (ls -l {folder})"
    else:
        remedy = (
            f"docker run --shm-size={size_mib}m or --ipc=host; elsewhere mount -o remount,size={size_mib}m {folder}"
        )
    return [*findings, _finding(level, text, remedy)]


def _refusal(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _finding(level: str, text: str, remedy: str = "") -> Finding:
    return Finding(level, "shared_memory", text, remedy, of_host=True)  # type: ignore[arg-type]


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f} MiB" if size < 10 * 1024 * _MIB else f"{size / 1024 / _MIB:.0f} GiB"
