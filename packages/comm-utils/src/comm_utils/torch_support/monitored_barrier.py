"""A barrier through a group's store that names the ranks that did not come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from comm_utils.errors import CommError, CommTimeoutError, PeerLostError
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.layout import LIMITED
from comm_utils.group_names import listed
from comm_utils.log import logger
from comm_utils.torch_support.bounded_store import BoundedStore
from comm_utils.torch_support.store_waits import StoreWait, answers, store_has_gone
from comm_utils.watch.watch import WATCH

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["pass_monitored_barrier"]

_KEYS = "comm/monitored_barrier"
_OPEN, _GIVEN_UP = b"open", b"given up"
# Of what a rank writes that it can read.
_MOST_BYTES = 40
# To write what has to be written, while signals come.
_ATTEMPTS = 3


def pass_monitored_barrier(store: Store, own: int, group: RingGroup, limit_s: float, all_missing: bool) -> None:
    """Wait in ``store`` until all members of a group have called this.

    Ranks meet in rounds. A round is opened by the last rank that comes, or given up by the first one whose time is
    over: whichever writes its decision first, as the store accepts one alone (``compare_set``). Ranks that still have
    time go on to the next round. So a barrier is passed by all or by none, and all agree which round is next. All that
    a rank writes says the same when it is written again: a rank that got no answer, or was interrupted, comes back to
    the round that it was in.

    Args:
        store: the group's own.
        own: this process's group rank.
        all_missing: name every rank that is missing when the time is over, not only the first.

    Raises:
        CommTimeoutError: on every rank that came; names those that did not. Or the store does not answer.
        PeerLostError: a member has ended.
    """
    who = f"monitored_barrier on rank {group.ranks[own]}"
    bounded = BoundedStore(store, who, limit_s)
    try:
        with StoreWait("monitored_barrier", "monitored barrier", group, group.ranks[own], limit_s, LIMITED) as wait:
            _Barrier(bounded, own, wait, limit_s, all_missing).pass_it()
    except CommError:
        raise
    except RuntimeError as error:
        if answers(bounded):
            raise
        raise store_has_gone(who, error) from error


class _Position(NamedTuple):
    """The rounds of a rank: the first one whose keys it has not deleted, and the one that it is in, or enters next."""

    oldest: int = 0
    current: int = 0

    def encoded(self) -> str:
        return f"{self.oldest} {self.current}"

    @classmethod
    def decoded(cls, data: bytes) -> _Position:
        """Return what :meth:`encoded` wrote; the first round for what no rank writes."""
        try:
            oldest, current = map(int, data[:_MOST_BYTES].split())
        except ValueError:
            return cls()
        return cls(oldest, current) if 0 <= oldest <= current else cls()


class _Barrier:
    """One call of one rank."""

    def __init__(self, store: BoundedStore, own: int, wait: StoreWait, limit_s: float, all_missing: bool) -> None:
        self._store, self._own, self._wait, self._ranks = store, own, wait, wait.group.ranks
        self._limit_s, self._all_missing = limit_s, all_missing
        self._end = time.monotonic() + limit_s

    def pass_it(self) -> None:
        key = f"{_KEYS}/position/{self._own}"
        position = _Position.decoded(self._store.compare_set(key, "", _Position().encoded()))
        rounds = [_Round(self._store, position.current, len(self._ranks))]
        interruption = self._take_part(rounds)
        while not rounds[-1].is_open:
            following = rounds[-1].number + 1
            self._store.set(key, _Position(position.oldest, following).encoded())
            rounds.append(_Round(self._store, following, len(self._ranks)))
            interruption = self._take_part(rounds)
        opened = rounds[-1].number
        interruption = self._set(key, _Position(opened, opened + 1).encoded()) or interruption
        # Who is in this round has left those before.
        for number in range(position.oldest, opened):
            _Round(self._store, number, len(self._ranks)).delete_keys(self._own)
        if interruption is not None:
            raise interruption

    def _take_part(self, rounds: Sequence[_Round]) -> BaseException | None:
        """Be in the last of ``rounds`` until it is decided.

        Returns:
            what a signal handler raised, where the round was opened nevertheless.

        Raises:
            CommError, or what a signal handler raised: this rank gave up.
        """
        current, lost = rounds[-1], None
        try:
            if current.is_decided() or current.join(self._own):
                return None
            self._wait.begin()
            if self._wait.until(self._store, [current.decision], self._left_s()) and current.is_decided():
                return None
        except BaseException as error:
            lost = error
            if isinstance(error, PeerLostError) and not answers(self._store):
                raise
        try:
            missing = self._give_up(rounds, lost is None)
        except (CommError, RuntimeError) as error:
            raise lost or error from None
        if current.is_open:
            return None if isinstance(lost, CommError) else lost
        raise lost or self._not_all(missing)

    def _give_up(self, rounds: Sequence[_Round], may_open: bool) -> list[int]:
        """Give the last of ``rounds`` up, unless it is open; return the ranks that have not come."""
        *earlier, current = rounds
        absent = [place for place in range(len(self._ranks)) if not current.has(place)]
        # All may be here, and the last one had no answer, or was interrupted, before it could open the round.
        current.decide(_OPEN if may_open and not absent else _GIVEN_UP)
        # Who was in an earlier round of this call came, and gave up since.
        shared = [one for one in earlier if one.was_joined]
        return [self._ranks[place] for place in absent if not any(one.has(place) for one in shared)]

    def _left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def _set(self, key: str, value: str) -> BaseException | None:
        """Set a key that has to be set; return what a signal handler raised meanwhile."""
        interruption: BaseException | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._store.set(key, value)
            except CommError:
                raise
            except BaseException as error:
                interruption = error
            else:
                return interruption
        assert interruption is not None
        raise interruption

    def _not_all(self, missing: list[int]) -> CommTimeoutError:
        limit_s = self._limit_s
        if not missing:
            return CommTimeoutError(
                f"monitored_barrier: every rank came, but not all within the same {limit_s:g} s: some had given up "
                "before"
            )
        hint = "" if self._all_missing or len(self._ranks) == 2 else " (wait_all_ranks=True names all that are missing)"
        named = missing if self._all_missing else missing[:1]
        logger.error("monitored_barrier: ranks %s did not arrive within %g s", listed(named), limit_s)
        plural, doing = "ranks" if len(named) > 1 else "rank", WATCH.absent(named, "monitored_barrier")
        return CommTimeoutError(
            f"monitored_barrier: {plural} {listed(named)[1:-1]} did not arrive within {limit_s:g} s{hint}"
            f"{f': {doing}' if doing else ''}"
        )


class _Round:
    """One round, as a rank sees it in the store."""

    def __init__(self, store: BoundedStore, number: int, members: int) -> None:
        self.number, self._store, self._members = number, store, members
        self._keys = f"{_KEYS}/{number}"
        self.decision = f"{self._keys}/decision"
        self.is_open = self.was_joined = False

    def is_decided(self) -> bool:
        """Return whether the round was opened or given up; after that ``is_open`` says which."""
        if not self._store.check([self.decision]):
            return False
        self.is_open = self._store.get(self.decision) == _OPEN
        return True

    def join(self, own: int) -> bool:
        """Be here; return whether that decided the round, which the last rank to come opens."""
        self.was_joined = True
        self._store.set(f"{self._keys}/here/{own}", "")
        # A rank that comes back counts twice, and one that was interrupted perhaps not at all: the keys decide.
        if self._store.add(f"{self._keys}/count", 1) < self._members:
            return False
        if not self._store.check([f"{self._keys}/here/{place}" for place in range(self._members)]):
            return False
        self.decide(_OPEN)
        return True

    def has(self, place: int) -> bool:
        """Return whether the rank of that place in the group has come to this round."""
        return self._store.check([f"{self._keys}/here/{place}"])

    def decide(self, wanted: bytes) -> bool:
        """Decide the round, unless it is decided; return whether it is open."""
        self.is_open = self._store.compare_set(self.decision, "", wanted.decode()) == _OPEN
        return self.is_open

    def delete_keys(self, own: int) -> None:
        """Delete what this rank wrote; the first rank deletes also what all did."""
        for name in (f"here/{own}", *(("count", "decision") if own == 0 else ())):
            self._store.delete_key(f"{self._keys}/{name}")
