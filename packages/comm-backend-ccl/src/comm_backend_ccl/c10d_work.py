"""The handles that ``torch.distributed`` expects from a process group."""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from comm_backend_ccl.work import CclWork
from comm_utils.log import logger

__all__ = ["C10dWork"]


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
        self._source = -1

    @classmethod
    def of_all(cls, works: Sequence[C10dWork], outputs: Sequence[torch.Tensor]) -> C10dWork:
        """One handle for several."""
        made = cls(None, outputs)
        made._works = [one for work in works for one in work._works]
        return made

    def of_rank(self, rank: int) -> C10dWork:
        """Remember whom a message comes from."""
        self._source = rank
        return self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout if timeout.total_seconds() > 0 else None)
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
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Completed by a thread of ours when the operation is."""
        if self._future is None:
            self._future = torch.futures.Future()
            # In a callback of another future, nobody else would complete this one.
            if self.is_completed() or _completing.is_this_thread():
                self._complete()
            else:
                _completing.add(self)
        return self._future

    getFuture = get_future

    def _complete(self) -> None:
        try:
            self.wait()
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._outputs)


class _Completing:
    """Waits for operations whose future somebody has asked for, one after the other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[C10dWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: C10dWork) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="comm-ccl-futures", daemon=True)
                self._thread.start()
                atexit.register(self.stop)
        self._queue.put(work)

    def is_this_thread(self) -> bool:
        """Return whether the caller is the thread that completes futures."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work._complete()
            except Exception:
                logger.exception("a callback of a collective's future failed")

    def stop(self) -> None:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(timeout=1.0)


_completing = _Completing()
