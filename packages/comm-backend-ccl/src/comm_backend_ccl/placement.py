"""The placement of a group's ranks on the host: whether they share hardware threads, and who is near to whom."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from comm_utils import topology
from comm_utils.errors import ArgumentError

__all__ = ["Place", "are_oversubscribed", "cache_share", "decoded", "mine", "reading_order"]

_Item = TypeVar("_Item")
# The cache, the node and the package of a place.
_Units: TypeAlias = tuple[int | None, ...]


class Place(NamedTuple):
    """The place of a rank on its host.

    Attributes:
        cpus: the hardware threads on which it may run; empty is unknown.
        cache: the first hardware thread of its last-level cache; None where it has several, or that is not known.
        node: its NUMA node, in the same way.
        package: its socket, in the same way.
    """

    cpus: frozenset[int]
    cache: int | None = None
    node: int | None = None
    package: int | None = None

    @classmethod
    def of(cls, placement: topology.Placement) -> Place:
        caches = [min(one) for one in placement.caches]
        units = (found[0] if len(found) == 1 else None for found in (caches, placement.nodes, placement.packages))
        return cls(placement.cpus, *units)

    def encoded(self) -> list[Any]:
        return [topology.format_cpu_list(self.cpus), self.cache, self.node, self.package]


def mine() -> Place:
    """Return where this thread runs."""
    return Place.of(topology.this_placement())


def decoded(found: object) -> Place:
    """Return the place that a peer :meth:`encoded <Place.encoded>`; what is no such thing is unknown."""
    if not isinstance(found, list) or len(found) != 4 or not isinstance(found[0], str):
        return Place(frozenset())
    try:
        cpus = topology.parse_cpu_list(found[0])
    except ArgumentError:
        return Place(frozenset())
    return Place(cpus, *(one if type(one) is int else None for one in found[1:]))


def are_oversubscribed(places: Sequence[Place], of_launcher: frozenset[int]) -> bool:
    """Return whether ranks share hardware threads: those of this group, or those of all ranks of the host.

    Args:
        of_launcher: the hardware threads on which the ranks of the host were started.
    """
    # Ranks that were bound one by one have others than their launcher, which may be bound as well, as a wrapper is.
    bound = any(one.cpus != places[0].cpus for one in places)
    host_cpus = os.cpu_count() if bound else len(of_launcher)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and host_cpus and int(local) > host_cpus:
        return True
    return bool(topology.overcommitted({rank: one.cpus for rank, one in enumerate(places)}))


def cache_share(places: Sequence[Place], rank: int, cache_bytes: int) -> int:
    """Return the part of a rank's last-level cache that each rank of the group which shares it has, in bytes.

    Args:
        cache_bytes: the whole cache; 0 is unknown, and so is its part.
    """
    own = places[rank].cache
    # Ranks whose cache is not known may have any.
    return cache_bytes // sum(own is None or one.cache in (own, None) for one in places)


def reading_order(places: Sequence[Place], rank: int) -> list[int]:
    """Return the other ranks in the order in which ``rank`` reads from them, near ones first.

    Ranks with the same last-level cache, node and package are neighbours. A rank begins with its own neighbours, goes
    on with groups of neighbours that share its cache, its node or its package, and ends with the others. Ranks that
    are equally far from some groups begin with different ones of these, and with different members: where groups have
    equal sizes, no two ranks read from the same peer at the same time.
    """
    groups: dict[_Units, list[int]] = {}
    for one, place in enumerate(places):
        groups.setdefault(place[1:], []).append(one)
    own = places[rank][1:]
    # Those of a package lie side by side, and those of a node among them.
    units = sorted(groups, key=lambda one: tuple(-1 if unit is None else unit for unit in reversed(one)))
    here, position = units.index(own), groups[own].index(rank)
    turned = _turned(groups[own], position)[1:]
    for distance in range(1, len(own) + 2):
        ring = _turned(units, here)
        far = [one for one in ring if _distance(own, one) == distance]
        nearer = sum(_distance(own, one) < distance for one in units[:here])
        for unit in _turned(far, nearer):
            turned += _turned(groups[unit], position)
    return turned


def _turned(items: Sequence[_Item], by: int) -> list[_Item]:
    """Return ``items`` as a ring that begins ``by`` items later."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


def _distance(one: _Units, other: _Units) -> int:
    """Return 0 for neighbours, else 1 and more: how many kinds of units they do not share, from the smallest on."""
    if one == other:
        return 0
    shared = (mine is not None and mine == theirs for mine, theirs in zip(one, other, strict=True))
    return 1 + next((level for level, is_shared in enumerate(shared) if is_shared), len(one))
