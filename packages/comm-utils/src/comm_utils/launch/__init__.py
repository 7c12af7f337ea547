"""Who started this process.

Each launcher has one module with one pure function ``discover(environ) -> LaunchInfo | None``; :data:`LAUNCHERS` is the
order in which they are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from comm_utils.launch import single, torchrun
from comm_utils.launch.info import LaunchInfo

__all__ = ["LAUNCHERS", "LaunchInfo", "discover"]

LAUNCHERS: tuple[tuple[str, Callable[[Mapping[str, str]], LaunchInfo | None]], ...] = (
    ("torchrun", torchrun.discover),
    ("single", single.discover),
)


def discover(environ: Mapping[str, str]) -> LaunchInfo:
    """The first launcher that recognises ``environ``; the last one, a single process, always does.

    Raises:
        LaunchError: the variables of the launcher that was recognised contradict each other.
    """
    for _, launcher in LAUNCHERS:
        info = launcher(environ)
        if info is not None:
            return info
    raise AssertionError("the last launcher recognises every environment")
