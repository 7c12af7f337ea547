"""The command line: ``commctl trace``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from comm_orchestrator.tools.help import Commands

__all__ = ["app"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Recorded communication: numbers, pictures, and running it again.",
)

_Folder = Annotated[Path, typer.Argument(help="A trace: the folder that start_trace() wrote.", show_default=False)]


@app.command()
def summary(
    folder: _Folder,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")] = False,
) -> None:
    """Operations of all ranks, where their time went, and which ranks were waited for."""
    from comm_orchestrator.tools.trace import files, tables
    from comm_orchestrator.tools.trace.summary import summarize

    found = summarize(files.read(folder))
    sys.stdout.write(
        json.dumps(found.to_json(), indent=2) + "\n" if as_json else tables.format_summary(found, sys.stdout)
    )


@app.command()
def merge(
    folder: _Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; .gz is compressed.")],
) -> None:
    """One Chrome trace of all ranks, for https://ui.perfetto.dev and chrome://tracing."""
    from comm_orchestrator.tools.trace import files

    files.check_output("--output", output, folder)
    files.merge(files.read(folder), output)


@app.command()
def plot(
    folder: _Folder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .svg or .png.")],
    kind: Annotated[str, typer.Option(help="timeline, traffic (bytes from rank to rank) or both.")] = "both",
    from_s: Annotated[
        float | None, typer.Option("--from", help="Seconds since the first call.", show_default="the first call")
    ] = None,
    to_s: Annotated[float | None, typer.Option("--to", help="Likewise.", show_default="the last completion")] = None,
    ranks: Annotated[str, typer.Option(help="Such as 0,2,4-6.", show_default="all")] = "",
) -> None:
    """Plot a timeline of all ranks, and a map of the bytes that they sent to each other."""
    from comm_orchestrator.tools.trace import files, plotting

    wanted = plotting.Wanted(kind, from_s, to_s, plotting.ranks_of(ranks) if ranks else ())
    plotting.check(output, wanted)
    files.check_output("--output", output, folder)
    plotting.plot(files.read(folder), output, wanted)


@app.command()
def replay(
    folder: _Folder,
    backend: Annotated[str, typer.Option(help="The library, such as gloo or ccl.", show_default="as recorded")] = "",
    output: Annotated[
        str, typer.Option("--output", "-o", help="A folder for the trace of the replay.", show_default="none")
    ] = "",
    keep_gaps: Annotated[
        bool, typer.Option("--keep-gaps", help="Pause where the job has computed; otherwise as fast as possible.")
    ] = False,
    json_file: Annotated[str, typer.Option("--json", help="A file for the comparison.", show_default="none")] = "",
    timeout: Annotated[
        float, typer.Option(help="Seconds for each operation; 0: three times the longest, at least 60.")
    ] = 0.0,
) -> None:
    """Run the communication again, without the program, and compare.

    By itself it starts as many ranks as the trace has, on this host; under a launcher (torchrun --no-python, mpirun,
    srun) it is one of them. Exit code 1 if other bytes were moved than the recorded ones, or a rank failed.
    """
    from comm_orchestrator.tools.trace.replay import run
    from comm_orchestrator.tools.trace.replay_options import Options

    raise typer.Exit(run(Options(str(folder), backend, output, keep_gaps, json_file, timeout)))
