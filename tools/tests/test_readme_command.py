"""What CI runs is cut out of README.md."""

from __future__ import annotations

import readme_command

README = """# Title

<!-- command: tests -->
```bash
python3 -m venv .venv
nox
```

```bash
unmarked
```

<!-- command: demo -->

```bash
nox -s demo
```
"""


def test_marked_blocks() -> None:
    assert readme_command.commands(README) == {"tests": "python3 -m venv .venv\nnox\n", "demo": "nox -s demo\n"}


def test_the_readme_marks_what_ci_runs() -> None:
    found = readme_command.commands(readme_command.README.read_text())
    assert set(found) == {"demo", "tests"}
    assert found["tests"].strip().endswith("nox")
    assert found["demo"].strip().endswith("nox -s demo")
