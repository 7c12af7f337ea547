"""Messages with a tag on oneCCL, which has none: they travel through the group's store.

Messages without one are oneCCL's own, and pay nothing for this.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.distributed import Store

from comm_backend_ccl.tables import MESSAGE_DTYPES, OTHER_DTYPE
from comm_backend_ccl.work import ANY_SOURCE
from comm_utils.errors import ArgumentError

__all__ = ["MOST_BYTES", "StoreMessages", "StoreReceive"]

#: Of all messages of a group that were sent and not received.
MOST_BYTES = 256 << 20
# Stores bound the size of a value.
_CHUNK_BYTES = 1 << 20
# At the head of a message: its bytes, and the code of its dtype.
_HEAD = struct.Struct("<QI")
_NAMES = {code: str(dtype) for dtype, code in MESSAGE_DTYPES.items()}
_NAPS_S = 0.0002, 0.005


class _Taken(NamedTuple):
    """A message whose content is in the tensor of its receive."""

    source: int
    number: int
    pieces: int
    ended_ns: int


class StoreReceive:
    """A receive on its way.

    Attributes:
        taken: the message that has arrived.
        failure: why the message could not be taken.
    """

    def __init__(self, tensor: torch.Tensor, source: int, tag: int) -> None:
        self.tensor, self._named, self.tag = tensor, source, tag
        self.taken: _Taken | None = None
        self.failure: str | None = None

    @property
    def is_from_any(self) -> bool:
        """Tell whether no source is named."""
        return self._named == ANY_SOURCE

    @property
    def source(self) -> int:
        """Return the group rank that is named, or ``ANY_SOURCE``; the sender's in the end."""
        return self._named if self.taken is None else self.taken.source

    @property
    def ended_ns(self) -> int | None:
        """Return when the message had arrived; None before."""
        return None if self.taken is None else self.taken.ended_ns


