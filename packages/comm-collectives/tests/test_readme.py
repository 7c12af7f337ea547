"""The example of README.md runs where only this package and what it declares is installed."""

from pathlib import Path

import pytest

from comm_utils.testing import run_ranks

README = (Path(__file__).parent.parent / "README.md").read_text()
PROGRAMS = [block.split("```")[0] for block in README.split("```python ranks=2\n")[1:]]


@pytest.mark.parametrize("program", PROGRAMS)
def test_example(tmp_path: Path, program: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    run_ranks(str(script), 2, timeout_s=120)


def test_there_is_an_example() -> None:
    assert PROGRAMS
