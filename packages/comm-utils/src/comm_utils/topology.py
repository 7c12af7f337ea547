"""The topology below a process: its hardware threads, cores, last-level caches, NUMA nodes and packages, from sysfs.

Files of sysfs may be missing, as in containers and virtual machines, or hold anything; what they do not say is absent
from the result.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from comm_utils.errors import ArgumentError

__all__ = [
    "MOST_CPUS",
    "SYSFS",
    "Placement",
    "allowed_cpus",
    "cpus_of_launcher",
    "format_cpu_list",
    "overcommitted",
    "parse_cpu_list",
    "read_placement",
    "this_placement",
]

SYSFS = Path("/sys")
#: Linux is built for up to 8192; a larger number is no cpu.
MOST_CPUS = 1 << 14
# Of a list that names every second cpu.
_MOST_BYTES = 1 << 16
_MOST_NODES = 1 << 10
_MOST_CACHES = 16


@dataclass(frozen=True)
class Placement:
    """The place of a set of hardware threads; units are in ascending order of their first thread.

    Attributes:
        cpus: the hardware threads, by Linux's numbers.
        cores: the hardware threads of each physical core, with those that are not in ``cpus``.
        caches: the same for each last-level cache; those that sysfs does not name are absent.
        nodes: the numbers of the NUMA nodes.
        packages: the numbers of the sockets.
        cache_bytes: the size of the smallest of ``caches``; 0 where sysfs does not say.
    """

    cpus: frozenset[int]
    cores: tuple[frozenset[int], ...] = ()
    caches: tuple[frozenset[int], ...] = ()
    nodes: tuple[int, ...] = ()
    packages: tuple[int, ...] = ()
    cache_bytes: int = 0


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return the cpus of a list such as ``0-3,8``, in time and memory that :data:`MOST_CPUS` bounds.

    Raises:
        ArgumentError: it is no such list, or names a cpu beyond the bound.
    """
    if len(text) > _MOST_BYTES:
        raise ArgumentError(f"a list of cpus: got {len(text)} characters, expected {_MOST_BYTES} at most")
    cpus: set[int] = set()
    count = 0
    for part in text.strip().split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(one.isascii() and one.isdigit() and len(one) <= len(str(MOST_CPUS)) for one in numbers):
            raise ArgumentError(f"a list of cpus: got {part[:40]!r}, expected a number or a range such as 0-3")
        begin, end = int(numbers[0]), int(numbers[-1])
        # Ranges may repeat, but not without end.
        count += end - begin + 1
        if begin > end or end >= MOST_CPUS or count > MOST_CPUS:
            raise ArgumentError(f"a list of cpus: got {part[:40]!r}, expected ascending ranges of {MOST_CPUS} at most")
        cpus.update(range(begin, end + 1))
    return frozenset(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Return cpus as a list of ranges, as Linux and ``taskset`` write it: ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if ranges and ranges[-1][1] == cpu - 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) <= 9 else None


def _bytes(file: Path) -> int:
    """Return a size that is written in KiB, as ``32768K``; 0 where the file has none."""
    text = _text(file) or ""
    number = text.removesuffix("K")
    is_size = text != number and number.isascii() and number.isdigit() and len(number) <= 9
    return int(number) << 10 if is_size else 0


def _cpus(file: Path) -> frozenset[int] | None:
    text = _text(file)
    try:
        return None if text is None else parse_cpu_list(text)
    except ArgumentError:
        return None


def read_placement(cpus: Iterable[int], sysfs: Path = SYSFS) -> Placement:
    """Return where ``cpus`` lie, by the files below ``sysfs``. Never raises for what these hold.

    A core whose threads sysfs does not name counts as a core of each thread.
    """
    wanted = frozenset(cpus)
    processors = sysfs / "devices/system/cpu"
    cores: set[frozenset[int]] = set()
    caches: dict[frozenset[int], int] = {}
    packages: set[int] = set()
    in_core: set[int] = set()
    in_cache: set[int] = set()
    for cpu in sorted(wanted):
        folder = processors / f"cpu{cpu}"
        if cpu not in in_core:
            core = _siblings(folder / "topology", cpu)
            cores.add(core)
            in_core |= core
            package = _number(folder / "topology/physical_package_id")
            if package is not None:
                packages.add(package)
        if cpu not in in_cache and (cache := _last_cache(folder / "cache", cpu)) is not None:
            caches[cache[0]] = cache[1]
            in_cache |= cache[0]
    nodes = _nodes(wanted, sysfs / "devices/system/node")
    by_first = tuple(sorted(cores, key=min)), tuple(sorted(caches, key=min))
    return Placement(wanted, *by_first, nodes, _sorted(packages), min(caches.values(), default=0))


