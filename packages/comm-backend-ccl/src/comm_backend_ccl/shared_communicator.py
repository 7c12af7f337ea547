"""A group of ranks on one host, in shared memory."""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence, Set
from datetime import timedelta
from typing import Any

from comm_backend_ccl import host_profile, placement, shared_memory, variables
from comm_backend_ccl.communicator import Begun, Communicator
from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.peers import Peers
from comm_backend_ccl.tables import DTYPES, IN_SHARED_MEMORY, RECORDED_CODES, Operation
from comm_utils import topology
from comm_utils.errors import BackendUnavailableError, CommTimeoutError
from comm_utils.flight_recorder.layout import MOST_NATIVE_GROUPS, EntryType
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.log import logger
from comm_utils.torch_support.passed_tensors import AS_IT_TRAVELS, passed
from comm_utils.torch_support.remedies import how_to_set_timeout
from comm_utils.weak_collections import members_of

__all__ = ["SharedCommunicator", "open_groups"]


class SharedCommunicator(Communicator):
    """Every rank of the group constructs one after the first rank has created ``memory``.

    Raises:
        MemoryError: there is not enough shared memory.
        PermissionError: the first rank's memory cannot be opened from here.
    """

    engine = "shared memory"
    moves_nothing = True
    capabilities = IN_SHARED_MEMORY
    ended_ns = staticmethod(shared_memory.ended_ns)  # on the way of what is recorded

    def __init__(
        self,
        peers: Peers,
        rank: int,
        timeout: timedelta,
        ranks: Sequence[int] | None,
        memory: tuple[int, int],
        places: Sequence[placement.Place],
    ) -> None:
        super().__init__(peers, rank, timeout, ranks)
        pids = [process.pid for process in peers.processes]
        #: Ranks share hardware threads, so that who waits gives its own away.
        self.oversubscribed = placement.are_oversubscribed(places, topology.cpus_of_launcher())
        #: The other ranks, in the order in which this one reads from them.
        self.reading_order = placement.reading_order(places, rank)
        share = placement.cache_share(places, rank, topology.this_placement().cache_bytes)
        #: How the group moves data, for as long as it is there.
        self.settings = variables.settings()
        self.native = shared_memory.join(
            pids[0], memory, rank, pids, self.oversubscribed, self.reading_order, share, self.settings
        )
        #: What measured the profile from which the group started; empty where it started from none.
        self.profile_by = ""
        self._described = -1
        _open.add(self)

    def start_from(self, profile: Sequence[Sequence[Any]]) -> None:
        """Replace what the group has learned by rows of the host's profile; on all ranks alike, with nothing under way.

        Args:
            profile: rows as :class:`host_profile.Row` has them; without any, the group measures everything again.
        """
        shared_memory.start_from(self.native, [host_profile.Row(*row) for row in profile])

    @property
    def learns(self) -> bool:
        """Return whether the group chooses among methods by measuring them."""
        return not any(self.settings)

    def warn_of_single_copy(self) -> None:
        """Say that the kernel forbids the transfer which is wanted, where it does; all ranks have joined."""
        shared_memory.warn_of_single_copy(self.native)

    def methods(self) -> list[dict[str, Any]]:
        """Return what this rank's group has learned about moving data."""
        return shared_memory.methods(self.native)

    def _end(self) -> None:
        _open.discard(self)
        shared_memory.close(self.native)

    def _break(self, what: str) -> None:
        super()._break(what)
        shared_memory.close(self.native)  # the memory of its tensors is the user's again

    def describe(self) -> None:
        """Describe the group in this process's ring, once it has a name; again does nothing."""
        if self._described != RECORDER.opened and self.name:
            self._described = RECORDER.opened
            index = self.recorded_as()
            shared_memory.record_as(self.native, index if index < MOST_NATIVE_GROUPS else 0)

    def begin_wait(self, handle: shared_memory.Pending, limited: bool) -> None:
        shared_memory.begin_wait(handle, RECORDER.caller(1), limited)

    def _begin(self, call: Call) -> Begun:
        self.describe()
        source, target, what = call.source, call.target, passed()
        if source.dtype not in DTYPES:
            item = source.element_size()
            what = what._replace(dtype=what.dtype or source.dtype)
            call = call._replace(
                elements=call.elements * item,
                source_counts=[item * one for one in call.source_counts],
                target_counts=[item * one for one in call.target_counts],
            )
        if call.operation is Operation.ALL_TO_ALL:
            # Others may have given sizes that come to the same for this rank.
            counts = [call.elements] * self.size
            call = call._replace(
                operation=Operation.ALL_TO_ALL_V, elements=0, source_counts=counts, target_counts=counts
            )
        try:
            described = None if what is AS_IT_TRAVELS else (what.text, what.digest)
            handle = shared_memory.start(self.native, call, described)
        except MemoryError as error:  # the others get an error, too
            name = call.name or call.operation.name.lower()
            self._break(f"{name}: {error}")
            raise BackendUnavailableError(f"{name} on {self}: {error}") from error
        return (None, ()) if handle is None else (handle, (source, target))

    def gone_for(self, handle: shared_memory.Pending, peer: int | None) -> Set[int]:
        gone = self.gone(peer)
        # A rank that has done its part may end before the others are through.
        return gone & shared_memory.missing(handle) if gone and peer is None else gone

    def source(self, handle: shared_memory.Pending) -> int:
        return shared_memory.source(handle)

    records_natively = True

    def timed_out(self, call: str, limit_s: float, of_call: bool) -> Exception:
        missing = self._named(shared_memory.waits_for(self.native))
        trouble = self._cause(timed_out=True)
        shared_memory.time_out(self.native)  # the others need not wait for this rank, nor for the ranks that it awaits
        self._break(f"{call}: timed out after {limit_s:g} s waiting for {missing}")
        if trouble is not None:
            return self._timed_out_error(call, limit_s, trouble)
        return self.failure(
            CommTimeoutError,
            f"{call} on {self} timed out after {limit_s:g} s",
            f"{missing} of the group did not take part, or came too late; {how_to_set_timeout(of_call)}",
        )

    def failed(self, call: str, error: BaseException, peer: int | None = None) -> Exception:
        found = shared_memory.timed_out(self.native) if self.usable and self.broken is None else None
        if found is None or self.gone(peer):
            return super().failed(call, error, peer)
        finder, missing = found
        text = f"rank {self.ranks[finder]} timed out waiting for {self._named(missing)}"
        trouble = self._cause(timed_out=False)
        if trouble is not None:
            return self.in_trouble(call, trouble, text)
        self._break(f"{call}: {text}")
        late = ", which is this rank: it came too late" if missing == {self.rank} else ""
        return self.failure(CommTimeoutError, f"{call} on {self} failed", f"{text}{late}")

    def _named(self, positions: Set[int]) -> str:
        ranks = [self.ranks[one] for one in sorted(positions) if one < self.size]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"

    def is_complete(self, handle: shared_memory.Pending) -> bool:
        return shared_memory.wait(handle, 0.0) != 0  # what has failed does not touch its memory any more

    def within(self, handle: shared_memory.Pending, seconds: float) -> bool:
        state = shared_memory.wait(handle, seconds)
        if state < 0:
            raise RuntimeError(shared_memory.failure(handle))
        return state == 1

    def release(self, handle: shared_memory.Pending) -> None:
        """Do nothing: the object frees itself, and the operation goes on."""


