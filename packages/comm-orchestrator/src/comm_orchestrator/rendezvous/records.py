"""What each rank tells the others when it arrives, and what is wrong with what they told: pure functions on records."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

__all__ = ["Arrival", "Finding", "check_arrival", "check_devices", "device_indices", "listed", "missing", "places"]

# Settings that mean nothing unless they are the same on every rank; the others may differ, as interface names do.
AGREED_SETTINGS = (
    "process_group.backend",
    "timeouts.collective_s",
    "timeouts.init_s",
    "comms_logger.enabled",
    "comms_logger.prof_all",
    "comms_logger.prof_ops",
    "comms_logger.trace",
)
# torch wraps every group of a rank that has it, and the wrappers talk to each other.
AGREED_VARIABLES = ("TORCH_DISTRIBUTED_DEBUG",)


@dataclass(frozen=True)
class Arrival:
    """One process that came to the meeting.

    Attributes:
        host, host_id: its name, and what tells hosts of one name apart (boot and network namespace).
        program: of its command line.
        address: through which the others can be reached from it; None where nobody knows.
        sources: where ``rank`` and ``world_size`` came from.
        settings: those of :data:`AGREED_SETTINGS`, and :data:`AGREED_VARIABLES`.
        device_type, device_count, visible_devices: what it computes on, how many of them it sees, and the value of the
            variable that chose them.
        obstacles: backend -> why this rank cannot use it.
        within_host: backend -> why this rank can use it within its host only.
        problem: class and text of an error that keeps this rank from going on.
    """

    rank: int
    world_size: int
    host: str
    host_id: str
    pid: int
    program: str = ""
    address: str | None = None
    local_rank: int | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    device_type: str = "cpu"
    device_count: int = 0
    visible_devices: str | None = None
    obstacles: Mapping[str, str | None] = field(default_factory=dict)
    within_host: Mapping[str, str] = field(default_factory=dict)
    problem: Sequence[str] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"

    @property
    def process(self) -> str:
        return f"pid {self.pid} on {self.host}" + (f", {self.program}" if self.program else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Arrival:
        """Read the record of a rank that may run another version of this package, which is for others to find out."""
        known = {one.name for one in fields(Arrival)}
        return Arrival(**{name: value for name, value in json.loads(text).items() if name in known})


@dataclass(frozen=True)
class Finding:
    """Why the ranks cannot go on: the name of an error class of ``comm_utils.errors``, and its message."""

    kind: str
    message: str


def listed(ranks: Iterable[int], most: int = 8) -> str:
    """``rank 3`` or ``ranks 0-3, 7``; of many only the first, and how many more."""
    numbers = sorted(ranks)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs[:most]]
    rest = len(numbers) - sum(b - a + 1 for a, b in runs[:most])
    more = f" and {rest} more" if rest else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(texts)}{more}"


def places(arrivals: Iterable[Arrival]) -> str:
    """Who is here, by host: ``ranks 0, 1 on host-a, rank 2 on host-b``."""
    hosts: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for one in arrivals:
        hosts.setdefault(one.host_id, []).append(one.rank)
        names[one.host_id] = one.host
    texts = [f"{listed(ranks)} on {names[host_id]}" for host_id, ranks in hosts.items()]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more hosts" if len(texts) > 8 else "")


def missing(here: Mapping[int, Arrival], world_size: int, waited_s: float) -> Finding:
    """Some ranks did not come in time."""
    absent = [rank for rank in range(world_size) if rank not in here]
    them = "it" if len(absent) == 1 else "they"
    return Finding(
        "CommTimeoutError",
        f"{listed(absent)} of {world_size} did not come within {waited_s:g} s ({places(here.values()) or 'nobody'} "
        f"came); check that {'it was' if len(absent) == 1 else 'they were'} started, and what {them} printed",
    )


def check_arrival(first: Arrival, here: Mapping[int, Arrival], new: Arrival) -> Finding | None:
    """Whether ``new`` fits those that are ``here`` already, of whom ``first`` came first."""
    if new.problem is not None:
        return Finding(new.problem[0], f"{new} cannot go on: {new.problem[1]}")
    if new.world_size != first.world_size:
        return Finding(
            "LaunchError",
            f"the ranks disagree on the world size: {_says(first, 'world_size')}, but {_says(new, 'world_size')}; "
            "start all of them with the same one",
        )
    twin = here.get(new.rank)
    if twin is not None:
        return Finding(
            "LaunchError",
            f"two processes have rank {new.rank}: {twin.process} ({twin.sources.get('rank', 'launcher')}), and "
            f"{new.process} ({new.sources.get('rank', 'launcher')}); give every process a rank of its own, and, if one "
            "of them belongs to another job, this one a MASTER_PORT of its own",
        )
    for name in dict.fromkeys((*first.versions, *new.versions)):
        if first.versions.get(name) != new.versions.get(name):
            return Finding(
                "LaunchError",
                f"the ranks run different versions of {name}: {first} has {first.versions.get(name, 'none')}, {new} "
                f"has {new.versions.get(name, 'none')}; install the same on every host",
            )
    for key in dict.fromkeys((*first.settings, *new.settings)):
        if first.settings.get(key) != new.settings.get(key):
            return Finding(
                "LaunchError",
                f"the ranks disagree on the setting {key}: {first} has {first.settings.get(key)!r}, {new} has "
                f"{new.settings.get(key)!r}; give every rank the same arguments, COMM_* variables and configuration",
            )
    return None


def _says(one: Arrival, name: str) -> str:
    return f"{one} says {getattr(one, name)} ({one.sources.get(name, 'launcher')})"


def check_devices(arrivals: Sequence[Arrival], kinds: Iterable[str]) -> Finding | None:
    """Whether every rank has a device of its own where one of ``kinds`` is what the backend needs."""
    wanted = set(kinds) - {"cpu"}
    for host_ranks in _by_host(arrivals):
        users = [one for one in host_ranks if one.device_type in wanted]
        if not users or _private(users):
            continue
        short = [one for one in users if len(users) > one.device_count]
        if short:
            one = short[0]
            return Finding(
                "LaunchError",
                f"{len(users)} ranks on {one.host} ({listed(user.rank for user in users)}) have {one.device_count} "
                f"{one.device_type} device{'s' if one.device_count != 1 else ''} between them; start at most as "
                "many processes a host as it has devices, or choose a CPU backend with dist_backend='gloo'",
            )
    return None


def device_indices(arrivals: Sequence[Arrival]) -> dict[int, int]:
    """rank -> index of the device it is to use: its local rank, or the only one where each was given its own."""
    result: dict[int, int] = {}
    for host_ranks in _by_host(arrivals):
        private = _private(host_ranks)
        for position, one in enumerate(host_ranks):
            local = one.local_rank if one.local_rank is not None else position
            alone = len(host_ranks) == 1 == one.device_count
            result[one.rank] = 0 if private or alone else local
    return result


def _private(users: Sequence[Arrival]) -> bool:
    """Whether the launcher shows every process a device of its own, as ``srun --gpus-per-task=1`` does."""
    visible = [one.visible_devices for one in users]
    return all(visible) and len(set(visible)) == len(visible) and all(one.device_count == 1 for one in users)


def _by_host(arrivals: Sequence[Arrival]) -> list[list[Arrival]]:
    hosts: dict[str, list[Arrival]] = {}
    for one in sorted(arrivals, key=lambda one: one.rank):
        hosts.setdefault(one.host_id, []).append(one)
    return list(hosts.values())
