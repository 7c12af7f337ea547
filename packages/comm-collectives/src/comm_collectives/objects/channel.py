"""The transport of objects: first small records of numbers, then messages whose sizes every rank knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from struct import Struct
from typing import Any

import torch
from torch.distributed import ProcessGroup

from comm_collectives.failed_steps import breaking
from comm_collectives.memory import as_bytes
from comm_collectives.object_codec import ObjectDecodeError
from comm_utils.backend import Backend
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.torch_support import factories
from comm_utils.torch_support.plain_tensors import present

__all__ = ["INLINE_BYTES", "RECORD_NUMBERS", "Channel", "Inbox", "outbox"]

RECORD_NUMBERS = 6
_SIZE = Struct("=q")
_RECORD = Struct(f"={RECORD_NUMBERS}q")
#: A message of up to this size travels within the record, so a small object takes one exchange instead of two.
INLINE_BYTES = 256 - _RECORD.size

# Below this, one padded exchange beats W exact ones whatever it wastes.
_PADDED_BYTES = 1 << 20


def outbox(message: bytearray, device: torch.device) -> torch.Tensor:
    """Return a message as a uint8 tensor on ``device``; the memory of the message itself on the CPU."""
    if not message:
        return factories.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(message, dtype=torch.uint8).to(device)


class Inbox:
    """A buffer for received messages.

    Attributes:
        tensor: (n,), uint8, to be written by the backend.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._memory = bytearray(size_bytes)
        self._on_host = outbox(self._memory, torch.device("cpu"))
        self.tensor = self._on_host if device.type == "cpu" else self._on_host.to(device)

    def messages(self, sizes: Sequence[int], stride: int | None = None) -> list[memoryview]:
        """Return the received messages, one after the other, or one at every multiple of ``stride``."""
        if self.tensor is not self._on_host:
            self._on_host.copy_(self.tensor)
        view, start, found = memoryview(self._memory), 0, []
        for size in sizes:
            found.append(view[start : start + size])
            start += size if stride is None else stride
        return found


