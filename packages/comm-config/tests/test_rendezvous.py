"""`rendezvous_settings`: as `resolve` where all is right, and what is right of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comm_config import load_config, resolve
from comm_config.rendezvous import rendezvous_settings

KEYS = ("process_group.init_method", "launch.master_addr", "launch.master_port", "timeouts.init_s")
DOCUMENT = {
    "process_group": {"init_method": "tcp://node1:1"},
    "launch": {"master_addr": "node1", "master_port": 1},
    "timeouts": {"init_s": 1},
}


@pytest.mark.parametrize(
    ("source", "environ", "overrides"),
    [
        (None, {}, {}),
        (DOCUMENT, {}, {}),
        (DOCUMENT, {"COMM_LAUNCH": '{"master_port": 2, "master_addr": "node2"}'}, {}),
        (DOCUMENT, {"COMM_LAUNCH": '{"master_port": 2}', "COMM_LAUNCH__MASTER_PORT": "3"}, {}),
        (DOCUMENT, {"COMM_PROCESS_GROUP__INIT_METHOD": "file:///tmp/x", "COMM_TIMEOUTS__INIT_S": "2.5"}, {}),
        (None, {"COMM_LAUNCH__MASTER_PORT": "3"}, {"launch.master_port": 4, "process_group.backend": None}),
        (load_config(DOCUMENT, environ={}), {}, {}),
        (resolve(DOCUMENT, environ={}), {}, {}),
    ],
)
def test_a_right_configuration(source: Any, environ: dict[str, str], overrides: dict[str, Any]) -> None:
    expected = resolve(source, environ=environ, overrides=overrides)
    found = rendezvous_settings(source, environ, overrides)
    assert [found.value(key) for key in KEYS] == [expected.value(key) for key in KEYS]
    argument = "argument" in expected.sources["launch.master_port"]
    assert (found.sources["launch.master_port"] == "argument") is argument


@pytest.mark.parametrize("named", ["argument", "variable"])
def test_a_file(tmp_path: Path, named: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({**DOCUMENT, "comms_logger": {"enabled": "maybe"}}))
    source, environ = (str(path), {}) if named == "argument" else (None, {"COMM_CONFIG": str(path)})
    found = rendezvous_settings(source, environ, {})
    assert [found.value(key) for key in KEYS] == ["tcp://node1:1", "node1", 1, 1.0]


def test_what_is_wrong_is_skipped() -> None:
    wrong = {"process_group": {"init_method": "node1"}, "launch": {"master_addr": " ", "master_port": True}, "x": 1}
    environ = {"COMM_LAUNCH": "{", "COMM_LAUNCH__MASTER_PORT": "70000", "COMM_TIMEOUTS__INIT_S": "nan"}
    found = rendezvous_settings(wrong, environ, {"launch.master_port": "many"})
    assert [found.value(key) for key in KEYS] == [None, None, 29500, None]
    assert found.sources == resolve(environ={}).sources
    found = rendezvous_settings(DOCUMENT, environ, {"process_group.init_method": "node1"})
    assert [found.value(key) for key in KEYS] == ["tcp://node1:1", "node1", 1, 1.0]


@pytest.mark.parametrize("source", ["/no/such/file.json", 3, [], {"launch": 3}, {"launch": {"master_port": None}}])
def test_sources_that_are_none(source: Any) -> None:
    assert [rendezvous_settings(source, {}, {}).value(key) for key in KEYS] == [None, None, 29500, None]


def test_pydantic_is_not_imported() -> None:
    code = (
        "import sys\n"
        "from comm_config.rendezvous import rendezvous_settings\n"
        "found = rendezvous_settings({'launch': {}}, {'COMM_LAUNCH__MASTER_PORT': '3', 'COMM_X': 'y'}, {})\n"
        "assert found.launch.master_port == 3\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
