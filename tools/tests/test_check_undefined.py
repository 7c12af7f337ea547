from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import check_undefined

LISTED = """\
                 U PyLong_FromLong
                 U _Py_NoneStruct
                 U memcpy@GLIBC_2.17
                 w __gmon_start__
                 U missing_kernel
"""


def test_names_that_nobody_defines() -> None:
    assert check_undefined.missing(LISTED) == ["missing_kernel"]


@pytest.mark.skipif(not all(map(shutil.which, ("cc", "nm"))), reason="needs a C compiler and nm")
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("void *PyLong_FromLong(long); void *f(void) { return PyLong_FromLong(1); }", ""),
        ("void PyErr_Clear(void), lost(void); void f(void) { PyErr_Clear(); lost(); }", "definition of: lost"),
        ("void f(void) {}", "needs nothing of Python"),
    ],
)
def test_modules(source: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "module.c").write_text(source)
    module = tmp_path / "module.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", module, tmp_path / "module.c"], check=True)
    assert check_undefined.main([str(module)]) == (1 if says else 0)
    assert says in capsys.readouterr().err
