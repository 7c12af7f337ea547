"""Report what the checks found: one report a rank, and one of the whole job that repeats nothing.

``docs/command-line.md`` describes the JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from comm_orchestrator import facade
from comm_orchestrator.rendezvous.records import format_ranks
from comm_orchestrator.tools.doctor import clocks, placement
from comm_orchestrator.tools.doctor.finding import LEVELS, Finding, Level, worst
from comm_orchestrator.tools.doctor.trial import Trial

__all__ = ["RankReport", "Report", "differences", "merge_reports", "of_trials"]


@dataclass(frozen=True)
class RankReport:
    """The report of one rank alone; ``rank`` is None if it is unknown."""

    rank: int | None
    world_size: int
    host: str
    pid: int
    launcher: str = ""
    node_rank: int | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    torch: Mapping[str, Any] = field(default_factory=dict)
    backends: Mapping[str, Any] = field(default_factory=dict)
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    variables: Mapping[str, str] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankReport:
        return RankReport(**{**plain, "findings": [Finding(**one) for one in plain["findings"]]})


@dataclass(frozen=True)
class Report:
    """The summary of a job.

    Attributes:
        complete: every rank is in it; otherwise it is one rank's own view.
        ranks: one entry a rank; ``packages``, ``torch`` and ``backends`` are those of the first.
    """

    complete: bool
    world_size: int
    findings: list[Finding]
    ranks: list[RankReport]
    clocks: list[facade.clocks.Clock]
    trials: list[Trial]

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        return int(self.level == "problem")

    def hosts(self) -> list[dict[str, Any]]:
        """Return each host once, in the order of its first rank."""
        found: dict[tuple[str, int | None], dict[str, Any]] = {}
        for one in self.ranks:
            key = (one.host, one.node_rank)
            new = {"host": one.host, "node_rank": one.node_rank, "ranks": [], "interfaces": one.interfaces}
            found.setdefault(key, new)["ranks"].append(one.rank)
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        first = self.ranks[0]
        own = ("rank", "host", "pid", "launcher", "launch", "variables", "placement")
        keys = ("level", "check", "found", "remedy")
        return {
            "level": self.level,
            "complete": self.complete,
            "world_size": self.world_size,
            "findings": [
                {**{key: getattr(one, key) for key in keys}, "ranks": list(one.ranks)} for one in self.findings
            ],
            "packages": dict(first.packages),
            "torch": dict(first.torch),
            "backends": dict(first.backends),
            "hosts": self.hosts(),
            "ranks": [{key: one.to_plain()[key] for key in own} for one in self.ranks],
            "clocks": [
                {"rank": one.rank, "offset_s": one.offset_s, "uncertainty_s": one.uncertainty_s} for one in self.clocks
            ],
            "collectives": [asdict(one) for one in self.trials],
        }


def merge_reports(
    reports: Sequence[RankReport],
    measured: Sequence[facade.clocks.Clock],
    trials: Sequence[Trial],
    more: Iterable[Finding] = (),
) -> Report:
    """Return one report of those of all ranks.

    Args:
        reports: of all ranks in their order, or of this one alone.
        more: findings that belong to no report, with their ranks.
    """
    size = reports[0].world_size
    complete = len(reports) == size and reports[0].rank is not None
    found = [*_of_ranks(reports), *placement.judge(reports), *differences(reports), *of_trials(trials), *more]
    if measured:
        found += clocks.judge(measured)
    return Report(complete, size, _joined(found, size), list(reports), list(measured), list(trials))


def _of_ranks(reports: Sequence[RankReport]) -> list[Finding]:
    hosts: dict[tuple[str, int | None], list[RankReport]] = {}
    for report in reports:
        hosts.setdefault((report.host, report.node_rank), []).append(report)
    result: list[Finding] = []
    for neighbours in hosts.values():
        ranks = tuple(one.rank for one in neighbours if one.rank is not None)
        for check in dict.fromkeys(one.check for report in neighbours for one in report.findings):
            each = [[one for one in report.findings if one.check == check and one.of_host] for report in neighbours]
            # They looked at the same thing; of amounts that change meanwhile, one is enough.
            chosen = max(each, key=lambda findings: LEVELS.index(worst(findings)))
            result += [replace(one, ranks=ranks) for one in chosen or next(filter(None, each), [])]
            for report in neighbours:
                own = () if report.rank is None else (report.rank,)
                result += [replace(one, ranks=own) for one in report.findings if one.check == check and not one.of_host]
    return result


def _joined(findings: Iterable[Finding], size: int) -> list[Finding]:
    """Return those that say the same, once; what is true of all ranks names none."""
    ranks: dict[tuple[str, ...], set[int]] = {}
    first: dict[tuple[str, ...], Finding] = {}
    for one in findings:
        key = (one.level, one.check, one.found, one.remedy)
        first.setdefault(key, one)
        ranks.setdefault(key, set()).update(one.ranks or range(size))
    joined = [
        replace(one, ranks=() if len(ranks[key]) == size else tuple(sorted(ranks[key]))) for key, one in first.items()
    ]
    checks = list(dict.fromkeys(one.check for one in joined))
    return sorted(joined, key=lambda one: (checks.index(one.check), -LEVELS.index(one.level)))


def differences(reports: Sequence[RankReport]) -> list[Finding]:
    """Return the facts that should be the same on all ranks."""
    first, result = reports[0], []
    for name in first.packages:
        others = [one for one in reports if one.packages.get(name) != first.packages[name]]
        if others:
            theirs = others[0].packages.get(name) or "none"
            text = (
                f"{name} is {first.packages[name] or 'not installed'} on rank {first.rank}, and {theirs} on "
                f"{format_ranks(one.rank for one in others if one.rank is not None)}"
            )
            result.append(Finding("warning", "packages", text, "install the same on every host"))
    for name in dict.fromkeys(name for one in reports for name in one.backends):
        cannot = [one for one in reports if not one.backends.get(name, {}).get("usable")]
        if cannot and len(cannot) < len(reports):
            lacking = cannot[0].backends.get(name, {"reason": "not installed", "remedy": "install what provides it"})
            who = format_ranks(one.rank for one in cannot if one.rank is not None)
            text = f"{name} cannot be used by {who}: {lacking['reason']}"
            result.append(Finding("warning", "backends", text, lacking["remedy"]))
    return result


def of_trials(trials: Sequence[Trial]) -> list[Finding]:
    """Return how each library did, and the ranks that failed."""
    result = []
    for backend in dict.fromkeys(one.backend for one in trials):
        each = [one for one in trials if one.backend == backend]
        good = [one for one in each if not one.error]
        for one in each:
            if one.error:
                text = f"{backend}: {one.error}"
                result.append(Finding("problem", "communication", text, one.remedy, ranks=(one.rank,)))
        if good:
            setup_s = max(one.setup_s or 0.0 for one in good)
            took_s = max(one.all_reduce_s or 0.0 for one in good)
            text = f"{backend}: set up in {setup_s:.2f} s, all_reduce right after {took_s * 1e3:.3g} ms"
            result.append(Finding("ok", "communication", text, ranks=tuple(one.rank for one in good)))
    return result
