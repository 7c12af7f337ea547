"""The settings of the watch of this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Mismatch", "WatchSettings"]

#: When calls that differ between ranks are found out: never, soon after, or before any data moves.
Mismatch = Literal["auto", "off", "lazy", "strict"]


@dataclass(frozen=True)
class WatchSettings:
    """The settings of the watch.

    Attributes:
        enabled: whether there is one.
        warn_after_s: after so many seconds in one call, the ranks that are missing are named in a warning; 0 is never.
        mismatch: ``"auto"`` is ``"lazy"``; shared memory compares calls before any data moves, whatever this is.
        signals: Ctrl-C and SIGTERM print what the ranks do, where the program has no handler of its own.
    """

    enabled: bool = True
    warn_after_s: float = 30.0
    mismatch: Mismatch = "auto"
    signals: bool = True

    @property
    def compares(self) -> bool:
        """Return whether calls are compared afterwards; of shared memory, those that its engine has not compared."""
        return self.mismatch in ("auto", "lazy", "strict")
