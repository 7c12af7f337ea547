"""Mappings: dict, and those of :mod:`collections`, in their order; and namespaces, which have attributes instead."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.sequences import COLLIDING, collide
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer

__all__ = ["READERS", "WRITERS"]

_FACTORIES: tuple[Callable[[], object] | None, ...] = (
    *(None, bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict),
)


def _write_pairs(writer: Writer, mapping: Mapping[Any, Any]) -> None:
    if collide(mapping):
        raise Refused(COLLIDING, wrong_kind=False)
    writer.enter()
    writer.size(len(mapping))
    position, key = 0, None
    try:
        for position, key in enumerate(mapping):  # noqa: B007
            writer.value(key)
    except Refused as refused:
        raise refused.within(mapping, f".<key {position}>") from None
    try:
        for key, value in mapping.items():  # noqa: B007
            writer.value(value)
    except Refused as refused:
        raise refused.within(mapping, f"[{_shown(key)}]") from None
    writer.leave()


def _shown(key: object) -> str:
    # Only of types whose repr runs no code of the user's.
    return f"{key!r:.60}" if type(key) in (str, int, float, bool, bytes, type(None)) else f"<{type(key).__name__}>"


def _read_pairs(reader: Reader) -> dict[Any, Any]:
    reader.enter()
    count = reader.count(2)
    keys = [reader.value() for _ in range(count)]
    if collide(keys):
        raise ObjectDecodeError(COLLIDING)
    result = {key: reader.value() for key in keys}
    if len(result) != count:
        raise ObjectDecodeError("a dict has two equal keys")
    reader.leave()
    return result


def _write_dict(writer: Writer, mapping: dict[Any, Any]) -> None:
    writer.out.append(Tag.DICT)
    _write_pairs(writer, mapping)


def _write_counter(writer: Writer, counter: Counter[Any]) -> None:
    writer.begin(Tag.COUNTER)
    _write_pairs(writer, counter)


def _read_counter(reader: Reader) -> Counter[Any]:
    reader.skip_filler(Tag.COUNTER)
    counter: Counter[Any] = Counter()
    dict.update(counter, _read_pairs(reader))
    return counter


def _write_ordered_dict(writer: Writer, mapping: OrderedDict[Any, Any]) -> None:
    # A module's state_dict() carries the versions of its parts in this attribute.
    attributes = dict(vars(mapping))
    metadata = attributes.pop("_metadata", None)
    if attributes:
        raise Refused(f"got an OrderedDict with the attribute {next(iter(attributes))!r}; only its items can be sent")
    writer.begin(Tag.ORDERED_DICT)
    _write_pairs(writer, mapping)
    writer.enter()
    try:
        writer.value(metadata)
    except Refused as refused:
        raise refused.within(mapping, "._metadata") from None
    writer.leave()


def _read_ordered_dict(reader: Reader) -> OrderedDict[Any, Any]:
    reader.skip_filler(Tag.ORDERED_DICT)
    mapping = OrderedDict(_read_pairs(reader))
    reader.enter()
    metadata = reader.value()
    reader.leave()
    if metadata is not None:
        mapping._metadata = metadata  # type: ignore[attr-defined]
    return mapping


def _write_default_dict(writer: Writer, mapping: defaultdict[Any, Any]) -> None:
    if mapping.default_factory not in _FACTORIES:
        raise Refused("got a defaultdict whose default_factory is no builtin type; send dict(...) of it").within(
            mapping, ".default_factory"
        )
    writer.out += bytes((Tag.DEFAULT_DICT, _FACTORIES.index(mapping.default_factory)))
    _write_pairs(writer, mapping)


def _read_default_dict(reader: Reader) -> defaultdict[Any, Any]:
    (factory,) = reader.take(1)
    if factory >= len(_FACTORIES):
        raise ObjectDecodeError(f"unknown default_factory {factory}")
    return defaultdict(_FACTORIES[factory], _read_pairs(reader))


def _write_namespace(tag: Tag, writer: Writer, namespace: Namespace | SimpleNamespace) -> None:
    writer.begin(tag)
    writer.enter()
    attributes = vars(namespace)
    writer.size(len(attributes))
    for name, value in attributes.items():
        if type(name) is not str:
            raise Refused(f"got a namespace with the attribute {name!r:.60}; the names of attributes are text")
        writer.value(name)
        try:
            writer.value(value)
        except Refused as refused:
            raise refused.within(namespace, f".{name:.60}") from None
    writer.leave()


def _read_namespace(tag: Tag, make: type[Any], reader: Reader) -> Any:
    reader.skip_filler(tag)
    reader.enter()
    result = make()
    attributes = vars(result)
    count = reader.count(2)
    for _ in range(count):
        name = reader.value()
        if type(name) is not str:
            raise ObjectDecodeError("a namespace has an attribute whose name is not text")
        attributes[name] = reader.value()
    if len(attributes) != count:
        raise ObjectDecodeError("a namespace has two equal attributes")
    reader.leave()
    return result


WRITERS: Mapping[type, Write] = {
    dict: _write_dict,
    OrderedDict: _write_ordered_dict,
    defaultdict: _write_default_dict,
    Counter: _write_counter,
    Namespace: partial(_write_namespace, Tag.NAMESPACE),
    SimpleNamespace: partial(_write_namespace, Tag.SIMPLE_NAMESPACE),
}

READERS: Mapping[int, Read] = {
    Tag.DICT: _read_pairs,
    Tag.ORDERED_DICT: _read_ordered_dict,
    Tag.DEFAULT_DICT: _read_default_dict,
    Tag.COUNTER: _read_counter,
    Tag.NAMESPACE: partial(_read_namespace, Tag.NAMESPACE, Namespace),
    Tag.SIMPLE_NAMESPACE: partial(_read_namespace, Tag.SIMPLE_NAMESPACE, SimpleNamespace),
}
