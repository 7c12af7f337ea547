"""Limits of this process that leave no room to communicate, found before a library fails in the middle of its start.

gloo ends the process where a connection comes in and no descriptor is left for it, or where it can start no thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from pathlib import Path

from comm_utils import threads
from comm_utils.cgroup_limits import most_tasks
from comm_utils.errors import BackendUnavailableError

__all__ = [
    "DESCRIPTORS_TO_START",
    "GLOO_DESCRIPTORS",
    "check_address_space",
    "check_descriptors",
    "check_threads",
    "descriptors_to_start",
    "free_descriptors",
    "lack_of_threads",
    "start_thread",
]

#: The rendezvous and the smallest world, of two ranks, take about 20.
DESCRIPTORS_TO_START = 24
#: Of a group of gloo, beside one for each member, with some to spare for what the program opens meanwhile.
GLOO_DESCRIPTORS = 8

# Of Python, and of C++'s std::thread.
_NO_THREAD = re.compile(r"can't start new thread|Resource temporarily unavailable", re.IGNORECASE)


def check_descriptors(who: str, needed: int) -> None:
    """Check that this process may open ``needed`` more files.

    Args:
        who: the call and the rank, for the message.

    Raises:
        BackendUnavailableError: it may not; names the limit and how to raise it.
    """
    free = free_descriptors()
    if free is None or free >= needed:
        return
    raise BackendUnavailableError(
        f"{who} can open {free} more files, the limit is {_limit('RLIMIT_NOFILE')}; expected {needed} at least: close "
        "files and destroy groups that are not used any more, or raise the limit before the start (ulimit -n 4096, or "
        "LimitNOFILE= of a service)"
    )


def descriptors_to_start(rank: int, world_size: int, local_size: int, backend: str) -> int:
    """Return how many more files a rank opens to start a world, with some to spare for the program.

    The watch maps the ring of each rank of this host and holds its process; gloo connects all ranks, and rank 0 serves
    the store to them.

    Args:
        local_size: the ranks of this host.
        backend: its name; "" where it is not known yet, which counts as ccl.
    """
    libraries = {*re.split("[:,]", backend.lower() or "ccl")}
    further, further_here = max(0, world_size - 2), max(0, local_size - 2)
    connections = further * (("gloo" in libraries) + (rank == 0))
    return DESCRIPTORS_TO_START + further_here * 2 + connections


def free_descriptors() -> int | None:
    """Return how many more files this process may open; None where that is unlimited or not known."""
    limit = _limit("RLIMIT_NOFILE")
    if limit is None:
        return None
    try:
        return max(0, limit - len(os.listdir("/proc/self/fd")) + 1)  # one was for listing them
    except FileNotFoundError:  # no Linux
        return None
    except OSError:  # no descriptor for listing them
        return 0


def check_address_space(who: str, needed_mib: int) -> None:
    """Check that this process may map ``needed_mib`` MiB more.

    Args:
        who: the call and the rank, for the message.

    Raises:
        BackendUnavailableError: it may not; names the limit and how to raise it.
    """
    limit = _limit("RLIMIT_AS")
    if limit is None:
        return
    with contextlib.suppress(OSError):
        mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        free_mib = max(0, limit - mapped) >> 20
        if free_mib < needed_mib:
            raise BackendUnavailableError(
                f"{who} can map {free_mib} MiB more, the limit of its address space is {limit >> 20} MiB; expected "
                f"{needed_mib} MiB at least: raise the limit before the start (ulimit -v unlimited, or LimitAS= of a "
                "service)"
            )


def check_threads(who: str, needed: int) -> None:
    """Check that this process can start ``needed`` more threads, by starting them.

    Args:
        who: the call and the rank, for the message.

    Raises:
        BackendUnavailableError: it cannot; names the limits and how to raise them.
    """
    all_run = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(needed):
            thread = threading.Thread(target=all_run.wait, daemon=True)
            threads.start(thread)
            started.append(thread)
    except RuntimeError as error:
        raise BackendUnavailableError(f"{who}: {lack_of_threads(error) or error}") from error
    finally:
        all_run.set()
        for thread in started:
            thread.join()


def start_thread(thread: threading.Thread, who: str, otherwise: str = "") -> None:
    """Start a thread that a call needs.

    Args:
        who: the call, for the message.
        otherwise: does without the thread.

    Raises:
        BackendUnavailableError: there can be no more threads; names the limits and how to raise them.
    """
    try:
        threads.start(thread)
    except RuntimeError as error:
        lack = lack_of_threads(error) or str(error)
        raise BackendUnavailableError(f"{who}: {lack}{f'; or {otherwise}' if otherwise else ''}") from error


def _limit(name: str) -> int | None:
    """Return a limit of this process by its name in ``resource``; None where it has none."""
    if sys.platform == "win32":
        return None
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return None if soft == resource.RLIM_INFINITY else int(soft)


def lack_of_threads(error: BaseException) -> str:
    """Return that this process may start no more threads, and how to raise the limits; "" for other failures."""
    found = _NO_THREAD.search(str(error))
    if found is None:
        return ""
    of_user, of_cgroup = _limit("RLIMIT_NPROC"), most_tasks()
    limits = f"the user's limit is {'unlimited' if of_user is None else of_user}"
    if of_cgroup is not None:
        limits += f", that of the cgroup {of_cgroup[0]} ({of_cgroup[1]})"
    return (
        f"this process cannot start another thread; {limits}: raise what is too low before the start (ulimit -u, "
        f"TasksMax= of a service, or pids.max of a container's cgroup), or have other programs end [{found[0]}]"
    )
