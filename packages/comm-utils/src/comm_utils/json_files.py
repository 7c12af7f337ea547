"""Bounded reading of JSON documents and JSON lines that other processes wrote.

Whatever the input, reading takes time and memory in proportion to the file, and what it returns can be computed with,
printed and written again: containers at most :data:`MAX_DEPTH` deep, integers of 64 bits, text that UTF-8 can encode.
Floats may be infinite or NaN: only who knows their names can say which of them is wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from typing import IO, Any

from comm_utils.errors import ArgumentError
from comm_utils.regular_file import open_regular

__all__ = ["MAX_DEPTH", "MAX_DOCUMENT_BYTES", "MAX_LINE_BYTES", "parse", "read_document", "read_lines"]

#: Containers within containers. The files of these packages have at most six.
MAX_DEPTH = 64
#: A document is read as a whole; ``commctl bench`` writes about 1 kB for each result.
MAX_DOCUMENT_BYTES = 1 << 28
#: A line names each rank of a group once or twice, in up to eight bytes.
MAX_LINE_BYTES = 1 << 24

_SHOWN = 80
_PIECE_BYTES = 1 << 20
_INT64 = range(-(1 << 63), 1 << 63)
# Only text with so many digits can hold a larger integer; others take the decoder without a hook, which is faster.
_LONG = re.compile(r"[0-9]{19}")


def parse(text: str, where: str) -> Any:
    """Return the JSON value in ``text``.

    Unpaired surrogates in texts become ``?``.

    Args:
        where: what the text is, for errors: a file, with its line, or a variable.

    Raises:
        ArgumentError: it is not JSON, nested too deeply, or has an integer of more than 64 bits; begins with ``where``.
    """
    try:
        found = (_CHECKED if _LONG.search(text) else _FAST).decode(text)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ArgumentError(
            f"{where}: got text that is not JSON: {error.msg} ({place}column {error.colno}){_excerpt(text)}"
        ) from None
    except RecursionError:
        raise ArgumentError(f"{where}: got text that is not JSON, or {_TOO_DEEP}") from None
    except ValueError as error:  # from the hook
        raise ArgumentError(f"{where}: {error}{_excerpt(text)}") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(found, where)
    return _encodable(found) if "\\u" in text else found


def read_document(path: str | os.PathLike[str]) -> Any:
    """Return the JSON value that the file at ``path`` (UTF-8) holds.

    Raises:
        ArgumentError: as :func:`parse`; it is not UTF-8, or larger than :data:`MAX_DOCUMENT_BYTES`. Names the file.
        OSError: it cannot be read.
    """
    with _opened(path) as file:
        # In pieces: the whole of what a call asks for is allocated before the file is looked at.
        data = bytearray()
        while len(data) <= MAX_DOCUMENT_BYTES and (piece := file.read(_PIECE_BYTES)):
            data += piece
    if len(data) > MAX_DOCUMENT_BYTES:
        raise ArgumentError(f"{path}: got more than {MAX_DOCUMENT_BYTES} bytes; expected at most so many")
    return parse(_text(data, str(path)), str(path))


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of the file at ``path`` (UTF-8), to be given to :func:`parse` one by one.

    Yields:
        The line's number, from 1; its text, without the line feed; and True where it has one, False where the file ends
        within the line.

    Raises:
        ArgumentError: a line is not UTF-8 or longer than :data:`MAX_LINE_BYTES`; names the file and the line.
        OSError: the file cannot be read, or is no regular one.
    """
    with _opened(path, open_regular) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ArgumentError(f"{where}: got more than {MAX_LINE_BYTES} bytes; expected at most so many")
            yield number, _text(line.removesuffix(b"\n"), where), line.endswith(b"\n")


def _opened(path: str | os.PathLike[str], opener: Callable[[str], int] | None = None) -> IO[bytes]:
    try:
        return open(path if opener is None else opener(os.fspath(path)), "rb")
    except ValueError as error:  # a null character in the name
        raise ArgumentError(f"{str(path)!r:.200}: not the name of a file: {error}") from None


def _text(data: bytes | bytearray, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{where}: got text that is not UTF-8: {error}; expected JSON") from None


def _excerpt(text: str) -> str:
    shown = text.strip()
    return f": {shown[:_SHOWN]!r}" if shown else ""


_TOO_DEEP = f"containers that are nested more than {MAX_DEPTH} deep; expected fewer levels"


def _check_depth(found: Any, where: str) -> None:
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, list | dict)]
        if not inner:
            return
        level = [one for values in inner for one in values]
    raise ArgumentError(f"{where}: got {_TOO_DEEP}")


def _encodable(found: Any) -> Any:
    if isinstance(found, str):
        return found.encode("utf-8", "replace").decode("utf-8")
    if isinstance(found, list):
        return [_encodable(one) for one in found]
    if isinstance(found, dict):
        return {_encodable(name): _encodable(one) for name, one in found.items()}
    return found


def _integer(digits: str) -> int:
    if len(digits) > 20 or (value := int(digits)) not in _INT64:
        raise ValueError(f"got the integer {digits:.30}; expected one of 64 bits")
    return value


_FAST = json.JSONDecoder()
_CHECKED = json.JSONDecoder(parse_int=_integer)
