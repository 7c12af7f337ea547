"""Run ``commctl top``."""

from __future__ import annotations

import json
import sys
import time

from comm_orchestrator.tools.rings import JobRings, opened_job
from comm_orchestrator.tools.top.display import Parts, parts, repeat
from comm_orchestrator.tools.top.rows import Row, Sampler
from comm_orchestrator.tools.trace.tables import render
from comm_utils.errors import ArgumentError

__all__ = ["run"]


def run(where: str | None, once: bool, to_json: bool, interval_s: float) -> int:
    """Show what ranks do; return 0, or 2 where there are no rings."""
    sampler = Sampler()
    if once or to_json or not sys.stdout.isatty():
        with opened_job(where, prefers_running=True) as job:
            sampler.rows(job)  # rates are since this
            time.sleep(interval_s)
            rows = sampler.rows(job)
            text = json.dumps(_as_json(job, rows), indent=2) + "\n" if to_json else render(parts(job, rows), sys.stdout)
        sys.stdout.write(text)
        return 0
    with opened_job(where, prefers_running=True):
        pass  # so that a wrong argument is an error
    repeat(lambda: _look(where, sampler), interval_s)
    return 0


def _look(where: str | None, sampler: Sampler) -> Parts:
    """Return what is shown now; rings come and go."""
    try:
        with opened_job(where, prefers_running=True) as job:
            return parts(job, sampler.rows(job))
    except ArgumentError:
        return ["no job runs"]


def _as_json(job: JobRings, rows: list[Row]) -> dict[str, object]:
    return {
        "job": job.name,
        "folder": str(job.folder),
        "world_size": job.world_size,
        "ranks": [row.to_json() for row in rows],
        "absent": job.absent,
        "damaged": job.damaged,
    }
