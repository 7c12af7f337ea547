"""What an info string asks for is understood, and a block that nothing checks is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_blocks import blocks, programs

PAGE = """
```python ranks=2
a = 1
```

```text
one
```

Goes on:

```python continues
b = 2
```
```text
two
```

- In a list:

  ```json file=comm.json
  {"a":
    1}
  ```

Not an output:

```text
three
```
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_blocks(page: Path) -> None:
    first, second, third, fourth = blocks(page)
    assert (first.line, first.language, first.options, first.text, first.output) == (
        2,
        "python",
        {"ranks": "2"},
        "a = 1\n",
        "one\n",
    )
    assert (second.options, second.output) == ({"continues": ""}, "two\n")
    assert (third.text, third.options) == ('{"a":\n  1}\n', {"file": "comm.json"})
    assert (fourth.language, fourth.text) == ("text", "three\n")


def test_programs(page: Path) -> None:
    (program,) = programs(page)
    assert (program.text, program.output, program.options) == ("a = 1\nb = 2\n", "one\ntwo\n", {"ranks": "2"})


@pytest.mark.parametrize("info", ["", "perl", "python rank=2", "bash ranks=2"])
def test_unknown_info(tmp_path: Path, info: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```{info}\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks(page)
