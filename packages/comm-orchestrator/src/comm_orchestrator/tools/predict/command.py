"""The options of ``commctl fit`` and ``commctl predict``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["fit", "predict"]


def fit(
    files: Annotated[list[Path], typer.Argument(metavar="BENCH.json...", help="Files of commctl bench --json.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the model to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the residuals: a file that ends in .svg, .png or .pdf.")
    ] = None,
    hold_out: Annotated[
        str | None,
        typer.Option(
            metavar="sizes|world-sizes",
            help="Also fit without every other size, or without each number of ranks in turn, and print the error of "
            "what was left out.",
        ),
    ] = None,
    time: Annotated[
        str,
        typer.Option(metavar="median|average|min", help="Which time to fit: median of the rounds, average, least."),
    ] = "median",
    link: Annotated[
        str | None,
        typer.Option(
            metavar="LATENCY,BANDWIDTH",
            help="The network between the hosts of the measurements, such as 5us,100Gbit, so that another can be "
            "predicted.",
        ),
    ] = None,
) -> None:
    """Fit latency and bandwidth, per operation, library, algorithm and level, to what commctl bench measured."""
    from comm_orchestrator.tools.predict.run import run_fit

    raise typer.Exit(run_fit(files, output, plot, hold_out, time, link))


def predict(
    trace: Annotated[Path, typer.Argument(metavar="TRACE_FOLDER", help="A recorded job: a folder of rank<N>.jsonl.")],
    model: Annotated[Path, typer.Option(help="A file of commctl fit.")],
    nodes: Annotated[int | None, typer.Option(help="Hosts; as recorded by default.")] = None,
    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks of each; as recorded by default.")] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="LATENCY,BANDWIDTH", help="Between the hosts, such as 5us,100Gbit; the model's own by default."
        ),
    ] = None,
    library: Annotated[str | None, typer.Option(help="Of the model: ours, torch, ...; where it has several.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Of the model: gloo, ccl, ...; the recorded one by default.")
    ] = None,
    subgroups: Annotated[
        str,
        typer.Option(
            metavar="keep|mesh",
            help="Groups of some ranks stay as they are; with mesh, those of every s-th rank of all grow with the job.",
        ),
    ] = "keep",
    steps: Annotated[int | None, typer.Option(help="Steps in the trace, to print the time of one.")] = None,
    keep_parts: Annotated[
        bool, typer.Option("--keep-parts", help="In groups that grow, parts of gathered arrays stay, not the whole.")
    ] = False,
    keep_recorded: Annotated[
        bool, typer.Option("--keep-recorded", help="What the model has no fit of takes as long as recorded.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the prediction to this file.")] = None,
) -> None:
    """Predict a recorded job on other hosts, by a model, with intervals: nothing of it is measured."""
    from comm_orchestrator.tools.predict.run import PredictOptions, run_predict

    options = PredictOptions(
        folder=trace,
        model=model,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        network=network,
        library=library,
        backend=backend,
        subgroups=subgroups,
        steps=steps,
        keep_parts=keep_parts,
        keep_recorded=keep_recorded,
        json=json,
    )
    raise typer.Exit(run_predict(options))
