"""Memory that is used again by the next call."""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from comm_collectives.memory import current_stream, used_here
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support import factories

__all__ = ["Buffers"]

# Of all that is kept for later calls, in bytes.
_MOST_KEPT = 64 << 20
_turn = ProcessLock(threading.Lock)
_kept: dict[tuple[object, int], list[torch.Tensor]] = {}
_kept_bytes = 0


def _size_class(count: int) -> int:
    return max(4096, 1 << (count - 1).bit_length()) if count else 0


def _owner_of(device: torch.device) -> object:
    """Return whose memory it is: what one stream of a device still reads is not for another one."""
    return device if device.type == "cpu" else (device, current_stream(device))


class Buffers:
    """Memory for one call while it goes on; kept for later calls at its end.

    What an operation that failed may still write to is not kept, nor what another stream reads than the call began in.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._owner = _owner_of(device)
        self._taken: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._scratch: torch.Tensor | None = None

    def __enter__(self) -> Buffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _kept_bytes
        if kind is not None:
            return
        every = [*self._taken.values(), *(one for some in self._free.values() for one in some)]
        if self._owner != _owner_of(self._device):  # a handle was waited for in another stream, which reads from it
            for memory in every:
                used_here(memory)
            return
        with _turn.lock:
            for memory in every:
                if _kept_bytes + memory.numel() <= _MOST_KEPT:
                    _kept.setdefault((self._owner, memory.numel()), []).append(memory)
                    _kept_bytes += memory.numel()

    def take(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes, uint8, of any content, valid until they are given back."""
        size = _size_class(count)
        if size == 0:
            return factories.empty(0, dtype=torch.uint8, device=self._device)
        free = self._free.get(size)
        memory = free.pop() if free else self._from_earlier_calls(size)
        if memory is None:
            memory = factories.empty(size, dtype=torch.uint8, device=self._device)
        self._taken[memory.data_ptr()] = memory
        return memory[:count]

    def _from_earlier_calls(self, size: int) -> torch.Tensor | None:
        global _kept_bytes
        with _turn.lock:
            kept = _kept.get((self._owner, size))
            if not kept:
                return None
            _kept_bytes -= size
            return kept.pop()

    def give_back(self, *some: torch.Tensor) -> None:
        """Let :meth:`take` return this memory again."""
        for one in some:
            if one.numel():
                memory = self._taken.pop(one.data_ptr())
                self._free.setdefault(memory.numel(), []).append(memory)

    def scratch(self, count: int) -> torch.Tensor:
        """Return ``count`` float32 of any content, valid until the next call of this method."""
        if self._scratch is None or self._scratch.numel() < count:
            self._scratch = self.take(4 * count).view(torch.float32)
        return self._scratch[:count]

    def float32(self, source: torch.Tensor) -> torch.Tensor:
        """Return ``source`` as float32, itself where it is; valid as long as what :meth:`scratch` returns."""
        if source.dtype is torch.float32:
            return source
        copied = self.scratch(source.numel())
        copied.copy_(source)
        return copied
