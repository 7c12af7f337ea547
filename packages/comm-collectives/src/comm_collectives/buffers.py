"""Memory that is used again by the next call."""

from __future__ import annotations

import threading
from types import TracebackType

import torch
from torch.distributed import ProcessGroup

from comm_utils.backend import Backend
from comm_utils.errors import BackendUnavailableError

__all__ = ["Buffers", "Pool", "SharedPool"]

# Of all that a pool keeps, in bytes.
_MOST_KEPT = 64 << 20


def _size_class(count: int) -> int:
    return max(4096, 1 << (count - 1).bit_length()) if count else 0


class Pool:
    """Memory that earlier calls took, for later ones. Calls of several threads may take from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[tuple[object, int], list[torch.Tensor]] = {}
        #: Of all that it has.
        self.kept_bytes = 0

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Return new memory: uint8, (size,), of any content."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def take(self, owner: object, size: int) -> torch.Tensor | None:
        """Return memory of just this size that ``owner`` kept, or None."""
        with self._lock:
            kept = self._kept.get((owner, size))
            if not kept:
                return None
            self.kept_bytes -= size
            return kept.pop()

    def keep(self, owner: object, memory: torch.Tensor) -> None:
        """Keep what :meth:`allocate` or :meth:`take` returned, where there is room."""
        with self._lock:
            if self.kept_bytes + memory.numel() <= _MOST_KEPT:
                self._kept.setdefault((owner, memory.numel()), []).append(memory)
                self.kept_bytes += memory.numel()


class SharedPool(Pool):
    """Memory on the CPU that the ranks of a group can reach, where their library has such memory and there is some."""

    def __init__(self, backend: Backend, group: ProcessGroup | None) -> None:
        super().__init__()
        self._backend, self._group = backend, group

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        try:
            return self._backend.empty_shared([size], torch.uint8, self._group)
        except BackendUnavailableError:
            return super().allocate(size, device)


_usual = Pool()


class Buffers:
    """Memory for one call while it goes on; kept for later calls at its end.

    What an operation that failed may still write to is not kept.

    Args:
        pool: where it is kept; by default one for all calls of the process.
    """

    def __init__(self, device: torch.device, pool: Pool = _usual) -> None:
        self._device, self._pool = device, pool
        # What one stream of a device still reads is not for another one.
        self._owner: object = device
        if device.type != "cpu":
            self._owner = device, torch.get_device_module(device).current_stream(device)
        self._taken: dict[int, torch.Tensor] = {}
        self._free: dict[int, list[torch.Tensor]] = {}
        self._scratch: torch.Tensor | None = None

    def __enter__(self) -> Buffers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            for memory in [*self._taken.values(), *(one for some in self._free.values() for one in some)]:
                self._pool.keep(self._owner, memory)

    def take(self, count: int) -> torch.Tensor:
        """Return ``count`` bytes, uint8, of any content, valid until they are given back."""
        size = _size_class(count)
        if size == 0:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        free = self._free.get(size)
        memory = free.pop() if free else self._pool.take(self._owner, size)
        if memory is None:
            memory = self._pool.allocate(size, self._device)
        self._taken[memory.data_ptr()] = memory
        return memory[:count]

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
