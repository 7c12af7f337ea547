"""One group of ranks: who they are, what became of them, and the errors that say so."""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC
from collections.abc import Collection, Sequence, Set
from datetime import timedelta
from typing import ClassVar

from comm_backend_ccl.peers import Peers
from comm_backend_ccl.work import ANY_SOURCE, STORE_GONE, EngineHandle
from comm_utils.errors import (
    BackendUnavailableError,
    CollectiveMismatchError,
    CommError,
    CommTimeoutError,
    NotInitializedError,
    PeerLostError,
)
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.recorder import RECORDER
from comm_utils.group_names import group_text
from comm_utils.torch_support.breakable_group import DESTROYED_DURING_CALL, ENDED_WITH_PROCESS, BreakableGroup
from comm_utils.torch_support.failures import is_exhausted
from comm_utils.torch_support.members_in_rings import ranks_in_rings
from comm_utils.torch_support.remedies import how_to_set_timeout, of_world, remedy
from comm_utils.watch.trouble import Trouble
from comm_utils.watch.watch import WATCH

__all__ = ["Group"]

_NO_TIMEOUT_S = 10.0**9
# Words of the engines about what has nothing to do with other ranks.
_OF_THIS_PROCESS = ("forked child", "process is ending", "held up by a group")
_DESTROYED = "group was destroyed"
_LACKING = "not enough shared memory"
# As it ended, or for want of descriptors or mappings.
_DISAGREE = "disagree about how much"
_UNREACHABLE = "cannot reach the memory"
_GAVE_UP = "gave up; its own error says why"
# A connection may end before the process does.
_NOTICE_S = 0.3
# And one that has begun to end may take so long to free its memory on a busy machine.
_END_S = 5.0


