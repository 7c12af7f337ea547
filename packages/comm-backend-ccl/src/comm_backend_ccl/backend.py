"""Both engines behind the contract of ``comm_utils.backend``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch.distributed import GroupMember, ProcessGroup

from comm_backend_ccl.communicator import Communicator
from comm_backend_ccl.fast_path import fast_path
from comm_backend_ccl.foreign_groups import ForeignGroups
from comm_backend_ccl.process_group import CclProcessGroup
from comm_backend_ccl.shared_communicator import SharedCommunicator
from comm_backend_ccl.shared_tensors import empty_shared
from comm_backend_ccl.work import ANY_SOURCE, CclWork
from comm_utils.backend import Backend, Capabilities, Work
from comm_utils.errors import NotInitializedError
from comm_utils.fast_path import FastPath
from comm_utils.reduce_op import parse_reduce_op
from comm_utils.torch_support.process_groups import ProcessGroups
from comm_utils.watch.trouble import Trouble

__all__ = ["CclBackend"]


class CclBackend(ProcessGroups):
    """Serve groups of ccl by their engine, and other groups by the installed backend of their library.

    Args:
        timeout: given at initialisation; groups made later inherit it.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        super().__init__(timeout)
        self._foreign_groups = ForeignGroups(self.fast_paths)

    def fast_path(
        self, operation: str, detail: object = None, group: ProcessGroup | None = None, async_op: bool = False
    ) -> FastPath | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).fast_path(operation, detail, group, async_op)
        return fast_path(ours, operation, detail, self._call or operation, async_op, self.fast_paths.clear)

    # --- members

    def mark_broken(self, group: ProcessGroup | None, reason: str) -> None:
        super().mark_broken(group, reason)
        ours = group if group is not None else GroupMember.WORLD
        if isinstance(ours, CclProcessGroup) and ours.communicator is not None:
            ours.communicator.give_up(reason)

    def _in_trouble(self, group: str, trouble: Trouble) -> None:
        for pg in list(self._states):
            if isinstance(pg, CclProcessGroup) and pg.group_name == group and pg.communicator is not None:
                pg.communicator.fall_into(trouble)
                self.fast_paths.clear()
                return
        super()._in_trouble(group, trouble)

    def _ours(self, group: ProcessGroup | None) -> Communicator | None:
        """Return the communicator of ``group``; None where another library serves it."""
        pg = GroupMember.WORLD if group is None else group
        if not isinstance(pg, CclProcessGroup):
            return None
        communicator = pg.communicator
        if communicator is None:
            super().check_group(group)  # raises for what became of it
            raise NotInitializedError("this process group no longer exists; make a new one with new_group()")
        return communicator

    def _foreign(self, group: ProcessGroup | None) -> Backend:
        """Return the backend that serves ``group``, which is not ours."""
        backend = self._foreign_groups.backend_for(self.get_backend(group))
        if not self._call:
            return backend
        if self._limit is None or self._end is None:
            return backend.during(self._call)
        return backend.during(self._call, timedelta(seconds=max(0.001, round(self._end - time.monotonic(), 3))))

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        ours = self._ours(group)
        return self._foreign(group).capabilities(group, device_type) if ours is None else ours.capabilities

    def empty_shared(
        self, shape: Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None
    ) -> torch.Tensor:
        if isinstance(self._ours(group), SharedCommunicator):
            return empty_shared(shape, dtype or torch.get_default_dtype())
        return super().empty_shared(shape, dtype, group)

    def check_group(self, group: ProcessGroup | None = None) -> None:
        super().check_group(group)
        ours = self._ours(group)
        if ours is not None:
            ours.check()
        elif (backend := self._foreign_groups.find(self.get_backend(group))) is not None:
            backend.check_group(group)

    def destroy_process_group(self, group: ProcessGroup | None = None) -> None:
        if group is None:
            self._foreign_groups.clear()
        elif not isinstance(group, CclProcessGroup):
            backend = self._foreign_groups.find(self.get_backend(group))
            if backend is not None:
                self._states.pop(group, None)
                backend.destroy_process_group(group)
                return
        ending = [pg for pg in (self._states if group is None else [group]) if isinstance(pg, CclProcessGroup)]
        super().destroy_process_group(group)
        for pg in ending:
            pg.shutdown()  # torch 2.6 leaves groups of other libraries than NCCL to the garbage collector

    # --- collectives

    def _finish(self, work: CclWork, outcome: Any, async_op: bool) -> Work | None:
        work.outcome = outcome
        if self._end is not None:
            work.end, work.limit_s = self._end, self._limit.total_seconds() if self._limit else 0.0
        if async_op:
            return work
        try:
            work.wait()
        except BaseException:
            self.fast_paths.clear()
            raise
        return None

    def all_reduce(
        self, tensor: torch.Tensor, op: object = "sum", group: ProcessGroup | None = None, async_op: bool = False
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).all_reduce(tensor, op, group, async_op)
        return self._finish(
            ours.all_reduce(tensor, parse_reduce_op(op), async_op, self._call or "all_reduce"), tensor, async_op
        )

    def reduce(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).reduce(tensor, dst, op, group, async_op, group_dst)
        root = ours.position(dst, group_dst)
        return self._finish(
            ours.reduce(tensor, root, parse_reduce_op(op), async_op, self._call or "reduce"), tensor, async_op
        )

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).broadcast(tensor, src, group, async_op, group_src)
        return self._finish(
            ours.broadcast(tensor, ours.position(src, group_src), async_op, self._call or "broadcast"), tensor, async_op
        )

    def all_gather(
        self,
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).all_gather(tensor_list, tensor, group, async_op)
        return self._finish(
            ours.all_gather_parts(tensor_list, tensor, async_op, self._call or "all_gather"), tensor_list, async_op
        )

    def all_gather_into_tensor(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        work = ours.all_gather(output_tensor, input_tensor, async_op, self._call or "all_gather_into_tensor")
        return self._finish(work, output_tensor, async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: object = "sum",
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).reduce_scatter_tensor(output, input, op, group, async_op)
        work = ours.reduce_scatter(output, input, parse_reduce_op(op), async_op, self._call or "reduce_scatter_tensor")
        return self._finish(work, output, async_op)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).all_to_all_single(
                output, input, output_split_sizes, input_split_sizes, group, async_op
            )
        work = ours.all_to_all_rows(
            output, input, output_split_sizes, input_split_sizes, async_op, self._call or "all_to_all_single"
        )
        return self._finish(work, output, async_op)

    def gather(
        self,
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_dst: int | None = None,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).gather(tensor, gather_list, dst, group, async_op, group_dst)
        root = ours.position(dst, group_dst)
        work = ours.gather_parts(gather_list, tensor, root, async_op, self._call or "gather")
        return self._finish(work, gather_list, async_op)

    def scatter(
        self,
        tensor: torch.Tensor,
        scatter_list: list[torch.Tensor] | None = None,
        src: int | None = None,
        group: ProcessGroup | None = None,
        async_op: bool = False,
        group_src: int | None = None,
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).scatter(tensor, scatter_list, src, group, async_op, group_src)
        root = ours.position(src, group_src)
        return self._finish(
            ours.scatter_parts(tensor, scatter_list, root, async_op, self._call or "scatter"), tensor, async_op
        )

    def barrier(
        self, group: ProcessGroup | None = None, async_op: bool = False, device_ids: list[int] | None = None
    ) -> Work | None:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).barrier(group, async_op, device_ids)
        return self._finish(ours.barrier(async_op, self._call or "barrier"), None, async_op)

    # --- point to point

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        ours = self._ours(group)
        if ours is None:
            self._foreign(group).send(tensor, dst, group, tag, group_dst)
        else:
            self._finish(
                ours.send(tensor, ours.position(dst, group_dst), tag=tag, name=self._call or "send"), tensor, False
            )

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).recv(tensor, src, group, tag, group_src)
        work = ours.receive(tensor, _source(ours, src, group_src), tag=tag, name=self._call or "recv")
        self._finish(work, tensor, False)
        return ours.ranks[work.source_rank()]

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).isend(tensor, dst, group, tag, group_dst)
        work = self._finish(
            ours.send(tensor, ours.position(dst, group_dst), True, tag, self._call or "send"), tensor, True
        )
        assert work is not None
        return work

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        ours = self._ours(group)
        if ours is None:
            return self._foreign(group).irecv(tensor, src, group, tag, group_src)
        work = self._finish(
            ours.receive(tensor, _source(ours, src, group_src), True, tag, self._call or "recv"), tensor, True
        )
        assert work is not None
        return work

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        group = p2p_op_list[0].group
        if self._ours(group) is None:
            return self._foreign(group).batch_isend_irecv(p2p_op_list)
        return [
            (self.isend if one.op is c10d.isend else self.irecv)(one.tensor, one.peer, one.group, one.tag)
            for one in p2p_op_list
        ]


def _source(ours: Communicator, src: int | None, group_src: int | None) -> int:
    return ANY_SOURCE if src is None and group_src is None else ours.position(src, group_src)