def _sorted(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(numbers))


def _siblings(folder: Path, cpu: int) -> frozenset[int]:
    found = _cpus(folder / "thread_siblings_list") or _cpus(folder / "core_cpus_list")
    return found if found is not None and cpu in found else frozenset((cpu,))


def _last_cache(folder: Path, cpu: int) -> tuple[frozenset[int], int] | None:
    """Return the cpus that share the cache of the highest level, and its bytes; of instructions alone there is none."""
    found: dict[int, tuple[frozenset[int], int]] = {}
    for index in range(_MOST_CACHES):
        one = folder / f"index{index}"
        cpus = _cpus(one / "shared_cpu_list")
        if cpus is None or cpu not in cpus or _text(one / "type") == "Instruction":
            continue
        level = _number(one / "level")
        found[index if level is None else level] = cpus, _bytes(one / "size")
    return found[max(found)] if found else None


def _nodes(cpus: frozenset[int], folder: Path) -> tuple[int, ...]:
    online = _cpus(folder / "online")
    if online is None:
        try:
            names = [entry.name[4:] for entry in os.scandir(folder) if entry.name.startswith("node")]
        except OSError:
            return ()
        online = frozenset(int(name) for name in names if name.isascii() and name.isdigit() and len(name) <= 4)
    here = (one for one in sorted(online)[:_MOST_NODES] if cpus & (_cpus(folder / f"node{one}/cpulist") or frozenset()))
    return tuple(here)


def allowed_cpus(pid: int = 0) -> frozenset[int]:
    """Return the hardware threads on which a process may run, 0 being this thread; empty where that is not known."""
    try:
        return frozenset(os.sched_getaffinity(pid))
    except (AttributeError, OSError):
        return frozenset()


def cpus_of_launcher() -> frozenset[int]:
    """Return the hardware threads of this process and of its parent: all ranks of the host have them together.

    A launcher that binds its ranks one by one is not bound as they are; what binds the launcher binds all of them.
    """
    return allowed_cpus() | allowed_cpus(os.getppid())


def this_placement() -> Placement:
    """Return where this thread may run now."""
    return _of_this_host(allowed_cpus())


@functools.lru_cache(maxsize=8)
def _of_this_host(cpus: frozenset[int]) -> Placement:
    return read_placement(cpus)


def overcommitted(units: Mapping[int, frozenset[int]]) -> list[tuple[tuple[int, ...], frozenset[int]]]:
    """Return the ranks that cannot all have a unit of their own, each group of them with the units that it has.

    Args:
        units: of each rank, such as the hardware threads on which it may run; a rank without any is left out.

    Returns:
        Groups of ranks with fewer units than ranks (P. Hall, "On Representatives of Subsets", 1935), found by a maximum
        matching; no two groups share a unit. Empty where every rank can have a unit of its own.
    """
    owners: dict[int, int] = {}
    # A rank with as many units as there are ranks always finds one.
    choosy = {rank: one for rank, one in units.items() if 0 < len(one) < len(units)}
    left = [rank for rank in sorted(choosy) if not _give_unit(rank, choosy, owners, set())]
    groups: list[tuple[set[int], set[int]]] = []
    for rank in left:
        ranks = {rank}
        reached: set[int] = set()
        waiting = [rank]
        while waiting:
            for unit in choosy[waiting.pop()] - reached:
                reached.add(unit)
                if owners[unit] not in ranks:
                    ranks.add(owners[unit])
                    waiting.append(owners[unit])
        for other in [one for one in groups if one[1] & reached]:
            groups.remove(other)
            ranks |= other[0]
            reached |= other[1]
        groups.append((ranks, reached))
    return [(_sorted(ranks), frozenset(reached)) for ranks, reached in sorted(groups, key=lambda one: min(one[0]))]


def _give_unit(rank: int, units: Mapping[int, frozenset[int]], owners: dict[int, int], seen: set[int]) -> bool:
    """Find a unit for ``rank``, moving others to another of theirs."""
    for unit in sorted(units[rank]):
        if unit in seen:
            continue
        seen.add(unit)
        if unit not in owners or _give_unit(owners[unit], units, owners, seen):
            owners[unit] = rank
            return True
    return False
