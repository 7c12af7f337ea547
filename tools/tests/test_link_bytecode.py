from __future__ import annotations

import compileall
import os
import py_compile
import subprocess
import sys
from pathlib import Path

from link_bytecode import link_bytecode

LOOK = "import sys; sys.path.insert(0, sys.argv[1]); import package.module as m; print(m.VALUE, m.__cached__)"


def environment(folder: Path, cache: Path) -> Path:
    """An environment whose files are hard links into ``cache``, as uv installs them."""
    (folder / "package").mkdir(parents=True)
    for path in cache.iterdir():
        os.link(path, folder / "package" / path.name)
    return folder


def cached(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.rglob("*.pyc")}


def cache_of_packages(tmp_path: Path) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "__init__.py").write_text("")
    (cache / "module.py").write_text("VALUE = 1")
    return cache


def test_bytecode_of_the_same_files_is_shared(tmp_path: Path) -> None:
    cache = cache_of_packages(tmp_path)
    first, second = (environment(tmp_path / name, cache) for name in ("first", "second"))
    compileall.compile_dir(first, quiet=2)
    assert link_bytecode(second, [first, tmp_path / "not there"]) == 2
    assert cached(second) == cached(first) != {}
    before = cached(second)
    done = subprocess.run([sys.executable, "-c", LOOK, second], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 ")
    assert cached(second) == before  # Python took what was linked
    assert link_bytecode(second, [first]) == 0


def test_bytecode_of_other_files_is_not(tmp_path: Path) -> None:
    cache = cache_of_packages(tmp_path)
    first, second = (environment(tmp_path / name, cache) for name in ("first", "second"))
    # Of the same size and time, which is all that Python compares.
    module = second / "package" / "module.py"
    changed = module.with_name("changed")
    changed.write_text("VALUE = 2")
    os.utime(changed, ns=(module.stat().st_atime_ns, module.stat().st_mtime_ns))
    changed.replace(module)
    py_compile.compile(str(first / "package" / "module.py"))
    assert link_bytecode(second, [first]) == 0
    assert cached(second) == {}


def test_bytecode_of_what_another_environment_alone_has_is_not(tmp_path: Path) -> None:
    cache = cache_of_packages(tmp_path)
    first = environment(tmp_path / "first", cache)
    compileall.compile_dir(first, quiet=2)
    second = tmp_path / "second"
    second.mkdir()
    assert link_bytecode(second, [first]) == 0
    assert list(second.iterdir()) == []
