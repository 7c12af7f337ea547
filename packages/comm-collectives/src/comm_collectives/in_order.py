"""Asynchronous calls on CPU tensors that complete in the order in which they were started, as on NCCL's stream.

DeepSpeed starts several operations of a group and waits for the last one alone. On NCCL, that waits for all of them.
gloo and oneCCL work on several at a time, and what the earlier ones deliver may not be there yet.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as c10d

from comm_utils.group_names import name_of
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support.handle import Handle
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["in_order"]

# By the name of their group, the numbers and handles of calls that nobody has waited for yet.
_started: dict[str, deque[tuple[int, Any]]] = {}
_numbers = itertools.count()
_lock = ProcessLock(threading.Lock)


@functools.cache
def in_order(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with handles whose ``wait()`` waits for earlier calls of the group as well.

    Args:
        call: of the façade, with the parameters ``group`` and ``async_op``.
    """
    place = [*inspect.signature(call).parameters].index("group")

    @functools.wraps(call)
    def ordered(*args: Any, **kwargs: Any) -> Any:
        returned = call(*args, **kwargs)
        if not hasattr(returned, "is_completed") or not _is_on_cpu((*args, *kwargs.values())):
            return returned
        group = kwargs.get("group", args[place] if len(args) > place else None)
        return _InOrder(returned, name_of(c10d.group.WORLD if group is None else group))

    return uncompiled(ordered)


def _is_on_cpu(values: Iterable[Any]) -> bool:
    for value in values:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(first, torch.Tensor):
            return first.is_cpu
    return False


def _oldest(group: str) -> tuple[int, Any] | None:
    with _lock.lock:
        return next(iter(_started.get(group, ())), None)


def _remove(group: str, one: tuple[int, Any]) -> None:
    with _lock.lock:
        started = _started.get(group)
        if started and started[0] is one:  # another thread may have waited for it as well
            started.popleft()
        if not started:
            _started.pop(group, None)


class _InOrder(Handle):
    """A handle of one call, which keeps those before it in its group until somebody waits."""

    __slots__ = ("_group", "_number", "_work")

    def __init__(self, work: Any, group: str) -> None:
        self._work, self._group = work, group
        while (oldest := _oldest(group)) is not None and oldest[1].is_completed() and oldest[1].exception() is None:
            oldest[1].wait()  # which adds what the library does not provide
            _remove(group, oldest)
        with _lock.lock:
            self._number = next(_numbers)
            _started.setdefault(group, deque()).append((self._number, work))

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait(timeout)
        while (oldest := _oldest(self._group)) is not None and oldest[0] <= self._number:
            oldest[1].wait(timeout)
            _remove(self._group, oldest)
        return True

    def get_future(self) -> Any:
        return self._work.get_future()

    def result(self) -> Any:
        self.wait()
        return self._work.result()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        found: BaseException | None = self._work.exception()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
