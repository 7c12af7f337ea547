"""The errors of every layer.

Each is also the built-in that a caller would catch, so that ``except TimeoutError`` works for someone who
never heard of this module. A message says what was got, what was expected, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailableError",
    "BrokenGroupError",
    "CollectiveMismatchError",
    "CommError",
    "CommTimeoutError",
    "ConfigurationError",
    "LaunchError",
    "NotInitializedError",
    "PeerLostError",
]


class CommError(Exception):
    """Anything that this family of packages raises on purpose."""


class NotInitializedError(CommError, RuntimeError, ValueError):
    """A call needs the distributed environment and nothing has set it up; a ValueError too, as torch's own."""


class ArgumentError(CommError, ValueError):
    """An argument cannot be served; raised before anything is sent."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of the wrong kind, such as a list where a tensor belongs."""


class BackendUnavailableError(CommError, RuntimeError):
    """A backend that was asked for by name cannot be had here."""


class LaunchError(CommError, RuntimeError):
    """The launch environment contradicts itself or lacks a fact."""


class CollectiveMismatchError(CommError, RuntimeError):
    """Ranks called collectives that do not belong together."""


class PeerLostError(CommError, RuntimeError):
    """Another rank went away while this one was communicating with it."""


class CommTimeoutError(CommError, TimeoutError, RuntimeError):
    """An operation did not finish in time; a RuntimeError too, which is what code around torch catches.

    Attributes:
        waits_for: of an operation that is still under way: its name and group, and who is missing.
    """

    waits_for: tuple[str, str] = "the operation", ""


class BrokenGroupError(CommError, RuntimeError):
    """The group failed earlier (timeout or lost peer) and its ranks may disagree about what came after."""


class ConfigurationError(CommError, ValueError):
    """A configuration value is wrong; the message names its source and key."""
