import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from torch.distributed import HashStore

from comm_backend_ccl import libraries, oneccl_library, provider, shared_memory
from comm_utils import BackendUnavailableError, Setup
from comm_utils.backend import ENTRY_POINT_GROUP

needs_oneccl = pytest.mark.skipif(
    oneccl_library.unavailable_reason() is not None, reason=str(oneccl_library.unavailable_reason())
)


def test_it_registers_itself() -> None:
    (entry,) = entry_points(group=ENTRY_POINT_GROUP, name="ccl")
    assert entry.load() is provider


@needs_oneccl
def test_what_is_found_is_told() -> None:
    found = provider.availability()["ccl"]
    assert found.usable
    assert found.reason == "shared memory within a host, oneCCL 2021.17.2 over libfabric's tcp"
    assert found.within_host == ""
    assert found.details["shared memory"].startswith("between up to 64 ranks")
    assert found.details["oneCCL"].startswith("Gold-2021.17.2 ")
    assert found.details["oneCCL from"] == str(libraries.folder() / libraries.ONECCL)  # type: ignore[operator]
    assert found.details["libfabric"] == "2.5"
    assert Path(found.details["libfabric from"]).is_file()
    assert found.details["fabric provider"] == "tcp"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda patch, _: patch.setattr(sys, "platform", "darwin"), "Linux on x86-64 only, this is darwin"),
        (lambda patch, _: patch.setattr(oneccl_library, "folder", lambda: None), "was built without oneCCL"),
        (lambda patch, path: patch.setenv("CCL_OFI_LIBRARY_PATH", str(path / "none.so")), "cannot be loaded .*none.so"),
    ],
)
@needs_oneccl
def test_what_keeps_it_from_running_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: object, reason: str
) -> None:
    change(monkeypatch, tmp_path)  # type: ignore[operator]
    found = provider.availability()["ccl"]
    assert found.usable == (shared_memory.unavailable_reason() is None)
    assert re.search(reason, found.within_host)
    monkeypatch.setenv("CCL_SHARED_MEMORY", "0")
    found = provider.availability()["ccl"]
    assert not found.usable
    assert found.remedy
    with pytest.raises(BackendUnavailableError, match=f"backend 'ccl' cannot be used: .*{reason}"):
        provider.initialize(Setup("ccl", 0, 1, HashStore()))


def test_it_adopts_its_own() -> None:
    assert provider.adopts("ccl")
    assert not provider.adopts("gloo")


@needs_oneccl
def test_a_name_that_is_taken_is_told() -> None:
    program = """
import torch.distributed as c10d
c10d.Backend.register_backend("ccl", print, devices=["cpu"])
import comm_backend_ccl
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 1
    assert "backend 'ccl' of torch.distributed was registered by builtins" in done.stderr


def test_intels_bindings_are_offered_where_they_are(tmp_path: Path) -> None:
    """Intel's package cannot be had from PyPI: what registers the name as it does stands in for it."""
    (tmp_path / "oneccl_bindings_for_pytorch.py").write_text(
        """
import torch.distributed as c10d
c10d.Backend.register_backend("ccl", lambda *_: None, devices=["xpu", "cpu"])
"""
    )
    program = """
import os
import torch.distributed as c10d
import comm_backend_ccl
from comm_backend_ccl import provider
from comm_utils import Setup
print(provider.availability()["oneccl_bindings_for_pytorch"].reason)
up = provider.initialize(Setup("oneccl_bindings_for_pytorch", 0, 1, c10d.HashStore()))
print(type(up).__name__, up.get_backend())
print(c10d.Backend._plugins["CCL"].creator_fn.__module__, flush=True)
os._exit(0)  # whatever stands in has no group to end
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert "discontinued by Intel" in done.stdout, done.stderr
    assert "oneccl_bindings_for_pytorch" in done.stdout.splitlines()[-1], done.stdout + done.stderr
