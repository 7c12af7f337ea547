"""Find records in a ring by one of their words, without an object for each of them.

A scan of 8,192 records takes a few hundred microseconds, so that it can be repeated several times a second.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

from comm_utils.flight_recorder.calls import Call
from comm_utils.flight_recorder.layout import (
    CODES,
    HEADER_BYTES,
    IN_BACKGROUND,
    LIMITED,
    MARGIN,
    ON_DEVICE,
    RECORD_BYTES,
)
from comm_utils.flight_recorder.reader import RingReader

__all__ = [
    "Mark",
    "MessageMark",
    "MessageSeries",
    "calls_numbered",
    "column",
    "digests",
    "is_under_way",
    "marks",
    "messages",
    "native_marks",
    "open_numbers",
    "receives_from_any",
]

_RECORD_WORDS = RECORD_BYTES // 8
_LARGEST_NUMBER = 1 << 62
# Words of a record, see ``layout``.
_NUMBER, _END, _KIND, _ELEMENTS, _IN_SERIES, _DIGEST, _EXTRA = 0, 2, 3, 4, 5, 6, 7
_LOWER_HALF, _ROOT = 0xFFFFFFFF, 0xFFFF
# Ranks may differ in it: whether somebody waits.
_NATIVE_KIND = _LOWER_HALF & ~(1 << CODES["asynchronous"][0])
_UNDER_WAY = frozenset((0, IN_BACKGROUND, LIMITED, ON_DEVICE))
_AT_ONCE = 64


class Mark(NamedTuple):
    """The part of a collective's record that is compared.

    Attributes:
        group: its name.
        has_parts: its ranks may have different numbers of elements, which the digest does not cover.
    """

    group: str
    in_series: int
    digest: int
    has_parts: bool


class MessageSeries(NamedTuple):
    """Messages that are numbered together: those of a group from one global rank to another, with one tag."""

    group: str
    sender: int
    receiver: int
    tag: int


class MessageMark(NamedTuple):
    """The part of a message's record that is compared; ``number`` is that of the record."""

    digest: int
    number: int


def marks(ring: RingReader, most: int) -> list[Mark]:
    """Return what is compared of the last ``most`` collectives that Python recorded."""
    last = ring.count(0)
    if last > _LARGEST_NUMBER:
        return []
    found = []
    for number in range(max(1, last - min(most, ring.records - MARGIN) + 1), last + 1):
        record = ring.record(0, number)
        described = None if record is None else ring.kinds.get(record[_KIND] & _LOWER_HALF)
        if record is None or described is None or not record[_DIGEST] or described["is_message"]:
            continue
        group = ring.groups.get(described["group"])
        if group is not None:
            found.append(Mark(group.name, record[_IN_SERIES], record[_DIGEST], described["is_uneven"]))
    return found


