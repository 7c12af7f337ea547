"""Files that commands write: whole, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from comm_utils.errors import ArgumentError

__all__ = ["replaced"]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write instead of ``path``, which becomes ``path`` at the end of the block, unless that fails.

    Where ``path`` is a link, what it leads to is replaced.

    Raises:
        ArgumentError: nothing can be written there.
    """
    given, path = path, Path(os.path.realpath(path))
    if path.is_dir():
        raise ArgumentError(f"{given}: got a folder; expected the name of a file to write")
    if path.exists() and not path.is_file():  # a device or a pipe, which stays what it is
        try:
            yield path
        except OSError as error:
            raise _unwritable(given, error) from None
        return
    try:
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise _unwritable(given, error) from None
    os.close(number)
    try:
        yield Path(name)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except OSError as error:
        raise _unwritable(given, error) from None
    finally:
        with suppress(OSError):
            os.unlink(name)


def _unwritable(path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(f"{path}: cannot be written: {error.strerror or error}")
