"""The base of all handles, with what torch's own have too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from comm_utils.torch_support.completing import COMPLETING
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["Handle", "future_of", "tensors_of"]


@uncompiled
class Handle(ABC):
    """See ``comm_utils.backend.Work``. Subclasses say how to wait, and have in ``_result`` what is there afterwards."""

    __slots__ = ()

    _result: Any = None
    _future: Any = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        uncompiled(cls)

    @abstractmethod
    def wait(self, timeout: float | timedelta | None = None) -> bool: ...

    @abstractmethod
    def is_completed(self) -> bool: ...

    @abstractmethod
    def exception(self) -> BaseException | None: ...

    def result(self) -> Any:
        self.wait()
        return self._result

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        raise RuntimeError("source_rank: got an operation that is no receive; only a message that is received has one")

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        if self._future is None:
            self._future = future_of(self, list(tensors_of(self._result)), self._complete_later)
        return self._future

    def _complete_later(self, complete: Callable[[], None]) -> None:
        COMPLETING.add(self.is_completed, complete)


def future_of(
    work: Handle | torch.distributed.Work,
    tensors: list[torch.Tensor],
    complete_later: Callable[[Callable[[], None]], None],
) -> Any:
    """Return a future that gives ``tensors``, or the error of ``work``, once that has ended.

    A caller that keeps the future does so only now: an error that comes before leaves one that nobody completes.

    Args:
        complete_later: calls what it gets when ``work`` has ended.
    """
    devices = {tensor.device for tensor in tensors if not tensor.is_cpu}
    future: Any = torch.futures.Future(devices=[*devices])

    def complete() -> None:
        try:
            work.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(tensors)

    # On a device, waiting and local work are ordered on the current stream, which is the caller's. In a callback of
    # another future, nobody else would complete this one.
    if devices or work.is_completed() or COMPLETING.is_this_thread():
        complete()
    else:
        complete_later(complete)
    return future


def tensors_of(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an operation's result, in their order."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for one in result:
            yield from tensors_of(one)
