"""The host's profile: how long each method of moving data takes here, from which new groups in shared memory start.

It is measured by the first group of so many ranks that this host sees, in a fraction of a second, or thoroughly by
``commctl tune``, and kept in the user's cache folder for this processor, kernel and version of this package. Groups go
on learning from their own calls, so what it has wrong is corrected. Where the time does not suffice, the next groups of
as many ranks go on, a few times.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
import platform
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from comm_utils import json_files
from comm_utils.atomic_write import NAME_CHARACTERS, replacing
from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder.ring_locks import is_at, lock_as_owner
from comm_utils.log import logger

__all__ = [
    "FIRST_GROUP",
    "TUNE",
    "VARIABLE",
    "Row",
    "checked_rows",
    "describe",
    "is_wanted",
    "known",
    "load",
    "path",
    "rows_of",
    "sole_measurement",
    "store",
    "unavailable_reason",
]

#: A file to use instead of the one in the cache folder; 0 for none.
VARIABLE = "CCL_SHARED_MEMORY_PROFILE"
#: What measures a profile.
FIRST_GROUP, TUNE = "its first group", "commctl tune"
# Of a file with all numbers of ranks, several times over.
_MOST_BYTES = 4 << 20
_MOST_ROWS, _MOST_TEXT = 4096, 80
# Measurements of a number of ranks that are cut off: on a machine that stays busy, each would delay a job.
_MOST_TRIES = 3
# Nobody takes so long to write a profile.
_UNFINISHED_S = 3600.0
# Counts the sets of transfers that there were: a profile without one of today's makes each group compare all of them.
_CANDIDATES = 3
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


# Each of which is logged once in this process.
_warnings: set[str] = set()
# Files that could not be written: what groups measure would be measured again by each.
_unwritable: set[Path] = set()


class Row(NamedTuple):
    """The duration of one kind of operation with one method.

    Attributes:
        operation: its name in native code.
        least_bytes: of its size class, which ends at twice as much.
        narrow: of 16-bit floats.
        eager: in one step, through pieces of the ring.
        method: its name.
        ns: the median of some calls.
    """

    operation: str
    least_bytes: int
    narrow: bool
    eager: bool
    method: str
    ns: int


@functools.cache
def _machine() -> dict[str, Any]:
    """Return what a profile holds for."""
    processor = platform.processor() or platform.machine()
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0]
    except OSError:
        first = ""
    found = dict(re.findall(r"^([^:\n]+?)\s*: *(.*)$", first, re.MULTILINE))
    return {
        "processor": ", ".join(f"{name} {found[name]}" for name in _PROCESSOR if found.get(name)) or processor,
        "cores": os.cpu_count() or 1,
        "kernel": platform.release(),
        "comm-backend-ccl": f"{version('comm-backend-ccl')} (transfers: {_CANDIDATES})",
    }


def path() -> Path | None:
    """Return the profile's file, which need not exist; None where profiles are turned off or there is no home."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted == "0":
        return None
    if wanted:
        return Path(os.path.expanduser(wanted))
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        # A relative one is to be ignored, by the XDG Base Directory Specification.
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(_machine(), sort_keys=True).encode()).hexdigest()
    return folder / "comm-backend-ccl" / f"profile-{digest[:16]}.json"


class _Found(NamedTuple):
    """The content of the file; without measurements where there is none for this machine.

    Attributes:
        problem: why it cannot be used; "" where it can, or does not exist.
        remedy: of that.
        is_foreign: it is a profile of another machine, kernel or version.
    """

    content: dict[str, Any]
    problem: str = ""
    remedy: str = ""
    is_foreign: bool = False


def _read() -> _Found:
    nothing: dict[str, Any] = {"machine": _machine(), "ranks": {}}
    file = path()
    if file is None:
        return _Found(nothing)
    try:
        found = _parsed(_text(file), str(file))
    except FileNotFoundError:
        return _Found(nothing)
    except OSError as error:
        return _Found(nothing, str(error), f"let XDG_CACHE_HOME name a folder of this user, or {VARIABLE} a file")
    except ArgumentError as error:
        return _Found(nothing, str(error), "remove it, or run commctl tune")
    if found.get("machine") == _machine():
        return _Found(found)
    logger.debug("%s was measured on another machine, kernel or version; it is not used", file)
    return _Found(nothing, is_foreign=True)


