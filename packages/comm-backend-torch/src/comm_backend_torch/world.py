"""Start and finish operations of c10d's process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_backend_torch.capabilities import capabilities_of
from comm_backend_torch.dropped_messages import settle
from comm_backend_torch.message_waits import wake
from comm_backend_torch.waits import NOTICE_S, leave
from comm_backend_torch.work import forget_abandoned, have_ended
from comm_utils import operations
from comm_utils.backend import Capabilities
from comm_utils.flight_recorder.layout import IN_BACKGROUND, LIMITED
from comm_utils.flight_recorder.recorder import WAITED_FOR, Kind
from comm_utils.torch_support.failures import is_interruption
from comm_utils.torch_support.gloo_connections import keep_in_memory
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.process_groups import ProcessGroups
from comm_utils.torch_support.recorded_calls import Note, kind_of_call

__all__ = ["World"]


class World(ProcessGroups):
    """Every process group of this process, with what its operations have in common."""

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        return capabilities_of(self._state(group).libraries[device_type], device_type)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        ending = [self._state(group)] if group is not None else list(self._states.values())
        settle(NOTICE_S, ending)
        super().destroy_process_group(group)
        forget_abandoned()

    def _wake(self, state: GroupState) -> None:
        wake(state)

    def _release(self, ended: Sequence[GroupState]) -> None:
        if ended and not have_ended(NOTICE_S, ended):
            for one in ended:
                if not have_ended(0.0, [one]):
                    keep_in_memory(one.pg)

    def _note_message(
        self, operation: str, state: GroupState, tensor: torch.Tensor, peer: int, tag: int, background: bool
    ) -> Note:
        """Record that a ``"send"`` or ``"recv"`` begins; ``peer`` is a group rank, -1 is any."""
        kind = self._kind(operation, state, tensor.dtype, root=peer, tag=tag)
        kind = self._on_device(kind, state, tensor.device.type)
        return Note(kind, kind.begin(tensor.numel(), 3, None, None, self._state_of(background)))

    def _on_device(self, kind: Kind, state: GroupState, device: str) -> Kind:
        """Return ``kind``; where the host does not wait for the type of ``device``, one that follows its calls."""
        # A call with a time of its own is left to the library.
        if device == "cpu" or self._end is not None:
            return kind
        calls = state.on_device(device)
        return kind if calls is None else calls.recorded(kind)

    def _kind(self, operation: str, state: GroupState, dtype: torch.dtype | None, **more: Any) -> Kind:
        return kind_of_call(state.recorded_as(), state.ranks, operation, self._call or operation, dtype, **more)

    def _state_of(self, background: bool) -> int:
        """Return the state of a call that begins, as the flight recorder has it."""
        if background:
            return IN_BACKGROUND
        return WAITED_FOR if self._end is None else LIMITED

    def _start(self, operation: str, state: GroupState, note: Note, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except BaseException as error:
            failed = self._noted(error, operation, state, note)
            if failed is error:
                raise
            raise failed from error

    def _noted(
        self, error: BaseException, operation: str, state: GroupState, note: Note, work: Any = None
    ) -> BaseException:
        """Return the error to raise for a failed call, which the flight recorder has as failed from then on."""
        failed = self._failed(operation, state, note.device, error, work)
        note.fail()
        return failed

    def _failed(self, operation: str, state: GroupState, device: str, error: BaseException, work: Any) -> BaseException:
        """Return the error to raise for a call that has ended with ``error``.

        What a signal handler raised stays as it is; where the call is under way then, the group is broken.
        """
        if is_interruption(error):
            if state.libraries.get(device) == "gloo":
                leave(state, work, error, operations.get(operation).pattern.is_message)
            return error
        return self._failure(operation, state, error) if isinstance(error, (RuntimeError, MemoryError)) else error
