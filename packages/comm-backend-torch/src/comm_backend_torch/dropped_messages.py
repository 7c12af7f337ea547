"""Messages that are sent although nobody keeps their handle.

gloo cancels a message whose handle is dropped before the receiver has come. So what a dropped handle held is kept here
until then, by a thread that waits for one message after the other.
"""

from __future__ import annotations

import _thread
import atexit
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from comm_backend_torch.message_waits import abort, message_wait
from comm_backend_torch.waits import NOTICE_S
from comm_utils.log import logger
from comm_utils.torch_support.group_state import GroupState
from comm_utils.torch_support.recorded_calls import Note

__all__ = ["Message", "keep", "settle"]

# The end of the program waits so long for receivers.
_PATIENCE_AT_EXIT_S = 1.0
_POLL_S = 0.005


class Message(NamedTuple):
    """A message under way.

    Attributes:
        end: when its time is over, by the monotonic clock; None leaves that to the group's timeout.
        note: of the call in the flight recorder.
        translate: turns a failure into one of this package's and marks the group as broken.
    """

    work: Any
    state: GroupState
    end: float | None
    note: Note | None
    translate: Callable[[BaseException], BaseException]


_kept: deque[Message] = deque()
_waiting: list[Message] = []
#: Threads that wait, until they have let go of their last message.
_threads: list[int] = []
#: Of the process that forked this one: their destructors would ask for locks that its threads may have held.
_inherited: list[Message] = []


def keep(
    state: GroupState,
    work: Any,
    end: float | None,
    note: Note | None,
    translate: Callable[[BaseException], BaseException],
) -> None:
    """Keep a :class:`Message` until it is received or its group ends.

    Destructors call this, also within garbage collections.
    """
    if state.inherited or state.broken is not None:
        return
    _kept.append(Message(work, state, end, note, translate))
    if not _waiting:
        # Not threading.Thread, whose locks the code that a collection interrupts may hold.
        with suppress(RuntimeError):  # there are no more threads, or the interpreter ends
            _thread.start_new_thread(_wait_for_all, ())


def _wait_for_all() -> None:
    thread = _thread.get_ident()
    _threads.append(thread)
    try:
        while True:
            try:
                message = _kept.popleft()
            except IndexError:
                return
            _waiting.append(message)
            try:
                _wait_for(message)
            finally:
                _waiting.remove(message)
                del message
    finally:
        _threads.remove(thread)


def _wait_for(message: Message) -> None:
    note = message.note
    try:
        message_wait(message.state)(message.work, message.end)
    except BaseException as error:
        if note is not None:
            note.fail()
        logger.error(
            "rank %d: a message whose handle was dropped was not received: %s",
            message.state.ranks[message.state.rank],
            message.translate(error),
        )
    else:
        if note is not None:
            note.complete()


def settle(patience_s: float, groups: Iterable[GroupState] | None = None) -> None:
    """Wait so long until the messages of ``groups``, None are all, are received; then cancel the others."""
    ending = None if groups is None else {id(one) for one in groups}

    def pending() -> list[Message]:
        found = [*_kept, *_waiting]
        return [one for one in found if ending is None or id(one.state) in ending]

    end = time.monotonic() + patience_s
    while (left := pending()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    for message in left:
        with suppress(ValueError):
            _kept.remove(message)
            logger.error(
                "rank %d: a message whose handle was dropped was not received before its group ended",
                message.state.ranks[message.state.rank],
            )
    abort([one.work for one in left if one in _waiting])
    end = time.monotonic() + NOTICE_S
    # The destructor of a work gives the GIL away: where the interpreter has ended meanwhile, that ends the process.
    while (pending() or (groups is None and _threads)) and time.monotonic() < end:
        time.sleep(_POLL_S)


atexit.register(settle, _PATIENCE_AT_EXIT_S)


def _forget() -> None:
    """Leave the messages of the process that forked this one to it."""
    _inherited.extend((*_kept, *_waiting))
    _kept.clear()
    _waiting.clear()
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
