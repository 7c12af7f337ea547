"""The host's profile: how long each method of moving data takes here, from which new groups in shared memory start.

It is measured by the first group of so many ranks that this host sees, in a fraction of a second, or thoroughly by
``commctl tune``, and kept in the user's cache folder for this processor, kernel and version of this package. Groups go
on learning from their own calls, so what it has wrong is corrected.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from comm_utils import json_files
from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError
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
    "store",
]

#: A file to use instead of the one in the cache folder; 0 for none.
VARIABLE = "CCL_SHARED_MEMORY_PROFILE"
#: What measures a profile.
FIRST_GROUP, TUNE = "its first group", "commctl tune"
# Of a file with all numbers of ranks, several times over.
_MOST_BYTES = 4 << 20
_MOST_ROWS = 4096
_PROCESSOR = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU implementer", "CPU part")


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
        "comm-backend-ccl": version("comm-backend-ccl"),
    }


def path() -> Path | None:
    """Return the profile's file, which need not exist; None where profiles are turned off or there is no home."""
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted == "0":
        return None
    if wanted:
        return Path(wanted)
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        folder = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(_machine(), sort_keys=True).encode()).hexdigest()
    return folder / "comm-backend-ccl" / f"profile-{digest[:16]}.json"


def _read() -> dict[str, Any]:
    """Return the file's content; without measurements where there is none for this machine."""
    nothing: dict[str, Any] = {"machine": _machine(), "ranks": {}}
    file = path()
    if file is None:
        return nothing
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ArgumentError(f"{file}: got {file.stat().st_size} bytes, expected {_MOST_BYTES} at most")
        found = json_files.parse(file.read_text(encoding="utf-8", errors="replace"), str(file))
        if not isinstance(found, dict) or not isinstance(found.get("ranks"), dict):
            raise ArgumentError(f"{file}: expected an object with 'ranks'")
        if found.get("machine") != _machine():
            logger.debug("%s was measured on another machine, kernel or version; it is not used", file)
            return nothing
        for ranks, one in found["ranks"].items():
            if not ranks.isdecimal():
                raise ArgumentError(f"{file}: got {ranks[:40]!r} for a number of ranks")
            _checked(one, str(file))
    except FileNotFoundError:
        return nothing
    except (OSError, ArgumentError) as error:
        logger.warning("the host's profile is not used: %s; remove it, or run commctl tune", error)
        return nothing
    return found


def _checked(found: Any, where: str) -> list[Row]:
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
            and 0 < one[1] < 1 << 62
            and 0 < one[5] < 1 << 62
        ):
            raise ArgumentError(f"{where}: got the row {str(one)[:80]}, expected {', '.join(Row._fields)}")
        checked.append(Row(*one))
    return checked


def load(ranks: int) -> tuple[list[Row], str]:
    """Return what is known of groups of ``ranks``, and what measured it; both empty where that is nothing."""
    found = _read()["ranks"].get(str(ranks))
    return ([], "") if found is None else (_checked(found, ""), str(found.get("by")))


def store(ranks: int, rows: Sequence[Row], by: str) -> Path | None:
    """Keep what was measured with ``ranks``, beside what is known of other numbers of ranks.

    Args:
        by: how it was measured.

    Returns:
        The file; None where it cannot be written, which is logged.
    """
    file = path()
    if file is None or not rows:
        return None
    content = _read()
    content["machine"] = _machine()
    content["ranks"][str(ranks)] = {"measured": time.strftime("%Y-%m-%d %H:%M:%S"), "by": by, "rows": list(rows)}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as written:
            json.dump(content, written)
    except (OSError, ArgumentError) as error:
        logger.debug("the host's profile cannot be kept: %s", error)
        return None
    return file


def is_wanted(ranks: int) -> bool:
    """Return whether a group of ``ranks`` should measure: nothing is known, and what it finds can be kept."""
    file = path()
    if file is None or ranks < 2 or load(ranks)[0]:
        return False
    folder = file.parent
    while not os.path.exists(folder) and folder != folder.parent:  # False as well where it cannot be seen
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)


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
    """Return the whole profile: its file, the machine it holds for, and what is known by number of ranks."""
    found = _read()
    ranks = {
        number: {"measured": str(one.get("measured")), "by": str(one.get("by")), "rows": _checked(one, "")}
        for number, one in sorted(found["ranks"].items())
    }
    file = path()
    return {"file": None if file is None else str(file), "machine": found["machine"], "ranks": ranks}


def describe() -> str:
    """Return which profile is in force, for reports."""
    file = path()
    if file is None:
        return "none"
    measured = ", ".join(f"{ranks} ranks by {one['by']}" for ranks, one in known()["ranks"].items())
    return f"{file}, measured with {measured}" if measured else "none yet; the first group measures it"
