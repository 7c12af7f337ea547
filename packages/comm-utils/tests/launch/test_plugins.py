"""Launchers from other packages, installed for the test as real distributions."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from comm_utils import LaunchError
from comm_utils.launch import LAUNCHERS, discover, with_plugins

PLUGIN = """
from comm_utils import LaunchError
from comm_utils.launch import LaunchInfo

def discover(environ):
    if "MINE" not in environ:
        return None
    if environ["MINE"] == "bad":
        raise LaunchError("MINE: got bad")
    return LaunchInfo("mine", environ["MINE"] if environ["MINE"] == "text" else 1, 2)

def raises(environ):
    raise KeyError("MINE")

def leaves(environ):
    raise SystemExit(3)

def wrong(environ):
    return {"rank": 0}
"""


def install(folder: Path, name: str, entries: str, code: str = PLUGIN) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[comm_utils.launchers]\n{entries}\n")
    (folder / f"{name}_launcher.py").write_text(code)


def test_without_plugins() -> None:
    assert with_plugins() == LAUNCHERS


def test_they_come_after_torchrun_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "first", "zeta = first_launcher:discover\nalpha = first_launcher:discover")
    install(tmp_path, "second", "beta = second_launcher:discover")
    monkeypatch.syspath_prepend(tmp_path)
    launchers = with_plugins()
    assert [name for name, _ in launchers[:4]] == ["torchrun", "alpha", "beta", "zeta"]
    assert launchers[4:] == LAUNCHERS[1:]
    pmi = {"PMI_RANK": "0", "PMI_SIZE": "1"}
    assert discover({"MINE": "1", **pmi}, launchers).launcher == "mine"
    assert discover(pmi, launchers).launcher == "pmi"
    assert discover({"MINE": "1", "RANK": "0", "WORLD_SIZE": "1"}, launchers).launcher == "environment"
    with pytest.raises(LaunchError, match="MINE: got bad"):
        discover({"MINE": "bad"}, launchers)
    # Each process would go on as a world of its own.
    with pytest.raises(LaunchError, match="rank: got 'text', of type str"):
        discover({"MINE": "text"}, launchers)


@pytest.mark.parametrize(
    ("target", "code", "warning"),
    [
        ("bad_launcher:discover", "import no_such_module_anywhere", "bad_launcher:discover cannot be imported (Module"),
        ("bad_launcher:missing", PLUGIN, "bad_launcher:missing cannot be imported (AttributeError: "),
        ("bad_launcher:raises", PLUGIN, "bad_launcher:raises failed (KeyError: 'MINE')"),
        ("bad_launcher:leaves", PLUGIN, "bad_launcher:leaves failed (RuntimeError: bad 1.0 called sys.exit(3))"),
        (
            "bad_launcher:discover",
            "import sys\nsys.exit(3)",
            "bad_launcher:discover cannot be imported (ImportError: bad 1.0 called sys.exit(3) while it was imported",
        ),
    ],
)
def test_a_broken_one_does_not_take_the_others_down(
    target: str,
    code: str,
    warning: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(tmp_path, "bad", f"bad = {target}", code)
    install(tmp_path, "good", "good = good_launcher:discover")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "bad_launcher", raising=False)
    with caplog.at_level(logging.WARNING, logger="comm"):
        launchers = with_plugins()
        assert discover({}, launchers).launcher == "none"
        assert discover({"MINE": "1"}, launchers).launcher == "mine"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].getMessage().startswith("launcher bad is ")
    assert warning in caplog.records[0].getMessage()


def test_one_that_returns_something_else_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process would go on as a world of its own."""
    install(tmp_path, "odd", "odd = odd_launcher:wrong")
    monkeypatch.syspath_prepend(tmp_path)
    launchers = with_plugins()
    message = r"launcher 'odd': odd_launcher:wrong of odd 1\.0 returned dict; expected a LaunchInfo, or None"
    with pytest.raises(LaunchError, match=message):
        discover({}, launchers)
    assert discover({"RANK": "0", "WORLD_SIZE": "1"}, launchers).launcher == "environment"  # is asked first


def test_an_interrupt_during_the_import_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "interrupted", "slow = interrupted_launcher:discover", "raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        with_plugins()


def test_two_packages_of_one_name_are_refused_where_one_would_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        install(tmp_path / name, name, f"twin = {name}_launcher:discover")
        monkeypatch.syspath_prepend(tmp_path / name)
    launchers = with_plugins()
    assert [name for name, _ in launchers].count("twin") == 1
    assert discover({}, launchers).launcher == "none"
    both = r"two 1\.0 \(two_launcher:discover\) and one 1\.0 \(one_launcher:discover\); uninstall all but one"
    with pytest.raises(LaunchError, match=f"launcher 'twin': several installed packages provide it: {both}"):
        discover({"MINE": "1"}, launchers)


@pytest.mark.parametrize("second", ["my-twin", "My_Twin", "other"])
def test_a_package_found_twice_or_one_that_names_the_same_object_is_no_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    for number, name in enumerate(("my-twin", second)):
        folder = tmp_path / str(number)
        folder.mkdir()
        install(folder, name, "twin = twin_launcher:discover")
        (folder / f"{name}_launcher.py").rename(folder / "twin_launcher.py")
        monkeypatch.syspath_prepend(folder)
    assert discover({"MINE": "1"}, with_plugins()).launcher == "mine"
