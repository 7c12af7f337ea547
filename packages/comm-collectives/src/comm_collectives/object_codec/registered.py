"""Instances of registered classes. Their constructors are not called."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum, Flag
from functools import reduce
from typing import Any

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.registry import class_of, name_of
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer

__all__ = ["READERS", "find_writer"]


def find_writer(value: object) -> Write | None:
    """Return the function that writes ``value``, if its class was registered."""
    cls = type(value)
    return None if name_of(cls) is None else _WRITE[_tag_of(cls)]


def _tag_of(cls: type) -> Tag:
    if issubclass(cls, Enum):
        return Tag.ENUM
    return Tag.NAMED_TUPLE if issubclass(cls, tuple) else Tag.DATACLASS


def _begin(writer: Writer, tag: Tag, value: object) -> None:
    writer.out.append(tag)
    writer.blob(str(name_of(type(value))).encode("utf-8", "surrogatepass"))


def _read_class(reader: Reader, tag: Tag) -> Any:
    name = reader.text()
    cls = class_of(name)
    if cls is None:
        raise ObjectDecodeError(
            f"its type {name[:200]!r} is not registered on this rank; call register_object_type() for it here, as on "
            "the sending rank"
        )
    if _tag_of(cls) is not tag:
        raise ObjectDecodeError(f"the type {name[:200]!r} is of another kind on this rank than on the sending one")
    return cls


def _write_dataclass(writer: Writer, value: Any) -> None:
    _begin(writer, Tag.DATACLASS, value)
    writer.enter()
    declared = fields(value)
    writer.size(len(declared))
    for field in declared:
        if not hasattr(value, field.name):
            raise Refused("the field was never set", wrong_kind=False).within(value, f".{field.name}")
        writer.value(field.name)
        try:
            writer.value(getattr(value, field.name))
        except Refused as refused:
            raise refused.within(value, f".{field.name}") from None
    writer.leave()


def _read_dataclass(reader: Reader) -> Any:
    cls = _read_class(reader, Tag.DATACLASS)
    reader.enter()
    declared = {field.name for field in fields(cls)}
    found = {}
    for _ in range(reader.count(2)):
        name = reader.value()
        if type(name) is not str or name not in declared or name in found:
            raise ObjectDecodeError(f"{cls.__qualname__} has no field {name!r:.60} on this rank, or it comes twice")
        found[name] = reader.value()
    reader.leave()
    if missing := sorted(declared - found.keys()):
        raise ObjectDecodeError(f"{cls.__qualname__} comes without the fields {missing}, which it has on this rank")
    result = object.__new__(cls)
    for name, value in found.items():
        object.__setattr__(result, name, value)  # a frozen one refuses the ordinary way
    return result


def _write_enum(writer: Writer, value: Enum) -> None:
    members = type(value).__members__
    names = [value.name] if value.name in members else _parts(value)
    if names is None:
        raise Refused(f"got {value!r:.60}, which is no combination of the members of its class", wrong_kind=False)
    _begin(writer, Tag.ENUM, value)
    writer.size(len(names))
    for name in names:
        writer.blob(name.encode("utf-8", "surrogatepass"))


def _parts(value: Enum) -> list[str] | None:
    """Return the names of the members whose combination is ``value``."""
    if not isinstance(value, Flag):
        return None
    parts = {name: member for name, member in type(value).__members__.items() if member.value and member in value}
    combined = reduce(operator.or_, parts.values(), type(value)(0))
    return list(parts) if combined.value == value.value else None


def _read_enum(reader: Reader) -> Enum:
    cls: type[Enum] = _read_class(reader, Tag.ENUM)
    members = [_member(cls, reader.text()) for _ in range(reader.count(8))]
    if len(members) != 1 and not issubclass(cls, Flag):
        raise ObjectDecodeError(f"{cls.__qualname__} comes as {len(members)} members")
    combined: Enum = members[0] if len(members) == 1 else reduce(operator.or_, members, cls(0))
    return combined


def _member(cls: type[Enum], name: str) -> Any:
    member = cls.__members__.get(name)
    if member is None:
        raise ObjectDecodeError(f"{cls.__qualname__} has no member {name[:60]!r} on this rank")
    return member


def _write_named_tuple(writer: Writer, value: Any) -> None:
    _begin(writer, Tag.NAMED_TUPLE, value)
    writer.enter()
    writer.size(len(value))
    for name, item in zip(value._fields, value, strict=True):
        try:
            writer.value(item)
        except Refused as refused:
            raise refused.within(value, f".{name}") from None
    writer.leave()


def _read_named_tuple(reader: Reader) -> Any:
    cls = _read_class(reader, Tag.NAMED_TUPLE)
    reader.enter()
    items = [reader.value() for _ in range(reader.count())]
    reader.leave()
    if len(items) != len(cls._fields):
        raise ObjectDecodeError(f"{cls.__qualname__} comes with {len(items)} items and has {len(cls._fields)} here")
    return tuple.__new__(cls, items)


_WRITE: Mapping[Tag, Write] = {
    Tag.DATACLASS: _write_dataclass,
    Tag.ENUM: _write_enum,
    Tag.NAMED_TUPLE: _write_named_tuple,
}

READERS: Mapping[int, Read] = {
    Tag.DATACLASS: _read_dataclass,
    Tag.ENUM: _read_enum,
    Tag.NAMED_TUPLE: _read_named_tuple,
}
