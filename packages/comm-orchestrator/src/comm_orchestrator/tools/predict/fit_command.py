"""``commctl fit``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.text import Text

from comm_orchestrator.tools.errors import as_one_sentence
from comm_orchestrator.tools.predict.plotting import check_plot, plot_residuals
from comm_orchestrator.tools.predict.rendering import fits_table, held_out_table, show
from comm_utils.errors import ArgumentError
from comm_utils.observability import bench_results
from comm_utils.observability.cost_model import (
    HOLD_OUT,
    STATISTICS,
    Model,
    Source,
    collect,
    fit_all,
    held_out,
    parse_link,
)
from comm_utils.observability.cost_model.model import save

__all__ = ["run"]


@as_one_sentence
def run(
    files: Sequence[Path],
    output: Path | None,
    plot: Path | None,
    hold_out: str | None,
    statistic: str,
    link: str | None,
) -> int:
    """Fit, print and write; the exit code."""
    if hold_out not in (None, *HOLD_OUT):
        raise ArgumentError(f"--hold-out: got {hold_out!r}; expected {' or '.join(HOLD_OUT)}")
    if statistic not in STATISTICS:
        raise ArgumentError(f"--time: got {statistic!r}; expected {', '.join(STATISTICS)}")
    network = None if link is None else parse_link(link, "--link")
    if plot is not None:
        check_plot(plot)
    for path in (output, plot):
        if path is not None and path.resolve() in [file.resolve() for file in files]:
            raise ArgumentError(f"{path}: got one of the bench files to write to; expected another name")
    loaded = [(file, bench_results.load(file)) for file in files]
    collected = collect((bench for _, bench in loaded), statistic)
    model = Model(
        made=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(["commctl", "fit", *sys.argv[2:]]),
        statistic=statistic,
        fits=tuple(fit_all(collected.points)),
        sources=tuple(Source(file.name, bench.made, bench.command, dict(bench.system)) for file, bench in loaded),
        link=network,
        notes=tuple(collected.notes),
    )
    left_out = held_out(collected.points, hold_out) if hold_out is not None else None
    if output is not None:
        save(model, output)
    if plot is not None:
        plot_residuals(model, plot)
    parts = fits_table(model)
    if left_out is not None and hold_out is not None:
        parts += [Text(""), *held_out_table(left_out, hold_out)]
    show(sys.stdout, parts)
    return 0
