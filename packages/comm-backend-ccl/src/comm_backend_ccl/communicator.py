"""The operations that an engine does for a group of ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from comm_backend_ccl.engine_call import Call
from comm_backend_ccl.group import Group
from comm_backend_ccl.recorded import note_call
from comm_backend_ccl.tables import Operation
from comm_backend_ccl.work import ANY_SOURCE, CclWork, EngineHandle
from comm_utils.backend import Capabilities
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.reduce_op import ReduceOp
from comm_utils.torch_support import factories
from comm_utils.torch_support.failures import raised_by_handler
from comm_utils.torch_support.flattening import flat_view, flattened, staging_memory
from comm_utils.torch_support.recorded_calls import Note

__all__ = ["Begun", "Communicator"]

#: A handle, None where all is done, and the tensors in whose memory an operation goes on.
Begun = tuple["EngineHandle | None", tuple[torch.Tensor, ...]]


class Communicator(Group):
    """Starts operations of a group; see :class:`~comm_backend_ccl.group.Group` for its arguments."""

    #: Whether the engine writes its calls into the flight recorder itself.
    records_natively: ClassVar[bool] = False
    #: Whether calls without elements reach it, to be compared with those of others.
    moves_nothing: ClassVar[bool] = False
    #: What it reduces and moves as it is.
    capabilities: ClassVar[Capabilities]

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

    def begin_wait(self, handle: EngineHandle, limited: bool) -> None:
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
            RECORDER.end_group(self.name)
            self._end()
            self.peers.close()

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
        name = call.name or operation.name.lower()
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
                failed = error if raised_by_handler(error) else self.failed(name, error)
                if note is not None:
                    note.fail()
                if failed is error:
                    raise
                raise failed from error
            except BaseException:  # it was refused, or interrupted
                if note is not None:
                    note.fail()
                raise
            if note is not None and handle is None:
                note.end()
                note = None
        work = CclWork(self, handle, kept, name)
        if note is not None:
            work.note = note
        if operation in (Operation.SEND, Operation.RECEIVE):
            work.peer, work.is_receive = call.root, operation is Operation.RECEIVE
        return work

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp, watched: bool = False, name: str = "") -> CclWork:
        """Reduce ``tensor`` in place."""
        return self._start(Call(Operation.ALL_REDUCE, tensor, tensor, tensor.numel(), op, watched=watched, name=name))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp, watched: bool = False, name: str = "") -> CclWork:
        """Reduce into the tensor of ``root``; the others keep theirs."""
        return self._start(Call(Operation.REDUCE, tensor, tensor, tensor.numel(), op, root, watched, name=name))

    def broadcast(self, tensor: torch.Tensor, root: int, watched: bool = False, name: str = "") -> CclWork:
        """Overwrite ``tensor`` with that of ``root``."""
        return self._start(
            Call(Operation.BROADCAST, tensor, tensor, tensor.numel(), root=root, watched=watched, name=name)
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, watched: bool = False, name: str = "") -> CclWork:
        """Overwrite ``output``, of W times the size, with every rank's ``input``."""
        return self._start(Call(Operation.ALL_GATHER, input, output, input.numel(), watched=watched, name=name))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, op: ReduceOp, watched: bool = False, name: str = ""
    ) -> CclWork:
        """Overwrite ``output`` with this rank's part of the reduced ``input``, of W times the size."""
        return self._start(
            Call(Operation.REDUCE_SCATTER, input, output, output.numel(), op, watched=watched, name=name)
        )

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_counts: Sequence[int] = (),
        input_counts: Sequence[int] = (),
        watched: bool = False,
        name: str = "",
    ) -> CclWork:
        """Part r of ``input`` goes to rank r; parts are equal, or have so many elements."""
        if not output_counts and not input_counts:
            part = input.numel() // self.size
            return self._start(Call(Operation.ALL_TO_ALL, input, output, part, watched=watched, name=name))
        return self._start(
            Call(
                Operation.ALL_TO_ALL_V,
                input,
                output,
                0,
                watched=watched,
                source_counts=input_counts,
                target_counts=output_counts,
                name=name,
            )
        )

    def all_to_all_rows(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_rows: Sequence[int] | None,
        input_rows: Sequence[int] | None,
        watched: bool = False,
        name: str = "",
    ) -> CclWork:
        """Do :meth:`all_to_all` with parts of so many rows, of the first dimension; None or empty is equal parts."""
        if not output_rows and not input_rows:
            return self.all_to_all(output, input, watched=watched, name=name)
        return self.all_to_all(
            output, input, self._part_counts(output, output_rows), self._part_counts(input, input_rows), watched, name
        )

    def _part_counts(self, tensor: torch.Tensor, rows: Sequence[int] | None) -> list[int]:
        if not rows:
            return [tensor.numel() // self.size] * self.size
        have = tensor.shape[0] if tensor.dim() else 1
        row = tensor.numel() // have if have else 0
        return [row * count for count in rows]

    def gather(
        self, output: torch.Tensor | None, input: torch.Tensor, root: int, watched: bool = False, name: str = ""
    ) -> CclWork:
        """Overwrite ``output`` of ``root``, of W times the size, with every rank's ``input``."""
        target = input.new_empty(0) if output is None else output
        return self._start(Call(Operation.GATHER, input, target, input.numel(), root=root, watched=watched, name=name))

    def scatter(
        self, output: torch.Tensor, input: torch.Tensor | None, root: int, watched: bool = False, name: str = ""
    ) -> CclWork:
        """Overwrite ``output`` with this rank's part of the ``input`` of ``root``, of W times the size."""
        source = output.new_empty(0) if input is None else input
        return self._start(
            Call(Operation.SCATTER, source, output, output.numel(), root=root, watched=watched, name=name)
        )

    def all_gather_parts(
        self, outputs: Sequence[torch.Tensor], input: torch.Tensor, watched: bool = False, name: str = ""
    ) -> CclWork:
        """Overwrite each of W dense ``outputs`` with that rank's ``input``, dense as well."""
        memory, finish = staging_memory(outputs, input)
        return self.all_gather(memory, flat_view(input), watched, name).then(finish)

    def gather_parts(
        self,
        outputs: Sequence[torch.Tensor] | None,
        input: torch.Tensor,
        root: int,
        watched: bool = False,
        name: str = "",
    ) -> CclWork:
        """Do :meth:`all_gather_parts` on ``root`` alone; the others' ``outputs`` are not looked at."""
        if root != self.rank or not outputs:
            return self.gather(None, input, root, watched, name)
        memory, finish = staging_memory(outputs, input)
        return self.gather(memory, input, root, watched, name).then(finish)

    def scatter_parts(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        watched: bool = False,
        name: str = "",
    ) -> CclWork:
        """Overwrite ``output`` with this rank's of the W dense ``inputs`` of ``root``."""
        source = flattened(inputs, output) if root == self.rank and inputs else None
        return self.scatter(output, source, root, watched, name)

    def barrier(self, watched: bool = False, name: str = "") -> CclWork:
        """Complete when every rank has come."""
        nothing = factories.empty(0, device="cpu")
        return self._start(Call(Operation.BARRIER, nothing, nothing, 0, watched=watched, name=name))

    def send(self, tensor: torch.Tensor, peer: int, watched: bool = False, tag: int = 0, name: str = "") -> CclWork:
        """Send to ``peer``; complete when the memory may be used again."""
        return self._start(
            Call(Operation.SEND, tensor, tensor, tensor.numel(), root=peer, watched=watched, tag=tag, name=name)
        )

    def receive(self, tensor: torch.Tensor, peer: int, watched: bool = False, tag: int = 0, name: str = "") -> CclWork:
        """Overwrite ``tensor`` with what ``peer``, or any rank for ``ANY_SOURCE``, sent with the same tag."""
        return self._start(
            Call(Operation.RECEIVE, tensor, tensor, tensor.numel(), root=peer, watched=watched, tag=tag, name=name)
        )
