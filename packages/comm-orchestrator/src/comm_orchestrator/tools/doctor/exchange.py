"""Exchange reports, clocks and the outcomes of trials between all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import comm_config
from comm_orchestrator import facade, orchestrator
from comm_orchestrator.tools.devices import device_of
from comm_orchestrator.tools.doctor import clocks, local
from comm_orchestrator.tools.doctor.finding import Finding
from comm_orchestrator.tools.doctor.report import RankReport
from comm_orchestrator.tools.doctor.trial import Trial

__all__ = ["Exchanged", "Outcome", "exchange_outcomes", "exchange_reports", "leave", "to_try"]

# Beyond this many ranks one clock a host is measured; the ranks of a host share it anyway.
_MANY_RANKS = 64


@dataclass(frozen=True)
class Exchanged:
    """The reports of all ranks, and their clocks on rank 0."""

    reports: list[RankReport]
    clocks: list[facade.clocks.Clock]


@dataclass(frozen=True)
class Outcome:
    """The report of one rank after the trials."""

    trials: list[Trial]
    clocks: list[facade.clocks.Clock]
    findings: list[Finding]


def _set_up(backends: Mapping[str, Any], settings: comm_config.Settings) -> str:
    """Return the world in which the ranks talk: on gloo, which needs least, where this torch has it."""
    gloo = backends.get("gloo", {}).get("usable", False)
    facade.init_distributed("gloo" if gloo else None, config=settings, verbose=False)
    return str(facade.get_backend())


def _gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * facade.get_world_size()
    facade.all_gather_object(everyone, mine)
    return everyone


def exchange_reports(mine: RankReport, settings: comm_config.Settings, timeout_s: float) -> Exchanged:
    """Exchange reports and compare clocks; called by all ranks.

    Raises:
        CommError: they cannot meet.
    """
    backend = _set_up(mine.backends, settings)
    found = orchestrator.current_launch()
    if found is not None:  # knows more about hosts than the launcher said
        mine = local.with_hosts(mine, found, settings, timeout_s)
    reports = [RankReport.from_plain(one) for one in _gathered(mine.to_plain())]
    measured: list[facade.clocks.Clock] = []
    if len(reports) > 1:
        measured = clocks.measure(_clock_owners(reports), device_of(backend.rpartition(":")[2]))
    facade.destroy_process_group()
    return Exchanged(reports, measured)


def _clock_owners(reports: Sequence[RankReport]) -> list[int]:
    if len(reports) <= _MANY_RANKS:
        return list(range(len(reports)))
    first: dict[tuple[str, int | None], int] = {}
    for rank, one in enumerate(reports):
        first.setdefault((one.host, one.node_rank), rank)
    return sorted(first.values())


def to_try(reports: Sequence[RankReport]) -> list[str]:
    """Return the libraries that all ranks can use."""
    names = [name for name, one in reports[0].backends.items() if one["usable"]]
    return [name for name in names if all(one.backends.get(name, {}).get("usable") for one in reports)]


def exchange_outcomes(
    backends: Mapping[str, Any],
    settings: comm_config.Settings,
    trials: Sequence[Trial],
    measured: Sequence[facade.clocks.Clock],
    findings: Sequence[Finding],
) -> Outcome:
    """Tell all ranks how every rank's trials ended; the world stays up until :func:`leave`."""
    _set_up(backends, settings)
    mine = {
        "trials": [asdict(one) for one in trials],
        "clocks": [asdict(one) for one in measured],
        "findings": [asdict(one) for one in findings],
    }
    everyone = _gathered(mine)
    return Outcome(
        [Trial(**one) for each in everyone for one in each["trials"]],
        [facade.clocks.Clock(**one) for one in everyone[0]["clocks"]],
        [Finding(**one) for each in everyone for one in each["findings"]],
    )


def leave() -> None:
    """Wait for all ranks, and end.

    A launcher ends all ranks when one of them fails, so none may until rank 0 has printed the report.
    """
    facade.barrier()
    facade.destroy_process_group()
