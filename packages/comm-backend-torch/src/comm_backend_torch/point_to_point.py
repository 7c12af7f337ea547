"""Messages between two ranks by the process group's own methods."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from comm_backend_torch.dropped_messages import keep
from comm_backend_torch.message_waits import message_wait
from comm_backend_torch.waits import how_to_wait
from comm_backend_torch.work import Keep, PolledWork, TorchWork
from comm_backend_torch.world import World
from comm_utils.backend import Work
from comm_utils.torch_support.failures import is_interruption
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.recorded_calls import Note

__all__ = ["PointToPoint"]


class PointToPoint(World):
    """See ``comm_utils.backend.Backend`` for what every method does."""

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        self._complete("send", self._send(tensor, dst, group, tag, group_dst, is_waited_for=True), tensor, group)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        work = self._receive(tensor, src, group, tag, group_src, is_waited_for=True)
        self._complete("recv", work, tensor, group)
        state = self._state(group)
        if src is None and group_src is None:
            group_src = work._source_rank()  # type: ignore[attr-defined]
        return state.ranks[group_src] if src is None else src  # type: ignore[index]

    def _complete(self, operation: str, work: Any, tensor: torch.Tensor, group: ProcessGroup | None) -> None:
        """Wait for a message; one that a signal handler leaves before gloo has its end breaks the group."""
        try:
            work.wait()
        except BaseException as error:
            if is_interruption(error):
                self._failed(operation, self._state(group), tensor.device.type, error, work._work)
            raise

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        return self._send(tensor, dst, group, tag, group_dst, is_waited_for=False)

    def _send(
        self,
        tensor: torch.Tensor,
        dst: int | None,
        group: ProcessGroup | None,
        tag: int,
        group_dst: int | None,
        is_waited_for: bool,
    ) -> Work:
        state = self._state(group)
        peer = state.position(dst, group_dst)
        note = self._note_message("send", state, tensor, peer, tag, not is_waited_for)
        work = self._start("send", state, note, state.pg.send, [tensor], peer, tag)
        return self._point_to_point("send", work, tensor, state, note, partial(keep, state))

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        return self._receive(tensor, src, group, tag, group_src, is_waited_for=False)

    def _receive(
        self,
        tensor: torch.Tensor,
        src: int | None,
        group: ProcessGroup | None,
        tag: int,
        group_src: int | None,
        is_waited_for: bool,
    ) -> Work:
        state = self._state(group)
        peer = -1 if src is None and group_src is None else state.position(src, group_src)
        note = self._note_message("recv", state, tensor, peer, tag, not is_waited_for)
        if peer < 0:
            # gloo refuses to receive nothing from anyone; what arrives may be shorter than the memory it goes to.
            memory = tensor if tensor.numel() else tensor.new_empty(1)
            work = self._start("recv", state, note, state.pg.recv_anysource, [memory], tag)
        else:
            work = self._start("recv", state, note, state.pg.recv, [tensor], peer, tag)
        return self._point_to_point("recv", work, tensor, state, note)

    def _point_to_point(
        self,
        operation: str,
        work: Any,
        tensor: torch.Tensor,
        state: GroupState,
        note: Note,
        kept: Keep | None = None,
    ) -> Work:
        """Return the handle of a message.

        Args:
            kept: takes the message where the handle is dropped.
        """
        failure = partial(self._failure, operation, state)
        if state.libraries.get(tensor.device.type) == "gloo":
            return PolledWork(work, tensor, failure, self._end, note, message_wait(state), kept, state.check)
        return TorchWork(work, tensor, failure, self._end, note, how_to_wait(state, tensor.device.type))

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        first = p2p_op_list[0]
        if first.tensor.device.type == "cpu":
            return [self._one_of_a_batch(p2p) for p2p in p2p_op_list]
        # Only torch's own function opens the coalescing that device libraries need against deadlocks.
        works = c10d.batch_isend_irecv(p2p_op_list)
        result = [p2p.tensor for p2p in p2p_op_list]
        state = self._state(first.group)
        failure = partial(self._failure, "batch_isend_irecv", state)
        own_wait = how_to_wait(state, first.tensor.device.type)
        return [TorchWork(work, result, failure, self._end, None, own_wait) for work in works]

    def _one_of_a_batch(self, p2p: Any) -> Work:
        if p2p.op is c10d.isend:
            return self.isend(p2p.tensor, p2p.peer, p2p.group, p2p.tag)
        return self.irecv(p2p.tensor, p2p.peer, p2p.group, p2p.tag)
