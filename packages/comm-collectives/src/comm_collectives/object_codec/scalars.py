"""Values without values inside: numbers, text, bytes, paths, and torch's dtypes, devices and sizes."""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Callable, Mapping
from decimal import Decimal
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from struct import Struct
from struct import error as StructError
from types import MappingProxyType
from typing import Any

import torch

from comm_collectives.object_codec.errors import ObjectDecodeError
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer

__all__ = ["DTYPES", "READERS", "WRITERS", "dtype_name", "read_dtype"]

_INT = Struct("=Bq")
_FLOAT = Struct("=Bd")
_COMPLEX = Struct("=Bdd")
_INT_BODY, _FLOAT_BODY, _COMPLEX_BODY = Struct("=q"), Struct("=d"), Struct("=dd")

#: Every dtype of this torch by its name, such as ``"bfloat16"``.
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
)

# A path of the system arrives as one of the receiver's.
_PATHS: tuple[type[PurePath], ...] = (Path, PurePosixPath, PureWindowsPath)


def _constant(tag: Tag) -> Write:
    def write(writer: Writer, value: object) -> None:
        writer.out.append(tag)

    return write


def _write_int(writer: Writer, value: int) -> None:
    try:
        writer.out += _INT.pack(Tag.INT, value)
    except StructError:
        writer.out.append(Tag.BIG_INT)
        writer.blob(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _read_big_int(reader: Reader) -> int:
    return int.from_bytes(reader.blob(), "little", signed=True)


def _write_float(writer: Writer, value: float) -> None:
    writer.out += _FLOAT.pack(Tag.FLOAT, value)


def _write_complex(writer: Writer, value: complex) -> None:
    writer.out += _COMPLEX.pack(Tag.COMPLEX, value.real, value.imag)


def _text(tag: Tag, text_of: Callable[[Any], str] | None = None) -> Write:
    def write(writer: Writer, value: Any) -> None:
        writer.out.append(tag)
        text = value if text_of is None else text_of(value)
        writer.blob(text.encode("utf-8", "surrogatepass"))

    return write


def _write_bytes(writer: Writer, value: bytes) -> None:
    writer.out.append(Tag.BYTES)
    writer.blob(value)


def _write_bytearray(writer: Writer, value: bytearray) -> None:
    writer.out.append(Tag.BYTEARRAY)
    writer.blob(value)


def _write_path(writer: Writer, value: PurePath) -> None:
    kind = next(position for position, kind in enumerate(_PATHS) if isinstance(value, kind))
    writer.begin(Tag.PATH)
    writer.out.append(kind)
    writer.blob(str(value).encode("utf-8", "surrogatepass"))


def _read_path(reader: Reader) -> PurePath:
    reader.skip_filler(Tag.PATH)
    (kind,) = reader.take(1)
    if kind >= len(_PATHS):
        raise ObjectDecodeError(f"unknown kind of path {kind}")
    return _PATHS[kind](reader.text())


def _write_uuid(writer: Writer, value: uuid.UUID) -> None:
    writer.out.append(Tag.UUID)
    writer.out += value.bytes


def _write_size(writer: Writer, value: torch.Size) -> None:
    writer.out.append(Tag.TORCH_SIZE)
    writer.blob(array("q", value).tobytes())


def _read_size(reader: Reader) -> torch.Size:
    sizes = array("q")
    sizes.frombytes(reader.blob())
    return torch.Size(sizes)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a message."""
    return str(dtype).removeprefix("torch.")


def read_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name in a message.

    Raises:
        ObjectDecodeError: this torch has no such dtype.
    """
    found = DTYPES.get(name)
    if found is None:
        raise ObjectDecodeError(f"torch {torch.__version__} on this rank has no dtype {name[:40]!r}")
    return found


WRITERS: Mapping[type, Write] = {
    type(None): _constant(Tag.NONE),
    type(...): _constant(Tag.ELLIPSIS),
    bool: lambda writer, value: writer.out.append(Tag.TRUE if value else Tag.FALSE),
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _text(Tag.STR),
    bytes: _write_bytes,
    bytearray: _write_bytearray,
    Decimal: _text(Tag.DECIMAL, str),
    uuid.UUID: _write_uuid,
    type(Path()): _write_path,
    PurePosixPath: _write_path,
    PureWindowsPath: _write_path,
    torch.dtype: _text(Tag.TORCH_DTYPE, dtype_name),
    torch.device: _text(Tag.TORCH_DEVICE, str),
    torch.Size: _write_size,
}


def _as_read(value: Any) -> Read:
    return lambda reader: value


READERS: Mapping[int, Read] = {
    Tag.NONE: _as_read(None),
    Tag.FALSE: _as_read(False),
    Tag.TRUE: _as_read(True),
    Tag.ELLIPSIS: _as_read(...),
    Tag.INT: lambda reader: reader.unpack(_INT_BODY)[0],
    Tag.BIG_INT: _read_big_int,
    Tag.FLOAT: lambda reader: reader.unpack(_FLOAT_BODY)[0],
    Tag.COMPLEX: lambda reader: complex(*reader.unpack(_COMPLEX_BODY)),
    Tag.STR: Reader.text,
    Tag.BYTES: lambda reader: bytes(reader.blob()),
    Tag.BYTEARRAY: lambda reader: bytearray(reader.blob()),
    Tag.DECIMAL: lambda reader: Decimal(reader.text()),
    Tag.UUID: lambda reader: uuid.UUID(bytes=bytes(reader.take(16))),
    Tag.PATH: _read_path,
    Tag.TORCH_DTYPE: lambda reader: read_dtype(reader.text()),
    Tag.TORCH_DEVICE: lambda reader: torch.device(reader.text()),
    Tag.TORCH_SIZE: _read_size,
}