@functools.lru_cache(maxsize=2)  # each new group asks several times
def _parsed(text: str, where: str) -> dict[str, Any]:
    """Return the checked content of a profile, which callers leave as it is."""
    found = json_files.parse(text, where)
    if not isinstance(found, dict) or not isinstance(found.get("ranks"), dict):
        raise ArgumentError(f"{where}: expected an object with 'ranks'")
    for ranks, one in found["ranks"].items():
        if not ranks.isdecimal():
            raise ArgumentError(f"{where}: got {ranks[:40]!r} for a number of ranks")
        _checked(one, where)
    return found


def _text(file: Path) -> str:
    # A FIFO would be waited for, and what devices have may not end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{file}: expected a regular file")
        with open(descriptor, "rb", closefd=False) as opened:
            found = opened.read(_MOST_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(found) > _MOST_BYTES:
        raise ArgumentError(f"{file}: got more than {_MOST_BYTES} bytes")
    return found.decode("utf-8", errors="replace")


def _warn_once(text: str) -> None:
    if text not in _warnings:
        _warnings.add(text)
        logger.warning("%s", text)


def _checked(found: Any, where: str) -> list[Row]:
    if isinstance(found, dict) and not all(_is_label(found.get(name)) for name in ("by", "measured")):
        raise ArgumentError(f"{where}: expected texts of at most {_MOST_TEXT} characters for 'by' and 'measured'")
    if isinstance(found, dict) and not isinstance(found.get("whole", True), bool):
        raise ArgumentError(f"{where}: expected true or false for 'whole'")
    if isinstance(found, dict) and not (type(found.get("tries", 0)) is int and found.get("tries", 0) >= 0):
        raise ArgumentError(f"{where}: expected a number of measurements for 'tries'")
    return checked_rows(found.get("rows") if isinstance(found, dict) else None, where)


def checked_rows(rows: object, where: str) -> list[Row]:
    """Return ``rows``, values of JSON, as rows of a profile.

    Raises:
        ArgumentError: they are none, or too many; begins with ``where``.
    """
    if not isinstance(rows, list) or len(rows) > _MOST_ROWS:
        raise ArgumentError(f"{where}: expected a list of at most {_MOST_ROWS} rows for each number of ranks")
    checked = []
    for one in rows:
        if not (
            isinstance(one, list)
            and [type(value) for value in one] == [str, int, bool, bool, str, int]
            and _is_label(one[0])
            and _is_label(one[4])
            and 0 < one[1] < 1 << 62
            and 0 < one[5] < 1 << 62
        ):
            raise ArgumentError(f"{where}: got the row {str(one)[:80]}, expected {', '.join(Row._fields)}")
        checked.append(Row(*one))
    return checked


def _is_label(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MOST_TEXT and value.isprintable()


def load(ranks: int) -> tuple[list[Row], str]:
    """Return what is known of groups of ``ranks``, and what measured it; both empty where that is nothing.

    A file that cannot be used is warned of, so one rank of a group calls this.
    """
    content, problem, remedy, _ = _read()
    if problem:
        _warn_once(f"the host's profile is not used: {problem}; {remedy} ({VARIABLE}=0 does without)")
    found = content["ranks"].get(str(ranks))
    return (_checked(found, ""), str(found.get("by"))) if found is not None and found["rows"] else ([], "")


def _is_over(ranks: int) -> bool:
    """Return whether nothing is left to be measured with ``ranks``, or that was tried often enough."""
    found = _read().content["ranks"].get(str(ranks))
    if found is None:
        return False
    return bool(found["rows"] and found.get("whole", True)) or found.get("tries", 0) >= _MOST_TRIES


def store(ranks: int, rows: Sequence[Row], by: str, is_whole: bool = True) -> Path | None:
    """Keep what was measured with ``ranks``, beside what is known of other numbers of ranks.

    Args:
        by: how it was measured.
        is_whole: nothing is left to be measured by later groups of as many ranks. Where something is, what was measured
            before is kept beside ``rows``.

    Returns:
        The file; None where it cannot be written or is not to be, which is logged.
    """
    file, reason = path(), unavailable_reason(by)
    if file is None or reason or (is_whole and not rows):
        logger.debug("the host's profile is not kept: %s", reason or "nothing was measured")
        return None
    before = _read().content["ranks"]
    measured = time.strftime("%Y-%m-%d %H:%M:%S")
    kept: dict[str, Any] = {"measured": measured, "by": by, "whole": is_whole, "rows": list(rows)}
    if not is_whole:
        of_as_many, kinds = before.get(str(ranks), {}), {row[:4] for row in rows}
        earlier = _checked(of_as_many, "") if of_as_many else []
        kept["rows"] = [row for row in earlier if row[:4] not in kinds] + list(rows)
        kept["tries"] = of_as_many.get("tries", 0) + 1
    content = {"machine": _machine(), "ranks": {**before, str(ranks): kept}}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(file)
        with replacing(file) as written:
            json.dump(content, written)
    except (OSError, ArgumentError) as error:
        _cannot_keep(file, error)
        return None
    return file


def _cannot_keep(file: Path, error: Exception) -> None:
    _unwritable.add(file)
    _warn_once(f"the host's profile cannot be kept: {error}; groups compare transfers by their own calls")


@contextmanager
def sole_measurement() -> Iterator[bool]:
    """Keep other groups that use the file from measuring at the same time, as they would disturb each other.

    Yields:
        Whether this group may measure; False where another one does, for which nothing waits.
    """
    file = path()
    if file is None:
        yield False
        return
    lock = file.with_name(f".{file.name[:NAME_CHARACTERS]}.lock")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except PermissionError:  # of another user, who measures
        yield False
        return
    except OSError as error:
        _cannot_keep(file, error)
        yield False
        return
    try:
        # A file system without locks is no reason not to measure.
        is_locked = lock_as_owner(descriptor) is not False and is_at(descriptor, lock)
        try:
            yield is_locked
        finally:
            if is_locked:  # nobody else removes it, and who opened it before finds that it is gone
                with suppress(OSError):
                    lock.unlink()
    finally:
        os.close(descriptor)


def _remove_unfinished(file: Path) -> None:
    """Remove what processes left that were killed while they wrote it."""
    for one in file.parent.glob(f".{glob.escape(file.name[:NAME_CHARACTERS])}.*.tmp"):
        with suppress(OSError):
            if time.time() - one.stat().st_mtime > _UNFINISHED_S:
                one.unlink()


def unavailable_reason(by: str) -> str:
    """Return why a profile that is measured ``by`` something cannot be kept; "" where it can.

    In the cache folder, a file of that name is replaced whatever it is. A file that :data:`VARIABLE` names is not,
    unless it is a profile; and that of another machine by ``commctl tune`` alone.
    """
    file = path()
    if file is None:
        return "profiles are turned off"
    found, is_named = _read(), bool(os.environ.get(VARIABLE, "").strip())
    try:
        folder = file.parent
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        can_write = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
        size = file.stat().st_size if file.is_file() else -1
    except OSError as error:
        return str(error)
    if not can_write:
        return f"{folder} cannot be written"
    if found.problem and (size < 0 or (is_named and size > 0)):
        return f"{file} is not a profile, and is not replaced"
    if found.is_foreign and is_named and by != TUNE:
        return f"{file} was measured on another machine, kernel or version, and is not replaced"
    return ""


def is_wanted(ranks: int) -> bool:
    """Return whether a group of ``ranks`` should measure: something is not known, and what it finds can be kept."""
    if ranks < 2 or _is_over(ranks) or path() in _unwritable:
        return False
    reason = unavailable_reason(FIRST_GROUP)
    if reason and _read().is_foreign:
        _warn_once(f"the host's profile is not used: {reason}; give each kind of machine its own, or run commctl tune")
    return not reason


def rows_of(methods: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the rows of what a group has learned, see ``shared_memory.methods``."""
    return [
        Row(one["operation"], one["least_bytes"], one["narrow"], one["eager"], method, ns)
        for one in methods
        if one["settled"]
        for method, ns in one["typical_ns"].items()
        if ns > 0
    ]


def known() -> dict[str, Any]:
    """Return the whole profile.

    Returns:
        ``file``, the ``machine`` it holds for, what is known by number of ``ranks``, and the ``unavailable_reason``
        for which what ``commctl tune`` measures cannot be kept.
    """
    found = _read().content
    ranks = {
        number: {"measured": str(one.get("measured")), "by": str(one.get("by")), "rows": _checked(one, "")}
        for number, one in sorted(found["ranks"].items())
        if one["rows"]
    }
    file = path()
    name = None if file is None else str(file)
    return {"file": name, "machine": found["machine"], "ranks": ranks, "unavailable_reason": unavailable_reason(TUNE)}


def describe() -> str:
    """Return which profile is in force, for reports."""
    file = path()
    if file is None:
        return "none"
    measured = ", ".join(f"{ranks} ranks by {one['by']}" for ranks, one in known()["ranks"].items())
    if measured:
        return f"{file}, measured with {measured}"
    reason = unavailable_reason(FIRST_GROUP) or _read().problem
    return f"none; {reason}" if reason else "none yet; the first group measures it"
