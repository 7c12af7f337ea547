"""The handles that ``torch.distributed`` expects from a process group."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import Work

from comm_backend_ccl.work import CclWork
from comm_utils.torch_support.completing import COMPLETING
from comm_utils.torch_support.handle import future_of
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["C10dWork"]


_NO_LIMIT = timedelta(0)


@uncompiled
class C10dWork(Work):
    """A :class:`CclWork`, or several, as one handle of c10d.

    Args:
        outputs: what the handle's ``result()`` and future give.
    """

    def __init__(self, work: CclWork | None, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._works = [] if work is None else [work]
        self._outputs = list(outputs)
        self._future: Any = None

    @classmethod
    def of_all(cls, works: Sequence[C10dWork], outputs: Sequence[torch.Tensor]) -> C10dWork:
        """Return one handle for several."""
        made = cls(None, outputs)
        made._works = [one for work in works for one in work._works]
        return made

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        left_s = timeout.total_seconds() if timeout > _NO_LIMIT else None
        end = time.monotonic() + (left_s or 0.0)
        for work in self._works:
            work.wait(left_s)
            left_s = None if left_s is None else max(0.0, end - time.monotonic())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return the group rank of a received message's sender; -1 of operations that consist of several."""
        return self._works[0].source_rank() if len(self._works) == 1 else -1

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Completed by a thread of ours when the operation is."""
        if self._future is None:
            self._future = future_of(self, self._outputs, partial(COMPLETING.add, self.is_completed))
        return self._future if _is_called_by_python() else _for_cpp(self._future, self._outputs)

    getFuture = get_future


# --- futures for DDP's reducer and its built-in hooks, which are C++


def _is_called_by_python() -> bool:
    """Return whether Python code asks for the future, and not C++ in the course of what Python called."""
    try:
        return not _NAMES.isdisjoint(sys._getframe(2).f_code.co_names)
    except ValueError:  # there is no Python code on this thread
        return False


_NAMES = frozenset(("get_future", "getFuture"))


def _for_cpp(future: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a future that C++ can read.

    C++ takes an exception that Python set for a result, and crashes on it; it sees one that a callback raises. The hook
    ``BuiltinCommHookType.FP16_COMPRESS`` wants a list of tensors in the types of C++, which only TorchScript can make.
    """
    raising = future.then(lambda done: done.value())
    if not any(tensor.dtype is torch.float16 for tensor in tensors):
        return raising
    script = _typed_futures()
    return raising if script is None else script.when_done(raising, tensors)


@functools.cache
def _typed_futures() -> Any:
    """Return the compiled functions; None where torch is built without TorchScript."""
    try:
        return torch.jit.CompilationUnit(_TYPED_FUTURES)
    except (AttributeError, RuntimeError):
        return None


_TYPED_FUTURES = """
def tensors_of(done: Future[int], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(done)
    return tensors

def when_done(done: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(tensors_of, done, tensors)
"""
