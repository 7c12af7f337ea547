"""The hosts of a group's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Layout", "host_count_of", "layout_of", "set_hosts", "spans_hosts"]


@dataclass(frozen=True)
class Layout:
    """A group's ranks by host, of which each has as many.

    Attributes:
        hosts: group ranks of each host, both in the order of ranks.
        host: the position of this rank's host.
        local: the position of this rank on its host.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int

    @property
    def ranks_per_host(self) -> int:
        return len(self.hosts[0])

    def position(self, rank: int) -> tuple[int, int]:
        """Return the positions of the host of a group rank, and of the rank on it."""
        return next((host, ranks.index(rank)) for host, ranks in enumerate(self.hosts) if rank in ranks)

    def __str__(self) -> str:
        return f"{len(self.hosts)} hosts x {self.ranks_per_host} ranks"


class _World:
    host_of: ClassVar[tuple[int, ...]] = ()
    spans_hosts: ClassVar[bool] = False


def set_hosts(host_of: Sequence[int] | None) -> None:
    """Remember the host of each global rank, as a number; None where nobody knows."""
    _World.host_of = tuple(host_of or ())
    _World.spans_hosts = len(set(_World.host_of)) > 1


def spans_hosts() -> bool:
    """Return whether the ranks of the world are known to be on several hosts."""
    return _World.spans_hosts


def host_count_of(ranks: Sequence[int]) -> int:
    """Return on how many hosts the global ``ranks`` are; 1 where nobody knows."""
    known = _World.spans_hosts and max(ranks) < len(_World.host_of)
    return len({_World.host_of[rank] for rank in ranks}) if known else 1


def layout_of(ranks: Sequence[int], own_rank: int) -> Layout | None:
    """Return the layout of a group; None where steps within hosts and between them would not differ from one step.

    That is where the hosts are not known, where there is one host or one rank on each, and where the hosts have
    different numbers of ranks.

    Args:
        ranks: the global ranks of the members.
        own_rank: this process's group rank.
    """
    host_of = _World.host_of
    if not _World.spans_hosts or max(ranks) >= len(host_of):
        return None
    by_host: dict[int, list[int]] = {}
    for position, rank in enumerate(ranks):
        by_host.setdefault(host_of[rank], []).append(position)
    sizes = {len(members) for members in by_host.values()}
    if len(by_host) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    hosts = tuple(tuple(members) for members in by_host.values())
    host = next(place for place, members in enumerate(hosts) if own_rank in members)
    return Layout(hosts, host, hosts[host].index(own_rank))
