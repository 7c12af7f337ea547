"""One group of ranks on oneCCL: made through the group's store, ended with the group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
from torch.distributed import Store

from comm_backend_ccl import native
from comm_backend_ccl.interface import interface_between
from comm_backend_ccl.leftovers import sweep
from comm_backend_ccl.native import Operation
from comm_backend_ccl.peers import Peers, Process, this_process
from comm_backend_ccl.tables import DTYPES, OPS
from comm_backend_ccl.work import LOOK_AROUND_S, CclWork
from comm_utils.errors import (
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommTimeoutError,
    NotInitializedError,
    PeerLostError,
)
from comm_utils.reduce_op import ReduceOp

__all__ = ["Communicator"]

_BYTE = DTYPES[torch.uint8]
_NO_TIMEOUT_S = 10.0**9
# Words of native/oneccl.cpp about what has nothing to do with other ranks.
_OF_THIS_PROCESS = ("forked child", "process is ending", "held up by a group", "group was destroyed")
# A connection may end before the process does.
_NOTICE_S = 0.3
# How long a group may still take to be made after one of its processes has ended.
_GRACE_S = 2.0


class Communicator:
    """Starts oneCCL's operations; tensors are dense in memory and fit, and ranks are positions in the group.

    Every rank of the group constructs one with the same store; the constructor returns when all have come.

    Args:
        ranks: global ranks of the members; None is the world.

    Raises:
        CommTimeoutError: not every rank came in time.
        BackendUnavailableError: oneCCL refused.
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.ranks = list(range(size)) if ranks is None else list(ranks)
        self.set_timeout(timeout)
        self._how_to_go_on = _WORLD_GOES_ON if ranks is None else _GROUP_GOES_ON
        #: What failed first, or None.
        self.broken: str | None = None
        #: Whether it has neither failed nor ended.
        self.usable = False
        self._store = store
        self._lost_at: float | None = None
        end = time.monotonic() + self.timeout_s
        self.peers = Peers(self._introduce(end), rank)
        try:
            if os.environ.get("CCL_ATL_SHM") == "1":
                sweep()
            interface = interface_between(len({process.machine for process in self.peers.processes}))
            native.initialize(self.peers.local.index(rank), len(self.peers.local), interface)
            self._group: int | None = self._make(end)
        except BaseException:
            self.peers.close()
            raise
        self.usable = True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long an operation may take; 0 is no limit."""
        self.timeout_s = timeout.total_seconds() or _NO_TIMEOUT_S

    # --- how it comes to be, and ends

    def _introduce(self, end: float) -> list[Process]:
        self._put(f"process/{self.rank}", this_process().encoded())
        keys = [f"process/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=max(0.001, min(end - time.monotonic(), 10.0**6))))
        except RuntimeError as error:
            missing = [self.ranks[rank] for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CommTimeoutError(
                f"rank {self.ranks[self.rank]}: ranks {missing} of {self} did not come to make it within "
                f"{self.timeout_s:g} s"
            ) from error
        return [Process.decoded(self._store.get(key)) for key in keys]

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # torch takes bytes as well

    def _get(self, key: str, end: float) -> bytes | None:
        self._give_up(end)
        return self._store.get(key) if self._store.check([key]) else None

    def _give_up(self, end: float) -> None:
        """Raise where the group cannot be made any more."""
        now = time.monotonic()
        if self.peers.gone() and self._lost_at is None:
            self._lost_at = now
        if self._lost_at is not None and now > self._lost_at + _GRACE_S:
            raise self._lost("the making of the group", self.peers.gone())
        if now > end:
            raise CommTimeoutError(
                f"rank {self.ranks[self.rank]}: the making of {self} was not finished within {self.timeout_s:g} s; "
                "check that its ranks run and that the interface FI_TCP_IFACE leads from each to the others"
            )

    def _make(self, end: float) -> int:
        """The group; in a thread, as oneCCL waits for ranks that do not come without an end."""
        made: list[int] = []
        failed: list[BaseException] = []
        given_up: list[bool] = []

        def create() -> None:
            try:
                made.append(native.create(self.size, self.rank, lambda key: self._get(key, end), self._put))
                if given_up:
                    native.destroy(made[0])
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=create, name="comm-ccl-group", daemon=True)
        thread.start()
        while True:
            thread.join(LOOK_AROUND_S)
            if not thread.is_alive():
                break
            try:
                # What the store tells has its own end, a moment earlier.
                self._give_up(end + 2 * LOOK_AROUND_S)
            except BaseException:
                given_up.append(True)
                raise
        if failed:
            raise failed[0]
        return made[0]

    @property
    def group(self) -> int:
        """What the library knows the group by.

        Raises:
            BrokenGroupError, NotInitializedError: it has failed or ended.
        """
        if self.broken is not None:
            self.check()
        if self._group is None:
            raise NotInitializedError("this process group no longer exists; make a new one with new_group()")
        return self._group

    def close(self) -> None:
        """Free what the group holds. Operations that are under way lose their meaning."""
        self.usable = False
        group, self._group = self._group, None
        if group is not None:
            native.destroy(group)
            if self.peers.gone() and os.environ.get("CCL_ATL_SHM") == "1":
                sweep()
            self.peers.close()

    # --- failures

    def __str__(self) -> str:
        ranks = str(self.ranks) if len(self.ranks) <= 16 else f"[{self.ranks[0]} ... {self.ranks[-1]}]"
        return f"the group of ranks {ranks}"

    def _break(self, what: str) -> None:
        self.broken = self.broken or what
        self.usable = False

    def check(self) -> None:
        """Raise ``BrokenGroupError`` where something failed before."""
        if self.broken is not None:
            raise self.broken_error()

    def broken_error(self) -> BrokenGroupError:
        """What to raise after an earlier failure."""
        return BrokenGroupError(
            f"{self} failed earlier ({self.broken}) and its ranks may disagree about what happened since; "
            f"{self._how_to_go_on}"
        )

    def _lost(self, call: str, gone: Collection[int]) -> Exception:
        who = ", ".join(f"rank {self.ranks[one]} ({self.peers.processes[one]})" for one in sorted(gone))
        self._break(f"{call}: lost {who}")
        return PeerLostError(
            f"{call} on {self} lost a peer, as seen by rank {self.ranks[self.rank]}: {who} ended; its own output says "
            f"why. The group cannot be used any more: {self._how_to_go_on}"
        )

    def gone(self, peer: int | None) -> Collection[int]:
        """The ranks on this host that have ended, of all or of ``peer`` alone."""
        gone = self.peers.gone()
        return gone if peer is None else gone & {peer}

    def lost(self, call: str, peer: int | None) -> Exception:
        """The error to raise where a rank that an operation needs has ended; the group is broken from then on."""
        return self._lost(call, self.gone(peer))

    def timed_out(self, call: str, limit_s: float, of_call: bool) -> Exception:
        """The error to raise after waiting in vain; the group is broken from then on."""
        self._break(f"{call}: timed out after {limit_s:g} s")
        source = "this call" if of_call else "init_distributed() and new_group()"
        return CommTimeoutError(
            f"{call} on {self} timed out after {limit_s:g} s, as seen by rank {self.ranks[self.rank]}: a rank of the "
            "group did not take part, or is late; a dist.monitored_barrier() before the call names who, and timeout= "
            f"of {source} sets the limit. The group cannot be used any more: {self._how_to_go_on}"
        )

    def failed(self, call: str, error: BaseException, peer: int | None = None) -> Exception:
        """The error to raise where oneCCL, or what is around it, reported one."""
        if any(reason in str(error) for reason in _OF_THIS_PROCESS):
            return BackendUnavailableError(f"{call} on {self}: {error}")
        end = time.monotonic() + _NOTICE_S
        while not self.gone(peer) and time.monotonic() < end:
            time.sleep(0.01)
        if self.gone(peer):
            return self.lost(call, peer)
        self._break(f"{call}: {error}")
        # With all of them alive on this host, only their calls can differ.
        here = len(self.peers.local) == self.size
        kind, cause = (
            (CollectiveMismatchError, "the ranks called with different sizes, or different operations")
            if here
            else (PeerLostError, "a rank on another host ended, or the ranks called with different sizes or operations")
        )
        return kind(
            f"{call} on {self} failed, as seen by rank {self.ranks[self.rank]}: {cause} [{error}]. The group cannot be "
            f"used any more: {self._how_to_go_on}"
        )

    # --- operations

    def position(self, global_rank: int | None, group_rank: int | None) -> int:
        """The group rank that one of the two names; that of global rank 0 if neither is given."""
        if group_rank is not None:
            return group_rank
        return self.ranks.index(0 if global_rank is None else global_rank)

    def _start(
        self,
        operation: Operation,
        source: torch.Tensor,
        target: torch.Tensor,
        count: int,
        dtype: int,
        op: int,
        peer: int,
        watched: bool,
    ) -> CclWork:
        group = self.group
        if count == 0:
            return CclWork(self, None, (), operation)
        try:
            handle = native.start(
                group, operation, source.data_ptr(), target.data_ptr(), count, dtype, op, peer, watched
            )
        except RuntimeError as error:
            raise self.failed(operation.name.lower(), error) from error
        work = CclWork(self, handle, (source, target), operation)
        if operation in (Operation.SEND, Operation.RECEIVE):
            work.peer = peer
        return work

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, watched: bool = False) -> CclWork:
        """Reduce ``tensor`` in place."""
        code = DTYPES[tensor.dtype]
        return self._start(Operation.ALL_REDUCE, tensor, tensor, tensor.numel(), code, OPS[op], 0, watched)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, watched: bool = False) -> CclWork:
        """Reduce into the tensor of ``root``; the others keep theirs."""
        # oneCCL uses the output of every rank.
        target = tensor if root == self.rank else torch.empty_like(tensor)
        code = DTYPES[tensor.dtype]
        return self._start(Operation.REDUCE, tensor, target, tensor.numel(), code, OPS[op], root, watched)

    def broadcast(self, tensor: torch.Tensor, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``tensor`` with that of ``root``."""
        return self._start(Operation.BROADCAST, tensor, tensor, tensor.nbytes, _BYTE, 0, root, watched)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, watched: bool = False) -> CclWork:
        """Overwrite ``output``, of W times the size, with every rank's ``input``."""
        return self._start(Operation.ALL_GATHER, input, output, input.nbytes, _BYTE, 0, 0, watched)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, watched: bool = False) -> CclWork:
        """Overwrite ``output`` with this rank's part of the reduced ``input``, of W times the size."""
        code = DTYPES[output.dtype]
        return self._start(Operation.REDUCE_SCATTER, input, output, output.numel(), code, OPS[op], 0, watched)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_bytes: Sequence[int] = (),
        input_bytes: Sequence[int] = (),
        watched: bool = False,
    ) -> CclWork:
        """Part r of ``input`` goes to rank r; parts are equal, or have so many bytes."""
        if not output_bytes and not input_bytes:
            part = input.nbytes // self.size
            return self._start(Operation.ALL_TO_ALL, input, output, part, _BYTE, 0, 0, watched)
        group = self.group
        try:
            handle = native.start(
                group,
                Operation.ALL_TO_ALL_V,
                input.data_ptr(),
                output.data_ptr(),
                0,
                _BYTE,
                watched=watched,
                source_counts=input_bytes,
                target_counts=output_bytes,
            )
        except RuntimeError as error:
            raise self.failed("all_to_all", error) from error
        return CclWork(self, handle, (input, output), Operation.ALL_TO_ALL_V)

    def all_to_all_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
        watched: bool = False,
    ) -> CclWork:
        """The same with the sizes of parts in rows, of the first dimension; None or empty is in equal parts."""
        if not output_rows and not input_rows:
            return self.all_to_all(output, input, watched=watched)
        return self.all_to_all(
            output, input, self._part_bytes(output, output_rows), self._part_bytes(input, input_rows), watched
        )

    def _part_bytes(self, tensor: torch.Tensor, rows: Sequence[int] | None) -> list[int]:
        if not rows:
            return [tensor.nbytes // self.size] * self.size
        row = tensor.nbytes // tensor.shape[0] if tensor.shape[0] else 0
        return [row * count for count in rows]

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``output`` of ``root``, of W times the size, with every rank's ``input``."""
        sent, received = [0] * self.size, [0] * self.size
        sent[root] = input.nbytes
        if self.rank == root:
            received = [input.nbytes] * self.size
        target = input.new_empty(0) if output is None else output
        return self.all_to_all(target, input, received, sent, watched)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``output`` with this rank's part of the ``input`` of ``root``, of W times the size."""
        sent, received = [0] * self.size, [0] * self.size
        received[root] = output.nbytes
        if self.rank == root:
            sent = [output.nbytes] * self.size
        source = output.new_empty(0) if input is None else input
        return self.all_to_all(output, source, received, sent, watched)

    def barrier(self, watched: bool = False) -> CclWork:
        """Complete when every rank has come."""
        # oneCCL's own waits inside the call, without end where a rank is missing.
        token = torch.zeros(1, dtype=torch.int32)
        return self.all_reduce(token, ReduceOp.SUM, watched)

    def send(self, tensor: torch.Tensor, peer: int, watched: bool = False) -> CclWork:
        """Send to ``peer``; complete when the memory may be used again."""
        return self._start(Operation.SEND, tensor, tensor, tensor.nbytes, _BYTE, 0, peer, watched)

    def receive(self, tensor: torch.Tensor, peer: int, watched: bool = False) -> CclWork:
        """Overwrite ``tensor`` with what ``peer`` sent."""
        return self._start(Operation.RECEIVE, tensor, tensor, tensor.nbytes, _BYTE, 0, peer, watched)


_WORLD_GOES_ON = "call destroy_process_group() and then init_distributed() again, on every rank"
_GROUP_GOES_ON = "its members go on with destroy_process_group(group) and a new one from new_group()"
