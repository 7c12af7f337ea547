"""A group that refuses calls once an operation on it has failed, and the errors that say so."""

from __future__ import annotations

from comm_utils.errors import BackendUnavailableError, BrokenGroupError, CommError
from comm_utils.watch.trouble import Trouble

__all__ = ["DESTROYED_DURING_CALL", "ENDED_WITH_PROCESS", "IN_FORKED_CHILD", "BreakableGroup"]

#: Why a call failed whose group is no more.
DESTROYED_DURING_CALL = "this process destroyed the group before the call was complete"
#: Why a call failed that was made, or under way, when groups had ended at the end of the program.
ENDED_WITH_PROCESS = (
    "this process is ending, and its groups have ended; where an atexit callback communicates, register it after "
    "init_distributed()"
)
#: Follows the name of a group.
IN_FORKED_CHILD = (
    "cannot be used in a forked child of the process that created it; start processes with spawn or forkserver, or "
    "fork before communication is set up"
)


class BreakableGroup:
    """A group of ranks, as a backend knows it; its text names it in errors.

    Attributes:
        rank: this process's group rank.
        ranks: global ranks of the members, in the order of their group ranks.
        broken: why the group cannot be used; None while it can.
        inherited: the group belongs to the process that forked this one.
    """

    __slots__ = ("_trouble", "broken", "inherited")

    rank: int
    ranks: list[int]

    def __init__(self) -> None:
        self.broken: str | None = None
        self.inherited = False
        #: Why its ranks cannot go on, as the watch has found, until a call has raised it.
        self._trouble: Trouble | None = None

    def how_to_go_on(self) -> str:
        """Return the remedy after the group failed."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise what is wrong with the group.

        Raises:
            BackendUnavailableError: this is a forked child.
            BrokenGroupError: the group failed.
            CollectiveMismatchError, PeerLostError: the watch has found the group's ranks in trouble since the last
                call.
        """
        self.check_process()
        if self.broken is not None:
            trouble, self._trouble = self._trouble, None
            raise self.broken_error() if trouble is None else self.in_trouble("", trouble)

    def check_process(self) -> None:
        """Refuse a forked child.

        Raises:
            BackendUnavailableError: this is a forked child.
        """
        if self.inherited:
            raise BackendUnavailableError(f"{self} {IN_FORKED_CHILD}")

    def inherit(self) -> None:
        """Refuse communication: this is a forked child, which has none of the group's threads and connections."""
        self.inherited = True

    def fall_into(self, trouble: Trouble) -> None:
        """Refuse further calls: the first raises ``trouble`` itself."""
        if self.broken is None:
            self._trouble = trouble
            self._break(trouble.short)

    def give_up(self, reason: str) -> None:
        """Refuse further calls, after an error that was raised."""
        self._trouble = None
        self._break(reason)

    def _break(self, what: str) -> None:
        self.broken = self.broken or what

    def broken_error(self) -> BrokenGroupError:
        """Return the error for calls after an earlier failure."""
        return BrokenGroupError(
            f"{self} failed earlier ({self.broken}) and its ranks may disagree about what happened since; "
            f"{self.how_to_go_on()}"
        )

    def in_trouble(self, call: str, trouble: Trouble, said: str = "") -> CommError:
        """Return the error to raise where the watch has found trouble.

        Args:
            call: the call that failed; "" where it failed before this one.
            said: what the library has reported.
        """
        happened = f"{call} on {self} {trouble.verb}" if call else f"{self} cannot go on"
        return self.failure(trouble.kind, happened, trouble.text, said)

    def failure(self, kind: type[CommError], happened: str, why: str, said: str = "") -> CommError:
        """Return the error of a call that has broken the group.

        Args:
            happened, why: clauses without a full stop.
            said: what the library has reported.
        """
        return kind(
            f"{happened}, as seen by rank {self.ranks[self.rank]}: {why}. The group cannot be used any more: "
            f"{self.how_to_go_on()}{f' [{said}]' if said else ''}"
        )
