"""The wrapper that compares the calls of all ranks before any data moves.

Before each collective, the ranks of the group exchange a description of the call, of the same size for every operation,
through the wrapped backend. Where descriptions differ, all ranks raise the same error, and none has sent anything. A
message is preceded by its description, which the receiver compares with what it expects.

Libraries that compare calls themselves (``Capabilities.compares_calls``) are not slowed down.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import ProcessGroup

from comm_collectives.call_descriptions import Description, description_of, mismatch, part_mismatch
from comm_collectives.checked_messages import CheckedReceive
from comm_collectives.receive_turns import Turn, queue_up
from comm_collectives.work import After
from comm_collectives.wrapping import BackendWrapper
from comm_utils import operations
from comm_utils.backend import Backend, Capabilities, Work
from comm_utils.errors import CollectiveMismatchError
from comm_utils.fast_path import FastPath
from comm_utils.flight_recorder.call_sites import line_of_program
from comm_utils.flight_recorder.matching import at_caller
from comm_utils.flight_recorder.reduce_op import reducing
from comm_utils.group_names import name_of
from comm_utils.operations.table import ROWS
from comm_utils.torch_support import factories
from comm_utils.torch_support.initialization import timeout_of
from comm_utils.torch_support.passed_tensors import AS_IT_TRAVELS, passing
from comm_utils.torch_support.remedies import remedy
from comm_utils.watch import WATCH, Trouble

__all__ = ["CheckingBackend"]


class CheckingBackend(BackendWrapper):
    """Compares each call of the ranks of a group before it is made; see the module.

    Calls take the checked path. A difference raises ``CollectiveMismatchError`` on every rank, and the group is broken.
    """

    #: What the program gave this call.
    _timeout: timedelta | None = None

    def during(self, call: str, timeout: timedelta | None = None) -> CheckingBackend:
        view = super().during(call, timeout)
        view._timeout = timeout
        return view

    def fast_path(
        self, operation: str, detail: object = None, group: ProcessGroup | None = None, async_op: bool = False
    ) -> FastPath | None:
        return self.inner.fast_path(operation, detail, group, async_op) if self._is_free(group) else None

    def _is_free(self, group: ProcessGroup | None) -> bool:
        """Return whether there is nothing to compare: one rank, or a library that compares by itself."""
        inner = self.inner
        if inner.get_world_size(group) <= 1:
            return True
        return all(inner.capabilities(group, device).compares_calls for device in inner.device_types(group))

    def _check(self, operation: str, given: dict[str, Any]) -> None:
        """Raise where other ranks make another call than this one, which ``given`` are the arguments of."""
        group = given.get("group")
        if self._is_free(group):
            return
        mine = description_of(operation, self.call, given, self.inner, group)
        device = mine.device or self._device(group)
        found = [Description.decoded(row) for row in self._exchanged(mine.encoded(), group, device)]
        ranks = self.inner.get_process_group_ranks(group)
        text, culprits = mismatch(ranks, found)
        if not text and mine.is_uneven:
            rows = self._exchanged(mine.encoded_parts(len(ranks)), group, device)
            text, culprits = part_mismatch(ranks, rows, mine)
        if text:
            raise self._differs(text, culprits, group)

    def _exchanged(self, numbers: Sequence[int], group: ProcessGroup | None, device: torch.device) -> list[list[int]]:
        """Return what each rank of the group gives."""
        size = self.inner.get_world_size(group)
        own = factories.tensor(numbers, dtype=torch.int64, device=device)
        gathered = factories.empty(size * len(numbers), dtype=torch.int64, device=device)
        # The exchanges of calls that differ are alike, so they do not differ as well.
        with reducing(None), passing(AS_IT_TRAVELS):
            self.inner.all_gather_into_tensor(gathered, own, group)
        return cast("list[list[int]]", gathered.view(size, len(numbers)).tolist())

    def _device(self, group: ProcessGroup | None) -> torch.device:
        """Return the device on which calls without tensors are described."""
        types = self.inner.device_types(group)
        return torch.device("cpu" if "cpu" in types else types[0])

    def _differs(self, text: str, culprits: Sequence[int], group: ProcessGroup | None) -> CollectiveMismatchError:
        """Return the error; the group is broken from now on."""
        name, rank, where = self.call or "the call", self.inner.get_rank(), at_caller(line_of_program())
        pg: Any = self.inner.get_world_group() if group is None else group
        group_name = name_of(pg)
        failure = CollectiveMismatchError(
            f"{name}{where} was not begun, as seen by rank {rank}: {text}. No data was received. "
            f"The group cannot be used any more: {remedy(group_name)}"
        )
        self.inner.mark_broken(group, f"{name}: {text}")
        WATCH.tell(group_name, failure, Trouble(CollectiveMismatchError, text, tuple(culprits)))
        return failure

    # --- messages

    def capabilities(self, group: ProcessGroup | None = None, device_type: str = "cpu") -> Capabilities:
        found = self.inner.capabilities(group, device_type)
        # The receive of a message begins once its description has come.
        return found if self._is_free(group) else replace(found, independent_messages=False)

    def send(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> None:
        if not self._is_free(group):
            self.inner.send(self._announced(tensor), dst, group, tag, group_dst)
        self.inner.send(tensor, dst, group, tag, group_dst)

    def isend(
        self,
        tensor: torch.Tensor,
        dst: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Work:
        if self._is_free(group):
            return self.inner.isend(tensor, dst, group, tag, group_dst)
        announced = self.inner.isend(self._announced(tensor), dst, group, tag, group_dst)
        work = self.inner.isend(tensor, dst, group, tag, group_dst)
        return After([announced, work], None, tensor)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> int:
        if self._is_free(group):
            return self.inner.recv(tensor, src, group, tag, group_src)
        announced = self._announced(tensor)
        with self._turn("recv", src, group, tag, group_src).taken():
            found = self.inner.recv(announced, src, group, tag, group_src)
            self._compare_message(tensor, announced, found, group)
            self.inner.recv(tensor, found, group, tag)
        return found

    def irecv(
        self,
        tensor: torch.Tensor,
        src: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Work:
        if self._is_free(group):
            return self.inner.irecv(tensor, src, group, tag, group_src)
        announced = self._announced(tensor)

        def begin() -> Work:
            return self.inner.irecv(announced, src, group, tag, group_src)

        def receive(arrived: Work) -> Work:
            ranks = self.inner.get_process_group_ranks(group)
            found = src if src is not None else ranks[arrived.source_rank() if group_src is None else group_src]
            self._compare_message(tensor, announced, found, group)
            return self.inner.irecv(tensor, found, group, tag)

        return CheckedReceive(self._turn("irecv", src, group, tag, group_src), begin, receive, tensor)

    def batch_isend_irecv(self, p2p_op_list: list[Any]) -> list[Work]:
        if self._is_free(p2p_op_list[0].group) or p2p_op_list[0].tensor.device.type != "cpu":
            return self.inner.batch_isend_irecv(p2p_op_list)
        return [
            (self.isend if one.op is torch.distributed.isend else self.irecv)(one.tensor, one.peer, one.group, one.tag)
            for one in p2p_op_list
        ]

    def _turn(self, call: str, src: int | None, group: ProcessGroup | None, tag: int, group_src: int | None) -> Turn:
        if src is None and group_src is not None:
            src = self.inner.get_process_group_ranks(group)[group_src]
        key = self.inner.get_world_group() if group is None else group
        timeout = self._timeout or timeout_of(key)
        limit_s = None if timeout is None else timeout.total_seconds()
        who = f"{self.call or call} on rank {self.inner.get_rank()}"
        return queue_up(Turn(who, src, tag, limit_s), key)

    def _announced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the description of a message with ``tensor``."""
        numbers = Description.of_message(tensor).encoded()
        return factories.tensor(numbers, dtype=torch.int64, device=tensor.device)

    def _compare_message(
        self, tensor: torch.Tensor, announced: torch.Tensor, source: int, group: ProcessGroup | None
    ) -> None:
        mine, theirs = Description.of_message(tensor), Description.decoded(announced.tolist())
        if mine != theirs:
            own = self.inner.get_process_group_ranks(group)[self.inner.get_rank(group)]
            text = (
                f"the message from rank {source} to rank {own} differs: rank {source} sends {theirs.payload}, rank "
                f"{own} expects {mine.payload}"
            )
            raise self._differs(text, sorted((source, own)), group)


def _checking(operation: str) -> Callable[..., Any]:
    """Make the method that checks a collective and then makes it."""
    names = list(inspect.signature(getattr(Backend, operation)).parameters)[1:]

    def method(self: CheckingBackend, *args: Any, **kwargs: Any) -> Any:
        self._check(operation, {**dict(zip(names, args, strict=False)), **kwargs})
        return getattr(self.inner, operation)(*args, **kwargs)

    method.__name__ = operation
    return method


for _row in ROWS:
    if _row.primitive and not operations.get(_row.name).pattern.is_message:
        setattr(CheckingBackend, _row.name, _checking(_row.name))
