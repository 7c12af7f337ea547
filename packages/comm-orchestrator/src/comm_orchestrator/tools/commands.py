"""Subcommands of ``commctl``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperOption

from comm_orchestrator import selector
from comm_orchestrator.tools.bench.command_line import BenchCommand, bench
from comm_orchestrator.tools.config_commands import app as config_app
from comm_orchestrator.tools.errors import EXPECTED, tell
from comm_orchestrator.tools.help import Commands
from comm_orchestrator.tools.predict import command as prediction
from comm_orchestrator.tools.trace.command import app as trace_app

__all__ = ["app"]

_PACKAGES = (
    "comm-orchestrator",
    "comm-collectives",
    "comm-backend-torch",
    "comm-backend-ccl",
    "comm-config",
    "comm-utils",
)
_display_type = getattr(TyperOption, "display_type_rich", None)


def _type_of(option: TyperOption, *args: Any, **kwargs: Any) -> Any:
    """Return what the help shows as an option's type: nothing for a flag, where typer shows ``<bool>``."""
    return None if option.is_flag or _display_type is None else _display_type(option, *args, **kwargs)


if _display_type is not None:
    setattr(TyperOption, "display_type_rich", _type_of)  # noqa: B010 - a method, as mypy sees it


class _Commands(Commands):
    """All commands: each writes what it prints to its end, and has one sentence for errors that are expected."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            try:
                return super().main(*args, **kwargs)
            finally:
                sys.stdout.flush()
        except EXPECTED as error:
            sys.exit(tell(error))
        except SystemExit as ended:
            # Where the reader has closed the output, click ends with 1.
            if not isinstance(ended.__context__, BrokenPipeError):
                raise
            sys.exit(tell(ended.__context__))


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    help="Distributed communication for PyTorch.",
    pretty_exceptions_enable=False,
)
app.add_typer(config_app, name="config")
app.command(cls=BenchCommand)(bench)
app.command()(prediction.fit)
app.command()(prediction.predict)
app.add_typer(trace_app, name="trace")


def _print_version(wanted: bool) -> None:
    if wanted:
        print_version()
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Distributed communication for PyTorch."""


@app.command("version")
def print_version() -> None:
    """Print the versions of these packages and of torch, one a line."""
    for name in (*_PACKAGES, "torch"):
        print(name, _version_of(name))


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # comm-backend-ccl is an extra; a torch may have been built in its own folder
        return "not installed"


@app.command()
def backends(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """List the communication libraries and whether each can be used here."""
    found = selector.available_backends()
    if as_json:
        print(json.dumps({name: vars(one) for name, one in sorted(found.items())}, indent=2))
        return
    table = Table("backend", "usable", "why", "remedy")
    for name, one in sorted(found.items()):
        table.add_row(name, "yes" if one.usable else "no", one.reason, one.remedy)
    # Text of other packages is no markup: brackets stand for themselves.
    Console(markup=False, emoji=False).print(table)


def _at_least(least_s: float) -> Callable[[float], float]:
    """Return the check of a number of seconds; the ranges of options let NaN through, or blame their upper end."""

    def check(value: float) -> float:
        if not least_s <= value <= 3600:
            raise typer.BadParameter(f"got {value:g}; expected {least_s:g} to 3600 seconds")
        return value

    return check


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that each step with other ranks may take.", callback=_at_least(0.5))
    ] = 20.0,
) -> None:
    """Look at everything that communication depends on, try it, and say what to do about what is wrong.

    Under a launcher (torchrun --no-python, mpirun, srun) all ranks are examined together. Exit code 1 if there is a
    problem; warnings do not count.
    """
    from comm_orchestrator.tools.doctor.command import run

    raise typer.Exit(run(timeout, as_json))


def _rank_counts(values: list[int] | None) -> list[int] | None:
    for value in values or ():
        if not 2 <= value <= 64:
            raise typer.BadParameter(f"got {value}; expected 2 to 64 ranks")
    return values


@app.command()
def tune(
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Ranks to measure with; may be given again. A pair, and one a core.", callback=_rank_counts),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show what is known, and measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure which way of moving data in shared memory is the fastest on this host, and keep the result.

    Groups that are made later start from it. Run it while nothing else runs; it takes about a quarter of a minute.
    """
    from comm_orchestrator.tools.tune.command import default_ranks, run

    raise typer.Exit(run(ranks or default_ranks(), show, as_json))


_Where = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A folder with rings, or the name of a job.",
        show_default="the newest job of this user on this host",
    ),
]


@app.command()
def postmortem(
    where: _Where = None,
    calls: Annotated[int, typer.Option(help="Print so many of the last calls of each rank.", min=0)] = 0,
    torch_dump: Annotated[
        Path | None,
        typer.Option(help="An empty folder for dumps that torch's fr_trace reads.", show_default="none"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")] = False,
) -> None:
    """Find out what went wrong in a job, also after a crash, from the last calls of its ranks.

    Exit code 0 if nothing is wrong, 1 if something is or a ring cannot be read, 2 if there are no rings.
    """
    from comm_orchestrator.tools.postmortem.command import run

    raise typer.Exit(run(where, calls, torch_dump, as_json))


@app.command()
def top(
    where: _Where = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks.", callback=_at_least(0.1))] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")] = False,
) -> None:
    """Show what each rank of a running job does: its call, for how long, its rates, and whom it waits for.

    It reads what the ranks of this host record anyway. q or Ctrl-C ends it.
    """
    from comm_orchestrator.tools.top.command import run

    raise typer.Exit(run(where, once, as_json, interval))
