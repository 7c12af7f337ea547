"""What can be a target, and how a rank finds it."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import RankFailure, run_ranks, run_ranks_outcomes

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return "decorated", function(*args)

    return wrapper


@decorate
def decorated(value: int) -> int:
    return value


class Holder:
    @staticmethod
    def static(value: int) -> int:
        return value + 1

    def method(self) -> None: ...


def to_be_replaced() -> None: ...


ORIGINAL = to_be_replaced
to_be_replaced = len  # type: ignore[assignment]


def test_string() -> None:
    assert run_ranks("os.path:join", 2, "a", "b") == [os.path.join("a", "b")] * 2


def test_function_of_an_installed_module() -> None:
    assert run_ranks(textwrap.dedent, 1, "  a") == ["a"]


def test_builtin() -> None:
    assert run_ranks(len, 1, "abc") == [3]


def test_static_method_and_decorated_function() -> None:
    assert run_ranks(Holder.static, 1, 1) == [2]
    assert run_ranks(decorated, 1, 1) == [("decorated", 1)]


@pytest.mark.parametrize("target", [lambda: None, Holder().method, functools.partial(decorated, 1)])
def test_what_a_rank_cannot_find_is_refused(target: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="must be a function at the top level of a module"):
        run_ranks(target, 1)


def test_a_function_that_is_hidden_by_another_is_refused() -> None:
    with pytest.raises(TypeError, match="to_be_replaced is not the function that was passed"):
        run_ranks(ORIGINAL, 1)


def test_a_string_without_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write 'package\.module:function'"):
        run_ranks("os.path", 1)


def test_unknown_names_fail_in_the_rank() -> None:
    with pytest.raises(RankFailure, match="ModuleNotFoundError: No module named 'no_such_module'"):
        run_ranks("no_such_module:f", 1)
    with pytest.raises(RankFailure, match="has no attribute 'no_such_function'"):
        run_ranks("os.path:no_such_function", 1)


def test_script(tmp_path: Path) -> None:
    write(tmp_path, "beside.py", "GREETING = 'hello'")
    script = write(
        tmp_path,
        "script.py",
        """
        import os, sys
        from beside import GREETING
        if __name__ == "__main__":
            print(GREETING, os.environ["RANK"], *sys.argv[1:])
            print("a warning", file=sys.stderr)
            sys.exit(0)
        """,
    )
    assert run_ranks(script, 2, "--steps", 3) == ["hello 0 --steps 3\n", "hello 1 --steps 3\n"]
    assert run_ranks(str(script), 1) == ["hello 0\n"]
    with pytest.raises(TypeError, match="positional arguments only, got steps"):
        run_ranks(script, 1, steps=3)


def test_script_that_fails(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import sys\nprint('so far')\nsys.exit('no way')\n")
    (outcome,) = run_ranks_outcomes(script, 1)
    assert (outcome.status, outcome.exception_type, outcome.message, outcome.exit_code) == (
        "raised",
        "SystemExit",
        "no way",
        1,
    )
    assert outcome.stdout == "so far\n"
    assert outcome.traceback.splitlines()[1].strip().startswith(f'File "{script}", line 3')


def test_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        run_ranks(tmp_path / "none.py", 1)


def test_functions_and_classes_of_a_program(tmp_path: Path) -> None:
    program = write(
        tmp_path,
        "program.py",
        """
        import os
        from comm_utils.testing import run_ranks

        class Box:
            def __init__(self, value):
                self.value = value

        def fill(box):
            return Box(box.value + int(os.environ["RANK"]))

        if __name__ == "__main__":
            boxes = run_ranks(fill, 2, Box(10))
            print([box.value for box in boxes], all(type(box) is Box for box in boxes))
        """,
    )
    done = subprocess.run([sys.executable, program], env=ENV, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[10, 11] True\n", "")


@pytest.mark.parametrize("mode", ["importlib", "prepend"])
def test_test_modules_in_every_import_mode(tmp_path: Path, mode: str) -> None:
    text = """
        import os
        from dataclasses import dataclass

        import pytest
        from comm_utils.testing import RankFailure, RankPool, run_ranks

        from .{helper} import double

        @dataclass
        class Item:
            value: int

        def target(item):
            return Item(double(item.value) + int(os.environ["RANK"]))

        def wrong(value):
            assert value == 5

        def test_values():
            assert run_ranks(target, 2, Item(20)) == [Item(40), Item(41)]

        def test_pool():
            with RankPool(2) as pool:
                assert pool.run(target, Item(1)) == pool.run(target, Item(1)) == [Item(2), Item(3)]

        def test_assert():
            with pytest.raises(RankFailure, match="assert 4 == 5"):
                run_ranks(wrong, 1, 4)
        """
    # Twice the same file name: only its location says which module is meant.
    for package in ("first", "second"):
        write(tmp_path, f"project/{package}/__init__.py", "")
        write(tmp_path, f"project/{package}/helper_{package}.py", "def double(value):\n    return 2 * value\n")
        write(tmp_path, f"project/{package}/test_same.py", textwrap.dedent(text).format(helper=f"helper_{package}"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--import-mode={mode}", "project"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


def test_test_modules_outside_packages(tmp_path: Path) -> None:
    text = """
        from comm_utils.testing import run_ranks

        class Item:
            pass

        def target(item):
            return item

        def test_values():
            (found,) = run_ranks(target, 1, Item())
            assert type(found) is Item
        """
    write(tmp_path, "one/tests/test_same.py", text)
    write(tmp_path, "two/tests/test_same.py", text)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "one", "two"],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
