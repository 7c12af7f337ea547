"""Many small calls in few messages: what is called within a ``with`` block is done together at its end."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch

from comm_collectives import arguments, graph_breaks
from comm_collectives.coalescing.collecting import CollectingCache, Run
from comm_collectives.coalescing.launch import COLLECTED, launch
from comm_collectives.keyword_errors import with_keyword_errors
from comm_collectives.wrapping import BackendWrapper
from comm_utils.active import slot
from comm_utils.backend import Backend, Work
from comm_utils.errors import ArgumentError
from comm_utils.given import seconds_to_wait
from comm_utils.process_locks import ProcessLock
from comm_utils.torch_support.handle import Handle
from comm_utils.torch_support.uncompiled import uncompiled

__all__ = ["Coalescing", "coalescing"]


class Coalescing(Handle):
    """The handle of all calls of one ``with`` block; it can be waited for after the block."""

    def __init__(self) -> None:
        self._works: list[Work] | None = None

    def started(self, works: list[Work]) -> None:
        """Note what the calls came to, at the end of the block."""
        self._works = works

    def _begun(self) -> list[Work]:
        if self._works is None:
            raise ArgumentError(
                "coalescing: got a wait for calls that begin at the end of the with block; wait after it"
            )
        return self._works

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Return True once all results may be used.

        Args:
            timeout: as of the handle of a single call, for each message.
        """
        seconds_to_wait(timeout)
        for work in self._begun():
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether ``wait()`` would return at once."""
        return self._works is not None and all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None; does not wait."""
        return next((error for work in self._works or () if (error := work.exception()) is not None), None)

    def result(self) -> None:
        """Wait; the results are in the tensors of the calls."""
        self.wait()

    def get_future(self) -> Any:
        """Return a future of an empty list; the results are in the tensors of the calls."""
        self._begun()
        return super().get_future()


@with_keyword_errors
def coalescing(async_op: bool = False) -> AbstractContextManager[Coalescing]:
    """Do all calls within the block together at its end, in one message for each kind of call, op, group and dtype.

    Within the block, calls of this thread to ``all_reduce``, ``all_gather``, ``all_gather_into_tensor`` and
    ``reduce_scatter_tensor`` only take note of their tensors, which must not be used before the end. Other collectives
    raise ``ArgumentError``. Inputs are only read, as ever. Where tensors of two calls share memory, calls are made one
    by one, in their order. All ranks make the same calls in the same order; after an exception nothing is done. The
    arguments of all calls are checked at the end of the block, before anything is sent.

    Args:
        async_op: at the end of the block only start what is to be done. Of calls one by one, only the last is left
            under way.

    Returns:
        a context manager; it gives a handle, which is what calls with ``async_op`` return. With ``async_op``, wait for
        it after the block.
    """
    if torch.compiler.is_dynamo_compiling():
        return cast("AbstractContextManager[Coalescing]", graph_breaks.coalescing(async_op))
    arguments.active("coalescing")
    return _Block(arguments.as_flag("coalescing", "async_op", async_op))


graph_breaks.add("coalescing", coalescing, graph_breaks.NEVER)
#: While a thread opens or closes a block.
_turn = ProcessLock(threading.Lock)


@uncompiled
class _Block(AbstractContextManager[Coalescing]):
    """One ``with`` block. The first one of all threads puts a backend into the slot, and the last one takes it out."""

    def __init__(self, async_op: bool) -> None:
        self._async_op, self._was_entered = async_op, False
        self._runs: list[Run] = []
        self._handle = Coalescing()

    def __enter__(self) -> Coalescing:
        with _turn.lock:
            cache = slot.fast_paths
            if isinstance(cache, CollectingCache) and cache.collects_here:
                raise ArgumentError(
                    "coalescing: got called within another coalescing(), whose calls have not been made yet"
                )
            if self._was_entered:
                raise ArgumentError("coalescing: got entered a second time; call coalescing() for each with block")
            self._was_entered = True
            if not isinstance(cache, CollectingCache):
                cache = CollectingCache(cache, frozenset(COLLECTED))
                slot.backend, slot.fast_paths = cast(Backend, _Collecting(slot.backend, cache)), cache
            self._cache, self._thread = cache, cache.begin(self._runs, self._handle)
        return self._handle

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with _turn.lock:
            self._cache.end(self._thread)
            # Unless another thread has put another backend there meanwhile.
            if (
                isinstance(slot.backend, _Collecting)
                and slot.fast_paths is self._cache
                and not self._cache.is_collecting
            ):
                slot.backend, slot.fast_paths = slot.backend.inner, self._cache.usual
        if kind is None:
            self._handle.started(launch(self._runs, self._async_op))


class _Collecting(BackendWrapper):
    """Refuses calls that are not collected, of threads that collect theirs."""

    def __init__(self, inner: Backend, cache: CollectingCache) -> None:
        super().__init__(inner)
        self._cache = cache

    def during(self, call: str, timeout: timedelta | None = None) -> Any:
        if not self._cache.collects_here:
            return self.inner.during(call, timeout)
        raise ArgumentError(
            f"{call}: got called within coalescing(), which collects {', '.join(COLLECTED)} without timeout and "
            "compression; make this call outside of the block"
        )
