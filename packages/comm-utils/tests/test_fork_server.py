"""Which ranks are forked from a process that has imported their modules, and which are fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="forks need Linux 5.3 and Python 3.9")


def parent() -> tuple[int, int, str | None]:
    return os.getppid(), hash("of a set"), os.environ.get("ANY_SETTING")


def test_ranks_are_forked_and_neighbours_differ_in_hashes() -> None:
    first, second = run_ranks(parent, 2)
    assert os.getpid() not in (first[0], second[0])
    assert first[1] != second[1]
    assert [one[0] for one in run_ranks(parent, 2)] == [first[0], second[0]]


@pytest.mark.parametrize("env", [{"ANY_SETTING": "read by an import"}, {"COMM_TESTS_FORK": "0"}], ids=str)
def test_ranks_that_have_to_be_fresh(env: dict[str, Any]) -> None:
    (found,) = run_ranks(parent, 1, env=env)
    assert found[0] == os.getpid()
    assert found[2] == env.get("ANY_SETTING")


def test_what_is_read_later_can_differ() -> None:
    (found,) = run_ranks(parent, 1, env={"COMM_LOGGING__LEVEL": "debug"})
    assert found[0] != os.getpid()


def test_a_module_that_is_missing_is_named() -> None:
    program = (
        "from comm_utils.testing import preload, run_ranks\npreload('no_such_module')\nrun_ranks('os:getpid', 1)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr
    assert "preload() cannot import no_such_module" in said
    assert "No module named 'no_such_module'" in said


def test_garbage_is_collected_in_ranks_and_not_during_imports(tmp_path: Path) -> None:
    module = "import gc\ncollecting = gc.isenabled()\ndef found():\n    return collecting, gc.isenabled()\n"
    (tmp_path / "asks_at_import.py").write_text(module)
    program = (
        "from comm_utils.testing import preload, run_ranks\npreload('asks_at_import')\n"
        "print(run_ranks('asks_at_import:found', 1))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout == "[(False, True)]\n", done.stderr
