"""The ranks that have started. A rank that ends its world at once waits for them.

Libraries connect the ranks one by one: one may be done, and end, while others still need its store or its connections.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from torch.distributed import Store

from comm_orchestrator.rendezvous.protocol import counted
from comm_utils.errors import LaunchError
from comm_utils.flight_recorder import RECORDER
from comm_utils.threads import is_still_connecting, with_limit

__all__ = ["StartedRanks"]

_KEY = "started"
# The last rank is seldom more than a moment behind; one that failed never comes.
_LIMIT_S = 10.0
_INTERVAL_S = 0.005


class StartedRanks:
    """Counts the ranks whose library has started, in the store of their rendezvous.

    Args:
        store: of this rendezvous.
        world_size: number of ranks.
    """

    def __init__(self, store: Store, world_size: int) -> None:
        self._store, self._world_size, self._pid = store, world_size, os.getpid()
        self._begin = time.monotonic()
        with suppress(LaunchError, RuntimeError):  # its host has failed, which the first call finds out
            counted(store, _KEY, 1)

    def wait(self) -> None:
        """Return when all ranks have started, or the store does not answer; at the latest after 10 s."""
        # A forked child would speak on its parent's connection; after a failure the store may have gone. Where gloo
        # still connects a group that was given up, it waits in this connection.
        is_new = time.monotonic() < self._begin + _LIMIT_S
        if os.getpid() == self._pid and is_new and not RECORDER.has_failed and not is_still_connecting("gloo"):
            with suppress(RuntimeError, MemoryError):  # there can be no more threads: the world ends without
                with_limit(self._wait, _LIMIT_S)

    def _wait(self) -> None:
        end = time.monotonic() + _LIMIT_S
        while counted(self._store, _KEY) < self._world_size and time.monotonic() < end:
            time.sleep(_INTERVAL_S)
