"""What changes the digest of a package's code, and what does not."""

from __future__ import annotations

import shutil
from pathlib import Path

from comm_orchestrator.rendezvous.code_digests import _digest, code_digests


def test_only_python_files_count(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "one.py").write_text("x = 1\n")
    before = _digest(package)
    (package / "inner" / "__pycache__").mkdir()
    (package / "inner" / "__pycache__" / "one.py").write_text("no source")
    (package / "native.so").write_text("built on this host")
    (package / ".#one.py").symlink_to("user@host.123:1")  # of Emacs, for a file with unsaved changes
    (package / "one (copy).py").write_text("x = 3\n")
    (package / ".ipynb_checkpoints").mkdir()
    (package / ".ipynb_checkpoints" / "one.py").write_text("x = 3\n")
    assert _digest(package) == before
    assert _digest(Path(shutil.copytree(package, tmp_path / "elsewhere", symlinks=True))) == before

    (package / "inner" / "one.py").write_text("x = 2\n")
    changed = _digest(package)
    (package / "inner" / "one.py").rename(package / "inner" / "two.py")
    assert len({before, changed, _digest(package)}) == 3


def test_every_package_has_one() -> None:
    digests = code_digests()
    names = ["comm-backend-torch", "comm-collectives", "comm-config", "comm-orchestrator", "comm-utils"]
    assert sorted(digests) == [f"the code of {name}" for name in names]
    assert len(set(digests.values())) == len(names)
