"""Waits for messages of gloo that end where the group is broken or destroyed.

While a part of a message is on its way, gloo has its buffer in neither of the lists that it goes through when a
connection ends (``Pair::signalException`` of torch 2.6 to 2.13): who waits for the rest waits until the timeout of the
group, however long ago the other rank was lost. A slice of a wait that ends would close all connections of the group.
But ``c10d::Work::abort`` of C++ ends a wait in another thread. Python has no such method, so :func:`wake` calls it
through ctypes, after a comparison of the handle's virtual table.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from comm_backend_torch.waits import NOTICE_S, Wait, interrupted
from comm_backend_torch.work import left
from comm_utils import threads
from comm_utils.torch_support.failures import raised_by_handler, summarize
from comm_utils.torch_support.group_state import GroupState

__all__ = ["abort", "message_wait", "wake"]

logger = logging.getLogger(__name__)

_KINDS = ("8SendWork", "8RecvWork")
# Of a virtual table: what stands before its functions, at which objects point.
_BEFORE_FUNCTIONS = 2 * ctypes.sizeof(ctypes.c_void_p)


def message_wait(state: GroupState) -> Wait:
    """Return how messages of a group of gloo are waited for."""
    return partial(_wait, state)


def _wait(state: GroupState, work: Any, end: float | None = None) -> None:
    awaited = state.awaited_messages
    awaited.append(work)
    try:
        try:
            if state.broken is not None or state.is_destroyed:  # before this wait, so that nothing ends it
                wake(state)
            has_ended = work.wait() if end is None else work.wait(left(end))
        finally:
            awaited.remove(work)
    except KeyboardInterrupt:
        interrupted(state)
        raise
    except BaseException as error:
        # What a handler of a signal raises takes the place of a failed wait's error, which nobody else hears of.
        is_of_library = isinstance(error, RuntimeError) and not raised_by_handler(error)
        failure = None if is_of_library else _failure_before(error)
        if failure is not None:
            interrupted(state, f"{type(error).__name__}, after {summarize(failure)}")
        raise
    if not has_ended:
        raise RuntimeError("Connection closed by peer")


def _failure_before(error: BaseException) -> RuntimeError | None:
    """Return the error of the library that was on its way when ``error`` was raised."""
    before = error.__context__
    while not (before is None or isinstance(before, RuntimeError)):
        before = before.__context__
    return before


def wake(state: GroupState) -> None:
    """End the waits for messages of a group that is broken or no more, after ``NOTICE_S`` in which gloo may do so."""
    if not state.awaited_messages:
        return
    timer = threading.Timer(NOTICE_S, abort, (state.awaited_messages,))
    timer.daemon = True
    try:
        threads.start(timer)
    except RuntimeError:  # there are no more threads
        abort(state.awaited_messages)


def abort(awaited: Sequence[Any]) -> None:
    """End the waits for these messages, where torch does not hide how."""
    for work in list(awaited):
        address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value  # as pybind11 lays it out
        table = None if address is None else ctypes.c_void_p.from_address(address).value
        end = None if table is None else _aborts().get(table)
        if end is not None:
            end(address)


@cache
def _aborts() -> dict[int, Callable[..., None]]:
    """Return the functions that abort a message, by the address of its virtual table; none where torch hides them."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    found: dict[int, Callable[..., None]] = {}
    with suppress(OSError, AttributeError, ValueError):
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu{suffix}"))
        for kind in _KINDS:
            name = f"N4c10d16ProcessGroupGloo{kind}"
            table = ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + _BEFORE_FUNCTIONS
            abort = library[f"_Z{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[table] = abort
    if not found:
        logger.debug(
            "torch %s hides how messages of gloo are aborted: a wait may last until the timeout", torch.__version__
        )
    return found
