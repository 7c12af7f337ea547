"""The sdist of the package with native code is not built without what it is compiled from."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT

pytest.importorskip("scikit_build_core")


def test_an_sdist_without_oneccl_is_refused(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns(".oneccl", "__pycache__", "*.so*", "tests", "model")
    package = tmp_path / "package"
    shutil.copytree(ROOT / "packages" / "comm-backend-ccl", package, ignore=left_out)
    code = f"from scikit_build_core.build import build_sdist; build_sdist({str(tmp_path)!r})"
    env = {name: value for name, value in os.environ.items() if name != "COMM_CCL_WITHOUT_NATIVE"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=package, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    shown = " ".join((done.stdout + done.stderr).split())
    if missing := re.search("found no compiler|found no headers|oneCCL is there for x86-64 only", shown):
        pytest.skip(missing[0])
    assert done.returncode != 0
    assert re.search(r"run in the root of the repository: python tools/fetch_oneccl\.py", shown), shown
    assert list(tmp_path.glob("*.tar.gz")) == []
