"""Let all ranks agree through a store, or fail together.

Each rank writes a record. The first rank compares the records as they arrive and writes a verdict, for which the others
wait. A contradiction between ranks therefore ends every rank immediately, with the same message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import Store

import comm_utils.errors
from comm_orchestrator.rendezvous.authentication import Seal
from comm_orchestrator.rendezvous.records import (
    RankRecord,
    Refusal,
    check_record,
    format_hosts,
    format_ranks,
    lost_rank,
    missing_ranks,
)
from comm_utils.errors import CommError, LaunchError
from comm_utils.log import logger

__all__ = ["MOST_RECORD_BYTES", "Deadline", "RendezvousPoint", "counted", "rendezvous"]

# How long rank 0, whose end closes the store, waits until the other ranks have read why it fails; and how long for
# ranks that have not started yet, where the start fails before its time limit.
_GRACE_S = 1.0
_EARLY_GRACE_S = 10.0
# How much longer than their limit the others wait for the verdict, as the first rank may have started a moment later.
_PRECEDENCE_S = 0.3
_FIRST_NOTICE_S = 10.0
#: What a stranger may have put into the store is bounded before it is used. Ranks that failed may come again.
MOST_RECORD_BYTES = 64 * 1024
_MOST_VERDICT_BYTES_PER_RANK = 256
_MOST_RECORDS_PER_RANK = 16


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class RendezvousPoint:
    """The store in which the ranks meet, and how this rank got there.

    Attributes:
        store: of this rendezvous alone.
        hosted: the store, or the secret of its records, ends with this process, which therefore leaves a failed
            rendezvous last.
        address: this machine's, towards rank 0; None where no connection was made.
        description: ``"at host:port (why there)"`` or the like; empty in a world of one.
        doubt: called when ranks are missing; returns what may be wrong with the address.
        seal: signs and checks the records, where the ranks share a secret.
        agreed: called by one rank when all agreed.
        failed: called by each rank after it has read why they cannot go on.
        given_up: called by such a process when it stops waiting for others to read that.
        renewal: how to begin without what an earlier start has left in the store; empty where none can have.
    """

    store: Store
    hosted: bool = False
    address: str | None = None
    description: str = ""
    doubt: Callable[[], str] = str
    seal: Seal = field(default_factory=Seal)
    agreed: Callable[[], None] = _nothing
    failed: Callable[[], None] = _nothing
    given_up: Callable[[], None] = _nothing
    renewal: str = ""


class Deadline:
    """A time limit with notices in the log while it runs."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        #: why it is over before its time; empty where it is not
        self.interruption = ""
        self._start = time.monotonic()
        self._notice_s = _FIRST_NOTICE_S

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def left_s(self) -> float:
        return 0.0 if self.interruption else self.limit_s - self.elapsed_s()

    def interrupt(self, reason: str) -> None:
        """End it now, for what waits in another thread."""
        self.interruption = reason

    def pause(self, waiting: Callable[[], str] | None) -> bool:
        """Sleep for a while, the longer the longer it has lasted; False where no time is left.

        Args:
            waiting: says what is being waited for, for the log: after 10 s, and each time that has doubled; None: not.
        """
        if self.left_s() <= 0:
            return False
        if waiting is not None and self.elapsed_s() >= self._notice_s:
            self._notice_s *= 2
            logger.warning("init_distributed: %.0f s, and still waiting: %s", self.elapsed_s(), waiting())
        time.sleep(max(0.0, min(0.1, 0.0005 + self.elapsed_s() / 20, self.left_s())))
        return True


