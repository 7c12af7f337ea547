"""Check of the launch facts of this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comm_config
from comm_orchestrator import rank_discovery
from comm_orchestrator.report import FACTS
from comm_orchestrator.tools.doctor.finding import Finding, from_error, warnings_logged
from comm_utils.errors import CommError
from comm_utils.launch import LaunchInfo

__all__ = ["as_table", "find", "over_several_hosts"]

_MEETING = ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def find(environ: Mapping[str, str], settings: comm_config.Settings) -> tuple[LaunchInfo | None, list[Finding]]:
    """Return the launch facts of this process, None if they are unknown, and warnings about their sources."""
    elsewhere = settings.process_group.init_method is not None
    try:
        with warnings_logged() as warnings:
            launch = rank_discovery.find(environ, -1, -1, settings, elsewhere)
    except CommError as error:
        return None, [from_error("launch", error)]
    findings = [
        Finding("warning", "launch", text, "unset the variables that are left over from another launcher")
        for text in dict.fromkeys(warnings)
    ]
    stale = [name for name in _MEETING if name in environ]
    if launch.launcher == "none" and stale:
        text = f"{', '.join(stale)} set, but nothing says which rank this is: a world of one"
        remedy = f"unset {' '.join(stale)}, or set RANK and WORLD_SIZE as well"
        findings.append(Finding("warning", "launch", text, remedy))
    if launch.world_size > 1 and launch.master_addr is None and not elsewhere:
        text = f"{launch.launcher} announced {launch.world_size} ranks, but nobody says where they meet"
        remedy = "set MASTER_ADDR to the host of rank 0 (and MASTER_PORT)"
        findings.append(Finding("problem", "launch", text, remedy))
    if not findings:
        by = (
            "nobody launched this process with others"
            if launch.launcher == "none"
            else f"launched by {launch.launcher}"
        )
        findings.append(Finding("ok", "launch", f"{by}; world size {launch.world_size}"))
    return launch, findings


def as_table(launch: LaunchInfo) -> dict[str, dict[str, Any]]:
    """Return field -> its value and where that came from."""
    return {
        name: {
            "value": getattr(launch, name),
            "source": launch.sources.get(name, launch.launcher) if getattr(launch, name) is not None else "not known",
        }
        for name in (*FACTS, "job_id")
    }


def over_several_hosts(launch: LaunchInfo) -> bool:
    """Return whether there are ranks on other hosts, as far as one can tell: a launcher may not say."""
    return launch.world_size > (launch.local_world_size or 1)
