"""Calls that differed between ranks without an error on this one, which are logged instead."""

from __future__ import annotations

import time
from collections.abc import Container

from comm_utils.errors import CollectiveMismatchError
from comm_utils.log import logger
from comm_utils.watch.trouble import Trouble

__all__ = ["UnraisedMismatches"]

# In so long, a call that differs and is about to end may still raise.
_RAISES_S = 0.5


class UnraisedMismatches:
    """The groups whose calls differ, and in which no call of this rank has raised so far.

    Attributes:
        raised: the groups in which a call has raised.
    """

    def __init__(self) -> None:
        self.raised: set[str] = set()
        self._since: dict[str, tuple[float, Trouble]] = {}

    def add(self, group: str, trouble: Trouble) -> None:
        """Note trouble that was found in a group; only mismatches matter."""
        if trouble.kind is CollectiveMismatchError and group not in self.raised:
            self._since[group] = time.monotonic(), trouble

    def has_raised(self, group: str) -> None:
        """Note that a call of this rank in ``group`` has raised."""
        self.raised.add(group)
        self._since.pop(group, None)

    def log(self, rank: int, waits_in: Container[str]) -> None:
        """Log which calls that differ are over on this rank, as it may make no call that raises.

        Args:
            waits_in: groups in a call of which this rank waits, which raises.
        """
        for group, (since, trouble) in list(self._since.items()):
            if group in waits_in or time.monotonic() - since < _RAISES_S:
                continue
            if self._since.pop(group, None) is not None:
                logger.error(
                    "rank %d belongs to a group whose ranks have made calls that differ, so results of these calls may "
                    "be wrong: %s; the next call on this group raises CollectiveMismatchError",
                    rank,
                    trouble.text,
                )

    def log_at_end(self, rank: int) -> None:
        """Log all that are left, as this rank makes no further call."""
        for _, trouble in self._since.values():
            logger.error(
                "rank %d ended its world after calls that differed, so their results may be wrong: %s",
                rank,
                trouble.text,
            )
