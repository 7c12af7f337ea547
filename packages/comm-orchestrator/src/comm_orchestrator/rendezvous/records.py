"""Hold the record that each rank writes at the start, and find contradictions between records: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from comm_utils.errors import LaunchError
from comm_utils.rank_processes import has_ended

__all__ = [
    "AGREED_SETTINGS",
    "AGREED_VARIABLES",
    "RankRecord",
    "Refusal",
    "check_devices",
    "check_record",
    "device_indices",
    "format_hosts",
    "format_ranks",
    "lost_rank",
    "missing_ranks",
]

# Settings that mean nothing unless they are the same on every rank; the others may differ, as interface names do.
AGREED_SETTINGS = (
    "process_group.backend",
    "timeouts.collective_s",
    "timeouts.init_s",
    "comms_logger.enabled",
    "comms_logger.prof_all",
    "comms_logger.prof_ops",
    "comms_logger.trace",
    "reductions.deterministic",
    "reductions.compensated",
    "checks.mismatch",
)
# torch wraps every group of a rank that has it, and the wrappers talk to each other.
AGREED_VARIABLES = ("TORCH_DISTRIBUTED_DEBUG",)


@dataclass(frozen=True)
class RankRecord:
    """One process that takes part in the rendezvous.

    Attributes:
        host, host_id: its name, and what tells hosts of one name apart (boot and network namespace).
        program: of its command line.
        pid_space, started: what processes that see each other's pids have in common, and when this one began, in clock
            ticks since boot; empty and 0 where that is not known.
        address: of its host, towards rank 0; None where it is not known.
        sources: where ``rank`` and ``world_size`` came from.
        settings: those of :data:`AGREED_SETTINGS`, and :data:`AGREED_VARIABLES`.
        device_type, device_count, visible_devices: what it computes on, how many of them it sees, and the value of the
            variable that chose them.
        unavailable_reasons: backend -> why this rank cannot use it; None where it can.
        within_host: backend -> why this rank can use it only within its host.
        problem: class and text of an error that keeps this rank from starting.
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
    unavailable_reasons: Mapping[str, str | None] = field(default_factory=dict)
    within_host: Mapping[str, str] = field(default_factory=dict)
    problem: Sequence[str] | None = None
    pid_space: str = ""
    started: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.process})"

    @property
    def process(self) -> str:
        return f"pid {self.pid} on {self.host}" + (f", {self.program}" if self.program else "")

    def has_ended(self, seen_from: RankRecord) -> bool:
        """Return whether the process has ended, as far as that of ``seen_from`` can see."""
        return has_ended(self.pid, self.started, self.pid_space, seen_from.pid_space)

    def to_plain(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return asdict(self)

    @staticmethod
    def from_plain(plain: Any) -> RankRecord:
        """Check and read the record of a rank, which may run another version of this package.

        Raises:
            LaunchError: it is no such record; names the field.
        """
        if not isinstance(plain, dict):
            raise LaunchError(f"the record of a rank is {plain!r:.60}; expected an object{_FOREIGN}")
        for name, matches in _FIELDS.items():
            if name not in plain and name in _REQUIRED:
                raise LaunchError(f"the record of a rank has no {name!r}{_FOREIGN}")
            if name in plain and not matches(plain[name]):
                raise LaunchError(f"the record of a rank has {name} {plain[name]!r:.60}{_FOREIGN}")
        return RankRecord(**{name: plain[name] for name in _FIELDS if name in plain})


_FOREIGN = "; another program, or another release of these packages, writes to the store of this job"


def _text(value: object) -> bool:
    return isinstance(value, str)


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _ticks(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _object(value: object) -> bool:
    return isinstance(value, dict)


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str | None) for one in value.values())


def _optional(matches: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or matches(value)


def _error(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_text, value))


#: field of :class:`RankRecord` -> whether a value from the store can be one
_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("rank", "world_size", "pid", "device_count"), _count),
    **dict.fromkeys(("host", "host_id", "program", "device_type", "pid_space"), _text),
    **dict.fromkeys(("address", "visible_devices"), _optional(_text)),
    **dict.fromkeys(("sources", "versions", "unavailable_reasons", "within_host"), _texts),
    "local_rank": _optional(_count),
    "started": _ticks,
    "settings": _object,
    "problem": _optional(_error),
}
_REQUIRED = ("rank", "world_size", "host", "host_id", "pid")


# Characters of a message that are kept at either end.
_HALF = 1500


@dataclass(frozen=True)
class Refusal:
    """The reason why the ranks cannot start: the name of an error class of ``comm_utils.errors``, and its message.

    Of a long message, which holds what other processes wrote to the store, the middle is left out.
    """

    kind: str
    message: str

    def __post_init__(self) -> None:
        if len(self.message) > 2 * _HALF:
            object.__setattr__(self, "message", f"{self.message[:_HALF]} ... {self.message[-_HALF:]}")


def format_ranks(ranks: Iterable[int], most: int = 8) -> str:
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


