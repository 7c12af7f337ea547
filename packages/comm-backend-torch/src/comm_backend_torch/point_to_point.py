"""Messages between two ranks by the process group's own methods."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import ProcessGroup

from comm_backend_torch.work import PolledWork, TorchWork
from comm_backend_torch.world import World
from comm_utils.backend import Work
from comm_utils.torch_support.group_state import GroupState

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
        self.isend(tensor, dst, group, tag, group_dst).wait()

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        work = self.irecv(tensor, src, group, tag, group_src)
        work.wait()
        state = self._state(group)
        if src is None and group_src is None:
            group_src = work._source_rank()  # type: ignore[attr-defined]
        return state.ranks[group_src] if src is None else src  # type: ignore[index]

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        state = self._state(group)
        work = self._start("send", group, state.pg.send, [tensor], state.position(dst, group_dst), tag)
        return self._point_to_point("send", work, tensor, state, group)

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        state = self._state(group)
        if src is None and group_src is None:
            # gloo refuses to receive nothing from anyone; what arrives may be shorter than the memory it goes to.
            memory = tensor if tensor.numel() else tensor.new_empty(1)
            work = self._start("recv", group, state.pg.recv_anysource, [memory], tag)
        else:
            work = self._start("recv", group, state.pg.recv, [tensor], state.position(src, group_src), tag)
        return self._point_to_point("recv", work, tensor, state, group)

    def _point_to_point(
        self, operation: str, work: Any, tensor: torch.Tensor, state: GroupState, group: ProcessGroup | None
    ) -> Work:
        kind = PolledWork if state.libraries.get(tensor.device.type) == "gloo" else TorchWork
        return kind(work, tensor, partial(self._failure, operation, group), self._end)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        first = p2p_op_list[0]
        if first.tensor.device.type == "cpu":
            return [self._one_of_a_batch(p2p) for p2p in p2p_op_list]
        # Only torch's own function opens the coalescing that device libraries need against deadlocks.
        works = c10d.batch_isend_irecv(p2p_op_list)
        result = [p2p.tensor for p2p in p2p_op_list]
        failure = partial(self._failure, "batch_isend_irecv", first.group)
        return [TorchWork(work, result, failure, self._end) for work in works]

    def _one_of_a_batch(self, p2p: Any) -> Work:
        if p2p.op is c10d.isend:
            return self.isend(p2p.tensor, p2p.peer, p2p.group, p2p.tag)
        return self.irecv(p2p.tensor, p2p.peer, p2p.group, p2p.tag)