class Group(BreakableGroup, ABC):
    """The members of a group; ranks are positions in it.

    Args:
        peers: the ranks' processes.
        ranks: global ranks of the members; None is the world.
    """

    #: What moves the data, for messages.
    engine: ClassVar[str]

    def __init__(self, peers: Peers, rank: int, timeout: timedelta, ranks: Sequence[int] | None) -> None:
        super().__init__()
        self.peers = peers
        self.rank, self.size = rank, len(peers.processes)
        self.ranks = list(range(self.size)) if ranks is None else list(ranks)
        self.is_world = ranks is None
        #: Of the process group: its name, the same on all members, and ``group_desc``, for messages.
        self.name = self.description = ""
        self._recorded_as, self._opened = 0, -1
        self.set_timeout(timeout)
        #: Of the engine, instead of the usual one.
        self._remedy = ""
        #: Whether it has neither failed nor ended.
        self.usable = True
        self._open = True
        #: The end of the program has ended it.
        self.ended_with_process = False
        _groups.add(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of an operation; 0 is no limit."""
        self.timeout_s = timeout.total_seconds() or _NO_TIMEOUT_S

    def __str__(self) -> str:
        return group_text(self.ranks, self.description)

    def how_to_go_on(self) -> str:
        return self._remedy or (of_world() if self.is_world else remedy(self.name))

    def _break(self, what: str) -> None:
        super()._break(what)
        self.usable = False

    def _disagreed(self, what: str) -> None:  # most engines need nothing
        """Note that the engine failed as the ranks' calls differ, before the error is raised."""

    def _knows_difference(self) -> bool:
        """Return whether the engine has seen that the ranks' calls differ, so that a rank that ended is no cause."""
        return False

    def check(self) -> None:
        """Raise what is wrong with the group, and ``NotInitializedError`` after the end."""
        super().check()
        if not self._open:
            raise NotInitializedError("this process group no longer exists; make a new one with new_group()")

    def inherit(self) -> None:
        super().inherit()
        self.usable = False

    @property
    def was_destroyed(self) -> bool:
        """Return whether this process has destroyed the group."""
        return not self._open

    def destroyed_error(self, call: str) -> NotInitializedError:
        """Return the error for a call that was under way then."""
        why = ENDED_WITH_PROCESS if self.ended_with_process else DESTROYED_DURING_CALL
        return NotInitializedError(f"{call} on {self} failed: {why}")

    def for_diagnosis(self) -> RingGroup:
        """Return the group as rings describe it."""
        return RingGroup(self.name, ranks_in_rings(self.name, self.ranks), self.description, self.engine)

    def recorded_as(self) -> int:
        """Return the index of the group in the flight recorder."""
        if self._opened != RECORDER.opened:
            self._opened = RECORDER.opened
            ranks = ranks_in_rings(self.name, self.ranks)
            self._recorded_as = RECORDER.group_index(self.name, ranks, self.description, self.engine, self.timeout_s)
        return self._recorded_as

    def trouble(self) -> Trouble | None:
        """Return why the group's ranks cannot go on, as the watch has found; None while they can."""
        return WATCH.trouble(self.name)

    def in_trouble(self, call: str, trouble: Trouble, said: str = "") -> CommError:
        """Return the error to raise where the watch has found trouble; the group is broken from then on."""
        self._trouble = None
        self._break(f"{call}: {trouble.short}" if call else trouble.short)
        if call and trouble.kind is CollectiveMismatchError:
            self._disagreed(f"{call}: {trouble.text}")
        failure = super().in_trouble(call, trouble, said)
        WATCH.tell(self.name, failure, trouble)
        return failure

    def _cause(self, timed_out: bool) -> Trouble | None:
        """Return the cause of a failed call, as far as rings and other ranks tell."""
        return WATCH.explain(self.for_diagnosis(), timed_out) if WATCH.is_running else None

    def lost(self, call: str, gone: Collection[int]) -> Exception:
        """Return the error to raise where ranks that an operation needs have ended.

        The group is broken from then on.
        """
        trouble = self._cause(timed_out=False)
        if trouble is not None:
            text = trouble.text
            for one in sorted(gone):
                who = f"rank {self.ranks[one]} ({self.peers.processes[one]}"
                text += "" if who in trouble.text else f"; {who}) has ended{self.peers.describe_end(one)}"
            # A rank that could only be seen to be missing has ended.
            is_theirs = trouble.kind is CommTimeoutError and {self.ranks[one] for one in gone} >= {*trouble.ranks}
            kind = PeerLostError if is_theirs else trouble.kind
            return self.in_trouble(call, Trouble(kind, text, trouble.ranks))
        who = ", ".join(
            f"rank {self.ranks[one]} ({self.peers.processes[one]}) ended{self.peers.describe_end(one)}"
            for one in sorted(gone)
        )
        self._break(f"{call}: {who}")
        return self.failure(PeerLostError, f"{call} on {self} lost a peer", f"{who}; its own output says why")

    def gone(self, peer: int | None) -> Set[int]:
        """Return the ranks on this host that have ended, of all or of ``peer`` alone."""
        gone = self.peers.gone()
        if peer == ANY_SOURCE:  # of which one that lives is enough
            return gone if len(gone) == self.size - 1 else frozenset()
        return gone if peer is None else gone & {peer}

    def gone_for(self, handle: EngineHandle, peer: int | None) -> Set[int]:
        """Those of them without which an operation cannot go on, as far as the engine can tell."""
        return self.gone(peer)

    def timed_out(self, call: str, limit_s: float, of_call: bool) -> Exception:
        """Return the error to raise after waiting in vain; the group is broken from then on."""
        trouble = self._cause(timed_out=True)
        self._break(f"{call}: timed out after {limit_s:g} s")
        if trouble is not None:
            return self._timed_out_error(call, limit_s, trouble)
        return self.failure(
            CommTimeoutError,
            f"{call} on {self} timed out after {limit_s:g} s",
            "a rank of the group did not take part, or is late; a monitored_barrier() before the call names who, and "
            f"{how_to_set_timeout(of_call)}",
        )

    def _timed_out_error(self, call: str, limit_s: float, trouble: Trouble) -> Exception:
        failure = self.failure(trouble.kind, f"{call} on {self} timed out after {limit_s:g} s", trouble.text)
        WATCH.tell(self.name, failure, trouble)
        return failure

    def _lacking(self, call: str, error: BaseException) -> Exception:
        self._break(f"{call}: {error}")
        failure = BackendUnavailableError(f"{call} on {self}: {error}. {self.how_to_go_on().capitalize()}")
        WATCH.tell_of_lack(self.name, call, failure, str(error))
        return failure

    def failed(self, call: str, error: BaseException, peer: int | None = None) -> Exception:
        """Return the error to raise where the engine reported one."""
        if self.broken is not None:
            pending = self._trouble
            return self.broken_error() if pending is None else self.in_trouble(call, pending)
        if _DESTROYED in str(error):
            return self.destroyed_error(call)
        if any(reason in str(error) for reason in _OF_THIS_PROCESS):
            return BackendUnavailableError(f"{call} on {self}: {error}")
        if _LACKING in str(error) or is_exhausted(error):
            return self._lacking(call, error)
        if STORE_GONE in str(error):
            self._break(f"{call}: {error}")
            return PeerLostError(
                f"{call} on {self}: {error}: the process that holds it has ended. The group cannot be used any more: "
                f"{self.how_to_go_on()}"
            )
        disagree = _DISAGREE in str(error)
        # The two ranks of a message are all there is to find out.
        trouble = None if disagree and peer is not None else self._cause(timed_out=False)
        if trouble is not None and trouble.kind is CommTimeoutError:
            trouble = None  # a call that is only missing is no cause of what the engine reported
        if disagree and (trouble is None or trouble.kind is not CollectiveMismatchError):
            return self.in_trouble(call, Trouble(CollectiveMismatchError, f"the ranks' calls differ: {error}"))
        if trouble is not None:
            if trouble.kind is CollectiveMismatchError:
                self._disagreed(f"{call}: {error}")
                # The engine knows operations alone, and not the calls that they are part of.
                return self.in_trouble(call, trouble)
            return self.in_trouble(call, trouble, str(error))
        if not self._knows_difference():
            now = time.monotonic()
            end, last = now + _NOTICE_S, now + _END_S
            while not self.gone(peer) and (now < end or (now < last and self.peers.any_ending())):
                time.sleep(0.01)
                now = time.monotonic()
            if gone := self.gone(peer):
                return self.lost(call, gone)
        if _UNREACHABLE in str(error):
            return self._lacking(call, error)
        self._break(f"{call}: {error}")
        self._disagreed(f"{call}: {error}")
        if _GAVE_UP in str(error):
            return PeerLostError(f"{call} on {self}: {error}. The group cannot be used any more: {self.how_to_go_on()}")
        # With all of them alive on this host, only their calls can differ.
        here = len(self.peers.local) == self.size
        kind, cause = (
            (CollectiveMismatchError, "the ranks' calls differ, in the operation or in its arguments")
            if here
            else (PeerLostError, "a rank on another host ended, or the ranks called with different sizes or operations")
        )
        return self.in_trouble(call, Trouble(kind, cause), str(error))


_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def _refuse_inherited_groups() -> None:
    for group in list(_groups):
        group.inherit()


os.register_at_fork(after_in_child=_refuse_inherited_groups)
