"""Launchers that other packages add through the entry-point group ``comm_utils.launchers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint

from comm_utils.errors import LaunchError
from comm_utils.launch.info import LaunchInfo
from comm_utils.launch.table import LAUNCHERS, Launchers
from comm_utils.log import logger
from comm_utils.plugins import by_name, call, distribution_of, entry_points, load, said_twice

__all__ = ["ENTRY_POINT_GROUP", "with_plugins"]

ENTRY_POINT_GROUP = "comm_utils.launchers"
_Launcher = Callable[[Mapping[str, str]], LaunchInfo | None]


def with_plugins() -> Launchers:
    """:data:`LAUNCHERS` and those of installed packages, sorted by name directly after torchrun.

    One that cannot be imported, or fails, is left out with one WARNING: the others stay usable. Where several packages
    have one of the same name, the environment that one of them recognises raises :class:`LaunchError`.
    """
    found = by_name(entry_points(ENTRY_POINT_GROUP))
    plugins = tuple((name, launcher) for name in sorted(found) if (launcher := _load_all(found[name])) is not None)
    return (*LAUNCHERS[:1], *plugins, *LAUNCHERS[1:])


def _load_all(entries: Sequence[EntryPoint]) -> _Launcher | None:
    """Return the launcher of one name; None where no package has one that can be imported."""
    loaded = [launcher for entry in entries if (launcher := _load(entry)) is not None]
    if len(entries) == 1 or not loaded:
        return loaded[0] if loaded else None

    def refuse(environ: Mapping[str, str]) -> LaunchInfo | None:
        if all(launcher(environ) is None for launcher in loaded):
            return None
        raise LaunchError(f"launcher {entries[0].name!r}: {said_twice(entries)}; uninstall all but one")

    return refuse


def _load(entry: EntryPoint) -> _Launcher | None:
    try:
        function = load(entry)
    except Exception as error:  # whatever a package does at import, the others stay usable
        logger.warning(
            "launcher %s is left out: %s cannot be imported (%s: %s)",
            entry.name,
            entry.value,
            type(error).__name__,
            error,
        )
        return None

    has_failed = False

    def launcher(environ: Mapping[str, str]) -> LaunchInfo | None:
        nonlocal has_failed
        if has_failed:
            return None
        try:
            info = call(entry, function, environ)
        except LaunchError:
            raise  # it recognised the environment, and says what is wrong with it
        except Exception as error:
            has_failed = True
            logger.warning(
                "launcher %s is ignored: %s failed (%s: %s)", entry.name, entry.value, type(error).__name__, error
            )
            return None
        if info is not None and not isinstance(info, LaunchInfo):  # each process would be a world of its own without it
            raise LaunchError(
                f"launcher {entry.name!r}: {entry.value} of {distribution_of(entry)} returned {type(info).__name__}; "
                "expected a LaunchInfo, or None where it does not recognise the environment; correct or uninstall the "
                "package"
            )
        return info

    return launcher
