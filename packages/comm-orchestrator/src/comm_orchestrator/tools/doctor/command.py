"""Runs the examination, prints its report and says how the process is to end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from comm_orchestrator.tools.doctor.examination import examine
from comm_orchestrator.tools.doctor.limit import anything_stuck
from comm_orchestrator.tools.doctor.rendering import render
from comm_orchestrator.tools.doctor.report import Report

__all__ = ["run"]


def run(timeout_s: float, as_json: bool) -> int:
    """Examine and print; the exit code: 1 where there is a problem."""
    with _stdout_to_itself() as stdout:
        examined = examine(timeout_s)
        if examined.prints:
            with suppress(BrokenPipeError):
                stdout.write(_text(examined.report, as_json, stdout))
                stdout.flush()
        examined.leave()
    code = examined.report.exit_code
    if anything_stuck():
        sys.stderr.flush()
        os._exit(code)
    return code


def _text(report: Report, as_json: bool, stdout: TextIO) -> str:
    if not as_json:
        columns = os.environ.get("COLUMNS", "")
        return render(report, stdout, int(columns) if columns.isdecimal() else None)
    # Where every rank prints its own, a line is a document.
    return json.dumps(report.to_json(), indent=2 if report.complete else None) + "\n"


@contextmanager
def _stdout_to_itself() -> Iterator[TextIO]:
    """A stream for the report alone: what libraries print meanwhile, as NCCL does, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(os.dup(kept), "w", encoding=sys.stdout.encoding, errors="replace") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
