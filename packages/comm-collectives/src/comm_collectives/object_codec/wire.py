"""Writing and reading the parts of a message, within bounds.

A value is a tag, one byte, and what belongs to it. Numbers have the byte order that the header names, sizes and counts
have 64 bits. What is read takes at most :data:`MOST_TIMES` the memory of its message: objects that are large even
when empty are preceded by filler, so that no message can ask for many of them cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from struct import Struct
from typing import Any, TypeAlias

import torch

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused

__all__ = ["FILLER_BYTES", "MAX_DEPTH", "MOST_TIMES", "Read", "Reader", "Tag", "Write", "Writer"]

#: Containers within containers. Decoding uses two Python frames for each, far from the interpreter's own limit.
MAX_DEPTH = 100

#: So many times the size of a message is the most memory that its object takes.
MOST_TIMES = 20

_OWN_PART_BYTES = 1 << 16
_SHORT_BYTES = 256  # so little more than a reference to it that the container's check is enough
_SIZE = Struct("=Q")

Write: TypeAlias = "Callable[[Writer, Any], None]"
Read: TypeAlias = "Callable[[Reader], Any]"


class Tag(IntEnum):
    """The first byte of a value. Numbers are part of the format: never reuse one."""

    NONE = 0
    FALSE = 1
    TRUE = 2
    ELLIPSIS = 3
    INT = 4
    BIG_INT = 5
    FLOAT = 6
    COMPLEX = 7
    STR = 8
    BYTES = 9
    BYTEARRAY = 10
    RANGE = 11
    SLICE = 12
    DECIMAL = 13
    UUID = 14
    PATH = 15
    DATE = 16
    TIME = 17
    DATETIME = 18
    TIMEDELTA = 19
    TIMEZONE = 20
    LIST = 32
    TUPLE = 33
    SET = 34
    FROZENSET = 35
    DICT = 36
    ORDERED_DICT = 37
    DEFAULT_DICT = 38
    COUNTER = 39
    DEQUE = 40
    LIST_OF_INTS = 41
    LIST_OF_FLOATS = 42
    TUPLE_OF_INTS = 43
    TUPLE_OF_FLOATS = 44
    NAMESPACE = 45
    SIMPLE_NAMESPACE = 46
    DATACLASS = 64
    ENUM = 65
    NAMED_TUPLE = 66
    TENSOR = 96
    TORCH_DTYPE = 97
    TORCH_DEVICE = 98
    TORCH_SIZE = 99
    NUMPY_ARRAY = 112
    NUMPY_SCALAR = 113
    NUMPY_DTYPE = 114
    NUMPY_TEXT = 115


#: Zeros between the tag and the value. Part of the format. On 64-bit CPython with torch 2.13, a set takes 230 bytes,
#: one of five elements 750, a deque 480 to 780, a tensor of one element 820, a slice 65, a path 190, a namespace 350, a
#: Counter of one item 250, an OrderedDict of one item 570 with ``_metadata``.
FILLER_BYTES: Mapping[Tag, int] = {
    Tag.SET: 16,
    Tag.FROZENSET: 16,
    Tag.ORDERED_DICT: 24,
    Tag.COUNTER: 4,
    Tag.SLICE: 4,
    Tag.PATH: 4,
    Tag.DEQUE: 32,
    Tag.NAMESPACE: 16,
    Tag.SIMPLE_NAMESPACE: 16,
    Tag.TENSOR: 48,
}


class Writer:
    """Collects the bytes of a value.

    Args:
        table: the function that writes objects of each type.
        find: gives the function for an object whose type is not in the table, or refuses it.
        max_bytes: more than this is refused.

    Attributes:
        out: what was written since the last large part.
    """

    __slots__ = ("_depth", "_find", "_max_bytes", "_parts", "_size", "_table", "out")

    def __init__(self, table: Mapping[type, Write], find: Callable[[Any], Write], max_bytes: int) -> None:
        self._table = table
        self._find = find
        self._max_bytes = max_bytes
        self._parts: list[bytearray | memoryview | torch.Tensor] = []
        self._size = 0
        self._depth = 0
        self.out = bytearray()

    def value(self, value: Any) -> None:
        """Write a value of any type that has an encoding."""
        write = self._table.get(type(value))
        if write is None:
            write = self._find(value)
        write(self, value)

    def begin(self, tag: Tag) -> None:
        """Write a tag that is followed by filler."""
        self.out.append(tag)
        self.out += bytes(FILLER_BYTES[tag])

    def size(self, count: int) -> None:
        """Write a count or a number of bytes."""
        self.out += _SIZE.pack(count)

    def blob(self, data: bytes | bytearray) -> None:
        """Write bytes and their number."""
        size = len(data)
        self.out += _SIZE.pack(size)
        if size < _SHORT_BYTES:
            self.out += data
        elif size < _OWN_PART_BYTES:
            self.check(size)
            self.out += data
        else:
            self.part(memoryview(data), size)

    def part(self, data: memoryview | torch.Tensor, size_bytes: int) -> None:
        """Write bytes, or a flat uint8 tensor, without a copy until the message is put together."""
        self.check(size_bytes)
        self._parts += (self.out, data)
        self._size += len(self.out) + size_bytes
        self.out = bytearray()

    def check(self, more: int = 0) -> None:
        """Refuse to exceed the size limit."""
        size = self._size + len(self.out) + more
        if size > self._max_bytes:
            raise Refused(
                f"the encoded object is larger than {self._max_bytes} bytes; send it in pieces or as tensors, or raise "
                "the configuration key objects.max_bytes (environment variable COMM_OBJECTS__MAX_BYTES) on every rank",
                wrong_kind=False,
                too_large=True,
            )

    def enter(self) -> None:
        """Begin with the values inside a container; an object that contains itself ends here."""
        self.check()
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Refused(f"containers are nested more than {MAX_DEPTH} deep", wrong_kind=False)

    def leave(self) -> None:
        """End with the values inside a container."""
        self._depth -= 1

    def message(self) -> bytearray:
        """Everything written, in one piece."""
        self.check()
        if not self._parts:
            return self.out
        message = bytearray(self._size + len(self.out))
        view, start = memoryview(message), 0
        for part in (*self._parts, self.out):
            size = part.numel() if isinstance(part, torch.Tensor) else len(part)
            if isinstance(part, torch.Tensor):
                torch.frombuffer(message, dtype=torch.uint8, count=size, offset=start).copy_(part)
            else:
                view[start : start + size] = part
            start += size
        return message


class Reader:
    """Reads values from a message.

    Args:
        data: writable memory, which is only read.
        table: the function that reads what follows each tag.
    """

    __slots__ = ("_data", "_depth", "_end", "_table", "position")

    def __init__(self, data: memoryview, table: Mapping[int, Read]) -> None:
        self._data = data
        self._end = len(data)
        self._table = table
        self._depth = 0
        self.position = 0

    @property
    def left(self) -> int:
        """Return how many bytes have not been read."""
        return self._end - self.position

    def value(self) -> Any:
        """Read a value."""
        if self.position >= self._end:
            raise ObjectDecodeError("the message ends where a value is due")
        tag = self._data[self.position]
        self.position += 1
        read = self._table.get(tag)
        if read is None:
            raise ObjectDecodeError(f"unknown tag {tag}")
        return read(self)

    def take(self, size_bytes: int) -> memoryview:
        """Return the next bytes, without copying them."""
        start = self.position
        end = start + size_bytes
        if end > self._end:
            raise ObjectDecodeError(f"{size_bytes} bytes are due and {self.left} are left")
        self.position = end
        return self._data[start:end]

    def unpack(self, layout: Struct) -> tuple[Any, ...]:
        """Return the next bytes as numbers."""
        numbers = layout.unpack_from(self._data, self.position)  # raises where too few are left
        self.position += layout.size
        return numbers

    def size(self) -> int:
        """Read a number that is bounded by nothing."""
        (size,) = _SIZE.unpack_from(self._data, self.position)
        self.position += _SIZE.size
        return size  # type: ignore[no-any-return]

    def skip_filler(self, tag: Tag) -> None:
        """Pass over what :meth:`Writer.begin` wrote after ``tag``."""
        self.take(FILLER_BYTES[tag])

    def count(self, item_bytes: int = 1) -> int:
        """Read how many items follow, each of at least ``item_bytes``."""
        count = self.size()
        if count * item_bytes > self._end - self.position:
            raise ObjectDecodeError(f"{count} items are due and {self.left} bytes are left")
        return count

    def blob(self) -> memoryview:
        """Read bytes and their number, without copying them."""
        return self.take(self.size())

    def text(self) -> str:
        """Read a string."""
        (size,) = _SIZE.unpack_from(self._data, self.position)
        start = self.position + _SIZE.size
        end = start + size
        if end > self._end:
            raise ObjectDecodeError(f"a text of {size} bytes is due and {self._end - start} are left")
        self.position = end
        return str(self._data[start:end], "utf-8", "surrogatepass")

    def enter(self) -> None:
        """Begin with the values inside a container."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ObjectDecodeError(f"containers are nested more than {MAX_DEPTH} deep")

    def leave(self) -> None:
        """End with the values inside a container."""
        self._depth -= 1
