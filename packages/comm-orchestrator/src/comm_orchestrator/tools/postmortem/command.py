"""Run ``commctl postmortem``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from comm_orchestrator.tools.postmortem.evidence import gather
from comm_orchestrator.tools.postmortem.rendering import as_json, as_text
from comm_orchestrator.tools.postmortem.verdict import judge
from comm_orchestrator.tools.rings import JobRings, opened_job, state_of
from comm_utils.flight_recorder.snapshot import take_snapshot
from comm_utils.flight_recorder.torch_dump import check_folder, write_torch_dumps

__all__ = ["run"]


def run(where: str | None, calls: int, dump_folder: Path | None, to_json: bool) -> int:
    """Print a postmortem; return 0 where nothing is wrong, 1 where anything is or a ring is damaged, 2 without."""
    if dump_folder is not None:
        check_folder(dump_folder)
    with opened_job(where) as job:
        evidence = gather(job)
        found = judge(evidence)
        dumps = [] if dump_folder is None else _dump(job, dump_folder)
    if to_json:
        document = as_json(job, evidence, found, calls) | {"torch_dumps": [str(path) for path in dumps]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(as_text(job, evidence, found, calls))
        if dumps:
            command = f"python -m torch.distributed.flight_recorder.fr_trace {dump_folder}"
            print(f"\n{len(dumps)} dumps in {dump_folder}, for: {command}")
    return 1 if found or job.damaged else 0


def _dump(job: JobRings, folder: Path) -> list[Path]:
    """Write what the rings have, all of it."""
    snapshots = [
        take_snapshot(reader, is_local=state_of(reader) != "unknown", recent=reader.records)
        for reader in job.readers.values()
    ]
    return write_torch_dumps(snapshots, folder)
