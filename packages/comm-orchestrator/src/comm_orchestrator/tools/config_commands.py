"""Commands for configuration files: ``commctl config``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import comm_config
from comm_orchestrator import selector
from comm_orchestrator.tools.help import Commands
from comm_orchestrator.tools.output import printable

__all__ = ["app"]

app = typer.Typer(cls=Commands, no_args_is_help=True, help="Configuration files.")


@app.command("schema")
def print_schema() -> None:
    """Print the JSON Schema of configuration files, for editors."""
    print(json.dumps(comm_config.json_schema(), indent=2))


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A JSON file, of these packages or DeepSpeed's.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings in force as JSON.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="Print defaults, too.")] = False,
) -> None:
    """Check a configuration file together with the COMM_* variables, and print what differs from the defaults.

    Exit code 1 and a message if the file is wrong, if it names a backend that does not exist, or if a COMM_* variable
    is misspelt.
    """
    try:
        config = comm_config.load_config(file)
    except comm_config.ConfigError as error:
        _print_errors([str(error)])
        raise typer.Exit(1) from None
    errors = [*_backend_errors(config), *_variable_errors()]
    if errors:
        _print_errors(errors)
        raise typer.Exit(1)
    if as_json:
        # With escapes for what is not ASCII, which some terminals do not show.
        print(json.dumps(json.loads(config.model_dump_json()), indent=2))
        return
    sources = comm_config.sources_of(config)
    rows = [(key, value) for key, value in _leaves("", config.model_dump()) if key in sources]
    shown = [(key, value) for key, value in rows if show_all or sources[key] != "default"]
    table = Table("key", "value", "from")
    for key, value in shown:
        table.add_row(*(Text(printable(cell)) for cell in (key, json.dumps(value), sources[key])))
    if shown:
        Console().print(table)
    others = len(rows) - len(shown)
    print(f"{file}: ok" + (f"; {others} settings have their defaults (--all prints them)" if others else ""))


def _print_errors(errors: list[str]) -> None:
    for error in errors:
        print(f"error: {printable(error, lines=True)}", file=typer.get_text_stream("stderr"))


def _backend_errors(config: comm_config.CommConfig) -> list[str]:
    """Return an error for each named backend that no package of this project or of torch provides."""
    named = config.process_group.backend
    if named is None:
        return []
    errors = []
    for part in named.split(","):
        name = part.rpartition(":")[2]
        if name not in selector.COMMON_BACKENDS and name not in (known := selector.known_backends()):
            source = comm_config.sources_of(config)["process_group.backend"]
            guess = selector.likely_backend(name, known)
            hint = f"; did you mean {guess!r}?" if guess else ""
            errors.append(
                f"{source}: process_group.backend: got {name!r}, expected one of {', '.join(sorted(known))}{hint}"
            )
    return errors


def _variable_errors() -> list[str]:
    """Return an error for each COMM_* variable that looks like a misspelt one; others may be other programs'."""
    return [
        f"environment variable {name} is not a setting; did you mean {guess}?"
        for name, guess in comm_config.unknown_variables(os.environ).items()
        if guess is not None
    ]


def _leaves(prefix: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, inner)]
    return [(prefix, value)]
