"""A thread of its own for the ranks of other hosts: a store that does not answer holds up nothing else."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Mapping
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from comm_utils import threads
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import FindingKind
from comm_utils.flight_recorder.reader import RingReader
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.flight_recorder.scanning import Mark, digests
from comm_utils.log import logger
from comm_utils.watch.comparison import differ_by, marks_by_group
from comm_utils.watch.remote_ranks import Notice
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.world_view import WorldView

__all__ = ["RemoteObserver"]

# Most ranks find all others on their own host by then, and never connect.
_FIRST_POLL_S = 0.5
# A difference is found in three polls and reported in a fourth. A poll makes some five requests, and the store answers
# thousands of them a second.
_POLL_S, _POLL_S_OF_A_RANK = 0.2, 0.001
_ASK_S = 0.8

_T = TypeVar("_T")


class RemoteObserver:
    """Answers ranks of other hosts, hears of what they found, and compares their calls with those of this rank.

    Args:
        waker: a descriptor, which the observer closes: a byte makes the watch look at what was heard or found.
    """

    def __init__(self, view: WorldView, waker: int) -> None:
        self._view, self._waker = view, waker
        self._own = RingReader(RECORDER.memory.memory)  # not the watch's, which its thread moves on
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._found: SimpleQueue[tuple[str, Trouble]] = SimpleQueue()
        self._in_trouble: set[str] = set()
        # Groups whose calls differ, without the first call that does being known.
        self._unclear: set[str] = set()

    def start(self, compares: bool, broken: Container[str], stop: threading.Event) -> None:
        """Begin.

        Args:
            compares: whether calls are compared.
            broken: the groups that are in trouble already.
            stop: ends the thread.

        Raises:
            RuntimeError: there can be no thread.
        """
        thread = threading.Thread(
            target=self._run, args=(compares, broken, stop), name="comm-watch-remote", daemon=True
        )
        try:
            threads.start(thread)
        except BaseException:
            os.close(self._waker)
            raise

    def notices(self) -> list[Notice]:
        """Return the notices of ranks of other hosts since the last time."""
        return _drained(self._notices)

    def found(self) -> list[tuple[str, Trouble]]:
        """Return the groups whose calls differ between hosts, found since the last time."""
        return _drained(self._found)

    def _run(self, compares: bool, broken: Container[str], stop: threading.Event) -> None:
        try:
            self._observe(compares, broken, stop)
        finally:
            os.close(self._waker)

    def _wake(self) -> None:
        with suppress(OSError):
            os.write(self._waker, b"\0")

    def _observe(self, compares: bool, broken: Container[str], stop: threading.Event) -> None:
        has_warned = False
        pause_s = _FIRST_POLL_S
        while not stop.wait(pause_s):
            pause_s = max(_POLL_S, _POLL_S_OF_A_RANK * self._view.world_size)
            try:
                if self._view.has_unseen_ranks:
                    self._look(compares, broken)
            except Exception as error:
                if not stop.is_set() and not has_warned:
                    has_warned = True
                    logger.warning(
                        "the watch of rank %d could not look at other hosts: %s: %s",
                        self._view.rank,
                        type(error).__name__,
                        error,
                    )

    def _look(self, compares: bool, broken: Container[str]) -> None:
        self._exchange()
        if compares:
            self._compare(broken)

    def _exchange(self) -> None:
        self._view.remote.answer()
        for notice in self._view.remote.notices():
            self._notices.put(notice)
            self._in_trouble.add(notice.group)
            self._wake()

    def _exchange_until_notice(self, group: str) -> bool:
        self._exchange()
        return group in self._in_trouble

    def _compare(self, broken: Container[str]) -> None:
        """Compare the calls of this rank with those of the next ranks of other hosts in each group."""
        here = {*self._view.local.readers, self._view.rank}
        self._own.refresh()
        mine = marks_by_group(self._own)
        spanning = {one.name: one for one in self._own.groups.values() if not set(one.ranks) <= here}
        latest = {}
        for name, calls in mine.items():
            if name in spanning:
                last = calls[max(calls)]
                latest[name] = last.in_series, last.digest
        self._view.remote.publish_digests(latest)
        published: dict[int, dict[str, tuple[int, int]]] = {}
        for name in latest:
            group = spanning[name]
            at = group.ranks.index(self._view.rank)
            for other in {group.ranks[at - 1], group.ranks[(at + 1) % len(group.ranks)]} - here:
                if other not in published:
                    published[other] = self._view.remote.digests(other)
                number, digest = published[other].get(name, (0, 0))
                if name in broken or not self._differs(mine[name], name, number, digest):
                    continue
                answers = self._view.remote.ask([other], _ASK_S, partial(self._exchange_until_notice, name))
                known = {**self._view.snapshots(), **answers}
                found = [one for one in diagnose_group(known, group) if one.kind is FindingKind.MISMATCH]
                if not found and (self._exchange_until_notice(name) or (answers and name not in self._unclear)):
                    # The other rank has found it as well, or is about to; without an answer, it may be gone.
                    self._unclear.add(name)
                    continue
                if not found and all(one.threads == 1 for one in known.values()):
                    found = [differ_by(group, self._view.rank, other, number)]
                if found:
                    self._found.put((name, Trouble.of(found[0])))
                    self._wake()

    def _differs(self, latest: Mapping[int, Mark], group: str, number: int, digest: int) -> bool:
        """Return whether this rank's calls on a group, up to one of that number, have another digest."""
        if not number or number > max(latest):
            return False
        # The other rank has published it up to a second ago.
        mine = latest[number].digest if number in latest else digests(self._own, group).get(number, digest)
        return mine != digest


def _drained(queue: SimpleQueue[_T]) -> list[_T]:
    found: list[_T] = []
    with suppress(Empty):
        while True:
            found.append(queue.get_nowait())
    return found
