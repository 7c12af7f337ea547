"""What rank 0 says and writes: the table as it comes into being, and files in the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from comm_orchestrator.tools.bench import comparing, csv_file, plot, system
from comm_orchestrator.tools.bench.libraries import Library
from comm_orchestrator.tools.bench.options import AVERAGES, Options
from comm_orchestrator.tools.bench.plan import Plan, Row
from comm_orchestrator.tools.bench.progress import Progress
from comm_orchestrator.tools.bench.table import Table, closing
from comm_utils.observability.bench_results import BenchFile, BenchResult, load

__all__ = ["Printer"]


class Printer:
    """Prints the header at once, and each row when it is measured."""

    def __init__(self, options: Options, ranks: list[dict[str, Any]], made: Plan, libraries: Sequence[Library]) -> None:
        self._options, self._ranks = options, ranks
        self._old = load(options.compare) if options.compare else None
        self._results: list[BenchResult] = []
        self._told = 0
        self._operation = ""
        self._table = Table([(one.name, one.backend) for one in libraries], options.per_iteration)
        self._several = len({row.operation for row in made.rows}) > 1
        self._progress = Progress(len(made.rows))
        self._print([*self._header(), *(f"# note: {one}" for one in made.notes)])

    def show(self, row: Row, results: Sequence[BenchResult], notes: Sequence[str]) -> None:
        """Print a row, and what the libraries turned out not to do."""
        self._results += results
        lines = [f"# note: {one}" for one in notes[self._told :]]
        self._told = len(notes)
        if row.operation != self._operation:
            self._operation = row.operation
            lines += ["#", f"# {row.operation}", *self._table.header()]
        self._print([*lines, *self._table.rows(row, results)])
        self._progress.advance(row)

    def conclude(self) -> int:
        """Print the end and write the files; the exit code."""
        self._progress.close()
        if not self._results:
            self._print(["# FAILED: nothing could be measured"])
            return 1
        self._print(closing(self._results))
        options = self._options
        made = BenchFile(
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            options.command,
            system.described(self._ranks),
            options.to_json(),
            tuple(self._results),
        )
        if options.json:
            made.save(options.json)
        if options.csv:
            csv_file.write(self._results, options.csv)
        if options.plot:
            plot.plot(self._results, options.plot, self._title())
        failed = any(one.wrong for one in self._results)
        if self._old is not None:
            found = comparing.compare(self._old, made, options.tolerance)
            self._print(comparing.rendered(found, options.compare, options.tolerance))
            failed |= found.failed
        return int(failed)

    def _header(self) -> list[str]:
        options, facts = self._options, system.described(self._ranks)
        step = f"{options.stepbytes}(bytes)" if options.stepbytes else f"{options.stepfactor}(factor)"
        ours = facts["packages"].get("comm-orchestrator", "?")
        lines = [
            f"# comm-orchestrator {ours}, torch {facts['torch']}, Python {facts['python']}",
            f"# {options.command}",
            f"# minBytes {options.minbytes} maxBytes {options.maxbytes} step: {step} "
            f"warmup iters: {options.warmup_iters} iters: {options.iters} rounds: {options.rounds} "
            f"validation: {options.check} average: {options.average} ({AVERAGES[options.average]} over ranks)",
            "#",
            "# Using devices",
        ]
        for rank, one in enumerate(self._ranks):
            where = f"Pid {one['pid']:>6} on {one['host']:>10} device {one['device']}  {one['name']}"
            lines.append(f"#  Rank {rank:>2} Group {one['group']:>2} {where}")
        return lines

    def _title(self) -> str:
        facts = system.described(self._ranks)
        hosts = len(facts["hosts"])
        where = ", ".join(facts["devices"]) or facts["cpu"]
        return f"{len(self._ranks)} ranks on {hosts} host{'s' if hosts > 1 else ''}: {where}"

    def _print(self, lines: Sequence[str]) -> None:
        with self._progress.hidden():
            for line in lines:
                print(line)
            sys.stdout.flush()
