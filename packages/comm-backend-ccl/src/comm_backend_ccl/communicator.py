"""One group of ranks: who they are, what became of them, and the operations that an engine does for them."""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence, Set
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch

from comm_backend_ccl.peers import Peers
from comm_backend_ccl.recorded import note_call
from comm_backend_ccl.tables import Operation
from comm_backend_ccl.work import ANY_SOURCE, STORE_GONE, CclWork, EngineHandle
from comm_utils.backend import Capabilities
from comm_utils.errors import (
    BackendUnavailableError,
    BrokenGroupError,
    CollectiveMismatchError,
    CommTimeoutError,
    NotInitializedError,
    PeerLostError,
)
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.group_names import group_text
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support.flattening import flat_view, flattened, staging_memory
from comm_utils.torch_support.group_state import IN_FORKED_CHILD
from comm_utils.torch_support.recorded_calls import Note
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = ["Begun", "Call", "Communicator"]

#: A handle, None where all is done, and the tensors in whose memory an operation goes on.
Begun = tuple["EngineHandle | None", tuple[torch.Tensor, ...]]


class Call(NamedTuple):
    """A request to an engine; tensors are dense in memory and have matching sizes.

    Attributes:
        elements: of the whole tensor for all_reduce, reduce, broadcast and messages, else of a rank's part.
        watched: it has to come to an end even if nobody waits for it.
        source_counts, target_counts: elements for each rank, of all_to_all_v.
        tag: of a message.
    """

    operation: Operation
    source: torch.Tensor
    target: torch.Tensor
    elements: int
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    watched: bool = False
    source_counts: Sequence[int] = ()
    target_counts: Sequence[int] = ()
    tag: int = 0


_NO_TIMEOUT_S = 10.0**9
# Words of the engines about what has nothing to do with other ranks.
_OF_THIS_PROCESS = ("forked child", "process is ending", "held up by a group", "group was destroyed")
_LACKING = "not enough shared memory"
# As it ended, or for want of descriptors or mappings.
_DISAGREE = "disagree about how much"
_UNREACHABLE = "cannot reach the memory"
_GAVE_UP = "gave up; its own error says why"
# A connection may end before the process does.
_NOTICE_S = 0.3
# And one that has begun to end may take so long to free its memory on a busy machine.
_END_S = 5.0


