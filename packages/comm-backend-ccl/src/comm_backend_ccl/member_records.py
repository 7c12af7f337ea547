"""The records by which the members of a group make it, through a store in which any process may write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comm_backend_ccl import host_profile, placement
from comm_backend_ccl.peers import Process
from comm_utils import json_files
from comm_utils.errors import ArgumentError, BackendUnavailableError

__all__ = ["MOST_BYTES", "Member", "Memory", "member", "memory", "problem"]

#: Of one record; a profile has at most 4096 rows of about 100 bytes.
MOST_BYTES = 1 << 20
_MOST_ID = 2**31


@dataclass(frozen=True)
class Member:
    """One member, as it says itself.

    Attributes:
        unavailable: why it cannot use shared memory; None where it can.
        failure: why it cannot use oneCCL; None where nothing has failed.
        settings: how its groups move data.
        build: its release of this package.
        address: where it listens while the group is made, for members that cannot be connected; "" where it does not.
    """

    process: Process
    place: placement.Place
    unavailable: str | None
    failure: str | None
    settings: list[str]
    build: str
    address: str


@dataclass(frozen=True)
class Memory:
    """The memory that the first member made, and how the group begins.

    Attributes:
        descriptor, inode: of the memory, in the first member's process; descriptor -1 is none.
        profile: rows of the host's profile.
        measures: the group measures the host first.
        measured_by: what measured the profile; empty where there is none.
    """

    descriptor: int
    inode: int
    profile: list[host_profile.Row]
    measures: bool
    measured_by: str


def member(text: bytes, who: str) -> Member:
    """Return the record that a member wrote.

    Args:
        who: the member, for errors.

    Raises:
        BackendUnavailableError: it is no such record; names ``who``.
    """
    found = _parsed(text, who)
    if (
        isinstance(found, dict)
        and isinstance(process := found.get("process"), dict)
        and isinstance(host := process.get("host"), str)
        and isinstance(machine := process.get("machine"), str)
        and (pid := _natural(process.get("pid"))) is not None
        and 0 < pid < _MOST_ID
        and all(isinstance(found.get(name), str | None) for name in ("unavailable", "failure"))
        and isinstance(settings := found.get("settings"), list)
        and all(isinstance(one, str) for one in settings)
        and isinstance(build := found.get("build", "an earlier release"), str)
        and isinstance(address := found.get("address"), str)
    ):
        place = placement.decoded(found.get("place"))
        process_of = Process(host, machine, pid)
        return Member(process_of, place, found.get("unavailable"), found.get("failure"), settings, build, address)
    raise _refused(text, who)


def memory(text: bytes, who: str) -> Memory:
    """Return the record of the group's memory.

    Args:
        who: the first member, for errors.

    Raises:
        BackendUnavailableError: it is no such record; names ``who``.
    """
    found = _parsed(text, who)
    if isinstance(found, list) and len(found) == 5:
        descriptor, inode, rows, measures, measured_by = found
        if (
            type(descriptor) is int
            and -1 <= descriptor < _MOST_ID
            and _natural(inode) is not None
            and isinstance(measures, bool)
            and isinstance(measured_by, str)
        ):
            try:
                return Memory(descriptor, inode, host_profile.checked_rows(rows, who), measures, measured_by)
            except ArgumentError:
                pass
    raise _refused(text, who)


def problem(text: bytes, who: str) -> tuple[str, str] | None:
    """Return the kind and the text of what kept a member from joining; None where it joined.

    Raises:
        BackendUnavailableError: it is no such record; names ``who``.
    """
    found = _parsed(text, who)
    if found is None:
        return None
    if isinstance(found, list) and len(found) == 2 and all(isinstance(one, str) for one in found):
        return found[0], found[1]
    raise _refused(text, who)


def _parsed(text: bytes, who: str) -> Any:
    try:
        if len(text) <= MOST_BYTES:
            return json_files.parse(text.decode(), who)
    except (ArgumentError, UnicodeDecodeError):
        pass
    raise _refused(text, who)


def _natural(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _refused(text: bytes, who: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"making a group: {who} wrote the record {text[:60]!r} ({len(text)} bytes), which no member writes; another "
        "program, or another release of comm-backend-ccl, writes to the store of this job: give the job a port of its "
        "own, and install the same release everywhere"
    )