def format_hosts(records: Iterable[RankRecord]) -> str:
    """Format ranks by host: ``ranks 0, 1 on host-a, rank 2 on host-b``."""
    hosts: dict[str, list[int]] = {}
    names: dict[str, str] = {}
    for one in records:
        hosts.setdefault(one.host_id, []).append(one.rank)
        names[one.host_id] = one.host
    texts = [f"{format_ranks(ranks)} on {names[host_id]}" for host_id, ranks in hosts.items()]
    return ", ".join(texts[:8]) + (f" and {len(texts) - 8} more hosts" if len(texts) > 8 else "")


def missing_ranks(here: Mapping[int, RankRecord], world_size: int, waited_s: float) -> Refusal:
    """Return the refusal that names the ranks that did not start in time."""
    absent = [rank for rank in range(world_size) if rank not in here]
    them = "it" if len(absent) == 1 else "they"
    return Refusal(
        "CommTimeoutError",
        f"{format_ranks(absent)} of {world_size} did not come within {waited_s:g} s "
        f"({format_hosts(here.values()) or 'nobody'} came); "
        f"check that {'it was' if len(absent) == 1 else 'they were'} started, and what {them} printed",
    )


def lost_rank(lost: RankRecord, here: Mapping[int, RankRecord], world_size: int) -> Refusal:
    """Return the refusal that names a rank whose process has ended while the ranks waited for others."""
    absent = [rank for rank in range(world_size) if rank not in here]
    missing = f" while the others waited for {format_ranks(absent)}" if absent else ""
    return Refusal("PeerLostError", f"{lost} has ended{missing}; see what it printed")


def check_record(first: RankRecord, here: Mapping[int, RankRecord], new: RankRecord) -> Refusal | None:
    """Return the contradictions between ``new`` and the records ``here`` already, of which ``first`` is the oldest."""
    if new.problem is not None:
        return Refusal(new.problem[0], f"{new} cannot go on: {new.problem[1]}")
    if new.world_size != first.world_size:
        return Refusal(
            "LaunchError",
            f"the ranks disagree on the world size: {_says(first)}, but {_says(new)}; "
            "start all of them with the same one",
        )
    twin = here.get(new.rank)
    if twin is not None:
        return Refusal(
            "LaunchError",
            f"two processes have rank {new.rank}: {twin.process} ({twin.sources.get('rank', 'launcher')}), and "
            f"{new.process} ({new.sources.get('rank', 'launcher')}); give every process a rank of its own, and, if one "
            "of them belongs to another job, this one a MASTER_PORT of its own",
        )
    for name in dict.fromkeys((*first.versions, *new.versions)):
        if first.versions.get(name) != new.versions.get(name):
            return Refusal(
                "LaunchError",
                f"the ranks run different versions of {name}: {first} has {first.versions.get(name, 'none')}, {new} "
                f"has {new.versions.get(name, 'none')}; install the same on every host",
            )
    for key in dict.fromkeys((*first.settings, *new.settings)):
        if first.settings.get(key) != new.settings.get(key):
            return Refusal(
                "LaunchError",
                f"the ranks disagree on the setting {key}: {first} has {first.settings.get(key)!r}, {new} has "
                f"{new.settings.get(key)!r}; give every rank the same arguments, COMM_* variables and configuration",
            )
    return None


def _says(one: RankRecord) -> str:
    return f"{one} says {one.world_size} ({one.sources.get('world_size', 'launcher')})"


def check_devices(records: Sequence[RankRecord], kinds: Iterable[str]) -> Refusal | None:
    """Return a refusal where ranks would share a device of one of ``kinds``, which the backend needs."""
    wanted = set(kinds) - {"cpu"}
    for host_ranks in _by_host(records):
        users = [one for one in host_ranks if one.device_type in wanted]
        if not users or _private(users):
            continue
        short = [one for one in users if len(users) > one.device_count]
        if short:
            one = short[0]
            return Refusal(
                "LaunchError",
                f"{len(users)} ranks on {one.host} ({format_ranks(user.rank for user in users)}) have "
                f"{one.device_count} {one.device_type} device{'s' if one.device_count != 1 else ''} between them; "
                "start at most as many processes a host as it has devices, or "
                "choose a CPU backend with dist_backend='gloo'",
            )
    return None


def device_indices(records: Sequence[RankRecord]) -> dict[int, int]:
    """Return rank -> index of its device: its local rank, or 0 where each process sees one device of its own."""
    result: dict[int, int] = {}
    for host_ranks in _by_host(records):
        private = _private(host_ranks)
        for position, one in enumerate(host_ranks):
            local = one.local_rank if one.local_rank is not None else position
            alone = len(host_ranks) == 1 == one.device_count
            result[one.rank] = 0 if private or alone else local
    return result


def _private(users: Sequence[RankRecord]) -> bool:
    """Return True where the launcher shows every process a device of its own, as ``srun --gpus-per-task=1`` does."""
    visible = [one.visible_devices for one in users]
    return all(visible) and len(set(visible)) == len(visible) and all(one.device_count == 1 for one in users)


def _by_host(records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    hosts: dict[str, list[RankRecord]] = {}
    for one in sorted(records, key=lambda one: one.rank):
        hosts.setdefault(one.host_id, []).append(one)
    return list(hosts.values())
