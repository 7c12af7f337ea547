"""Files replaced as a whole, and what is no file written to as it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from comm_utils.atomic_write import replacing, replacing_binary


def test_an_open_pipe_is_written_to() -> None:
    """Its name, such as /dev/stdout, leads to one that no file has."""
    reading, writing = os.pipe()
    try:
        with replacing(f"/proc/self/fd/{writing}") as file:
            file.write("one\n")
        assert os.read(reading, 100) == b"one\n"
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("name", ["x" * 250, "\N{GRINNING FACE}" * 62], ids=["ascii", "four-bytes-a-character"])
def test_the_mode_stays_and_long_names_are_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replacing_binary(path) as file:
        file.write(b"new\r\n")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new\r\n", 0o600)


def test_an_error_without_a_name_gets_that_of_the_file(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as file:
            file.write("half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space") as caught:
        write()
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
