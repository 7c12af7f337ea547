"""The report for people."""

from __future__ import annotations

from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.report import FACTS
from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.report import Report

__all__ = ["render"]

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_MOST_RANKS = 32
_MOST_GOOD = 8  # findings of one check that nobody has to act on
# Narrower terminals get remedies below what was found, not beside it.
_WIDE = 120
_WHOLE = ("", "check", "backend", "usable", "package", "rank", "pid", "interface")
# Where nobody looks at it, lines are as long as they have to be: one finding a line, for grep.
_UNLIMITED = 10_000


def render(report: Report, stream: TextIO, width: int | None) -> str:
    """Tables as wide as the terminal ``stream``, or as ``width`` where it is none."""
    fixed_width = None if stream.isatty() else width or _UNLIMITED
    # Values and reasons are text of others, in which brackets stand for themselves.
    console = Console(file=stream, highlight=False, markup=False, emoji=False, width=fixed_width)
    with console.capture() as captured:
        console.print(Text(_title(report), style="bold"))
        for table in _tables(report, narrow=console.width < _WIDE):
            console.print()
            console.print(table)
        console.print()
        console.print(Text(_summary(report), style=_STYLES[report.level]))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _title(report: Report) -> str:
    first = report.ranks[0]
    if report.complete:
        hosts = dict.fromkeys(one["host"] for one in report.hosts())
        many = f"{len(hosts)} hosts" if len(hosts) > 1 else f"one host, {next(iter(hosts))}"
        return f"{report.world_size} rank{'s' if report.world_size > 1 else ''} on {many}"
    who = "a process that cannot tell its rank" if first.rank is None else f"rank {first.rank} of {first.world_size}"
    return f"{who} on {first.host}, alone"


def _tables(report: Report, narrow: bool) -> list[Table]:
    first = report.ranks[0]
    build = ", ".join(
        f"{name} {value}"
        for name, value in first.torch.items()
        if name not in ("git", "distributed", "debug") and value
    )
    packages = _table("package", "version")
    for name, version in first.packages.items():
        packages.add_row(name, f"{version} ({build})" if name == "torch" and build else version or "not installed")
    backends = _table("backend", "usable", "why", *(() if narrow else ("remedy",)))
    for name, one in first.backends.items():
        backends.add_row(name, "yes" if one["usable"] else "no", *_with_remedy(one["reason"], one["remedy"], narrow))
    tables = [packages, backends]
    if first.launch:
        facts = _table("launch" + (f", rank {first.rank}" if report.world_size > 1 else ""), "value", "from")
        for name, words in (("launcher", "launcher"), *FACTS.items()):
            one = {"value": first.launcher, "source": ""} if name == "launcher" else first.launch[name]
            facts.add_row(words, _shown(one["value"]), one["source"])
        tables.append(facts)
    if len(report.ranks) > 1:
        tables.append(_ranks(report))
    interfaces = _table("host", "interface", "addresses", "leads to the master")
    for host in report.hosts()[:_MOST_RANKS]:
        for one in host["interfaces"]:
            leads = "yes" if one["leads_to_master"] else ""
            interfaces.add_row(host["host"], one["name"], ", ".join(one["addresses"]), leads)
    return [*tables, interfaces, _findings(report, narrow)]


def _ranks(report: Report) -> Table:
    table = _table("rank", "host", "pid", "local rank", "clock")
    clocks = {one.rank: one for one in report.clocks}
    for one in report.ranks[:_MOST_RANKS]:
        clock = clocks.get(one.rank if one.rank is not None else -1)
        shown = f"{clock.offset_s * 1e3:+.3f} ± {clock.uncertainty_s * 1e3:.3f} ms" if clock is not None else ""
        table.add_row(str(one.rank), one.host, str(one.pid), _shown(one.launch["local_rank"]["value"]), shown)
    if len(report.ranks) > _MOST_RANKS:
        table.add_row("...", f"{len(report.ranks) - _MOST_RANKS} more: --json lists all")
    return table


def _findings(report: Report, narrow: bool) -> Table:
    table = _table("", "check", "found", *(() if narrow else ("remedy",)))
    good: dict[str, int] = {}
    for one in report.findings:
        good[one.check] = good.get(one.check, 0) + (one.level == "ok")
        if one.level == "ok" and good[one.check] > _MOST_GOOD:
            continue
        cells = _with_remedy(_where(one, report) + one.found, one.remedy, narrow)
        table.add_row(Text(one.level, style=_STYLES[one.level]), one.check, *cells)
    left_out = sum(max(0, number - _MOST_GOOD) for number in good.values())
    if left_out:
        table.add_row(Text("ok", style=_STYLES["ok"]), "...", f"{left_out} more: --json lists all")
    return table


def _with_remedy(text: str, remedy: str, narrow: bool) -> tuple[Text, ...]:
    """Return the cells of a text and its remedy: one below the other where two columns would break words."""
    if not narrow:
        return Text(text), Text(remedy)
    return (Text(f"{text}\n-> {remedy}" if remedy else text),)


def _where(finding: Finding, report: Report) -> str:
    if not finding.ranks or not report.complete or report.world_size == 1:
        return ""
    hosts = dict.fromkeys(one.host for one in report.ranks if one.rank in finding.ranks)
    several = len(report.hosts()) > 1
    on = f" on {', '.join(list(hosts)[:4])}{' and others' if len(hosts) > 4 else ''}" if several else ""
    return f"{format_ranks(finding.ranks)}{on}: "


def _summary(report: Report) -> str:
    counts = {level: sum(one.level == level for one in report.findings) for level in ("problem", "warning")}
    words = [f"{number or 'no'} {level}{'s' if number != 1 else ''}" for level, number in counts.items()]
    return ", ".join(words)


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(Text(name), overflow="fold", no_wrap=name in _WHOLE)
    return table