def native_marks(ring: RingReader, most: int) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Return what ranks have to agree about of the last ``most`` collectives of native code.

    Such records have no digest, so each says nothing of the calls before it.

    Returns:
        by group and by number in the group.
    """
    kept, last = _kept(ring, 1)
    first = max(kept, last - most + 1)
    if last < first:
        return {}
    words = (_NUMBER, _KIND, _ELEMENTS, _IN_SERIES, _EXTRA)
    columns = [column(ring, 1, word, first, last) for word in words]
    first_kept = _kept(ring, 1)[0]  # what was overwritten meanwhile may be a mixture of two calls
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    known: dict[int, Any] = {}
    for expected, (number, kind, elements, in_series, extra) in enumerate(zip(*columns, strict=True), first):
        if number != expected or number < first_kept or not in_series:
            continue
        kind &= _NATIVE_KIND
        if kind not in known:
            known[kind] = ring.native_kind(kind)
        described = known[kind]
        if described is None or described.is_message:
            continue
        sizes = None if described.is_uneven else elements
        root = extra & _ROOT if described.is_rooted else 0
        found.setdefault(described.group, {})[in_series] = (*described.agreed, root, sizes)
    return found


def column(ring: RingReader, lane: int, word: int, first: int, last: int) -> list[int]:
    """Return one word of each of the records ``first`` to ``last``, which are at most as many as a lane has."""
    size = ring.records
    assert last - first < size
    begin = HEADER_BYTES + lane * size * RECORD_BYTES
    at, end = first & size - 1, (last & size - 1) + 1
    with memoryview(ring.memory) as memory, memory[begin : begin + size * RECORD_BYTES].cast("Q") as words:
        places = [(at, end)] if at < end else [(at, size), (0, end)]
        found: list[int] = []
        for low, high in places:
            found += words[low * _RECORD_WORDS + word : high * _RECORD_WORDS : _RECORD_WORDS].tolist()
        return found


def is_under_way(end: int) -> bool:
    """Return whether word 2 of a record says that its call has not ended."""
    return end in _UNDER_WAY


def open_numbers(ring: RingReader, lane: int, first: int = 1) -> list[tuple[int, int]]:
    """Return the number, and word 2, of each record of a lane that is under way, from ``first`` on."""
    kept, last = _kept(ring, lane)
    first = max(first, kept)
    if last < first:
        return []
    ends, found = column(ring, lane, _END, first, last), []
    for at in range(0, len(ends), _AT_ONCE):
        part = ends[at : at + _AT_ONCE]
        if not _UNDER_WAY.isdisjoint(part):  # in native code, as nearly all parts are
            found += [(number, end) for number, end in enumerate(part, first + at) if end in _UNDER_WAY]
    # The number is what is written first: records that are other calls' by now are left out.
    return [(number, end) for number, end in found if ring.record(lane, number) is not None]


def _kept(ring: RingReader, lane: int = 0) -> tuple[int, int]:
    """Return the first and the last number of records that can be read; the last is smaller where none can."""
    last = ring.count(lane)
    return (1, 0) if last > _LARGEST_NUMBER else (max(1, last - ring.records + MARGIN + 1), last)


def digests(ring: RingReader, group: str) -> dict[int, int]:
    """Return the digest of each collective of a group that Python recorded and that is kept, by number in the group."""
    kinds = {
        index
        for index, one in ring.kinds.items()
        if not one["is_message"] and one["group"] in ring.groups and ring.groups[one["group"]].name == group
    }
    first, last = _kept(ring)
    if last < first or not kinds:
        return {}
    columns = (column(ring, 0, word, first, last) for word in (_NUMBER, _KIND, _IN_SERIES, _DIGEST))
    found = [
        (number, in_series, digest)
        for expected, (number, kind, in_series, digest) in enumerate(zip(*columns, strict=True), first)
        if kind & _LOWER_HALF in kinds and number == expected and digest
    ]
    first = _kept(ring)[0]  # what was overwritten meanwhile may be a mixture of two calls
    return {in_series: digest for number, in_series, digest in found if number >= first}


def calls_numbered(ring: RingReader, group: str, numbers: Container[int], lane: int = 0) -> dict[int, Call]:
    """Return the collectives of a group that are recorded under ``numbers`` in a lane and are kept, by number."""
    first, last = _kept(ring, lane)
    if last < first:
        return {}
    places = [at for at, number in enumerate(column(ring, lane, _IN_SERIES, first, last), first) if number in numbers]
    calls = (ring.call(lane, place) for place in places)
    return {
        call.in_series: call
        for call in calls
        if call is not None and call.group.name == group and not call.is_message and call.in_series in numbers
    }


def messages(ring: RingReader, most: int | None = None) -> dict[MessageSeries, dict[int, MessageMark]]:
    """Return the messages with a known peer among the last ``most`` calls that Python recorded, by number in a series.

    Args:
        most: None for all that are kept.
    """
    rank, kinds = ring.header.rank, {}
    for index, one in list(ring.kinds.items()):
        if one["is_message"] and one["peer"] >= 0 and one["group"] in ring.groups:
            ends = (rank, one["peer"]) if one["is_send"] else (one["peer"], rank)
            kinds[index] = ring.groups[one["group"]].name, *ends, one["tag"]
    first, last = _kept(ring)
    first = first if most is None else max(first, last - most + 1)
    if last < first or not kinds:
        return {}
    columns: Iterable[list[int]] = [
        column(ring, 0, word, first, last) for word in (_NUMBER, _KIND, _IN_SERIES, _DIGEST, _EXTRA)
    ]
    oldest = _kept(ring)[0]  # what was overwritten meanwhile may be a mixture of two calls
    found: dict[MessageSeries, dict[int, MessageMark]] = {}
    for expected, (number, kind, in_series, digest, extra) in enumerate(zip(*columns, strict=True), first):
        described = kinds.get(kind & _LOWER_HALF)
        if described is not None and number == expected >= oldest and in_series and digest:
            group, sender, receiver, tag = described
            series = MessageSeries(group, sender, receiver, tag or extra >> 32)
            found.setdefault(series, {})[in_series] = MessageMark(digest, number)
    return found


def receives_from_any(ring: RingReader, group: str) -> bool:
    """Return whether a rank has received from any rank of a group; no number tells which messages it took so."""
    ring.refresh()
    return any(
        one["is_message"] and not one["is_send"] and one["peer"] < 0 and ring.groups[one["group"]].name == group
        for one in list(ring.kinds.values())
        if one["group"] in ring.groups
    )
