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


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("oneccl_bindings_for_pytorch", "does not import oneccl_bindings_for_pytorch, or use"),
        ("strangers", "start a process that does not import strangers"),
        (None, "another library has registered 'ccl'"),
    ],
)
def test_a_name_that_another_library_has_is_left_to_it(module: str | None, expected: str) -> None:
    program = f"""
import torch.distributed as c10d
def create(*_): pass
create.__module__ = {module!r}
c10d.Backend.register_backend("ccl", create, devices=["cpu"])
from comm_backend_ccl import provider
from comm_utils import BackendUnavailableError, Setup
found = provider.availability()["ccl"]
assert not found.usable and not provider.adopts("ccl")
try:
    provider.initialize(Setup("ccl", 0, 1, c10d.HashStore()))
except BackendUnavailableError as error:
    print(error)
assert c10d.Backend._plugins["CCL"].creator_fn is create
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.startswith("backend 'ccl' cannot be used: "), done.stderr
    assert expected in done.stdout
