"""What the checks put together: of one rank, and of all of them. ``docs/command-line.md`` describes the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from comm_orchestrator.tools.doctor.clocks import Clock
from comm_orchestrator.tools.doctor.finding import Finding, Level, worst
from comm_orchestrator.tools.doctor.trial import Trial

__all__ = ["RankReport", "Report"]


@dataclass(frozen=True)
class RankReport:
    """What one rank found out alone; ``rank`` is None where it could not tell."""

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
    findings: list[Finding] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> RankReport:
        return RankReport(**{**plain, "findings": [Finding(**one) for one in plain["findings"]]})


@dataclass(frozen=True)
class Report:
    """What there is to say about a job.

    Attributes:
        complete: every rank is in it; otherwise it is one rank's own view.
        ranks: one entry a rank; ``packages``, ``torch`` and ``backends`` are those of the first.
    """

    complete: bool
    world_size: int
    findings: list[Finding]
    ranks: list[RankReport]
    clocks: list[Clock]
    trials: list[Trial]

    @property
    def level(self) -> Level:
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        return int(self.level == "problem")

    def hosts(self) -> list[dict[str, Any]]:
        """Each host once, in the order of its first rank."""
        found: dict[tuple[str, int | None], dict[str, Any]] = {}
        for one in self.ranks:
            key = (one.host, one.node_rank)
            new = {"host": one.host, "node_rank": one.node_rank, "ranks": [], "interfaces": one.interfaces}
            found.setdefault(key, new)["ranks"].append(one.rank)
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        first = self.ranks[0]
        own = ("rank", "host", "pid", "launcher", "launch", "variables")
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
            "clocks": [asdict(one) for one in self.clocks],
            "collectives": [asdict(one) for one in self.trials],
        }
