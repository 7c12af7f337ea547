"""The package as a whole: what it imports and offers."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources

import comm_config

_SHOW_IMPORTS = """
import sys
before = set(sys.modules)
import comm_config
comm_config.load_config({"comms_logger": {"enabled": True}}, environ={})
comm_config.json_schema()
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
"""


def test_it_imports_pydantic_and_nothing_else() -> None:
    shown = subprocess.run([sys.executable, "-c", _SHOW_IMPORTS], capture_output=True, text=True, check=True).stdout
    imported = {name for name in shown.split() if name not in sys.stdlib_module_names}
    pydantics = {"annotated_types", "pydantic", "pydantic_core", "typing_extensions", "typing_inspection"}
    assert {"comm_config", "pydantic"} <= imported
    assert {name for name in imported if not name.startswith("_")} <= {"comm_config", *pydantics}


def test_all_that_is_offered_exists() -> None:
    assert [name for name in comm_config.__all__ if not hasattr(comm_config, name)] == []
    assert comm_config.__all__ == sorted(comm_config.__all__)


def test_it_is_typed() -> None:
    assert resources.files(comm_config).joinpath("py.typed").is_file()
