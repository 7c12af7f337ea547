"""Launchers that other packages add through the entry-point group ``comm_utils.launchers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint

from comm_utils.errors import LaunchError
from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.table import LAUNCHERS, Launchers
from comm_utils.log import logger
from comm_utils.plugins import entry_points

__all__ = ["ENTRY_POINT_GROUP", "with_plugins"]

ENTRY_POINT_GROUP = "comm_utils.launchers"


def with_plugins() -> Launchers:
    """:data:`LAUNCHERS` and those of installed packages, sorted by name directly after torchrun.

    One that cannot be imported, or fails, is left out with a WARNING: the others stay usable.
    """
    found = {entry.name: entry for entry in entry_points(ENTRY_POINT_GROUP)}
    plugins = tuple((name, launcher) for name in sorted(found) if (launcher := _load(found[name])) is not None)
    return (*LAUNCHERS[:1], *plugins, *LAUNCHERS[1:])


def _load(entry: EntryPoint) -> Callable[[Mapping[str, str]], LaunchInfo | None] | None:
    try:
        function = entry.load()
    except Exception as error:  # whatever a package does at import, the others stay usable
        logger.warning(
            "launcher %s is left out: %s cannot be imported (%s: %s)",
            entry.name,
            entry.value,
            type(error).__name__,
            error,
        )
        return None

    def launcher(environ: Mapping[str, str]) -> LaunchInfo | None:
        try:
            info = function(environ)
            if info is not None and not isinstance(info, LaunchInfo):
                raise TypeError(f"returned {type(info).__name__}; expected LaunchInfo or None")
        except LaunchError:
            raise  # it recognised the environment, and says what is wrong with it
        except Exception as error:
            logger.warning(
                "launcher %s is ignored: %s failed (%s: %s)", entry.name, entry.value, type(error).__name__, error
            )
            return None
        return info

    return launcher
