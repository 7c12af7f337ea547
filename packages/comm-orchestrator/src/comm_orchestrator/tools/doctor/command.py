"""Run ``commctl doctor``: check this rank alone, then all ranks together, then each library; print the report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

import comm_config
from comm_orchestrator import facade
from comm_orchestrator.tools.doctor import exchange, local, trial
from comm_orchestrator.tools.doctor.finding import Finding, from_error, warnings_logged
from comm_orchestrator.tools.doctor.rendering import render
from comm_orchestrator.tools.doctor.report import RankReport, Report, merge_reports
from comm_orchestrator.tools.doctor.time_limit import anything_stuck, within
from comm_orchestrator.tools.doctor.trial import Trial

__all__ = ["Examined", "examine", "run"]

# A launcher ends all ranks soon after the first one fails; until then each prints what it found.
_LINGER_S = 2.0


@dataclass(frozen=True)
class Examined:
    """The report, whether it is for this rank to print, and what to do after that."""

    report: Report
    prints: bool
    leave: Callable[[], Any]


def examine(timeout_s: float) -> Examined:
    """Check everything; called by all ranks of a job. Takes a few times ``timeout_s`` at most, and never raises."""
    alone = local.examine(timeout_s)
    mine = alone.report
    if alone.launch is None or alone.settings is None:
        return _own(mine, [], [], [_not_tried()])
    if not any(one["usable"] for one in mine.backends.values()):
        return _own(mine, [], [], [])
    with warnings_logged() as warnings:
        examined = _examine_together(mine, alone.settings, timeout_s, warnings)
    return examined


def _examine_together(
    mine: RankReport, settings: comm_config.Settings, timeout_s: float, warnings: list[str]
) -> Examined:
    limit_s, rank = trial.limit_of(timeout_s), mine.rank or 0
    try:
        met = within(limit_s, lambda: exchange.exchange_reports(mine, settings, timeout_s), "the rendezvous")
    except Exception as error:
        with suppress(Exception):
            within(timeout_s, facade.destroy_process_group, "ending what came about")
        return _own(mine, [], [], [_failed(mine, "the ranks cannot meet", error)])
    trials: list[Trial] = []
    for backend in exchange.to_try(met.reports):
        trials.append(trial.run(backend, rank, settings, timeout_s))
        if trials[-1].stuck:
            break  # whatever it holds, it would be in the way of the next one
    reported = {one.found for one in mine.findings}
    heard = [
        Finding("warning", "communication", text, ranks=(rank,))
        for text in dict.fromkeys(warnings)
        if text not in reported
    ]
    try:
        all_told = within(
            limit_s,
            lambda: exchange.exchange_outcomes(mine.backends, settings, trials, met.clocks, heard),
            "telling the other ranks how it went",
        )
    except Exception as error:
        return _own(mine, met.clocks, trials, [*heard, _failed(mine, "the ranks cannot meet again", error)])
    report = merge_reports(met.reports, all_told.clocks, all_told.trials, all_told.findings)
    return Examined(report, rank == 0, lambda: _leave(limit_s))


def _leave(limit_s: float) -> None:
    with suppress(Exception):
        within(limit_s, exchange.leave, "leaving")


def _own(
    mine: RankReport, measured: list[facade.clocks.Clock], trials: list[Trial], findings: list[Finding]
) -> Examined:
    report = merge_reports([mine], measured, trials, findings)
    return Examined(report, True, lambda: time.sleep(_LINGER_S if mine.world_size > 1 else 0.0))


def _failed(mine: RankReport, what: str, error: BaseException) -> Finding:
    reported = from_error("communication", error)
    others = ", and what the other ranks print" if mine.world_size > 1 else ""
    remedy = reported.remedy or f"see the findings above{others}"
    ranks = () if mine.rank is None else (mine.rank,)
    what = f"{what}: " if mine.world_size > 1 else ""
    return Finding("problem", "communication", f"{what}{reported.found}", remedy, ranks=ranks)


def _not_tried() -> Finding:
    return Finding("warning", "communication", "not tried, because init_distributed() would not get that far")


def run(timeout_s: float, as_json: bool) -> int:
    """Examine and print; the exit code: 1 where there is a problem."""
    with _stdout_to_itself() as stdout:
        examined = examine(timeout_s)
        try:
            if examined.prints:
                stdout.write(_text(examined.report, as_json, stdout))
                stdout.flush()
        finally:
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
    """Provide a stream for the report alone; redirect other output, such as NCCL's, to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with (
            suppress(BrokenPipeError),
            open(os.dup(kept), "w", encoding=sys.stdout.encoding, errors="replace") as stream,
        ):
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
