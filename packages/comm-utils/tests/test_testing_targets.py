"""What can be a target, and how a rank finds it."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import RankPool, run_ranks, run_ranks_outcomes

# Loaded by path, as test folders are no packages.
_spec = importlib.util.spec_from_file_location(f"{__name__}_targets", Path(__file__).with_name("testing_targets.py"))
assert _spec is not None
assert _spec.loader is not None
targets = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(targets)

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("target", "args", "value"),
    [
        pytest.param("os.path:join", ("a", "b"), os.path.join("a", "b"), id="string"),
        pytest.param("colorsys:rgb_to_yiq", (0, 0, 0), (0, 0, 0), id="string, module not loaded before"),
        pytest.param(fnmatch.fnmatch, ("a", "?"), True, id="function of the standard library"),
        pytest.param(len, ("abc",), 3, id="builtin"),
        pytest.param(targets.my_rank, (), 0, id="function of a file"),
        pytest.param(targets.Holder.static, (1,), 2, id="static method"),
        pytest.param(targets.decorated, (1,), ("decorated", 1), id="decorated function"),
    ],
)
def test_functions(pool: RankPool, target: Callable[..., Any] | str, args: tuple[Any, ...], value: object) -> None:
    assert pool.run(target, *args) == [value]


@pytest.mark.parametrize("target", [lambda: None, targets.Holder().method, functools.partial(targets.decorated, 1)])
def test_what_a_rank_cannot_find_is_refused(target: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="must be a function at the top level of a module"):
        run_ranks(target, 1)


@pytest.mark.parametrize("file_name", ["<stdin>", "/nowhere/ipykernel_1/2.py"], ids=["prompt", "notebook"])
def test_functions_of_a_prompt_or_a_notebook_are_refused(file_name: str) -> None:
    program = textwrap.dedent(
        """
        import sys
        from comm_utils.testing import run_ranks
        exec(compile("def f(): pass", sys.argv[1], "exec"))
        try:
            run_ranks(f, 1)
        except TypeError as error:
            print(error)
        """
    )
    command = [sys.executable, "-c", program, file_name]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith(
        "a rank cannot find f() again, which a notebook, the prompt or `python -c` defines"
    ), done.stdout + done.stderr
    assert "put it into a module" in done.stdout


def test_a_function_that_is_hidden_by_another_is_refused() -> None:
    with pytest.raises(TypeError, match="to_be_replaced is not the function that was passed"):
        run_ranks(targets.ORIGINAL, 1)


def test_a_string_without_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"write 'package\.module:function'"):
        run_ranks("os.path", 1)


def test_unknown_names_fail_in_the_rank(pool: RankPool) -> None:
    (outcome,) = pool.run_outcomes("no_such_module:f")
    assert outcome.describe().startswith("rank 0 raised ModuleNotFoundError: No module named 'no_such_module'")
    (outcome,) = pool.run_outcomes("os.path:no_such_function")
    assert outcome.message.endswith("has no attribute 'no_such_function'")


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
    with pytest.raises(TypeError, match="positional arguments only, got steps"):
        run_ranks(script, 1, steps=3)


def test_script_that_fails(tmp_path: Path) -> None:
    script = write(tmp_path, "script.py", "import sys\nprint('so far')\nsys.exit('no way')\n")
    (outcome,) = run_ranks_outcomes(str(script), 1)
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


def test_test_modules_in_importlib_mode(tmp_path: Path) -> None:
    text = """
        import os
        from dataclasses import dataclass

        from comm_utils.testing import RankPool

        {imports}

        @dataclass
        class Item:
            value: int

        def target(item):
            return Item(double(item.value) + int(os.environ["RANK"]))

        def wrong(value):
            assert value == 5

        def test_pool():
            with RankPool(1) as pool:
                assert pool.run(target, Item(1)) == pool.run(target, Item(1)) == [Item(2)]
                (outcome,) = pool.run_outcomes(wrong, 4)
                assert outcome.message.startswith("assert 4 == 5")
        """
    text = textwrap.dedent(text)
    # Three times the same file name, in a package and outside: only its location says which module is meant.
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/helper.py", "def double(value):\n    return 2 * value\n")
    write(tmp_path, "package/test_same.py", text.format(imports="from .helper import double"))
    for folder in ("plain/one", "plain/two"):
        write(tmp_path, f"{folder}/test_same.py", text.format(imports="double = 2 .__mul__"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "."],
        cwd=tmp_path,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
