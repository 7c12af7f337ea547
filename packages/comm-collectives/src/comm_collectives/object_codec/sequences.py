"""Sequences and sets. Their order is kept; what occurs in two places arrives as two copies."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.wire import FILLER_BYTES, Read, Reader, Tag, Write, Writer

__all__ = ["COLLIDING", "READERS", "WRITERS", "collide"]

_COLLISIONS = 1000
COLLIDING = f"more than {_COLLISIONS} keys of one container share their hash with others"
# Sequences of one kind of number are packed: a tenth of the time for a long list of losses.
_PACKED_FROM = 4
_PACKED = {
    (list, float): (Tag.LIST_OF_FLOATS, "d"),
    (list, int): (Tag.LIST_OF_INTS, "q"),
    (tuple, float): (Tag.TUPLE_OF_FLOATS, "d"),
    (tuple, int): (Tag.TUPLE_OF_INTS, "q"),
}


def _write_items(writer: Writer, container: Collection[Any], step: str) -> None:
    writer.enter()
    writer.size(len(container))
    position = 0
    try:
        for position, item in enumerate(container):  # noqa: B007
            writer.value(item)
    except Refused as refused:
        raise refused.within(container, step.format(position)) from None
    writer.leave()


def _read_items(reader: Reader) -> list[Any]:
    reader.enter()
    items = [reader.value() for _ in range(reader.count())]
    reader.leave()
    return items


def _sequence(tag: Tag) -> Write:
    def write(writer: Writer, items: Sequence[Any]) -> None:
        if len(items) >= _PACKED_FROM and _write_packed(writer, items):
            return
        writer.out.append(tag)
        _write_items(writer, items, "[{}]")

    return write


def _write_packed(writer: Writer, items: Sequence[Any]) -> bool:
    kind = type(items[0])
    found = _PACKED.get((type(items), kind))
    if found is None or set(map(type, items)) != {kind}:
        return False
    tag, code = found
    try:
        packed = array(code, items)
    except OverflowError:
        return False
    writer.out.append(tag)
    writer.blob(packed.tobytes())
    return True


def _read_packed(code: str, kind: Callable[[Iterable[Any]], Any]) -> Read:
    def read(reader: Reader) -> Any:
        packed = array(code)
        packed.frombytes(reader.blob())
        return kind(packed)

    return read


def _set(tag: Tag) -> Write:
    def write(writer: Writer, items: Collection[Any]) -> None:
        if collide(items):
            raise Refused(COLLIDING, wrong_kind=False)
        writer.begin(tag)
        _write_items(writer, items, ".<element {}>")

    return write


def collide(keys: Collection[Hashable]) -> bool:
    """Return whether so many keys share one hash that they may be chosen: a table of n such keys takes n*n steps."""
    return len(keys) > _COLLISIONS and len(keys) - len(set(map(hash, keys))) > _COLLISIONS


def _read_set(tag: Tag, kind: Callable[[Iterable[Any]], Any]) -> Read:
    def read(reader: Reader) -> Any:
        reader.skip_filler(tag)
        items = _read_items(reader)
        if collide(items):
            raise ObjectDecodeError(COLLIDING)
        result = kind(items)
        if len(result) != len(items):
            raise ObjectDecodeError("a set has two equal elements")
        return result

    return read


def _write_deque(writer: Writer, items: deque[Any]) -> None:
    writer.begin(Tag.DEQUE)
    writer.size(0 if items.maxlen is None else items.maxlen + 1)
    _write_items(writer, items, "[{}]")


def _read_deque(reader: Reader) -> deque[Any]:
    reader.skip_filler(Tag.DEQUE)
    limit = reader.size()
    return deque(_read_items(reader), limit - 1 if limit else None)


def _fields(tag: Tag, *names: str) -> tuple[Write, Callable[[Reader], list[Any]]]:
    """Write and read the attributes ``names``, each any value."""
    filled = tag in FILLER_BYTES

    def write(writer: Writer, value: object) -> None:
        writer.begin(tag) if filled else writer.out.append(tag)
        writer.enter()
        for name in names:
            try:
                writer.value(getattr(value, name))
            except Refused as refused:
                raise refused.within(value, f".{name}") from None
        writer.leave()

    def read(reader: Reader) -> list[Any]:
        if filled:
            reader.skip_filler(tag)
        reader.enter()
        values = [reader.value() for _ in names]
        reader.leave()
        return values

    return write, read


_write_range, _read_range = _fields(Tag.RANGE, "start", "stop", "step")
_write_slice, _read_slice = _fields(Tag.SLICE, "start", "stop", "step")

WRITERS: Mapping[type, Write] = {
    list: _sequence(Tag.LIST),
    tuple: _sequence(Tag.TUPLE),
    set: _set(Tag.SET),
    frozenset: _set(Tag.FROZENSET),
    deque: _write_deque,
    range: _write_range,
    slice: _write_slice,
}

READERS: Mapping[int, Read] = {
    Tag.LIST: _read_items,
    Tag.TUPLE: lambda reader: tuple(_read_items(reader)),
    Tag.SET: _read_set(Tag.SET, set),
    Tag.FROZENSET: _read_set(Tag.FROZENSET, frozenset),
    Tag.DEQUE: _read_deque,
    Tag.LIST_OF_INTS: _read_packed("q", list),
    Tag.LIST_OF_FLOATS: _read_packed("d", list),
    Tag.TUPLE_OF_INTS: _read_packed("q", tuple),
    Tag.TUPLE_OF_FLOATS: _read_packed("d", tuple),
    Tag.RANGE: lambda reader: range(*_read_range(reader)),
    Tag.SLICE: lambda reader: slice(*_read_slice(reader)),
}
