"""A group of ranks on oneCCL: made through the group's store, ended with the group."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import Store

from comm_backend_ccl import oneccl_library, placement
from comm_backend_ccl.any_source import AnySource, QueuedReceive, match_all
from comm_backend_ccl.communicator import Begun, Communicator
from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.interface import interface_between
from comm_backend_ccl.peers import Peers
from comm_backend_ccl.shm_cleanup import sweep
from comm_backend_ccl.store_messages import StoreMessages, StoreReceive
from comm_backend_ccl.tables import ON_ONECCL, ONECCL_DTYPES, ONECCL_OPS, Operation
from comm_backend_ccl.work import ANY_SOURCE, EngineHandle
from comm_utils import topology
from comm_utils.errors import BackendUnavailableError, NotInitializedError
from comm_utils.torch_support import factories
from comm_utils.torch_support.breakable_group import IN_FORKED_CHILD
from comm_utils.torch_support.connecting import Connecting
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = ["OneCclCommunicator"]

_BYTE = ONECCL_DTYPES[torch.uint8]
_REDUCING = (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)
# How long a group may still take to be made after one of its processes has ended.
_GRACE_S = 2.0
# How long oneCCL is waited for at once while receives from any source look for their messages.
_SLICE_S = 0.002
# How often a rank that is being connected looks whether another one has failed.
_LOOK_S = 0.05


class OneCclCommunicator(Communicator):
    """Every rank of the group constructs one with the same store; the constructor returns when all have come.

    Raises:
        CommTimeoutError: not every rank came in time.
        BackendUnavailableError: oneCCL refused, or did not connect the ranks as they are numbered.
    """

    engine = "oneCCL"
    capabilities = ON_ONECCL

    def __init__(
        self,
        store: Store,
        peers: Peers,
        rank: int,
        timeout: timedelta,
        ranks: Sequence[int] | None,
        connecting: Connecting,
        places: Sequence[placement.Place],
    ) -> None:
        super().__init__(peers, rank, timeout, ranks)
        self._store = store
        self._lost_at: float | None = None
        self._messages = StoreMessages(store, rank, self.size)
        self.untagged = AnySource(store, rank, self.size, self._start_receive)
        if os.environ.get("CCL_ATL_SHM") == "1":
            sweep()
        interface = interface_between(len({process.machine for process in peers.processes}))
        oversubscribed = placement.are_oversubscribed([places[one] for one in peers.local], topology.cpus_of_launcher())
        oneccl_library.initialize(peers.local.index(rank), len(peers.local), interface, oversubscribed)
        self._group: oneccl_library.Group | None = self._make(connecting)

    # --- how it comes to be, and ends

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes as well

    def _get(self, key: str, connecting: Connecting) -> bytes | None:
        connecting.check()
        return self._store.get(key) if self._store.check([key]) else None

    def _look(self) -> None:
        """Raise where a member's process has ended, and so the group cannot be made any more."""
        now = time.monotonic()
        if self.peers.gone() and self._lost_at is None:
            self._lost_at = now
        if self._lost_at is not None and now > self._lost_at + _GRACE_S:
            raise self.lost("the making of the group", self.peers.gone())

    def _make(self, connecting: Connecting) -> oneccl_library.Group:
        """Return the group; oneCCL waits for ranks that do not come without an end."""
        return connecting.run(lambda: self._connect(connecting), oneccl_library.destroy, self._look)

    def _connect(self, connecting: Connecting) -> oneccl_library.Group:
        group = oneccl_library.create(self.size, self.rank, lambda key: self._get(key, connecting), self._put)
        try:
            self._check_connections(group, connecting)
        except BaseException:
            oneccl_library.destroy(group)
            raise
        return group

    def _check_connections(self, group: oneccl_library.Group, connecting: Connecting) -> None:
        """Gather the ranks' numbers: a group that is connected wrongly would give wrong results, and no errors."""
        mine, found = factories.tensor([self.ranks[self.rank]]), factories.full((self.size,), -1)
        handle = oneccl_library.start(group, Operation.ALL_GATHER, mine, found, 1, ONECCL_DTYPES[torch.int64])
        try:
            while not oneccl_library.wait(handle, _LOOK_S):
                connecting.check()
        except BaseException as error:
            oneccl_library.note_failure(f"the making of a group: {error}")
            raise
        oneccl_library.release(handle)
        if found.tolist() != self.ranks:
            raise BackendUnavailableError(
                f"oneCCL has connected rank {self.ranks[self.rank]} of {self} with ranks {found.tolist()}; use "
                "dist_backend='gloo'"
            )

    @property
    def group(self) -> oneccl_library.Group:
        """Return the library's handle of the group.

        Raises:
            BrokenGroupError, NotInitializedError: it has failed or ended.
        """
        self.check()
        if self._group is None:
            raise NotInitializedError("this process group no longer exists; make a new one with new_group()")
        return self._group

    def _end(self) -> None:
        group, self._group = self._group, None
        if self.inherited:
            return
        self.untagged.close()
        if group is not None:
            oneccl_library.destroy(group)
            if self.peers.gone() and os.environ.get("CCL_ATL_SHM") == "1":
                sweep()

    def trouble(self) -> Trouble | None:
        # oneCCL tells nobody that a rank has given up.
        return super().trouble() or WATCH.failure_elsewhere(self.name)

    def _knows_difference(self) -> bool:
        return self._messages.disagreed

    def _disagreed(self, what: str) -> None:
        if self._messages.disagreed:
            return  # oneCCL has no part in them
        oneccl_library.note_failure(what)
        self._remedy = f"{oneccl_library.START_AGAIN}, as oneCCL keeps requests of the failed operation"

    # --- operations

    def _begin(self, call: Call) -> Begun:
        operation, source, target = call.operation, call.source, call.target
        if operation is Operation.BARRIER:
            # oneCCL's own waits inside the call, without end where a rank is missing.
            token = factories.zeros(1, dtype=torch.int32, device="cpu")
            return self._begin(Call(Operation.ALL_REDUCE, token, token, 1, watched=call.watched))
        if operation is Operation.SEND and call.tag:
            self._messages.send(source, call.root, call.tag)
            return None, ()
        if operation is Operation.RECEIVE and call.tag:
            return self._messages.receive(target, call.root, call.tag), (target,)
        if operation is Operation.RECEIVE and (call.root == ANY_SOURCE or not self.untagged.take(call.root)):
            return self.untagged.receive(target, call.root), (target,)
        if operation is Operation.SEND:
            self.untagged.announce(call.root)
        item = source.element_size()
        source_counts, target_counts = call.source_counts, call.target_counts
        if operation in (Operation.GATHER, Operation.SCATTER):
            # Which oneCCL does not have.
            part = [call.elements if peer == call.root else 0 for peer in range(self.size)]
            whole = [call.elements if self.rank == call.root else 0] * self.size
            source_counts, target_counts = (part, whole) if operation is Operation.GATHER else (whole, part)
            operation = Operation.ALL_TO_ALL_V
        if operation is Operation.ALL_TO_ALL_V:
            handle = oneccl_library.start(
                self.group,
                operation,
                source,
                target,
                0,
                _BYTE,
                watched=call.watched,
                source_counts=[item * one for one in source_counts],
                target_counts=[item * one for one in target_counts],
            )
            return handle, (source, target)
        if operation is Operation.REDUCE and call.root != self.rank:
            target = torch.empty_like(target)  # oneCCL uses the output of every rank
        reducing = operation in _REDUCING
        handle = oneccl_library.start(
            self.group,
            operation,
            source,
            target,
            call.elements if reducing else call.elements * item,
            ONECCL_DTYPES[source.dtype] if reducing else _BYTE,
            ONECCL_OPS[call.op] if reducing else 0,
            max(call.root, 0),
            call.watched,
        )
        return handle, (source, target)

    def _start_receive(self, tensor: torch.Tensor, source: int) -> EngineHandle:
        return oneccl_library.start(
            self.group, Operation.RECEIVE, tensor, tensor, tensor.nbytes, _BYTE, peer=source, watched=True
        )

    def source(self, handle: EngineHandle) -> int:
        return handle.source if isinstance(handle, (StoreReceive, QueuedReceive)) else super().source(handle)

    def within(self, handle: EngineHandle, seconds: float) -> bool:
        if self.inherited:  # what this child would ask the store takes the parent's answers
            raise RuntimeError(f"oneCCL {IN_FORKED_CHILD}")
        if isinstance(handle, QueuedReceive):
            return self.untagged.within(handle, seconds, oneccl_library.wait)
        end = time.monotonic() + seconds
        # A sender may not go on before its message is received.
        while match_all() and (left_s := end - time.monotonic()) > _SLICE_S:
            if self._within(handle, min(left_s, _SLICE_S)):
                return True
        return self._within(handle, max(0.0, end - time.monotonic()))

    def _within(self, handle: EngineHandle, seconds: float) -> bool:
        if isinstance(handle, StoreReceive):
            return self._messages.within(handle, seconds)
        return oneccl_library.wait(handle, seconds)

    def ended_ns(self, handle: EngineHandle) -> int | None:
        if isinstance(handle, StoreReceive):
            return handle.ended_ns
        native = handle.handle if isinstance(handle, QueuedReceive) else handle
        return None if native is None else oneccl_library.ended_ns(native)

    def release(self, handle: EngineHandle) -> None:
        if isinstance(handle, StoreReceive):
            return
        native = handle.handle if isinstance(handle, QueuedReceive) else handle
        if native is not None:
            oneccl_library.release(native)
