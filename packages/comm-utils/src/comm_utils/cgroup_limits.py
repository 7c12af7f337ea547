"""Limits of the cgroups of this process, which bind containers and services beside the limits of the user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["most_tasks"]

_SELF = Path("/proc/self")


def most_tasks(process: Path = _SELF) -> tuple[int, Path] | None:
    """Return how many processes and threads the cgroups of a process may have, and the file of the smallest limit.

    None where they have no limit, or where it is not known.

    Source: the kernel's cgroup-v1/pids.rst, cgroup-v2.rst (pids.max), proc_pid_mountinfo(5) and cgroups(7).
    """
    found: list[tuple[int, Path]] = []
    try:
        for folder in _folders(process):
            path = folder / "pids.max"
            text = path.read_text(encoding="ascii").strip() if path.is_file() else "max"
            if text.isdigit():
                found.append((int(text), path))
    except (OSError, ValueError):
        return min(found, default=None)
    return min(found, default=None)


def _folders(process: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that count tasks, from that of the process up to the mount point."""
    groups: dict[str, str] = {}
    for line in (process / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups.update(dict.fromkeys(controllers.split(","), path))
    for line in (process / "mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        controller = {"cgroup": "pids", "cgroup2": ""}.get(kind)
        if controller is None or controller not in groups or controller not in ["", *options.split(",")]:
            continue
        root, mounted_at = before.split(" ")[3:5]
        top, below = Path(mounted_at), Path(groups[controller])
        # A container may see the path of its cgroup on the host, and only that cgroup mounted.
        inside = below.relative_to(root) if below.is_relative_to(root) else Path()
        folder = top / inside
        yield folder
        yield from (parent for parent in folder.parents if parent.is_relative_to(top))
