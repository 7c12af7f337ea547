"""Everything that a rank can check alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import comm_config
from comm_orchestrator import facade, interfaces, orchestrator
from comm_orchestrator.tools.doctor import launch, limits, network, placement, processes, software, variables
from comm_orchestrator.tools.doctor.finding import Finding, from_error, guarded, warnings_logged, worst
from comm_orchestrator.tools.doctor.report import RankReport
from comm_orchestrator.tools.doctor.time_limit import within
from comm_utils import topology
from comm_utils.errors import ConfigurationError
from comm_utils.host_identity import host_name
from comm_utils.launch import LaunchInfo

__all__ = ["Local", "examine", "with_hosts"]


@dataclass(frozen=True)
class Local:
    """A rank's report, and what it needs to meet the others; None where that cannot be had."""

    report: RankReport
    launch: LaunchInfo | None
    settings: comm_config.Settings | None


def examine(timeout_s: float) -> Local:
    """Check this process, its host and its surroundings."""
    findings: list[Finding] = []
    settings, warnings = _settings(timeout_s, findings)
    known = settings or comm_config.resolve(environ={})
    environ = dict(os.environ)
    applied = {**environ, **known.variables}
    found, build = software.versions(), software.torch_build()
    findings += guarded("packages", lambda: software.check_packages(found, build))
    available = facade.available_backends()
    findings += guarded("backends", lambda: software.check_backends(available, known))
    info, launch_findings = _launch(environ, known, timeout_s)
    findings += launch_findings
    findings += guarded("variables", lambda: variables.check(applied, warnings))
    addresses = interfaces.addresses()
    nccl = "nccl" in available and available["nccl"].usable
    findings += _of_host(info, applied, addresses, nccl, timeout_s)
    if info is not None:
        one, default = info, known.launch.master_port
        findings += guarded("port", lambda: network.check_port(one, environ, default))
    world_size = info.world_size if info is not None else 1
    rank, local_size = (info.rank, info.local_world_size or 1) if info is not None else (0, 1)
    findings += guarded("open_files", lambda: limits.check_open_files(rank, world_size, local_size))
    findings += guarded("processes", processes.check_processes)
    report = RankReport(
        info.rank if info is not None else None,
        world_size,
        host_name(),
        os.getpid(),
        launcher=info.launcher if info is not None else "",
        node_rank=info.node_rank if info is not None else None,
        launch=launch.as_table(info) if info is not None else {},
        packages=found,
        torch=build,
        backends={name: dict(vars(one)) for name, one in sorted(available.items())},
        interfaces=network.interface_rows(info.master_addr if info is not None else None, addresses),
        variables=variables.relevant(environ),
        placement=placement.as_table(topology.this_placement(), topology.cpus_of_launcher()),
        findings=findings,
    )
    return Local(report, info, settings)


def _of_host(
    info: LaunchInfo | None, applied: Mapping[str, str], addresses: interfaces.Addresses, nccl: bool, timeout_s: float
) -> list[Finding]:
    """Return the findings that depend on which ranks share a host."""
    findings: list[Finding] = []
    if info is not None:
        one = info
        findings += guarded("names", lambda: network.check_host_names(one, addresses, min(timeout_s, 10.0)))
        master = one.master_addr if worst(findings) != "problem" else None
        findings += guarded("interfaces", lambda: network.check_interfaces(one, master, applied, addresses, nccl))
    local_ranks = (info.local_world_size if info is not None else None) or 1
    return findings + guarded("shared_memory", lambda: limits.check_shared_memory(local_ranks))


def with_hosts(report: RankReport, met: LaunchInfo, settings: comm_config.Settings, timeout_s: float) -> RankReport:
    """``report`` with what the launcher had not said about hosts, and what follows from it."""
    known = report.launch.get("local_world_size", {}).get("value") is not None
    report = replace(report, launch=launch.as_table(met), node_rank=met.node_rank)
    if known or met.local_world_size is None:
        return report
    nccl = bool(report.backends.get("nccl", {}).get("usable"))
    applied = {**os.environ, **settings.variables}
    found = _of_host(met, applied, interfaces.addresses(), nccl, timeout_s)
    again = {one.check for one in found}
    return replace(report, findings=[*(one for one in report.findings if one.check not in again), *found])


def _settings(timeout_s: float, findings: list[Finding]) -> tuple[comm_config.Settings | None, list[str]]:
    """Return the configuration in force, with time limits that suit a check; and what reading it warned of."""
    with warnings_logged() as warnings:
        try:
            settings = orchestrator.load_config(
                None, timeouts__init_s=timeout_s, timeouts__collective_s=timeout_s, comms_logger__enabled=False
            )
        except ConfigurationError as error:
            reported = from_error("configuration", error)
            findings.append(
                Finding("problem", "configuration", reported.found, reported.remedy or "correct or unset it")
            )
            return None, warnings
    origins = set(settings.sources.values()) - {"default", "argument"}
    text = f"read from {', '.join(sorted(origins))}" if origins else "all settings are defaults"
    findings.append(Finding("ok", "configuration", text))
    return settings, warnings


def _launch(
    environ: dict[str, str], settings: comm_config.Settings, timeout_s: float
) -> tuple[LaunchInfo | None, list[Finding]]:
    try:
        # MPI may be asked, and may hang.
        return within(timeout_s, lambda: launch.find(environ, settings), "asking the launcher")
    except Exception as error:
        return None, [from_error("launch", error)]
