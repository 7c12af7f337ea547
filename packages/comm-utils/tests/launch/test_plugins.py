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
        ("bad_launcher:wrong", PLUGIN, "bad_launcher:wrong failed (TypeError: returned dict; expected LaunchInfo or"),
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
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert caplog.records[0].getMessage().startswith("launcher bad is ")
    assert warning in caplog.records[0].getMessage()
