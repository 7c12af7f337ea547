"""Objects as messages: a header, then one value, or a pickle where both sides allow it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from struct import Struct
from typing import Any

import torch

from comm_collectives.object_codec import arrays, mappings, registered, scalars, sequences, tensors, times
from comm_collectives.object_codec.errors import HOW_TO_ALLOW_PICKLE, ObjectDecodeError, Refused
from comm_collectives.object_codec.policy import object_policy, resolve_allow_pickle
from comm_collectives.object_codec.registry import can_register
from comm_collectives.object_codec.wire import Read, Reader, Write, Writer
from comm_utils.errors import ArgumentError, ArgumentTypeError

__all__ = ["HEADER_BYTES", "decode_object", "encode_object", "is_pickled"]

_MAGIC = b"commobj"
_VERSION = 2
_ENCODED, _PICKLED = 0, 1
_REASON_SHOWN = 200
_HEADER = Struct("=7sBBB6x")  # magic, version, byte order, kind
_BYTE_ORDER = 0 if sys.byteorder == "little" else 1

#: No message is shorter.
HEADER_BYTES = _HEADER.size

_WRITERS: Mapping[type, Write] = {
    **scalars.WRITERS,
    **sequences.WRITERS,
    **mappings.WRITERS,
    **times.WRITERS,
    **tensors.WRITERS,
}
_READERS: Mapping[int, Read] = {
    **scalars.READERS,
    **sequences.READERS,
    **mappings.READERS,
    **times.READERS,
    **tensors.READERS,
    **registered.READERS,
    **arrays.READERS,
}


def encode_object(
    obj: Any,
    allow_pickle: bool | None = None,
    *,
    max_bytes: int | None = None,
    call: str = "encode_object",
    name: str = "obj",
) -> bytearray:
    """Encode ``obj`` as a message.

    Args:
        obj: what the list in ``docs/objects.md`` names, or instances of registered classes.
        allow_pickle: pickle it as a whole if it holds anything else; None is what the policy says.
        max_bytes: the largest message; None is what the policy says.
        call, name: the function and its argument, for error messages.

    Raises:
        ArgumentTypeError: something in it cannot be encoded; says where and what would change that.
        ArgumentError: it is too large or nested too deeply, or contains itself.
    """
    pickled = resolve_allow_pickle(call, allow_pickle)
    limit = object_policy().max_bytes if max_bytes is None else max_bytes
    writer = Writer(_WRITERS, _find_writer, limit)
    writer.out += _HEADER.pack(_MAGIC, _VERSION, _BYTE_ORDER, _ENCODED)
    try:
        writer.value(obj)
        return writer.message()
    except Refused as refused:
        if pickled and not (refused.too_large or refused.damaged):
            return _pickle(obj, call, name, limit)
        kind = ArgumentTypeError if refused.wrong_kind else ArgumentError
        raise kind(f"{call}: {refused.message(name)}") from None


def _find_writer(value: object) -> Write:
    found = registered.find_writer(value) or arrays.find_writer(value)
    if found is not None:
        return found
    if isinstance(value, torch.Tensor):
        raise tensors.refuse_subclass(value)
    cls = type(value)
    if can_register(cls):
        remedy = f"call register_object_type({cls.__name__}) on every rank"
    else:
        remedy = "send what it consists of, such as a dataclass given to register_object_type()"
    raise Refused(
        f"got a value of type {cls.__module__}.{cls.__qualname__}, which cannot be sent as it is; {remedy}; or let "
        f"every rank pickle and unpickle, if you trust all of them, with {HOW_TO_ALLOW_PICKLE}"
    )


def _pickle(obj: Any, call: str, name: str, limit: int) -> bytearray:
    message = bytearray(_HEADER.pack(_MAGIC, _VERSION, _BYTE_ORDER, _PICKLED))
    try:
        message += pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the methods of the object's classes raise
        raise ArgumentTypeError(
            f"{call}: {name}: has no encoding and cannot be pickled either ({_described(error)})"
        ) from error
    if len(message) > limit:
        raise ArgumentError(
            f"{call}: {name}: its pickle has {len(message)} bytes; at most {limit} are sent (configuration key "
            "objects.max_bytes, environment variable COMM_OBJECTS__MAX_BYTES)"
        )
    return message


def is_pickled(message: bytes | bytearray | memoryview) -> bool:
    """Return whether the header of a message says that a pickle follows."""
    return len(message) >= HEADER_BYTES and _HEADER.unpack_from(message)[3] == _PICKLED


def decode_object(
    message: bytes | bytearray | memoryview, allow_pickle: bool | None = None, *, source: str = "the message"
) -> Any:
    """Decode a message. Nothing in it is executed unless it is pickled and that is allowed.

    Args:
        message: what :func:`encode_object` gave; not kept. Memory that is not writable is copied first.
        allow_pickle: accept a pickle, by which the sender can run any code here; None is what the policy says.
        source: who sent it, for error messages.

    Raises:
        ObjectDecodeError: it is damaged or not acceptable.
    """
    unpickle = resolve_allow_pickle("decode_object", allow_pickle)
    view = memoryview(message)
    if view.readonly:
        view = memoryview(bytearray(view))
    try:
        body = _check_header(view)
        if body == _PICKLED:
            return _unpickle(view[HEADER_BYTES:], unpickle)
        reader = Reader(view[HEADER_BYTES:], _READERS)
        try:
            value = reader.value()
            if reader.left:
                raise ObjectDecodeError(f"{reader.left} bytes are left over")
        # Whatever the values in a hostile message make a constructor raise: it is the message that is wrong.
        except Exception as error:
            reason = str(error) if isinstance(error, ObjectDecodeError) else _described(error)
            raise ObjectDecodeError(f"at byte {HEADER_BYTES + reader.position} of {len(view)}: {reason}") from error
        return value
    except ObjectDecodeError as error:
        raise ObjectDecodeError(f"{source} cannot be decoded: {error}") from error.__cause__


def _described(error: BaseException) -> str:
    """Describe an error in one line; torch appends its stack to some, numpy the values, and ``__str__`` may raise."""
    try:
        first = str(error).partition("\n")[0]
    except Exception:
        return f"{type(error).__name__} without a readable message"
    return f"{type(error).__name__}: {first[:_REASON_SHOWN]}"


def _check_header(view: memoryview) -> int:
    if len(view) < HEADER_BYTES:
        raise ObjectDecodeError(f"it has {len(view)} bytes, less than a header")
    magic, version, byte_order, kind = _HEADER.unpack_from(view)
    if magic != _MAGIC:
        raise ObjectDecodeError("it does not begin with the header of an object")
    if version != _VERSION:
        raise ObjectDecodeError(
            f"it has format {version}, this rank reads {_VERSION}; install the same release everywhere"
        )
    if byte_order != _BYTE_ORDER:
        raise ObjectDecodeError("it comes from a machine with another byte order")
    if kind not in (_ENCODED, _PICKLED):
        raise ObjectDecodeError(f"it is of the unknown kind {kind}")
    return int(kind)


def _unpickle(body: memoryview, allowed: bool) -> Any:
    if not allowed:
        raise ObjectDecodeError(
            "it is pickled, and unpickling lets the sender run any code here; if you trust every rank, allow it with "
            f"{HOW_TO_ALLOW_PICKLE}"
        )
    try:
        return pickle.loads(body)
    except (Exception, SystemExit) as error:  # whatever the classes in it raise
        raise ObjectDecodeError(f"its pickle fails with {_described(error)}") from error