class Communicator(ABC):
    """Starts operations; ranks are positions in the group.

    Args:
        peers: the ranks' processes.
        ranks: global ranks of the members; None is the world.
    """

    #: What moves the data, for messages.
    engine: ClassVar[str]
    #: Whether the engine writes its calls into the flight recorder itself.
    records_natively: ClassVar[bool] = False
    #: Whether calls without elements reach it, to be compared with those of others.
    moves_nothing: ClassVar[bool] = False
    #: What it reduces and moves as it is.
    capabilities: ClassVar[Capabilities]

    def __init__(self, peers: Peers, rank: int, timeout: timedelta, ranks: Sequence[int] | None) -> None:
        self.peers = peers
        self.rank, self.size = rank, len(peers.processes)
        self.ranks = list(range(self.size)) if ranks is None else list(ranks)
        self.is_world = ranks is None
        #: Of the process group: its name, the same on all members, and ``group_desc``, for messages.
        self.name = self.description = ""
        self._recorded_as, self._opened = 0, -1
        self.set_timeout(timeout)
        self._how_to_go_on = _WORLD_GOES_ON if ranks is None else _GROUP_GOES_ON
        #: What failed first, or None.
        self.broken: str | None = None
        #: Why its ranks cannot go on, as the watch has found, until a call has raised it.
        self._trouble: Trouble | None = None
        #: Whether it has neither failed nor ended.
        self.usable = True
        self._open = True
        self._inherited = False
        _communicators.add(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of an operation; 0 is no limit."""
        self.timeout_s = timeout.total_seconds() or _NO_TIMEOUT_S

    # --- what an engine does

    @abstractmethod
    def _begin(self, call: Call) -> Begun:
        """Start an operation: a handle, or None where it is complete already, and what it uses until the end.

        Raises:
            RuntimeError: it was refused, or failed.
        """

    @abstractmethod
    def within(self, handle: EngineHandle, seconds: float) -> bool:
        """Return whether the operation was complete within so long; 0 asks and does not wait.

        Raises:
            RuntimeError: it failed.
        """

    @abstractmethod
    def release(self, handle: EngineHandle) -> None:
        """Give a handle back. An operation that is under way goes on."""

    @abstractmethod
    def _end(self) -> None:
        """Free what the engine holds."""

    def ended_ns(self, handle: EngineHandle) -> int | None:
        """Return when a watched operation was complete, by ``time.perf_counter_ns``.

        None where the engine does not tell.
        """
        return None

    def begin_wait(self, handle: EngineHandle, limited: bool) -> None:  # noqa: B027
        """Note that somebody waits for the operation, which did not end within a moment.

        Args:
            limited: for a time that is not the group's.
        """

    def is_complete(self, handle: EngineHandle) -> bool:
        """Return whether the operation has come to a good end."""
        try:
            return self.within(handle, 0.0)
        except RuntimeError:
            return False

    def close(self) -> None:
        """Free what the group holds. Operations that are under way lose their meaning."""
        self.usable = False
        if self._open:
            self._open = False
            self._end()
            self.peers.close()

    # --- failures

    def __str__(self) -> str:
        return group_text(self.ranks, self.description)

    def _break(self, what: str) -> None:
        self.broken = self.broken or what
        self.usable = False

    def _disagreed(self, what: str) -> None:  # noqa: B027  # most engines need nothing
        """Note that the engine failed as the ranks' calls differ, before the error is raised."""

    def _knows_difference(self) -> bool:
        """Return whether the engine has seen that the ranks' calls differ, so that a rank that ended is no cause."""
        return False

    def check(self) -> None:
        """Raise ``BrokenGroupError`` where something failed before, ``NotInitializedError`` after the end."""
        if self._inherited:
            raise BackendUnavailableError(f"{self} {IN_FORKED_CHILD}")
        if self.broken is not None:
            trouble, self._trouble = self._trouble, None
            raise self.broken_error() if trouble is None else self.in_trouble("", trouble)
        if not self._open:
            raise NotInitializedError("this process group no longer exists; make a new one with new_group()")

    def inherit(self) -> None:
        """Refuse operations: this is a forked child, which has none of the engine's threads and connections."""
        self.usable, self._inherited = False, True

    def broken_error(self) -> BrokenGroupError:
        """Return the error for calls after an earlier failure."""
        return BrokenGroupError(
            f"{self} failed earlier ({self.broken}) and its ranks may disagree about what happened since; "
            f"{self._how_to_go_on}"
        )

    def for_diagnosis(self) -> RingGroup:
        """Return the group as rings describe it."""
        return RingGroup(self.name, tuple(self.ranks), self.description, self.engine)

    def recorded_as(self) -> int:
        """Return the index of the group in the flight recorder."""
        if self._opened != RECORDER.opened:
            self._opened = RECORDER.opened
            self._recorded_as = RECORDER.group_index(
                self.name, self.ranks, self.description, self.engine, self.timeout_s
            )
        return self._recorded_as

    def trouble(self) -> Trouble | None:
        """Return why the group's ranks cannot go on, as the watch has found; None while they can."""
        return WATCH.trouble(self.name)

    def fall_into(self, trouble: Trouble) -> None:
        """Refuse further calls: the first raises ``trouble`` itself."""
        if self.broken is None:
            self._trouble = trouble
            self._break(trouble.short)

    def give_up(self, reason: str) -> None:
        """Refuse further calls, after an error that was raised."""
        self._trouble = None
        self._break(reason)

    def in_trouble(self, call: str, trouble: Trouble, said: str = "") -> Exception:
        """Return the error to raise where the watch has found trouble; the group is broken from then on.

        Args:
            said: what the engine has reported.
        """
        self._trouble = None
        self._break(f"{call}: {trouble.short}" if call else trouble.short)
        if call and trouble.kind is CollectiveMismatchError:
            self._disagreed(f"{call}: {trouble.text}")
        happened = f"{call} on {self} {trouble.verb}" if call else f"{self} cannot go on"
        failure = trouble.kind(
            f"{happened}, as seen by rank {self.ranks[self.rank]}: {trouble.text}. The group cannot be used any more: "
            f"{self._how_to_go_on}{f' [{said}]' if said else ''}"
        )
        WATCH.tell(self.name, failure, trouble)
        return failure

    def _cause(self, timed_out: bool) -> Trouble | None:
        """Return the cause of a failed call, as far as rings and other ranks tell."""
        return WATCH.explain(self.for_diagnosis(), timed_out) if WATCH.is_running else None

    def _lost(self, call: str, gone: Collection[int]) -> Exception:
        trouble = self._cause(timed_out=False)
        if trouble is not None:
            ended = {self.ranks[one]: f"rank {self.ranks[one]} ({self.peers.processes[one]}" for one in sorted(gone)}
            text = trouble.text + "".join(f"; {who}) has ended" for who in ended.values() if who not in trouble.text)
            # A rank that could only be seen to be missing has ended.
            is_theirs = trouble.kind is CommTimeoutError and ended.keys() >= {*trouble.ranks}
            kind = PeerLostError if is_theirs else trouble.kind
            return self.in_trouble(call, Trouble(kind, text, trouble.ranks))
        who = ", ".join(f"rank {self.ranks[one]} ({self.peers.processes[one]})" for one in sorted(gone))
        self._break(f"{call}: lost {who}")
        return PeerLostError(
            f"{call} on {self} lost a peer, as seen by rank {self.ranks[self.rank]}: {who} ended; its own output says "
            f"why. The group cannot be used any more: {self._how_to_go_on}"
        )

    def gone(self, peer: int | None) -> Set[int]:
        """Return the ranks on this host that have ended, of all or of ``peer`` alone."""
        gone = self.peers.gone()
        if peer == ANY_SOURCE:  # of which one that lives is enough
            return gone if len(gone) == self.size - 1 else frozenset()
        return gone if peer is None else gone & {peer}

    def gone_for(self, handle: EngineHandle, peer: int | None) -> Set[int]:
        """Those of them without which an operation cannot go on, as far as the engine can tell."""
        return self.gone(peer)

    def lost(self, call: str, peer: int | None) -> Exception:
        """Return the error to raise where a rank that an operation needs has ended.

        The group is broken from then on.
        """
        return self._lost(call, self.gone(peer))

    def timed_out(self, call: str, limit_s: float, of_call: bool) -> Exception:
        """Return the error to raise after waiting in vain; the group is broken from then on."""
        trouble = self._cause(timed_out=True)
        self._break(f"{call}: timed out after {limit_s:g} s")
        if trouble is not None:
            return self._timed_out_error(call, limit_s, trouble)
        source = "this call" if of_call else "init_distributed() and new_group()"
        return CommTimeoutError(
            f"{call} on {self} timed out after {limit_s:g} s, as seen by rank {self.ranks[self.rank]}: a rank of the "
            "group did not take part, or is late; a dist.monitored_barrier() before the call names who, and timeout= "
            f"of {source} sets the limit. The group cannot be used any more: {self._how_to_go_on}"
        )

    def _timed_out_error(self, call: str, limit_s: float, trouble: Trouble) -> Exception:
        failure = trouble.kind(
            f"{call} on {self} timed out after {limit_s:g} s, as seen by rank {self.ranks[self.rank]}: "
            f"{trouble.text}. The group cannot be used any more: {self._how_to_go_on}"
        )
        WATCH.tell(self.name, failure, trouble)
        return failure

    def _lacking(self, call: str, error: BaseException) -> Exception:
        self._break(f"{call}: {error}")
        return BackendUnavailableError(f"{call} on {self}: {error}. {self._how_to_go_on.capitalize()}")

    def failed(self, call: str, error: BaseException, peer: int | None = None) -> Exception:
        """Return the error to raise where the engine reported one."""
        if self.broken is not None:
            pending = self._trouble
            return self.broken_error() if pending is None else self.in_trouble(call, pending)
        if any(reason in str(error) for reason in _OF_THIS_PROCESS):
            return BackendUnavailableError(f"{call} on {self}: {error}")
        if _LACKING in str(error):
            return self._lacking(call, error)
        if STORE_GONE in str(error):
            self._break(f"{call}: {error}")
            return PeerLostError(
                f"{call} on {self}: {error}: the process that holds it has ended. The group cannot be used any more: "
                f"{self._how_to_go_on}"
            )
        disagree = _DISAGREE in str(error)
        # The two ranks of a message are all there is to find out.
        trouble = None if disagree and peer is not None else self._cause(timed_out=False)
        if trouble is not None and trouble.kind is CommTimeoutError:
            trouble = None  # a call that is only missing is no cause of what the engine reported
        if disagree and (trouble is None or trouble.kind is not CollectiveMismatchError):
            return self.in_trouble(call, Trouble(CollectiveMismatchError, f"the ranks' calls differ: {error}"))
        if trouble is not None:
            if trouble.kind is CollectiveMismatchError:
                self._disagreed(f"{call}: {error}")
            return self.in_trouble(call, trouble, str(error))
        if not self._knows_difference():
            now = time.monotonic()
            end, last = now + _NOTICE_S, now + _END_S
            while not self.gone(peer) and (now < end or (now < last and self.peers.any_ending())):
                time.sleep(0.01)
                now = time.monotonic()
            if self.gone(peer):
                return self.lost(call, peer)
        if _UNREACHABLE in str(error):
            return self._lacking(call, error)
        self._break(f"{call}: {error}")
        self._disagreed(f"{call}: {error}")
        if _GAVE_UP in str(error):
            return PeerLostError(f"{call} on {self}: {error}. The group cannot be used any more: {self._how_to_go_on}")
        # With all of them alive on this host, only their calls can differ.
        here = len(self.peers.local) == self.size
        kind, cause = (
            (CollectiveMismatchError, "the ranks' calls differ, in the operation or in its arguments")
            if here
            else (PeerLostError, "a rank on another host ended, or the ranks called with different sizes or operations")
        )
        return self.in_trouble(call, Trouble(kind, cause), str(error))

    # --- operations

    def source(self, handle: EngineHandle) -> int:
        """Return the group rank of the sender of what a receive from any source has got; -1 before the end."""
        raise NotImplementedError

    def position(self, global_rank: int | None, group_rank: int | None) -> int:
        """Return the group rank that one of the two names; that of global rank 0 if neither is given."""
        if group_rank is not None:
            return group_rank
        return self.ranks.index(0 if global_rank is None else global_rank)

    def _start(self, call: Call) -> CclWork:
        self.check()
        operation = call.operation
        name = operation.name.lower()
        handle: EngineHandle | None = None
        kept: tuple[torch.Tensor, ...] = ()
        note: Note | None = None
        has_to_match = call.tag or (operation is Operation.RECEIVE and call.root == ANY_SOURCE)
        reaches_engine = operation in (Operation.ALL_TO_ALL_V, Operation.BARRIER) or has_to_match
        if call.elements or self.moves_nothing or reaches_engine:
            note = None if self.records_natively else note_call(self, call, 2)
            try:
                handle, kept = self._begin(call)
            except RuntimeError as error:
                failed = self.failed(name, error)
                if note is not None:
                    note.fail()
                raise failed from error
            if note is not None and handle is None:
                note.end()
                note = None
        work = CclWork(self, handle, kept, name)
        if note is not None:
            work.note = note
        if operation in (Operation.SEND, Operation.RECEIVE):
            work.peer = call.root
        return work

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, watched: bool = False) -> CclWork:
        """Reduce ``tensor`` in place."""
        return self._start(Call(Operation.ALL_REDUCE, tensor, tensor, tensor.numel(), op, watched=watched))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, watched: bool = False) -> CclWork:
        """Reduce into the tensor of ``root``; the others keep theirs."""
        return self._start(Call(Operation.REDUCE, tensor, tensor, tensor.numel(), op, root, watched))

    def broadcast(self, tensor: torch.Tensor, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``tensor`` with that of ``root``."""
        return self._start(Call(Operation.BROADCAST, tensor, tensor, tensor.numel(), root=root, watched=watched))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, watched: bool = False) -> CclWork:
        """Overwrite ``output``, of W times the size, with every rank's ``input``."""
        return self._start(Call(Operation.ALL_GATHER, input, output, input.numel(), watched=watched))

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, watched: bool = False) -> CclWork:
        """Overwrite ``output`` with this rank's part of the reduced ``input``, of W times the size."""
        return self._start(Call(Operation.REDUCE_SCATTER, input, output, output.numel(), op, watched=watched))

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_counts: Sequence[int] = (),
        input_counts: Sequence[int] = (),
        watched: bool = False,
    ) -> CclWork:
        """Part r of ``input`` goes to rank r; parts are equal, or have so many elements."""
        if not output_counts and not input_counts:
            part = input.numel() // self.size
            return self._start(Call(Operation.ALL_TO_ALL, input, output, part, watched=watched))
        return self._start(
            Call(
                Operation.ALL_TO_ALL_V,
                input,
                output,
                0,
                watched=watched,
                source_counts=input_counts,
                target_counts=output_counts,
            )
        )

    def all_to_all_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
        watched: bool = False,
    ) -> CclWork:
        """Return the same with the sizes of parts in rows, of the first dimension; None or empty is in equal parts."""
        if not output_rows and not input_rows:
            return self.all_to_all(output, input, watched=watched)
        return self.all_to_all(
            output, input, self._part_counts(output, output_rows), self._part_counts(input, input_rows), watched
        )

    def _part_counts(self, tensor: torch.Tensor, rows: Sequence[int] | None) -> list[int]:
        if not rows:
            return [tensor.numel() // self.size] * self.size
        row = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
        return [row * count for count in rows]

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``output`` of ``root``, of W times the size, with every rank's ``input``."""
        target = input.new_empty(0) if output is None else output
        return self._start(Call(Operation.GATHER, input, target, input.numel(), root=root, watched=watched))

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, root: int, watched: bool = False) -> CclWork:
        """Overwrite ``output`` with this rank's part of the ``input`` of ``root``, of W times the size."""
        source = output.new_empty(0) if input is None else input
        return self._start(Call(Operation.SCATTER, source, output, output.numel(), root=root, watched=watched))

    def all_gather_parts(self, outputs: Sequence[torch.Tensor], input: torch.Tensor, watched: bool = False) -> CclWork:
        """Overwrite each of W dense ``outputs`` with that rank's ``input``, dense as well."""
        memory, finish = staging_memory(outputs, input)
        return self.all_gather(memory, flat_view(input), watched).then(finish)

    def gather_parts(
        self, outputs: Sequence[torch.Tensor] | None, input: torch.Tensor, root: int, watched: bool = False
    ) -> CclWork:
        """Return the same on ``root`` alone; the others' ``outputs`` are not looked at."""
        if root != self.rank or not outputs:
            return self.gather(None, input, root, watched)
        memory, finish = staging_memory(outputs, input)
        return self.gather(memory, input, root, watched).then(finish)

    def scatter_parts(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, root: int, watched: bool = False
    ) -> CclWork:
        """Overwrite ``output`` with this rank's of the W dense ``inputs`` of ``root``."""
        source = flattened(inputs, output) if root == self.rank and inputs else None
        return self.scatter(output, source, root, watched)

    def barrier(self, watched: bool = False) -> CclWork:
        """Complete when every rank has come."""
        nothing = torch.empty(0, device="cpu")
        return self._start(Call(Operation.BARRIER, nothing, nothing, 0, watched=watched))

    def send(self, tensor: torch.Tensor, peer: int, watched: bool = False, tag: int = 0) -> CclWork:
        """Send to ``peer``; complete when the memory may be used again."""
        return self._start(Call(Operation.SEND, tensor, tensor, tensor.numel(), root=peer, watched=watched, tag=tag))

    def receive(self, tensor: torch.Tensor, peer: int, watched: bool = False, tag: int = 0) -> CclWork:
        """Overwrite ``tensor`` with what ``peer``, or any rank for ``ANY_SOURCE``, sent with the same tag."""
        return self._start(Call(Operation.RECEIVE, tensor, tensor, tensor.numel(), root=peer, watched=watched, tag=tag))


_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _refuse_inherited_groups() -> None:
    for communicator in list(_communicators):
        communicator.inherit()


os.register_at_fork(after_in_child=_refuse_inherited_groups)

_WORLD_GOES_ON = "call destroy_process_group() and then init_distributed() again, on every rank"
_GROUP_GOES_ON = "its members go on with destroy_process_group(group) and a new one from new_group()"
