"""The examples of README.md run where only this package and what it declares is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = [block.split("```")[0] for block in README.split("```python\n")[1:]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_example(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_there_is_an_example() -> None:
    assert PROGRAMS
