"""Run ``commctl fit`` and ``commctl predict`` with checked options."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.text import Text

from comm_orchestrator.tools.predict.job import Job, predict
from comm_orchestrator.tools.predict.placement import SUBGROUPS, Placement, in_words
from comm_orchestrator.tools.predict.plotting import check_plot, plot_residuals
from comm_orchestrator.tools.predict.rendering import fits_table, held_out_table, job_tables, show
from comm_orchestrator.tools.trace.files import check_output, read
from comm_utils.atomic_write import replacing
from comm_utils.errors import ArgumentError
from comm_utils.observability import bench_results
from comm_utils.observability.cost_model import (
    HOLD_OUT,
    MARKS,
    NOT_MEASURED,
    STATISTICS,
    Estimator,
    Link,
    Model,
    Source,
    collect,
    fit_all,
    held_out,
    parse_link,
)
from comm_utils.observability.cost_model.model import load as load_model
from comm_utils.observability.cost_model.model import save
from comm_utils.observability.traces import RankTrace

__all__ = ["FORMAT", "VERSION", "PredictOptions", "run_fit", "run_predict"]


def run_fit(
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
    if output is not None and plot is not None and output.resolve() == plot.resolve():
        raise ArgumentError(f"--plot: got {plot}, where the model is written; expected another name")
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


FORMAT, VERSION = "comm-prediction", 1
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class PredictOptions:
    """Keep what ``commctl predict`` was given; its ``--help`` says what each is.

    Attributes:
        folder: of the trace.
    """

    folder: Path
    model: Path
    nodes: int | None
    ranks_per_node: int | None
    network: str | None
    library: str | None
    backend: str | None
    subgroups: str
    steps: int | None
    keep_parts: bool
    keep_recorded: bool
    json: Path | None

    def check(self) -> Link | None:
        """Return the network between hosts.

        Raises:
            ArgumentError: an option is wrong.
        """
        for name in ("nodes", "ranks_per_node", "steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_RANKS:
                raise ArgumentError(f"--{name.replace('_', '-')}: got {value}; expected 1 to {_MOST_RANKS}")
        if self.subgroups not in SUBGROUPS:
            raise ArgumentError(f"--subgroups: got {self.subgroups!r}; expected {' or '.join(SUBGROUPS)}")
        link = None if self.network is None else parse_link(self.network)
        if self.json is not None:
            if self.json.resolve() == self.model.resolve():
                raise ArgumentError(f"--json: got {self.json}, which is the model; expected another name")
            check_output("--json", self.json, self.folder)
        return link


def run_predict(options: PredictOptions) -> int:
    """Predict, print and write; the exit code."""
    link = options.check()
    model = load_model(options.model)
    traces = read(options.folder)
    placement = Placement.of(traces, options.nodes, options.ranks_per_node, options.subgroups)
    if placement.world_size > _MOST_RANKS:
        raise ArgumentError(f"got {placement}; expected {_MOST_RANKS} at most")
    estimator, notes = _estimator(model, traces, options, link)
    job = predict(traces, estimator, placement, keep_parts=options.keep_parts, keep_recorded=options.keep_recorded)
    notes += _notes(job, traces, options.keep_parts, link)
    if options.json is not None:
        document = _document(job, options, estimator, link, notes)
        with replacing(options.json) as file:
            json.dump(document, file, indent=1, allow_nan=False)
            file.write("\n")
    show(sys.stdout, job_tables(job, link, f"{estimator.library}/{estimator.backend}", options.steps, notes))
    return 0


def _estimator(
    model: Model, traces: Sequence[RankTrace], options: PredictOptions, link: Link | None
) -> tuple[Estimator, list[str]]:
    """Of the library that was recorded where the model has it and nobody said another."""
    recorded, library, backend = traces[0].backend, options.library, options.backend
    if (
        library is None
        and backend is None
        and ("ours", recorded) in {(f.key.library, f.key.backend) for f in model.fits}
    ):
        library, backend = "ours", recorded
    estimator = Estimator(model, library, backend, link)
    if recorded and estimator.backend != recorded:
        return estimator, [f"recorded on {recorded}, predicted for {estimator.library}/{estimator.backend}"]
    return estimator, []


def _notes(job: Job, traces: Sequence[RankTrace], keep_parts: bool, link: Link | None) -> list[str]:
    placement, notes = job.placement, []
    if not placement.as_recorded:
        what = "each rank's part" if keep_parts else "the whole array"
        notes.append(
            f"recorded on {in_words(placement.recorded)}; every rank does as before (weak scaling): "
            f"groups of all ranks have {placement.world_size} now, {what} of gathers and scatters stays as large"
        )
    if link is not None and placement.nodes == 1:
        notes.append("--network: all ranks are on one host, so that no network is used")
    if kept := sorted({row.operation for row in job.rows if row.kept}):
        notes.append(
            f"as recorded: the model has no fit of {', '.join(kept)} for these groups (over hosts, give --network); "
            "nothing is known of how long they take here: the interval leaves them out"
        )
    if cut_off := [trace.rank for trace in traces if not trace.complete]:
        ranks = ", ".join(map(str, cut_off[:8])) + (", ..." if len(cut_off) > 8 else "")
        notes.append(f"the recording of rank {ranks} was cut off; what came after is not predicted")
    if job.dropped:
        notes.append(f"the trace has lost {job.dropped} events, which are missing here too")
    if job.lonely:
        notes.append(f"{job.lonely} operations lack the record of some rank and were not waited for")
    return notes


def _document(
    job: Job, options: PredictOptions, estimator: Estimator, link: Link | None, notes: list[str]
) -> dict[str, Any]:
    rows = [
        {
            "operation": row.operation,
            "size_bytes": row.size_bytes,
            "codec": row.codec,
            "ranks": row.shape.ranks,
            "nodes": row.shape.nodes,
            "recorded_ranks": row.recorded_shape.ranks,
            "calls": row.calls,
            "recorded_s": row.recorded_s,
            "predicted_by_a_model": asdict(row.predicted),
            "algorithm": row.estimate.algorithm,
            "kept_as_recorded": row.kept,
            "unsure": sorted(row.estimate.marks),
        }
        for row in job.rows
    ]
    predicted = {
        "whole_job": asdict(job.wall),
        "communication": asdict(job.communication),
        "without_communication_s": job.without_communication_s,
    }
    if options.steps:
        predicted["step"] = {name: value / options.steps for name, value in asdict(job.wall).items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "what": NOT_MEASURED,
        "trace": str(options.folder),
        "model": str(options.model),
        "library": estimator.library,
        "backend": estimator.backend,
        "nodes": job.placement.nodes,
        "ranks_per_node": job.placement.per_node,
        "network": None if link is None else asdict(link),
        "recorded": {
            "nodes": job.placement.recorded.nodes,
            "ranks": job.placement.recorded.ranks,
            "whole_job_s": job.recorded_wall_s,
            "communication_s": sum(row.recorded_s for row in job.rows),
        },
        "predicted_by_a_model": predicted,
        "operations": rows,
        "unsure": {mark: MARKS[mark] for mark in job.marks},
        "notes": notes,
    }
