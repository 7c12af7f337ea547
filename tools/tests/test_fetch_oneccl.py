"""Wheels are taken only with the pinned hash, and a folder that is not complete is replaced by one that is."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

import fetch_oneccl
from fetch_oneccl import WHEELS, Wheel

MEMBERS = {
    "little-1.0.data/data/lib/libccl.a": "archive",
    "little-1.0.data/data/include/oneapi/ccl.hpp": "header",
    "little-1.0.data/data/include/oneapi/ccl/types.hpp": "types",
    "little-1.0.data/data/lib/other.so": "not wanted",
    "little-1.0.dist-info/LICENSE.txt": "licence",
    "little-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n",
    "little-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "little-1.0.dist-info/RECORD": "",
}
WANTED = (
    ("little-1.0.data/data/lib/libccl.a", "lib/libccl.a"),
    ("little-1.0.data/data/include/oneapi/", "include/oneapi/"),
    ("little-1.0.dist-info/LICENSE.txt", "licenses/LICENSE.little"),
)
EXTRACTED = {
    "lib/libccl.a": "archive",
    "include/oneapi/ccl.hpp": "header",
    "include/oneapi/ccl/types.hpp": "types",
    "licenses/LICENSE.little": "licence",
}


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A little wheel in a folder, which is all that pip may look at."""
    index = tmp_path / "index"
    index.mkdir()
    path = index / "little-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in MEMBERS.items():
            archive.writestr(name, text)
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return Wheel("little", "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), WANTED)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / ".oneccl"


@pytest.fixture
def pip() -> None:
    try:
        fetch_oneccl.find_pip()
    except SystemExit as error:
        pytest.skip(str(error))


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Downloads, without pip; each leaves its folder here."""
    made: list[Path] = []

    def download(wheels: tuple[Wheel, ...], folder: Path) -> dict[Wheel, Path]:
        made.append(folder)
        return {wheel: fetch_oneccl.verify(wheel, tmp_path / "index") for wheel in wheels}

    monkeypatch.setattr(fetch_oneccl, "download", download)
    return made


@pytest.mark.usefixtures("pip")
def test_pip_downloads_what_is_pinned(wheel: Wheel, folder: Path) -> None:
    assert fetch_oneccl.fetch(folder, (wheel,))
    found = files(folder)
    assert found.pop(fetch_oneccl.RECORD)
    assert found == EXTRACTED
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.usefixtures("pip")
def test_pip_refuses_another_hash(wheel: Wheel, folder: Path) -> None:
    other = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(SystemExit, match=f"(?is)expected sha256 {'0' * 64}.*got +{wheel.sha256}.*do not build from it"):
        fetch_oneccl.fetch(folder, (other,))
    assert list(folder.parent.iterdir()) == []


@pytest.mark.usefixtures("pip")
def test_what_pip_does_not_find_is_named(wheel: Wheel, folder: Path) -> None:
    other = dataclasses.replace(wheel, version="2.0")
    with pytest.raises(
        SystemExit, match=r"(?s)could not download little==2\.0 .*; see whether this machine reaches PyPI"
    ):
        fetch_oneccl.fetch(folder, (other,))


@pytest.mark.usefixtures("pip")
def test_a_constraint_for_what_is_installed_is_no_hindrance(
    wheel: Wheel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constraints.txt").write_text("little==2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    assert fetch_oneccl.fetch(folder, (wheel,))


@pytest.mark.usefixtures("downloads")
def test_another_hash_is_refused_without_pip_as_well(wheel: Wheel, folder: Path) -> None:
    other = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(SystemExit, match=f"got sha256 {wheel.sha256}, expected {'0' * 64}; .*do not build from it"):
        fetch_oneccl.fetch(folder, (other,))
    assert not folder.exists()


@pytest.mark.usefixtures("downloads")
def test_a_member_that_is_not_there_is_named(wheel: Wheel, folder: Path) -> None:
    other = dataclasses.replace(wheel, members=(*WANTED, ("little-1.0.data/gone", "gone")))
    with pytest.raises(SystemExit, match=r"has no little-1\.0\.data/gone"):
        fetch_oneccl.fetch(folder, (other,))
    assert not folder.exists()


@pytest.mark.usefixtures("downloads")
def test_sonames_are_replaced_in_place(wheel: Wheel, folder: Path, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF\0old.so\0old.so.1\0")
    fetch_oneccl.rename_soname(library, "old.so", "new.so")
    assert library.read_bytes() == b"\x7fELF\0new.so\0old.so.1\0"
    fetch_oneccl.fetch(folder, (wheel,))
    other = dataclasses.replace(wheel, sonames=(("lib/libccl.a", "old.so", "new.so"),))
    with pytest.raises(SystemExit, match=r"libccl\.a: got 0 times old\.so, expected one"):
        fetch_oneccl.fetch(folder, (other,))
    assert fetch_oneccl.is_complete(folder, (wheel,))


def test_what_is_complete_stays(wheel: Wheel, folder: Path, downloads: list[Path]) -> None:
    assert fetch_oneccl.fetch(folder, (wheel,))
    inode = folder.stat().st_ino
    assert not fetch_oneccl.fetch(folder, (wheel,))
    assert len(downloads) == 1
    assert folder.stat().st_ino == inode
    assert not downloads[0].exists()


@pytest.mark.parametrize("harm", ["nothing but a folder", "a file is gone", "a file is cut", "no record", "a file"])
def test_what_is_not_complete_is_replaced(wheel: Wheel, folder: Path, downloads: list[Path], harm: str) -> None:
    folder.parent.mkdir()
    if harm == "nothing but a folder":
        folder.mkdir()
    elif harm == "a file":
        folder.write_text("")
    else:
        fetch_oneccl.fetch(folder, (wheel,))
        match harm:
            case "a file is gone":
                (folder / "lib/libccl.a").unlink()
            case "a file is cut":
                (folder / "lib/libccl.a").write_text("arch")
            case "no record":
                (folder / fetch_oneccl.RECORD).unlink()
    assert not fetch_oneccl.is_complete(folder, (wheel,))
    assert fetch_oneccl.fetch(folder, (wheel,))
    assert fetch_oneccl.is_complete(folder, (wheel,))
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.usefixtures("downloads")
def test_other_pins_replace_what_was_complete(wheel: Wheel, folder: Path) -> None:
    fetch_oneccl.fetch(folder, (wheel,))
    fewer = dataclasses.replace(wheel, members=WANTED[:1])
    assert fetch_oneccl.fetch(folder, (fewer,))
    assert set(files(folder)) == {"lib/libccl.a", fetch_oneccl.RECORD}


def test_two_at_once(wheel: Wheel, folder: Path, downloads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    both, extract = threading.Barrier(2, timeout=30), fetch_oneccl.extract

    def extract_together(wheel: Wheel, path: Path, folder: Path) -> None:
        extract(wheel, path, folder)
        both.wait()

    monkeypatch.setattr(fetch_oneccl, "extract", extract_together)
    folder.mkdir(parents=True)
    (folder / "left").write_text("of an earlier attempt")
    threads = [threading.Thread(target=fetch_oneccl.fetch, args=(folder, (wheel,))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(downloads) == 2
    assert fetch_oneccl.is_complete(folder, (wheel,))
    assert list(folder.parent.iterdir()) == [folder]


def test_without_any_pip_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="apt-get install python3-pip"):
        fetch_oneccl.find_pip()


def test_another_platform_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not fetch_oneccl.is_needed()
    with pytest.raises(SystemExit):
        fetch_oneccl.main([])
    assert "on riscv64, expected linux on x86_64" in capsys.readouterr().err


def test_pins_are_of_hashes_and_the_command_has_help() -> None:
    assert all(len(wheel.sha256) == 64 and set(wheel.sha256) <= set("0123456789abcdef") for wheel in WHEELS)
    done = subprocess.run([sys.executable, fetch_oneccl.__file__, "--help"], capture_output=True, text=True, check=True)
    assert "--into FOLDER" in done.stdout
