"""The processes of the ranks of the world, as they said at the start: for messages about ranks that nobody sees now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from comm_utils.host_identity import host_name, process_space
from comm_utils.process_state import process_state

__all__ = [
    "NO_PROCESSES",
    "PROCESSES",
    "RankProcess",
    "RankProcesses",
    "describe_unseen",
    "ended_ranks",
    "has_ended",
    "named_ranks",
    "own_pid_space",
]

# Of a large job, in a message; and so many are looked for.
_MOST_NAMED, _MOST_LOOKED_AT = 8, 64


def own_pid_space() -> str:
    """Return the same text for processes that see each other's pids and start times; empty where it is not known."""
    try:
        return process_space()
    except OSError:
        return ""


def has_ended(pid: int, started: int, pid_space: str, seen_from: str) -> bool:
    """Return whether a process has ended, as far as those of the pid space ``seen_from`` can see."""
    return bool(pid_space) and pid_space == seen_from and process_state(pid, started) == "ended"


@dataclass(frozen=True)
class RankProcess:
    """The process of one rank.

    Attributes:
        pid_space, started: see :func:`own_pid_space`, and when it began, in clock ticks since boot; empty and 0 where
            that is not known.
    """

    host: str
    pid: int
    pid_space: str = ""
    started: int = 0

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended, as far as this one can see."""
        return has_ended(self.pid, self.started, self.pid_space, own_pid_space())


class RankProcesses(Mapping[int, RankProcess]):
    """The processes of the world by global rank; empty where the ranks did not meet in a rendezvous."""

    def __init__(self) -> None:
        self._known: Sequence[RankProcess] = ()
        self._is_next = False

    def __getitem__(self, rank: int) -> RankProcess:
        if not 0 <= rank < len(self._known):
            raise KeyError(rank)
        return self._known[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._known)))

    def __len__(self) -> int:
        return len(self._known)

    def set_next(self, processes: Sequence[RankProcess]) -> None:
        """Note the processes of the world that is about to begin."""
        self._known, self._is_next = processes, True

    def begin(self) -> None:
        """Keep them for the world that has begun; forget those of another, if other code has made this world."""
        if not self._is_next:
            self._known = ()
        self._is_next = False

    def clear(self) -> None:
        """Forget all, at the end of a world and where its start has failed."""
        self._known, self._is_next = (), False


#: Where none are known.
NO_PROCESSES: Mapping[int, RankProcess] = MappingProxyType({})
#: Those of this process's world.
PROCESSES = RankProcesses()


def named_ranks(ranks: Iterable[int], processes: Mapping[int, RankProcess]) -> str:
    """Return ``rank 1 (pid 12 on host-a)`` or ``ranks 1 (pid 12 on host-a) and 2``, with the processes that are known.

    Of many, only the first are named, and how many more there are.
    """
    found = sorted(ranks)
    texts = [f"{one} ({processes[one]})" if one in processes else str(one) for one in found[:_MOST_NAMED]]
    if len(found) > _MOST_NAMED:
        texts.append(f"{len(found) - _MOST_NAMED} more")
    if len(texts) == 1:
        return f"rank {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"


def ended_ranks(ranks: Sequence[int], processes: Mapping[int, RankProcess]) -> list[int]:
    """Return those of the first 64 ``ranks`` whose process has ended, as far as this one can see."""
    return [rank for rank in ranks[:_MOST_LOOKED_AT] if rank in processes and processes[rank].has_ended]


def describe_unseen(ranks: Sequence[int], processes: Mapping[int, RankProcess]) -> str:
    """Return what is known of ranks that are not seen, as a sentence that begins with a pronoun."""
    is_one = len(ranks) == 1
    text = f"{'it is' if is_one else 'they are'} not seen from here"
    ended = ended_ranks(ranks, processes)
    if not ended:
        hosts = list(dict.fromkeys(processes[rank].host for rank in ranks if rank in processes))
        elsewhere = [host for host in hosts if host != host_name()]
        if elsewhere:
            named = ", ".join(elsewhere[:_MOST_NAMED]) + (", ..." if len(elsewhere) > _MOST_NAMED else "")
            text += f"; check {named} and the network to {'it' if len(elsewhere) == 1 else 'them'}"
        return text
    whose = "its process" if is_one else f"the process of {named_ranks(ended, NO_PROCESSES)}"
    return f"{text}, and {whose} has ended"
