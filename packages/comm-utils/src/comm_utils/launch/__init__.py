"""Launchers, and the launch facts that they provide.

Each launcher has one module with one pure function ``discover(environ) -> LaunchInfo | None``; :data:`LAUNCHERS` is the
order in which they are asked, and :func:`with_plugins` adds those of other packages.
"""

from __future__ import annotations

from collections.abc import Mapping

from comm_utils.launch.compare import contradictions
from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.mpi import mpi_launcher, size_beside
from comm_utils.launch.plugins import ENTRY_POINT_GROUP, with_plugins
from comm_utils.launch.table import LAUNCHERS, Launchers

__all__ = [
    "ENTRY_POINT_GROUP",
    "LAUNCHERS",
    "LaunchInfo",
    "Launchers",
    "contradictions",
    "discover",
    "mpi_launcher",
    "size_beside",
    "with_plugins",
]


def discover(environ: Mapping[str, str], launchers: Launchers = LAUNCHERS) -> LaunchInfo:
    """Return the first launcher that recognises ``environ``; the last one, a single process, always does.

    Raises:
        LaunchError: the variables of the launcher that was recognised contradict each other.
    """
    for _, launcher in launchers:
        info = launcher(environ)
        if info is not None:
            return info
    raise AssertionError("the last launcher recognises every environment")
