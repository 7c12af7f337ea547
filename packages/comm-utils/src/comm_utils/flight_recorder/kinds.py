"""The functions that record the calls of one kind, written for speed."""

from __future__ import annotations

import struct
import sys
import threading
from collections.abc import Callable
from itertools import count
from time import perf_counter_ns
from types import CodeType
from typing import Any, NamedTuple, Protocol

from comm_utils import kernels
from comm_utils.flight_recorder.layout import FAILED, HEADER_BYTES, IN_BACKGROUND, LANE_OFFSETS, RECORD_BYTES
from comm_utils.flight_recorder.memory import RingMemory

__all__ = ["LANE_WORD", "WAITED_FOR", "Kind", "Series", "Uncounted", "make_kind"]

# ``layout.RECORD`` with kind and caller apart, and the digest as Python's hashes are.
_PACKED = struct.Struct("<QQQIIQQqQ")
LANE_WORD = LANE_OFFSETS[0] // 8

Begin = Callable[..., int]
#: The state of a call whose caller waits for it; the others are ``IN_BACKGROUND``, ``LIMITED`` and ``ON_DEVICE`` of
#: ``layout``.
WAITED_FOR = 0


class Series:
    """Counts the calls that have to agree between ranks: the collectives of a group, or the messages of a pair.

    Attributes:
        number: of the last call.
        digest: of all of them.
    """

    __slots__ = ("digest", "number")

    def __init__(self) -> None:
        self.number = self.digest = 0


class Uncounted(Series):
    """Counts nothing: the number of each of its calls is 0."""

    __slots__ = ()

    number = property(lambda self: -1, lambda self, value: None)


class Kind(NamedTuple):
    """A kind of call, described once.

    Attributes:
        begin: ``begin(elements, depth, sent=None, received=None, state=WAITED_FOR)``, which takes no keywords, records
            that a call begins and returns its number; the caller is looked for ``depth`` frames above the one that
            calls this, and above.
        end: ``end(number)`` records that it has ended.
        fail: ``fail(number)`` records that it failed.
        wait: ``wait(number, state=WAITED_FOR)`` records that somebody waits for what began in the background.
        complete: as ``end``, which may only say that the host has gone on.
    """

    begin: Begin
    end: Callable[[int], None]
    fail: Callable[[int], None]
    wait: Callable[..., None]
    complete: Callable[[int], None]


class _Recorder(Protocol):
    """The part of a ``FlightRecorder`` that these functions use."""

    numbers: count[int]
    sites: dict[tuple[int, int], int]
    several_threads: list[int]

    @property
    def memory(self) -> RingMemory: ...

    def caller(self, depth: int) -> int: ...

    def note_thread(self) -> None: ...

    def raise_count(self, number: int) -> None: ...


def make_kind(recorder: _Recorder, series: Series, kind: int, agreed: object, counts: bool, tag_word: int = 0) -> Kind:
    """Make the functions that record calls of one kind.

    Args:
        kind: the index of its entry.
        agreed: what the ranks have to agree about, beside the elements.
        counts: they have to agree about these, too.
        tag_word: word 7 of its records where no split sizes are given: a tag, or tensors that are joined.

    Returns:
        the kind. Its functions are native where an installed package provides them. They are not looked up before torch
        is loaded, because importing that package loads torch.
    """
    signature = int.from_bytes(_stable_hash(agreed), "little")
    native = None
    if "torch" in sys.modules:
        native = kernels.recording_functions(recorder, series, kind, signature, counts, tag_word)
    if native is None:
        return _in_python(recorder, series, kind, signature, counts, tag_word)
    begin, end, fail, wait = native
    return Kind(begin, end, fail, wait, end)


def _in_python(recorder: _Recorder, series: Series, kind: int, signature: int, counts: bool, tag_word: int) -> Kind:
    # Written for speed: most calls of a kind come from the place, and on the thread, of the last one.
    memory, numbers, pack_into = recorder.memory, recorder.numbers, _PACKED.pack_into
    buffer, words = memory.memory, memory.words
    mask, caller, now, frame_at = memory.records - 1, recorder.caller, perf_counter_ns, sys._getframe
    thread_of, note_thread, sites = threading.get_ident, recorder.note_thread, recorder.sites
    several, raise_count = recorder.several_threads, recorder.raise_count
    last_thread = 0
    last: tuple[CodeType | None, int, int] = None, 0, 0

    def begin(elements: int, depth: int, sent: Any = None, received: Any = None, state: int = WAITED_FOR, /) -> int:
        nonlocal last_thread, last
        last_code, last_at, site = last
        try:
            frame = frame_at(depth + 1)
        except ValueError:  # called by no Python code, as at the end of the program
            site = 0
        else:
            if frame.f_code is not last_code or frame.f_lasti != last_at:
                site = caller(depth + 1)
                if sites.get((id(frame.f_code), frame.f_lasti), -1) >= 0:  # not one further up
                    last = frame.f_code, frame.f_lasti, site
        thread = thread_of()
        if thread != last_thread:
            note_thread()
            last_thread = thread
        number = next(numbers)
        while True:
            in_series, digest = series.number, series.digest
            digest = hash((digest, signature, elements if counts else 0))
            # Python changes threads at calls and at backward jumps only: not from here to the end of this block, but
            # perhaps before. A lock would cost a fifth of the whole record.
            if series.number == in_series:
                series.number = in_series = in_series + 1
                series.digest = digest
                break
        splits = tag_word if sent is None else memory.add_splits(number, sent, received)
        pack_into(
            buffer,
            HEADER_BYTES + (number & mask) * RECORD_BYTES,
            number,
            now(),
            state,
            kind,
            site,
            elements,
            in_series,
            digest,
            splits,
        )
        if several:
            raise_count(number)
        else:
            words[LANE_WORD] = number
        return number

    def end(number: int) -> None:
        at = (HEADER_BYTES >> 3) + ((number & mask) << 3)
        if words[at] == number:  # not overwritten by a later call
            words[at + 2] = now()

    def fail(number: int) -> None:
        at = (HEADER_BYTES >> 3) + ((number & mask) << 3)
        if words[at] == number:
            words[at + 2] = now() | FAILED

    def wait(number: int, state: int = WAITED_FOR, /) -> None:
        at = (HEADER_BYTES >> 3) + ((number & mask) << 3)
        if words[at] == number and words[at + 2] in (IN_BACKGROUND, WAITED_FOR):
            words[at + 2] = state

    return Kind(begin, end, fail, wait, end)


def _stable_hash(value: object) -> bytes:
    """Return 8 bytes that are the same in every process."""
    import hashlib

    return hashlib.blake2b(repr(value).encode(), digest_size=7).digest()