_open: weakref.WeakSet[SharedCommunicator] = weakref.WeakSet()


def open_groups() -> list[SharedCommunicator]:
    """Return this rank's sides of the groups that were not destroyed."""
    return members_of(_open)


def _record_to(descriptor: int) -> None:
    """Let native code write into the ring that was opened."""
    if descriptor >= 0:
        RECORDER.memory.add_entry(EntryType.CODES, RECORDED_CODES)
    try:
        shared_memory.record_to(descriptor)
    except (MemoryError, OSError, RuntimeError) as error:
        logger.warning("the flight recorder leaves out calls in shared memory: %s", error)
    for one in members_of(_open) if descriptor >= 0 else ():
        one.describe()


RECORDER.when_opened(_record_to)
if RECORDER.descriptor >= 0:
    _record_to(RECORDER.descriptor)

# For operations of all groups that nobody waits for, when a program ends.
_LAST_MOMENT_S = 1.0


@atexit.register
def _close_all() -> None:
    """Tensors go with the interpreter, so nothing may go on with them."""
    groups, end = members_of(_open), time.monotonic() + _LAST_MOMENT_S
    try:
        for one in groups:
            if one.usable:
                shared_memory.drain(one.native, max(0.0, end - time.monotonic()))
    finally:  # Ctrl-C ends the waiting, and leaves no group open
        for one in groups:
            one.ended_with_process = True
            shared_memory.close(one.native, quietly=True)