@dataclass
class _Rendezvous:
    point: RendezvousPoint
    mine: RankRecord
    deadline: Deadline
    here: dict[int, RankRecord]
    counted: int = 0
    unread: list[int] = field(default_factory=list)
    first: RankRecord | None = None

    @property
    def store(self) -> Store:
        return self.point.store

    def read_records(self) -> Refusal | None:
        """Read the records written since the last call; return the first contradiction."""
        try:
            count = counted(self.store, "ranks")
        except LaunchError as error:
            return Refusal("LaunchError", str(error))
        if not self.counted <= count <= self.counted + _MOST_RECORDS_PER_RANK * (self.mine.world_size + 64):
            return Refusal(
                "LaunchError",
                f"{count} ranks are counted, of {self.mine.world_size}: another program writes to the store of this "
                "job; give the job a port of its own",
            )
        self.unread += range(self.counted + 1, count + 1)
        self.counted = count
        for number in [number for number in self.unread if self.store.check([f"record/{number}"])]:
            self.unread.remove(number)
            try:
                new = self.record(number)
            except LaunchError as error:
                return Refusal("LaunchError", str(error))
            first = next(iter(self.here.values()), new)
            refusal = check_record(first, self.here, new)
            if refusal is not None:
                return refusal
            self.here[new.rank] = new
        return None

    def record(self, number: int) -> RankRecord:
        """Read and check a record.

        Raises:
            LaunchError: it is not one of a rank of this job.
        """
        key = f"record/{number}"
        return RankRecord.from_plain(self.point.seal.check(key, self.store.get(key), MOST_RECORD_BYTES))

    def ended(self) -> list[RankRecord]:
        """Return the ranks that came and whose processes have ended, as far as this host can see."""
        return [one for one in self.here.values() if one.has_ended(self.mine)]

    def waiting(self) -> str:
        absent = [rank for rank in range(self.mine.world_size) if rank not in self.here]
        return f"{format_ranks(absent)} of {self.mine.world_size} not here yet ({format_hosts(self.here.values())})"

    def coordinate(self, judge: Callable[[Sequence[RankRecord]], Any]) -> dict[str, Any]:
        while True:
            if self.store.check(["verdict"]):  # of a rank whose time was up first
                return self.read_verdict()
            refusal = self.read_records()
            if refusal is not None:
                return _as_verdict(refusal)
            lost = self.ended()
            if lost:
                return _as_verdict(lost_rank(lost[0], self.here, self.mine.world_size))
            if len(self.here) == self.mine.world_size:
                break
            if not self.deadline.pause(self.waiting):
                return _as_verdict(self._timed_out())
        try:
            judged = judge([self.here[rank] for rank in range(self.mine.world_size)])
        except Exception as error:
            judged = Refusal(
                "LaunchError", f"{self.mine} failed to compare the ranks ({type(error).__name__}: {error})"
            )
        if isinstance(judged, Refusal):
            return _as_verdict(judged)
        return {"agreed": judged, "world_size": self.mine.world_size}

    def verdict(self) -> dict[str, Any]:
        while not self.store.check(["verdict"]):
            # The first rank reads the records, and logs which ranks are missing.
            if not self.deadline.pause(None):
                if not self.deadline.interruption:
                    time.sleep(_PRECEDENCE_S)
                if not self.store.check(["verdict"]):
                    return self.decide(_as_verdict(self.read_records() or self._timed_out()))
            if self._first_has_ended() and not self.store.check(["verdict"]):
                return self.decide(_as_verdict(self.read_records() or self._timed_out()))
        return self.read_verdict()

    def _first_has_ended(self) -> bool:
        """Return whether the rank that compares the records has, as far as this host can see."""
        if self.first is None and self.store.check(["record/1"]):
            with suppress(LaunchError):
                self.first = self.record(1)
        return self.first is not None and self.first.has_ended(self.mine)

    def read_verdict(self) -> dict[str, Any]:
        """Read and check what all ranks go by.

        Raises:
            LaunchError: it was not written by a rank of this job.
        """
        bound = MOST_RECORD_BYTES + _MOST_VERDICT_BYTES_PER_RANK * self.mine.world_size
        found = self.point.seal.check("verdict", self.store.get("verdict"), bound)
        if isinstance(found, dict):
            if "agreed" in found and type(found.get("world_size")) is int:
                return found
            if all(isinstance(found.get(name), str) for name in ("kind", "message")):
                return found
        raise LaunchError(
            f"the verdict of the ranks is {found!r:.60}; another program writes to the store of this job: give the job "
            "a port of its own"
        )

    def _timed_out(self) -> Refusal:
        if self.deadline.interruption:
            return Refusal(
                "LaunchError",
                f"{self.mine} was interrupted in init_distributed ({self.deadline.interruption}); see what it printed, "
                "and start the ranks again",
            )
        lost = self.ended()
        if lost:
            return lost_rank(lost[0], self.here, self.mine.world_size)
        if len(self.here) < self.mine.world_size:
            refusal, doubt = missing_ranks(self.here, self.mine.world_size, self.deadline.limit_s), self.point.doubt()
            return replace(refusal, message=f"{refusal.message}; {doubt}") if doubt else refusal
        try:
            first = self.record(1)
        except LaunchError as error:
            return Refusal("LaunchError", str(error))
        return Refusal(
            "CommTimeoutError",
            f"{first}, who came first and compares the ranks, said nothing within {self.deadline.limit_s:g} s; check "
            "whether it still runs, and what it printed",
        )

    def refuse_late_rank(self, world_size: int) -> Refusal:
        """Return why this rank cannot join a world whose ranks have agreed already."""
        return self.read_records() or Refusal(
            "LaunchError",
            f"{self.mine} came to a world of {world_size} ranks that is complete ({format_hosts(self.here.values())})",
        )

    def remnant(self, decided: bool) -> str:
        """Return what an earlier start may have left in the store, and the remedy; empty where nothing hints at one.

        Args:
            decided: there was a verdict when this rank came.
        """
        if not self.point.renewal:
            return ""
        if decided:
            return f"; that was decided before {self.mine} came: if an earlier start left it, {self.point.renewal}"
        self.read_records()
        lost = self.ended()
        return f"; if {lost[0]}, which has ended, is of an earlier start, {self.point.renewal}" if lost else ""

    def decide(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write ``verdict`` unless another rank has written one; return the one that holds."""
        if counted(self.store, "verdicts", 1) != 1:
            end = time.monotonic() + _GRACE_S
            while time.monotonic() < end:
                if self.store.check(["verdict"]):
                    return self.read_verdict()
                time.sleep(0.001)
            # The rank that counted first has died since.
        if "agreed" in verdict:
            self.point.agreed()
        self.store.set("verdict", self.point.seal.sign("verdict", verdict))
        return verdict


def counted(store: Store, key: str, more: int = 0) -> int:
    """Add to a counter and return it; 0 where nothing was counted yet.

    Raises:
        LaunchError: another program has overwritten it, on which torch's store would close this rank's connection.
    """
    if store.check([key]):
        raw = store.get(key)
        if not (raw.isdigit() and len(raw) < 10):
            raise LaunchError(
                f"the store counts {raw[:20]!r} as {key!r}: another program writes to the store of this job; give the "
                "job a port of its own"
            )
        if not more:
            return int(raw)
    return store.add(key, more)


def _as_verdict(refusal: Refusal) -> dict[str, Any]:
    return {"kind": refusal.kind, "message": refusal.message}


def rendezvous(
    mine: RankRecord,
    deadline: Deadline,
    judge: Callable[[Sequence[RankRecord]], Any],
    point: RendezvousPoint,
) -> Any:
    """Wait for all ranks; return what ``judge`` returned for them, the same on every rank.

    Args:
        judge: called on one rank, with the records of all in the order of their ranks; a :class:`Refusal` refuses them,
            anything else has to be JSON.

    Raises:
        CommError: of the class that the refusal names, with the same message on every rank.
    """
    store = point.store
    state = _Rendezvous(point, mine, deadline, {})
    decided = bool(point.renewal) and store.check(["verdict"])
    try:
        number = counted(store, "ranks", 1)
        store.set(f"record/{number}", point.seal.sign(f"record/{number}", mine.to_plain()))
        verdict = state.decide(state.coordinate(judge)) if number == 1 else state.verdict()
        if "agreed" in verdict:
            if number <= mine.world_size == verdict["world_size"]:
                return verdict["agreed"]
            verdict = _as_verdict(state.refuse_late_rank(verdict["world_size"]))
    except LaunchError as error:
        verdict = _as_verdict(Refusal("LaunchError", str(error)))
    remnant = state.remnant(decided)
    point.failed()
    acknowledged = 0
    with suppress(LaunchError):
        acknowledged = counted(store, "acknowledged", 1)
    if point.hosted and acknowledged:
        ended, limit_s = len(state.ended()), min(deadline.left_s(), _EARLY_GRACE_S)
        _wait_until_acknowledged(store, acknowledged, mine.world_size, ended, limit_s)
        point.given_up()
    kind = getattr(comm_utils.errors, str(verdict["kind"]), None)
    if not (isinstance(kind, type) and issubclass(kind, CommError)):
        kind = LaunchError
    raise kind(f"init_distributed: {verdict['message']}{remnant}")


def _wait_until_acknowledged(store: Store, acknowledged: int, world_size: int, ended: int, limit_s: float) -> None:
    """Wait until all ranks have read the verdict; after ``limit_s``, until those that have started have.

    Args:
        ended: so many of them read nothing any more.
    """
    start, count = time.monotonic(), world_size
    while time.monotonic() - start < max(limit_s, _GRACE_S):
        with suppress(LaunchError):
            count = counted(store, "ranks")
        if acknowledged + ended >= (max(count, world_size) if time.monotonic() - start < limit_s else count):
            return
        time.sleep(0.01)
        with suppress(LaunchError):
            acknowledged = counted(store, "acknowledged")
