"""Files that are never seen half written."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, BinaryIO

from comm_utils.errors import ArgumentError

__all__ = ["NAME_CHARACTERS", "replacing", "replacing_binary"]

#: So many of a name are in that of the file that is written. With what is added, they stay within the 255 bytes that
#: file systems take, where each has four.
NAME_CHARACTERS = 56


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """Yield a text file that replaces ``path`` as :func:`replacing_binary` does.

    Characters that UTF-8 lacks are written as escapes.
    """
    with (
        replacing_binary(path) as binary,
        TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", newline="") as file,
    ):
        yield file


@contextmanager
def replacing_binary(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a file that replaces ``path`` at the end; after an exception, ``path`` is unchanged.

    It is written in the same folder under a name that begins with a dot and ends with ``.tmp``. Where ``path`` is a
    link, what it leads to is replaced; a device or a pipe is written to as it is.

    Raises:
        ArgumentError: there is no such folder, or ``path`` is a folder.
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        # Of the path as given: the real path of an open pipe, such as /dev/stdout, is the name of nothing.
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except NotADirectoryError:
        raise ArgumentError(f"{path}: {target.parent} is not a folder; give the path of a file in one") from None
    if mode is not None and stat.S_ISDIR(mode):
        raise ArgumentError(f"{path}: got a folder, expected the path of a file")
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as file:
            yield file
        return
    if not target.parent.is_dir():
        raise ArgumentError(f"{path}: there is no folder {str(Path(path).parent)!r}; create it, or give another path")
    temporary = target.with_name(f".{target.name[:NAME_CHARACTERS]}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            opened = temporary.open("xb")
        except OSError as error:
            raise ArgumentError(f"{path}: no file can be written there: {error.strerror or error}") from None
        with opened as file:
            if mode is not None:
                os.chmod(file.fileno(), stat.S_IMODE(mode))
            yield file
        os.replace(temporary, target)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = os.fspath(path)
        with suppress(OSError):
            temporary.unlink()
        raise
