"""A group of ranks on one host, in shared memory."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence, Set
from datetime import timedelta

import torch

from comm_backend_ccl import shared_memory
from comm_backend_ccl.communicator import Begun, Call, Communicator
from comm_backend_ccl.peers import Peers
from comm_backend_ccl.tables import DTYPES, IN_SHARED_MEMORY, Operation
from comm_utils.errors import BackendUnavailableError

__all__ = ["SharedCommunicator"]


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
        crowded: bool,
    ) -> None:
        super().__init__(peers, rank, timeout, ranks)
        pids = [process.pid for process in peers.processes]
        self.number = shared_memory.join(pids[0], memory, rank, pids, crowded)
        weakref.finalize(self, shared_memory.free, self.number).atexit = False
        _open.add(self)

    def _end(self) -> None:
        shared_memory.close(self.number)

    def _break(self, what: str) -> None:
        super()._break(what)
        shared_memory.close(self.number)  # the memory of its tensors is the user's again

    def _begin(self, call: Call) -> Begun:
        source, target = call.source, call.target
        dtype = source.dtype
        if dtype not in DTYPES:
            item = source.element_size()
            dtype = torch.uint8
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
        uneven = call.operation is Operation.ALL_TO_ALL_V
        try:
            handle = shared_memory.start(
                self.number,
                call.operation,
                source.data_ptr(),
                target.data_ptr(),
                call.elements,
                dtype,
                call.op,
                call.root,
                call.watched,
                call.source_counts if uneven else None,
                call.target_counts if uneven else None,
            )
        except MemoryError as error:  # the others get an error, too
            name = call.operation.name.lower()
            self._break(f"{name}: {error}")
            raise BackendUnavailableError(f"{name} on {self}: {error}") from error
        return (handle, (source, target)) if handle else (None, ())

    def gone_for(self, handle: int, peer: int | None) -> Set[int]:
        gone = self.gone(peer)
        # A rank that has done its part may end before the others are through.
        return gone & shared_memory.missing(handle) if gone and peer is None else gone

    def is_complete(self, handle: int) -> bool:
        return shared_memory.wait(handle, 0.0) != 0  # what has failed does not touch its memory any more

    def within(self, handle: int, seconds: float) -> bool:
        state = shared_memory.wait(handle, seconds)
        if state < 0:
            raise RuntimeError(shared_memory.failure(handle))
        return state == 1

    def release(self, handle: int) -> None:
        shared_memory.release(handle)


_open: weakref.WeakSet[SharedCommunicator] = weakref.WeakSet()
# For operations that nobody waits for, when a program ends.
_LAST_MOMENT_S = 1.0


@atexit.register
def _close_all() -> None:
    """Tensors go with the interpreter, so nothing may go on with them."""
    for one in list(_open):
        if one.usable:
            shared_memory.drain(one.number, _LAST_MOMENT_S)
        shared_memory.close(one.number, quietly=True)
