"""Begin and end the flight recorder and the watch with a world of ``torch.distributed``."""

from __future__ import annotations

import secrets
import time
import weakref
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup, Store
from torch.distributed import distributed_c10d as internals

from comm_utils.errors import BackendUnavailableError
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.process_limits import lack_of_threads
from comm_utils.rank_processes import PROCESSES
from comm_utils.torch_support.store_mailbox import connect_mailbox
from comm_utils.watch.uncaught import note_exception_in_flight, note_uncaught_exceptions
from comm_utils.watch.watch import WATCH

__all__ = ["begin_world", "end_world"]

_KEY = "comm-flight/job"


class _Observed:
    """The world group that has begun; a weak reference, as programs may end it through ``torch.distributed``."""

    world: weakref.ref[ProcessGroup] | None = None


def begin_world() -> None:
    """Open this rank's ring, and watch the other ranks of the world group that exists; once for each such group.

    Raises:
        BackendUnavailableError: there can be no thread for the watch; ranks that wait for this one read so in its ring.
    """
    world: Any = internals._get_default_group()
    if _Observed.world is not None and _Observed.world() is world:
        return
    store = internals._world.pg_map[world][1]
    rank, size = world.rank(), world.size()
    job = _agreed_name(store) if size > 1 else _new_name()
    PROCESSES.begin()
    RECORDER.open(rank, size, job)
    note_uncaught_exceptions()
    try:
        WATCH.start(rank, size, partial(connect_mailbox, store, job))
    except RuntimeError as error:
        lack = f"init_distributed: rank {rank}: {lack_of_threads(error) or error}"
        RECORDER.failure("", BackendUnavailableError.__name__, lack)
        raise BackendUnavailableError(lack) from error
    _Observed.world = weakref.ref(world)


def end_world() -> None:
    """End both with the world group."""
    note_exception_in_flight()
    WATCH.stop()
    RECORDER.close()
    PROCESSES.clear()
    _Observed.world = None


def _new_name() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _agreed_name(store: Store) -> str:
    """Return the name that the first rank to come has proposed."""
    try:
        return bytes(store.compare_set(_KEY, "", _new_name())).decode(errors="replace")
    except RuntimeError:  # a store without it: each rank has a folder of its own
        return _new_name()
