"""Collects what a launcher's variables say, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comm_utils.errors import LaunchError
from comm_utils.launch.info import LaunchInfo, integer
from comm_utils.launch.ports import derived_port

__all__ = ["LOOPBACK", "Facts"]

LOOPBACK = "127.0.0.1"


class Facts:
    """The fields of a :class:`LaunchInfo` in the making. What was said first stays."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[str, Any] = {}
        self._sources: dict[str, str] = {}

    def number(self, field: str, *variables: str) -> int | None:
        """Take ``field`` from the first of ``variables`` that is set, and return its value.

        Raises:
            LaunchError: it is not an integer; names the variable.
        """
        for variable in variables:
            if variable in self._environ:
                self.derive(field, integer(self._environ, variable), f"environment variable {variable}")
                break
        return self._values.get(field)

    def text(self, field: str, *variables: str) -> str | None:
        """Do :meth:`number` for a field that is a string."""
        for variable in variables:
            if variable in self._environ:
                self.derive(field, self._environ[variable], f"environment variable {variable}")
                break
        return self._values.get(field)

    def derive(self, field: str, value: int | str, source: str) -> None:
        """Set ``field`` unless it is set already; ``source`` says how ``value`` was found."""
        if field not in self._values:
            self._values[field] = value
            self._sources[field] = source

    def adopt(self, info: LaunchInfo) -> None:
        """Take over what another launcher's module found out about the processes, but not where they meet."""
        for field in ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "job_id"):
            value = getattr(info, field)
            if value is not None:
                self.derive(field, value, info.sources.get(field, info.launcher))

    def master(self) -> None:
        """``MASTER_ADDR`` and ``MASTER_PORT``, which win over what a launcher says: ask for them first."""
        self.text("master_addr", "MASTER_ADDR")
        self.number("master_port", "MASTER_PORT")

    def one_host(self) -> None:
        """Use the loopback address, and node rank 0, if all ranks are on this host.

        Raises:
            LaunchError: this host has more ranks than there are in all.
        """
        size, local_size = self._values.get("world_size"), self._values.get("local_world_size")
        if size is not None and local_size is not None and local_size > size:
            raise LaunchError(
                f"local world size: got {local_size} ({self._sources['local_world_size']}); expected at most the world "
                f"size of {size} ({self._sources['world_size']})"
            )
        if size is not None and size in (1, local_size):
            self.derive("node_rank", 0, "all ranks are on this host")
            self.derive("master_addr", LOOPBACK, "all ranks are on this host")

    def port(self) -> None:
        """Derive the port from the job's id, so that two jobs that share a host do not meet."""
        if "job_id" in self._values:
            self.derive("master_port", derived_port(self._values["job_id"]), f"derived from {self._sources['job_id']}")

    def info(self, launcher: str) -> LaunchInfo:
        """Return the finished facts.

        Raises:
            LaunchError: they contradict each other.
        """
        return LaunchInfo(launcher, sources=self._sources, **self._values)