class StoreMessages:
    """The messages of one rank.

    Message n from one rank to another with one tag has the keys ``message/from/to/tag/n/piece``. The sender writes
    piece 0 last. The receiver deletes them.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._sent: Counter[tuple[int, int]] = Counter()
        self._received: Counter[tuple[int, int]] = Counter()
        self._posted: list[StoreReceive] = []
        self._first = 0  # whose messages are looked for first, so that a rank that sends much hides no other
        self._lock = threading.Lock()
        #: Whether a message had another size or dtype than its receive.
        self.disagreed = False

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        """Write the message; the tensor may be used again.

        Raises:
            ArgumentError: too much waits to be received; nothing was sent.
        """
        count = tensor.nbytes
        starts = range(0, count, _CHUNK_BYTES) or (0,)
        with self._lock:
            key = self._key(self._rank, to, tag, self._sent[to, tag])
            try:
                if self._store.add("message/bytes", count) > MOST_BYTES:
                    raise ArgumentError(
                        f"send: a message of {count} bytes with tag {tag}: messages with tags go through the group's "
                        f"store on oneCCL, which keeps {MOST_BYTES >> 20} MiB until they are received; receive earlier "
                        "ones first, or send without a tag"
                    )
                content = b""
                for piece, start in reversed(list(enumerate(starts))):
                    content = ctypes.string_at(tensor.data_ptr() + start, min(_CHUNK_BYTES, count - start))
                    if piece:
                        self._store.set(f"{key}/{piece}", content)  # type: ignore[arg-type]  # torch takes bytes as well
            except BaseException:
                with suppress(RuntimeError):  # the store has gone
                    self._store.add("message/bytes", -count)
                raise
            content = _HEAD.pack(count, MESSAGE_DTYPES.get(tensor.dtype, OTHER_DTYPE)) + content
            # Just before: the receiver waits without end for a number that an interrupted send leaves out.
            self._sent[to, tag] += 1
            self._store.set(f"{key}/0", content)  # type: ignore[arg-type]

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> StoreReceive:
        """Post a receive into ``tensor``; the earlier of two takes the earlier message."""
        posted = StoreReceive(tensor, source, tag)
        with self._lock:
            self._posted.append(posted)
        return posted

    def within(self, receive: StoreReceive, seconds: float) -> bool:
        """Return whether a receive was complete within so long; 0 asks and does not wait.

        Raises:
            RuntimeError: the message has another size or dtype, or the store has gone.
        """
        end, nap_s = time.monotonic() + seconds, _NAPS_S[0]
        while True:
            if receive.taken is None and receive.failure is None:
                self._progress()
            if receive.failure is not None:
                raise RuntimeError(receive.failure)
            if receive.taken is not None:
                return True
            left_s = end - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(nap_s * 1.5, _NAPS_S[1])

    def _progress(self) -> None:
        """Give messages that have arrived to the receives that were posted first."""
        with self._lock:
            for receive in list(self._posted):
                self._settle(receive)  # of which an exception of a signal handler may have ended this
            absent: set[tuple[int, int]] = set()
            for receive in list(self._posted):
                for source in self._sources(receive):
                    if (source, receive.tag) in absent:
                        continue
                    number = self._received[source, receive.tag]
                    if self._store.check([f"{self._key(source, self._rank, receive.tag, number)}/0"]):
                        self._take(receive, source, number)
                        self._settle(receive)
                        break
                    absent.add((source, receive.tag))

    def _sources(self, receive: StoreReceive) -> list[int]:
        if receive.source != ANY_SOURCE:
            return [receive.source]
        everyone = ((self._first + turn) % self._size for turn in range(self._size))
        return [one for one in everyone if one != self._rank]

    def _take(self, receive: StoreReceive, source: int, number: int) -> None:
        """Copy the message, or say why it cannot be taken; interrupted, this begins again."""
        key = self._key(source, self._rank, receive.tag, number)
        tensor, first = receive.tensor, self._store.get(f"{key}/0")
        if len(first) < _HEAD.size:
            self._refuse(receive, source, f"{len(first)} bytes at the head of a message")
            return
        count, dtype = _HEAD.unpack_from(first)
        expected = tensor.nbytes, MESSAGE_DTYPES.get(tensor.dtype, OTHER_DTYPE)
        if (count, dtype) != expected:
            self.disagreed = True
            receive.failure = (
                f"rank {source} sends {_described(count, dtype)} with tag {receive.tag}, and rank {self._rank} expects "
                f"{_described(*expected)}"
            )
            return
        pieces = max(1, -(-count // _CHUNK_BYTES))
        for piece in range(pieces):
            part = first[_HEAD.size :] if piece == 0 else self._store.get(f"{key}/{piece}")
            due = min(_CHUNK_BYTES, count - piece * _CHUNK_BYTES)
            if len(part) != due:  # more of them would be written behind the tensor
                self._refuse(receive, source, f"{len(part)} bytes in piece {piece} of a message, where {due} are due,")
                return
            ctypes.memmove(tensor.data_ptr() + piece * _CHUNK_BYTES, part, len(part))
        # One assignment: an exception of a signal handler comes before or after it.
        receive.taken = _Taken(source, number, pieces, time.perf_counter_ns())

    def _settle(self, receive: StoreReceive) -> None:
        """Forget a receive that has ended, and its message; interrupted, this begins again."""
        taken = receive.taken
        if taken is None and receive.failure is None:
            return
        if taken is not None:
            self._received[taken.source, receive.tag] = taken.number + 1
            if receive.is_from_any:
                self._first = (taken.source + 1) % self._size
            key = self._key(taken.source, self._rank, receive.tag, taken.number)
            for piece in range(taken.pieces):
                self._store.delete_key(f"{key}/{piece}")
            self._store.add("message/bytes", -receive.tensor.nbytes)
        self._posted.remove(receive)

    def _refuse(self, receive: StoreReceive, source: int, what: str) -> None:
        self.disagreed = True
        receive.failure = (
            f"rank {self._rank} found {what} from rank {source} with tag {receive.tag}; another program writes to the "
            "store of this job: give the job a port of its own"
        )

    @staticmethod
    def _key(source: int, to: int, tag: int, number: int) -> str:
        return f"message/{source}/{to}/{tag}/{number}"


def _described(count: int, code: int) -> str:
    return f"{count} bytes of {_NAMES.get(code, 'another dtype')}"
