"""How many files a process may have open; every connection to another rank is one."""

from __future__ import annotations

import resource

from comm_orchestrator.tools.doctor.finding import Finding

__all__ = ["check", "enough", "least"]


def least(world_size: int) -> int:
    """What one group needs beside Python and torch: a connection to every rank, and on rank 0 two for the store."""
    return 128 + 3 * world_size


def enough(world_size: int) -> int:
    """What a program with several groups and data loaders gets by with."""
    return max(1024, 512 + 8 * world_size)


def check(world_size: int) -> list[Finding]:
    """The limit of this process, against what ``world_size`` ranks ask for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_number(soft)} open files allowed, {_number(hard)} at most"
    wanted = enough(world_size)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return [Finding("ok", "open_files", text)]
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}"
    if soft < least(world_size):
        level, text = "problem", f"{text}; {ranks} cannot connect with less than {least(world_size)}"
    else:
        level, text = "warning", f"{text}; with {ranks} a program with several groups may need {wanted}"
    remedy = f"ulimit -n {wanted}"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        remedy = (
            f"raise the hard limit to {wanted}: 'nofile' in /etc/security/limits.conf, LimitNOFILE= of whatever "
            f"starts the ranks, or docker run --ulimit nofile={wanted}"
        )
    return [Finding(level, "open_files", text, remedy)]  # type: ignore[arg-type]


def _number(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
