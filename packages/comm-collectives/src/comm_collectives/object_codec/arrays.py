"""numpy's arrays, scalars and dtypes. numpy is imported only where a message contains one of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer

if TYPE_CHECKING:
    import numpy

__all__ = ["READERS", "find_writer"]

# bool, integers, floats, complex, bytes, text, durations, times, raw memory; no objects and no records.
_DTYPE = re.compile(r"[<>|=][biufcSUmMV]\d+(\[\d*[a-zA-Zμ]+\])?")
_MAX_DIMENSIONS = 64
_LAST_CODE_POINT = 0x10FFFF
_INVALID_TEXT = "an array of text with characters that do not exist"


def find_writer(value: object) -> Write | None:
    """Return the function that writes ``value``, if it is one of numpy's."""
    numpy: Any = sys.modules.get("numpy")
    if not hasattr(numpy, "ndarray"):  # nobody has imported numpy, or somebody is just doing it
        return None
    if type(value) is numpy.ndarray:
        return _write_array
    if isinstance(value, numpy.ndarray):
        kind = type(value).__name__
        is_masked = isinstance(value, numpy.ma.MaskedArray)  # asarray() would drop the mask
        remedy = "its data and its mask, or filled() of it" if is_masked else "numpy.asarray() of it"
        raise Refused(f"got an array of the subclass {kind}; send {remedy}")
    if isinstance(value, numpy.generic):
        return _write_text if type(value) in (numpy.str_, numpy.bytes_) else _write_scalar
    return _write_dtype if isinstance(value, numpy.dtype) else None


def _write_array(writer: Writer, array: numpy.ndarray[Any, Any]) -> None:
    _write_elements(writer, Tag.NUMPY_ARRAY, array)


def _write_scalar(writer: Writer, scalar: numpy.generic) -> None:
    import numpy

    _write_elements(writer, Tag.NUMPY_SCALAR, numpy.asarray(scalar))


def _write_text(writer: Writer, text: str | bytes) -> None:
    # As an array, or by str(), it would lose null characters at its end.
    writer.out.append(Tag.NUMPY_TEXT)
    writer.enter()
    writer.value("".join((text,)) if isinstance(text, str) else bytes(text))
    writer.leave()


def _read_text(reader: Reader) -> Any:
    numpy = _numpy()
    reader.enter()
    text = reader.value()
    reader.leave()
    if type(text) not in (str, bytes):
        raise ObjectDecodeError("an invalid numpy text")
    return numpy.str_(text) if isinstance(text, str) else numpy.bytes_(text)


def _write_dtype(writer: Writer, dtype: numpy.dtype[Any]) -> None:
    code = _code(dtype)
    writer.out.append(Tag.NUMPY_DTYPE)
    writer.blob(code)


def _code(dtype: numpy.dtype[Any]) -> bytes:
    import numpy

    if dtype.hasobject:
        raise Refused("got a numpy array of Python objects; send tolist() of it")
    # A type from an extension, such as ml_dtypes.bfloat16, calls itself raw memory.
    if dtype.fields or dtype.subdtype or not _DTYPE.fullmatch(dtype.str) or numpy.dtype(dtype.str) != dtype:
        raise Refused(f"got numpy's dtype {dtype!r:.60}, which cannot be sent; send a view() of another dtype")
    return dtype.str.encode()


def _write_elements(writer: Writer, tag: Tag, array: numpy.ndarray[Any, Any]) -> None:
    import numpy

    code = _code(array.dtype)
    if array.size and not array.itemsize:
        raise Refused("got a numpy array whose elements have no bytes")
    if array.ndim > _MAX_DIMENSIONS:
        raise Refused(f"got a numpy array of {array.ndim} dimensions; at most {_MAX_DIMENSIONS} can be sent")
    writer.check(array.nbytes)  # before a copy of elements that do not lie in order is made
    writer.out.append(tag)
    writer.blob(code)
    writer.size(array.ndim)
    for size in array.shape:
        writer.size(size)
    if array.nbytes:
        raw = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        if array.dtype.kind == "b":
            raw = (raw != 0).view(numpy.uint8)
        if not _has_valid_text(raw.data, array.dtype):
            raise Refused(f"got {_INVALID_TEXT}", wrong_kind=False, damaged=True)
        writer.part(raw.data, array.nbytes)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ObjectDecodeError("it contains a numpy array and numpy is not installed on this rank") from None
    return numpy


def _read_code(reader: Reader) -> numpy.dtype[Any]:
    module = _numpy()
    code = str(reader.blob(), "utf-8")
    if not _DTYPE.fullmatch(code):
        raise ObjectDecodeError(f"{code[:40]!r} is not a numpy dtype that can be sent")
    found: numpy.dtype[Any] = module.dtype(code)
    return found


def _read_array(reader: Reader) -> numpy.ndarray[Any, Any]:
    dtype = _read_code(reader)
    import numpy

    dimensions = reader.size()
    if dimensions > _MAX_DIMENSIONS:
        raise ObjectDecodeError(f"a numpy array of {dimensions} dimensions is never sent")
    shape = tuple(reader.size() for _ in range(dimensions))
    if not prod(shape):
        return numpy.empty(shape, dtype)
    if not dtype.itemsize:
        raise ObjectDecodeError("a numpy array has elements without bytes")
    memory = reader.take(prod(shape) * dtype.itemsize)
    # Bytes that no element can have, on which numpy would fail later, or worse.
    if dtype.kind == "b" and numpy.frombuffer(memory, numpy.uint8).max() > 1:
        raise ObjectDecodeError("a bool array has bytes other than 0 and 1")
    if not _has_valid_text(memory, dtype):
        raise ObjectDecodeError(_INVALID_TEXT)
    return numpy.frombuffer(memory, dtype).reshape(shape).copy()


def _has_valid_text(memory: memoryview, dtype: numpy.dtype[Any]) -> bool:
    import numpy

    if dtype.kind != "U":
        return True
    points = numpy.frombuffer(memory, numpy.dtype(numpy.uint32).newbyteorder(dtype.byteorder))
    return bool(points.max() <= _LAST_CODE_POINT)


def _read_scalar(reader: Reader) -> Any:
    array = _read_array(reader)
    if array.shape:
        raise ObjectDecodeError(f"a numpy scalar has the shape {array.shape}")
    return array[()]


READERS: Mapping[int, Read] = {
    Tag.NUMPY_ARRAY: _read_array,
    Tag.NUMPY_SCALAR: _read_scalar,
    Tag.NUMPY_DTYPE: _read_code,
    Tag.NUMPY_TEXT: _read_text,
}
