"""docs/configuration.md has every key and variable, with its default, and its examples hold."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from comm_config import CommConfig
from comm_config.environment import environment_variables
from comm_config.keys import leaves, model_at
from comm_config.library import LibraryConfig

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
PYTHON = [
    *re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL),
    *re.findall(r"```python\n(.*?)```", (ROOT / "packages/comm-config/README.md").read_text("utf-8"), re.DOTALL),
]


def rows(section: str) -> dict[str, list[str]]:
    """Return the cells of the tables under the heading ``section``, by their first one."""
    match = re.search(rf"^#+ `?{re.escape(section)}`?\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert match, f"no section {section}"
    lines = [line for line in match[1].splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)}


@pytest.mark.parametrize("path", [path for path, _ in leaves(CommConfig)], ids=".".join)
def test_every_setting_is_in_its_table(path: tuple[str, ...]) -> None:
    *section, key = path
    cells = rows(".".join(section) or "Compression")[key]
    model = model_at(CommConfig, tuple(section))
    if issubclass(model, LibraryConfig):
        assert key == "variables" or cells[2].startswith(f"`{model.variable_of(key)}`: ")
    else:
        default = model.model_fields[key].get_default(call_default_factory=True)
        assert cells[2] == f"`{json.dumps(default)}`"


@pytest.mark.parametrize(
    "section", ["launch", "network", "network.nccl", "network.gloo", "network.ccl", "comms_logger"]
)
def test_no_table_has_a_key_that_does_not_exist(section: str) -> None:
    model = model_at(CommConfig, tuple(section.split(".")))
    assert set(rows(section)) <= set(model.model_fields)


def test_variables_that_are_mentioned_exist() -> None:
    mentioned = set(re.findall(r"\bCOMM_[A-Z_]*[A-Z]", PAGE)) - {"COMM_SECTION__KEY", "COMM_CONFIG"}
    assert mentioned
    assert mentioned <= set(environment_variables())


@pytest.mark.parametrize("code", PYTHON, ids=[str(number) for number in range(len(PYTHON))])
def test_the_examples_hold(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


def test_the_errors_shown_are_the_ones_raised(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"```text\n(configuration dict: .*?)```", PAGE, re.DOTALL)
    assert shown
    (code,) = [block for block in PYTHON if "print(error)" in block]
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == shown[1]
