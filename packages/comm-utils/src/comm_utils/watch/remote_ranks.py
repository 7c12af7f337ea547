"""Ranks of other hosts: what they do is asked for through the store when something is wrong."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

from comm_utils import json_files, threads
from comm_utils.flight_recorder.reader import RingError
from comm_utils.flight_recorder.snapshot import RankSnapshot, decode_snapshot, encode_snapshot
from comm_utils.log import logger
from comm_utils.watch.mailbox import Mailbox

__all__ = ["Notice", "RemoteRanks", "decode_answer", "decode_digests", "decode_notice", "encode_answer"]

_T = TypeVar("_T")

_PREFIX = "comm-flight"
_GONE = (RuntimeError, OSError)
_LARGEST_BYTES = 1 << 20
# Of the notices of others, so many are read in a row: the questions of other ranks are answered after that.
_MOST_NOTICES = 100
# A notice that was counted and is not there is looked for so many times.
_MOST_LOOKS = 50
# So many ranks tell of the same error in a group, as one may end before it has: its other members say the same.
_MOST_TELLERS = 3
# So many ranks of a large group ask why it failed: each asks all others, and what they find reaches all.
_MOST_ASKERS, _LARGE = 8, 64
# After an error, the store is tried again so much later, twice as late each time.
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 30.0
# The end of a world does not wait longer for a store that does not answer.
_CLOSE_S = 0.3


class Notice(NamedTuple):
    """Hold the reason why the ranks of a group cannot go on, which a rank of another host tells.

    Attributes:
        error: the name of the error that it raised.
        last: the number of the last collective that it began on the group; -1 is not known.
    """

    group: str
    error: str
    text: str
    last: int = -1


class RemoteRanks:
    """Answers the questions of ranks of other hosts, and asks them; for several threads.

    A store that does not answer blocks its caller for an unknown time. :meth:`close` and the methods with a limit do
    not wait for it.

    Args:
        connect: opens the way to them when it is first needed; None where there is none.
        take: returns what this rank does now.
    """

    def __init__(
        self, rank: int, connect: Callable[[], Mailbox | None], take: Callable[[], RankSnapshot | None]
    ) -> None:
        self._rank, self._connect, self._take = rank, connect, take
        self._mailbox: Mailbox | None = None
        self._lock = threading.Lock()
        self._is_absent = self._is_closed = self._has_warned = False
        self._failures, self._retry_at, self._last_error = 0, 0.0, ""
        self._answered = self._read_notices = 0
        self._missing_notices: dict[int, int] = {}  # counted and not yet found, and how often they were looked for
        self._published: bytes | None = None

    def _with_store(self, use: Callable[[Mailbox], _T]) -> _T | None:
        """Use the store; None after an error, and until it is tried again."""
        with self._lock:
            if not self._is_usable:
                return None
            try:
                if self._mailbox is None:
                    self._mailbox = self._connect()
                if self._mailbox is None:
                    self._is_absent = True
                    return None
                found = use(self._mailbox)
                self._failures = 0
                return found
            except _GONE as error:
                self._failed(error)
                return None
            finally:
                if self._is_closed:
                    self._drop()

    @property
    def _is_usable(self) -> bool:
        return not self._is_absent and not self._is_closed and time.monotonic() >= self._retry_at

    def _failed(self, error: BaseException) -> None:
        self._drop()
        self._retry_at = time.monotonic() + min(_FIRST_RETRY_S * 2**self._failures, _LAST_RETRY_S)
        self._failures += 1
        self._last_error = f"{type(error).__name__}: {error!s:.200}"

    def _warn_of_store(self, reason: str = "") -> None:
        """Say that ranks of other hosts cannot be asked; before that, the rank with the store may just have ended.

        Args:
            reason: "" for the last error, if there was one.
        """
        reason = reason or (self._last_error if self._failures else "")
        if reason and not self._is_closed and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "rank %d cannot reach the store (%s): ranks of other hosts are not seen until it answers again",
                self._rank,
                reason,
            )

    def _drop(self) -> None:
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            with suppress(*_GONE):
                mailbox.close()

    def _get(self, name: str) -> bytes | None:
        return self._with_store(lambda box: box.get(f"{_PREFIX}/{name}"))

    def answer(self) -> None:
        """Publish what this rank does, if another rank has asked since the last time."""
        asked = self._with_store(lambda box: box.add(f"{_PREFIX}/asked", 0))
        if asked and asked != self._answered:
            snapshot = self._take()
            if snapshot is not None:
                data = encode_answer(asked, snapshot)
                # The one key of this rank: it answers all that have asked so far.
                self._with_store(lambda box: box.set(f"{_PREFIX}/state/{self._rank}", data))
            if self._is_usable:
                self._answered = asked

    def ask(
        self, ranks: Iterable[int], limit_s: float, meanwhile: Callable[[], bool] = lambda: False
    ) -> dict[int, RankSnapshot]:
        """Return what ``ranks`` do now; those that do not answer within ``limit_s`` seconds are left out.

        Args:
            meanwhile: is called again and again until then, as the others may ask as well; True ends the wait.
        """
        found: dict[int, RankSnapshot] = {}
        self._ask(found, [], ranks, limit_s, meanwhile)
        return found

    def _ask(
        self,
        found: dict[int, RankSnapshot],
        numbers: list[int | None],
        ranks: Iterable[int],
        limit_s: float,
        meanwhile: Callable[[], bool],
    ) -> None:
        """Fill ``found``; note the number of the question in ``numbers`` when the store has answered."""
        wanted = set(ranks)
        number = self._with_store(lambda box: box.add(f"{_PREFIX}/asked", 1)) if wanted else None
        numbers.append(number)
        if not number:
            if wanted:
                self._warn_of_store()
            return
        end = time.monotonic() + limit_s
        while wanted and self._is_usable and time.monotonic() < end:
            for rank in sorted(wanted):
                data = self._get(f"state/{rank}")
                answer = None if data is None else decode_answer(data)
                if answer is not None and answer[0] >= number:
                    wanted.discard(rank)
                    if answer[1].rank == rank:
                        found[rank] = answer[1]
            if wanted:
                if meanwhile():
                    break
                time.sleep(0.05)

    def ask_within(
        self, ranks: Iterable[int], limit_s: float, meanwhile: Callable[[], bool] = lambda: False
    ) -> dict[int, RankSnapshot]:
        """Do the same, for no longer than ``limit_s`` where the store does not answer either."""
        found: dict[int, RankSnapshot] = {}  # with what has come, when the time is over
        numbers: list[int | None] = []
        if not _within(limit_s, "comm-watch-ask", lambda: self._ask(found, numbers, ranks, limit_s, meanwhile)):
            return {}
        if not numbers:  # the link to it is down: no error comes
            self._warn_of_store(f"no answer within {limit_s:.1f} s")
        return dict(found)

    def leaves_asking_to_others(self, group: str, asked: int, limit_s: float) -> bool:
        """Return whether enough ranks ask already why a group failed, which tell the others what they find.

        Args:
            asked: so many ranks this one would ask.
            limit_s: for the store to answer.
        """
        askers: list[int | None] = []
        if asked > _LARGE:
            count = partial(self._with_store, lambda box: box.add(f"{_PREFIX}/askers/{group}", 1))
            _within(limit_s, "comm-watch-ask", lambda: askers.append(count()))
        return any(one is not None and one > _MOST_ASKERS for one in askers)

    # --- what has to reach all ranks

    def tell(self, group: str, error: str, text: str, last: int = -1) -> None:
        """Tell all ranks of other hosts why the ranks of a group cannot go on, unless enough others have.

        Args:
            last: see :class:`Notice`.
        """
        data = json.dumps({"group": group, "error": error, "text": text[:4000], "last": last}).encode()

        def publish(box: Mailbox) -> None:
            if box.add(f"{_PREFIX}/tellers/{error}/{group}", 1) > _MOST_TELLERS:
                return
            box.set(f"{_PREFIX}/notice/{box.add(f'{_PREFIX}/notices', 1)}", data)

        self._with_store(publish)

    def tell_within(self, group: str, error: str, text: str, limit_s: float, last: int = -1) -> None:
        """Do the same, and go on after ``limit_s`` seconds while it is under way."""
        _within(limit_s, "comm-watch-tell", lambda: self.tell(group, error, text, last))

    def notices(self) -> list[Notice]:
        """Return notices that were not returned before, the earliest ones."""
        count = self._with_store(lambda box: box.add(f"{_PREFIX}/notices", 0))
        if count is None:
            return []
        found = []
        last = min(count, self._read_notices + _MOST_NOTICES)
        for number in [*self._missing_notices, *range(self._read_notices + 1, last + 1)]:
            data = self._get(f"notice/{number}")
            if data is None and not self._is_usable:
                break
            looks = self._missing_notices.pop(number, 0)
            self._read_notices = max(self._read_notices, number)
            if data is None:  # its rank is about to write it, or has ended
                if looks < _MOST_LOOKS:
                    self._missing_notices[number] = looks + 1
                continue
            notice = decode_notice(data)
            if notice is not None:
                found.append(notice)
        return found

    # --- comparison of calls

    def publish_digests(self, latest: dict[str, tuple[int, int]]) -> None:
        """Publish number and digest of this rank's last collective in each group."""
        data = json.dumps(latest).encode()
        if latest and data != self._published:
            self._with_store(lambda box: box.set(f"{_PREFIX}/digests/{self._rank}", data))
            if self._is_usable:
                self._published = data

    def digests(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return what ``rank`` published."""
        data = self._get(f"digests/{rank}")
        return {} if data is None else decode_digests(data)

    def close(self) -> None:
        """End the connection to the store; where another thread waits for the store, that one does it afterwards."""
        self._is_closed = True
        self._connect = lambda: None  # it holds the store
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._drop()
            finally:
                self._lock.release()


def _within(limit_s: float, name: str, work: Callable[[], object]) -> bool:
    """Wait for ``work``, which a thread of its own does, for so long; return False where there can be no thread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    try:
        threads.start(thread)
    except (RuntimeError, MemoryError):  # this process has no memory left for one, which its caller reports
        return False
    thread.join(limit_s)
    return True


def encode_answer(number: int, snapshot: RankSnapshot) -> bytes:
    """Return the answer to the questions up to ``number``."""
    return b"%d\n%b" % (number, encode_snapshot(snapshot))


def decode_answer(data: bytes) -> tuple[int, RankSnapshot] | None:
    """Return the last question that an answer is to, and the snapshot; None where ``data`` says something else."""
    number, _, content = data.partition(b"\n")
    if not number.isdigit() or len(number) > 18:
        return None
    try:
        return int(number), decode_snapshot(content)
    except RingError:
        return None


def decode_notice(data: bytes) -> Notice | None:
    """Return the notice that ``data`` has; None where it says something else."""
    if len(data) > _LARGEST_BYTES:
        return None
    try:
        content = json_files.parse(data.decode(), "a notice")
        return Notice(str(content["group"]), str(content["error"]), str(content["text"]), int(content["last"]))
    except (ValueError, TypeError, KeyError, OverflowError):
        return None


def decode_digests(data: bytes) -> dict[str, tuple[int, int]]:
    """Return the number and the digest of the last collective in each group; nothing for other data."""
    if len(data) > _LARGEST_BYTES:
        return {}
    try:
        # Digests have 64 bits without a sign.
        found = json.loads(data)
        return {
            str(group).encode("utf-8", "replace").decode(): (int(number), int(digest))
            for group, (number, digest) in found.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
        return {}
