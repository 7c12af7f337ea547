"""Files replaced as a whole, and what is no file written to as it is."""

from __future__ import annotations

import os
from pathlib import Path

from comm_utils.atomic_write import replacing


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


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with replacing(tmp_path / "link") as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]
