"""The ranks meet in a store, and go on together or not at all.

Everyone who arrives leaves a record; who arrives first compares the records as they come, and leaves a verdict that all
the others wait for. So a mistake that a comparison can show ends every rank at once, with the same message.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import Store

import comm_utils.errors
from comm_orchestrator.rendezvous.records import Arrival, Finding, check_arrival, listed, missing, places
from comm_utils.errors import CommError, LaunchError
from comm_utils.log import logger

__all__ = ["Deadline", "Place", "meet"]

# How long rank 0, with whom the store goes, waits for ranks to hear why it gives up; and for ranks to come at all,
# where something is wrong before the time is up.
_GRACE_S = 1.0
_EARLY_GRACE_S = 10.0
# How much longer than their time others wait for the verdict of who came first, who may have come a moment later.
_PRECEDENCE_S = 0.3
_FIRST_NOTICE_S = 10.0


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Place:
    """Where the ranks meet.

    Attributes:
        store: private to this meeting.
        hosted: it ends with this process, which therefore is the last to leave a meeting that failed.
        address: this machine's, as seen on the way to rank 0; None where there was no way to go.
        description: ``"at host:port (why there)"`` or the like; empty where there is nobody to meet.
        doubt: asked when ranks did not come, says what may be wrong with the place.
        agreed, failed: called once in all when the ranks agreed, and by each rank that heard why they cannot go on.
    """

    store: Store
    hosted: bool = False
    address: str | None = None
    description: str = ""
    doubt: Callable[[], str] = str
    agreed: Callable[[], None] = _nothing
    failed: Callable[[], None] = _nothing


class Deadline:
    """A time limit, and when to tell the user that something is still being waited for."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._start = time.monotonic()
        self._notice_s = _FIRST_NOTICE_S

    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def left_s(self) -> float:
        return self.limit_s - self.elapsed_s()

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
class _Meeting:
    place: Place
    mine: Arrival
    deadline: Deadline
    here: dict[int, Arrival]
    counted: int = 0
    unread: list[int] = field(default_factory=list)

    @property
    def store(self) -> Store:
        return self.place.store

    def note_arrivals(self) -> Finding | None:
        """Read the records that came since the last time; the first thing that is wrong with one of them."""
        came = self.store.add("arrived", 0)
        self.unread += range(self.counted + 1, came + 1)
        self.counted = came
        for place in [place for place in self.unread if self.store.check([f"arrival/{place}"])]:
            self.unread.remove(place)
            try:
                new = Arrival.from_json(self.store.get(f"arrival/{place}"))
            except (TypeError, ValueError) as error:
                return Finding("LaunchError", f"a rank that cannot be understood came: {error}")
            first = next(iter(self.here.values()), new)
            finding = check_arrival(first, self.here, new)
            if finding is not None:
                return finding
            self.here[new.rank] = new
        return None

    def waiting(self) -> str:
        absent = [rank for rank in range(self.mine.world_size) if rank not in self.here]
        return f"{listed(absent)} of {self.mine.world_size} not here yet ({places(self.here.values())})"

    def coordinate(self, judge: Callable[[Sequence[Arrival]], Any]) -> dict[str, Any]:
        while True:
            finding = self.note_arrivals()
            if finding is not None:
                return _refusal(finding)
            if len(self.here) == self.mine.world_size:
                break
            if not self.deadline.pause(self.waiting):
                return _refusal(self._gave_up())
        try:
            judged = judge([self.here[rank] for rank in range(self.mine.world_size)])
        except Exception as error:
            judged = Finding(
                "LaunchError", f"{self.mine} failed to compare the ranks ({type(error).__name__}: {error})"
            )
        if isinstance(judged, Finding):
            return _refusal(judged)
        return {"agreed": judged, "world_size": self.mine.world_size}

    def verdict(self) -> dict[str, Any]:
        while not self.store.check(["verdict"]):
            # Whoever came first reads the records, and tells the user who is waited for.
            if not self.deadline.pause(None):
                time.sleep(_PRECEDENCE_S)
                if not self.store.check(["verdict"]):
                    return self.decide(_refusal(self.note_arrivals() or self._gave_up()))
        found: dict[str, Any] = json.loads(self.store.get("verdict"))
        return found

    def _gave_up(self) -> Finding:
        if len(self.here) < self.mine.world_size:
            finding, doubt = missing(self.here, self.mine.world_size, self.deadline.limit_s), self.place.doubt()
            return replace(finding, message=f"{finding.message}; {doubt}") if doubt else finding
        first = Arrival.from_json(self.store.get("arrival/1"))
        return Finding(
            "CommTimeoutError",
            f"{first}, who came first and compares the ranks, said nothing within {self.deadline.limit_s:g} s; check "
            "whether it still runs, and what it printed",
        )

    def too_late(self, world_size: int) -> Finding:
        """What is wrong with this rank, which the others, who agreed already, did not wait for."""
        return self.note_arrivals() or Finding(
            "LaunchError",
            f"{self.mine} came to a world of {world_size} ranks that is complete ({places(self.here.values())})",
        )

    def decide(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Leave ``verdict`` for all, unless somebody was quicker; return the one that stands."""
        if self.store.add("verdicts", 1) == 1:
            if "agreed" in verdict:
                self.place.agreed()
            self.store.set("verdict", json.dumps(verdict))
            return verdict
        end = time.monotonic() + _GRACE_S
        while not self.store.check(["verdict"]):
            if time.monotonic() > end:  # whoever was quicker has died since
                return verdict
            time.sleep(0.001)
        found: dict[str, Any] = json.loads(self.store.get("verdict"))
        return found


def _refusal(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, "message": finding.message}


def meet(
    mine: Arrival,
    deadline: Deadline,
    judge: Callable[[Sequence[Arrival]], Any],
    place: Place,
) -> Any:
    """Wait for all ranks; return what ``judge`` said about them, which is the same on every rank.

    Args:
        judge: called on one rank, with the records of all in the order of their ranks; a :class:`Finding` refuses them,
            anything else has to be JSON.

    Raises:
        CommError: of the class that the finding names, with the same message on every rank.
    """
    store = place.store
    meeting = _Meeting(place, mine, deadline, {})
    came = store.add("arrived", 1)
    store.set(f"arrival/{came}", mine.to_json())
    verdict = meeting.decide(meeting.coordinate(judge)) if came == 1 else meeting.verdict()
    if "agreed" in verdict:
        if came <= mine.world_size == verdict["world_size"]:
            return verdict["agreed"]
        verdict = _refusal(meeting.too_late(verdict["world_size"]))
    heard = store.add("heard", 1)
    place.failed()
    if place.hosted:
        _wait_until_heard(store, heard, mine.world_size, min(deadline.left_s(), _EARLY_GRACE_S))
    kind = getattr(comm_utils.errors, str(verdict["kind"]), None)
    if not (isinstance(kind, type) and issubclass(kind, CommError)):
        kind = LaunchError
    raise kind(f"init_distributed: {verdict['message']}")


def _wait_until_heard(store: Store, heard: int, world_size: int, limit_s: float) -> None:
    """Until all ranks know, also those that have not come yet; after ``limit_s`` those who came are enough."""
    start = time.monotonic()
    while time.monotonic() - start < max(limit_s, _GRACE_S):
        came = store.add("arrived", 0)
        if heard >= (max(came, world_size) if time.monotonic() - start < limit_s else came):
            return
        time.sleep(0.01)
        heard = store.add("heard", 0)