class Channel:
    """One call's way to the other ranks of its group.

    Args:
        call: the function that was called, for messages.
        device: as the caller gave it; None for the CPU where the group serves it, else the current accelerator.
    """

    def __init__(self, call: str, backend: Backend, group: ProcessGroup | None, device: Any = None) -> None:
        self.call = call
        self.backend = backend
        self.group = group
        self.ranks = backend.get_process_group_ranks(group)
        self.rank = backend.get_rank(group)
        self.W = len(self.ranks)
        self.device = _transport_device(call, backend, group, device)
        self.capabilities = backend.capabilities(group, self.device.type)

    def bytes_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """int64 numbers as the backend can move them."""
        return as_bytes(numbers, self.capabilities.dtypes)

    def exchange(self, record: Sequence[int], message: bytes | bytearray) -> list[tuple[tuple[int, ...], memoryview]]:
        """Every rank's record of RECORD_NUMBERS and INLINE_BYTES, in which its message is if it fits."""
        mine = bytearray(_RECORD.pack(*record)) + bytes(INLINE_BYTES)
        if len(message) <= INLINE_BYTES:
            mine[_RECORD.size : _RECORD.size + len(message)] = message
        inbox = Inbox(self.W * len(mine), self.device)
        self.backend.all_gather_into_tensor(inbox.tensor, outbox(mine, self.device), self.group)
        records = inbox.messages([len(mine)] * self.W)
        return [(_RECORD.unpack_from(one), one[_RECORD.size :]) for one in records]

    def delivering(self) -> AbstractContextManager[None]:
        """Break the group where this rank fails, as by lack of memory, to move what all ranks have agreed to move."""
        return breaking(self.call, self.backend, self.group, what="the delivery of objects")

    def all_gather(self, message: bytearray, sizes: Sequence[int]) -> list[memoryview]:
        """Every rank's message on every rank."""
        largest = max(sizes)
        if self.W * largest <= max(_PADDED_BYTES, 2 * sum(sizes)):
            inbox = Inbox(self.W * largest, self.device)
            padded = message if len(message) == largest else message + bytes(largest - len(message))
            self.backend.all_gather_into_tensor(inbox.tensor, outbox(padded, self.device), self.group)
            return inbox.messages(sizes, largest)
        inboxes = [Inbox(0 if rank == self.rank else size, self.device) for rank, size in enumerate(sizes)]
        tensors = [inbox.tensor for inbox in inboxes]
        tensors[self.rank] = outbox(message, self.device)
        works = [self.backend.broadcast(tensor, None, self.group, True, rank) for rank, tensor in enumerate(tensors)]
        for work in works:
            if work is not None:
                work.wait()
        received = [inbox.messages([size])[0] for inbox, size in zip(inboxes, sizes, strict=True)]
        received[self.rank] = memoryview(message)
        return received

    def broadcast(self, message: bytearray | None, size: int, root: int) -> memoryview:
        """Return the message of ``root`` on every rank."""
        if self.rank == root:
            assert message is not None
            self.backend.broadcast(outbox(message, self.device), None, self.group, False, root)
            return memoryview(message)
        inbox = Inbox(size, self.device)
        self.backend.broadcast(inbox.tensor, None, self.group, False, root)
        return inbox.messages([size])[0]

    def gather(self, message: bytearray, sizes: Sequence[int], root: int) -> list[memoryview]:
        """Every rank's message on ``root``; nothing elsewhere."""
        if self.rank != root:
            out = [len(message) if rank == root else 0 for rank in range(self.W)]
            self._all_to_all(Inbox(0, self.device), [0] * self.W, message, out)
            return []
        arriving = [0 if rank == root else size for rank, size in enumerate(sizes)]
        inbox = Inbox(sum(arriving), self.device)
        self._all_to_all(inbox, arriving, bytearray(), [0] * self.W)
        received = inbox.messages(arriving)
        received[root] = memoryview(message)
        return received

    def scatter(self, messages: Sequence[bytearray], largest: int, root: int) -> memoryview:
        """Message r of ``root`` on rank r; none has more than ``largest`` bytes.

        Raises:
            ObjectDecodeError: the root sends more than that.
        """
        if self.W * largest > _PADDED_BYTES:
            size = self._checked(
                self._scatter_part(map(_SIZE.pack, map(len, messages)), _SIZE.size, root), largest, root
            )
            return self._scatter_exactly(messages, size, root)
        parts = (_SIZE.pack(len(message)) + message.ljust(largest, b"\0") for message in messages)
        received = self._scatter_part(parts, _SIZE.size + largest, root)
        return received[_SIZE.size :][: self._checked(received, largest, root)]

    def _scatter_part(self, parts: Iterable[bytes | bytearray], size: int, root: int) -> memoryview:
        inbox = Inbox(size, self.device)
        sent = [outbox(bytearray(part), self.device) for part in parts] if self.rank == root else None
        self.backend.scatter(inbox.tensor, sent, None, self.group, False, root)
        return inbox.messages([size])[0]

    def _checked(self, received: memoryview, largest: int, root: int) -> int:
        (size,) = _SIZE.unpack_from(received)
        if not 0 < size <= largest:
            raise ObjectDecodeError(
                f"{self.call}: rank {self.ranks[root]} sends {size} bytes after announcing {largest}"
            )
        return int(size)

    def _scatter_exactly(self, messages: Sequence[bytearray], size: int, root: int) -> memoryview:
        if self.rank != root:
            inbox = Inbox(size, self.device)
            arriving = [size if rank == root else 0 for rank in range(self.W)]
            self._all_to_all(inbox, arriving, bytearray(), [0] * self.W)
            return inbox.messages([size])[0]
        leaving = [0 if rank == root else len(message) for rank, message in enumerate(messages)]
        joined = bytearray().join(message for rank, message in enumerate(messages) if rank != root)
        self._all_to_all(Inbox(0, self.device), [0] * self.W, joined, leaving)
        return memoryview(messages[root])

    def _all_to_all(self, inbox: Inbox, arriving: list[int], message: bytearray, leaving: list[int]) -> None:
        # The one collective that moves parts of any size and leaves out the ranks that have none.
        sent = outbox(message, self.device)
        self.backend.all_to_all_single(inbox.tensor, sent, arriving, leaving, self.group)


def _transport_device(call: str, backend: Backend, group: ProcessGroup | None, device: Any) -> torch.device:
    served = backend.device_types(group)
    if device is None:
        kind = "cpu" if "cpu" in served else served[0]
        return _current(torch.device(kind))
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentTypeError(f"{call}: device: got {shown(device)}; expected a torch.device or None") from error
    if chosen.type not in present(served):
        raise ArgumentError(
            f"{call}: device: got {chosen}; backend {backend.get_backend(group)!r} of this group serves "
            f"{' and '.join(present(served))} here; leave device out"
        )
    return _current(chosen)


def _current(device: torch.device) -> torch.device:
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, getattr(torch, device.type).current_device())
