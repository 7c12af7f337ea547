"""The launch facts of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from types import MappingProxyType

from comm_utils.errors import LaunchError

__all__ = ["LaunchInfo", "integer"]

_INTEGERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "master_port")
_TEXTS = ("launcher", "master_addr", "job_id")
_REQUIRED = ("launcher", "rank", "world_size")


@dataclass(frozen=True)
class LaunchInfo:
    """The launch facts of this process; ``sources`` names the source of each field's value.

    Attributes:
        launcher: name of what started the process, such as ``"torchrun"``.
        rank, world_size: position among all processes, and their number.
        local_rank, local_world_size: the same among the processes of this host; None where the launcher does not say.
        node_rank: position of this host; None where the launcher does not say.
        master_addr, master_port: where the ranks meet; None where nobody said (a single process needs neither).
        job_id: the same on all ranks, and another one in other jobs or steps; None where the launcher does not say.

    Raises:
        LaunchError: a value is of another type or out of range, or two of them contradict each other.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    job_id: str | None = None
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        self._check_types()
        if self.world_size < 1:
            raise LaunchError(f"world size: got {self.world_size} ({self._source('world_size')}); expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank: got {self.rank} ({self._source('rank')}); expected 0 to {self.world_size - 1} "
                f"for a world size of {self.world_size} ({self._source('world_size')})"
            )
        self._check_host()
        self._check_master()

    def _check_types(self) -> None:
        for names, kind, expected in ((_INTEGERS, Integral, "an integer"), (_TEXTS, str, "text")):
            for name in names:
                value = getattr(self, name)
                if value is None and name not in _REQUIRED:
                    continue
                if not isinstance(value, kind) or isinstance(value, bool):
                    what = f"{name.replace('_', ' ')}: got {value!r:.200}, of type {type(value).__name__}"
                    raise LaunchError(f"{what} ({self._source(name)}); expected {expected}")
                if kind is Integral:  # JSON knows no other type, such as numpy's
                    object.__setattr__(self, name, int(value))

    def _check_host(self) -> None:
        if self.local_rank is not None and self.local_rank < 0:
            raise LaunchError(f"local rank: got {self.local_rank} ({self._source('local_rank')}); expected 0 or more")
        if self.node_rank is not None and self.node_rank < 0:
            raise LaunchError(f"node rank: got {self.node_rank} ({self._source('node_rank')}); expected 0 or more")
        if self.local_world_size is None:
            return
        size = f"local world size: got {self.local_world_size} ({self._source('local_world_size')})"
        if self.local_world_size < 1:
            raise LaunchError(f"{size}; expected at least 1")
        if self.local_rank is not None and self.local_rank >= self.local_world_size:
            raise LaunchError(
                f"local rank: got {self.local_rank} ({self._source('local_rank')}); expected less than the local world "
                f"size of {self.local_world_size} ({self._source('local_world_size')})"
            )

    def _check_master(self) -> None:
        if self.master_addr is not None and not self.master_addr.strip():
            raise LaunchError(
                f"master address: got {self.master_addr!r:.200} ({self._source('master_addr')}); "
                "expected a host name or an IP address"
            )
        if self.master_port is not None and not 0 <= self.master_port <= 65535:
            raise LaunchError(
                f"master port: got {self.master_port} ({self._source('master_port')}); expected 0 to 65535"
            )

    def _source(self, name: str) -> str:
        return self.sources.get(name, str(self.launcher))


def integer(environ: Mapping[str, str], variable: str) -> int:
    """Return the value of a variable that a launcher sets to an integer.

    Raises:
        LaunchError: it is something else; names the variable.
    """
    try:
        return int(environ[variable])
    except ValueError:
        raise LaunchError(
            f"environment variable {variable}: got {environ[variable]!r:.60}; expected an integer: correct or unset it"
        ) from None
