"""The native libraries are found where the package is installed, show only what is ours, and are small."""

import ctypes
from importlib.metadata import files
from pathlib import Path

import pytest

from comm_backend_ccl import libraries

MEGABYTE = 1e6


@pytest.fixture
def folder() -> Path:
    found = libraries.folder()
    if found is None:
        pytest.skip("this comm-backend-ccl was built without oneCCL")
    return found


def test_all_of_them_are_there(folder: Path) -> None:
    assert (folder / libraries.ONECCL).is_file()
    assert (folder / libraries.LIBFABRIC).is_file()
    assert {path.name for path in (folder / "licenses").iterdir()} >= {"LICENSE.oneccl", "LICENSE.libfabric"}


def test_what_is_installed_stays_small() -> None:
    installed = [Path(str(file.locate())) for file in files("comm-backend-ccl") or ()]
    assert sum(path.stat().st_size for path in installed if path.is_file()) < 60 * MEGABYTE


def test_only_the_c_abi_is_exported(folder: Path) -> None:
    library = ctypes.CDLL(str(folder / libraries.ONECCL))
    assert hasattr(library, "comm_oneccl_version")
    # Stubs, and a function of oneCCL, which others in the process may have for real.
    for name in ("hwloc_topology_init", "_intel_fast_memcpy", "_ZN13atl_base_comm8init_tagEv"):
        assert not hasattr(library, name)


def test_sources_alone_have_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("comm_backend_ccl.__path__", [str(tmp_path)])
    assert libraries.folder() is None


def test_of_two_folders_the_one_with_the_library_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / libraries.ONECCL).touch()
    monkeypatch.setattr("comm_backend_ccl.__path__", [str(tmp_path / "src"), str(tmp_path)])
    assert libraries.folder() == tmp_path
