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
from comm_orchestrator.arrivals import Arrival, Finding, check_arrival, listed, missing, places
from comm_utils.errors import CommError, LaunchError
from comm_utils.log import logger

__all__ = ["Deadline", "meet"]

# How long rank 0, with whom the store goes, waits for ranks that have not heard yet why it gives up.
_GRACE_S = 1.0
_FIRST_NOTICE_S = 10.0


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

    def pause(self, waiting: Callable[[], str]) -> bool:
        """Sleep for a while, the longer the longer it has lasted; False where no time is left.

        Args:
            waiting: says what is being waited for, for the log: after 10 s, and each time that has doubled.
        """
        if self.left_s() <= 0:
            return False
        if self.elapsed_s() >= self._notice_s:
            self._notice_s *= 2
            logger.warning("init_distributed: %.0f s, and still waiting: %s", self.elapsed_s(), waiting())
        time.sleep(max(0.0, min(0.1, 0.0005 + self.elapsed_s() / 20, self.left_s())))
        return True


@dataclass
class _Meeting:
    store: Store
    mine: Arrival
    deadline: Deadline
    here: dict[int, Arrival]
    doubt: Callable[[], str]
    counted: int = 0
    unread: list[int] = field(default_factory=list)

    def note_arrivals(self) -> Finding | None:
        """Read the records that came since the last time; the first thing that is wrong with one of them."""
        came = self.store.add("arrived", 0)
        self.unread += range(self.counted + 1, came + 1)
        self.counted = came
        for place in [place for place in self.unread if self.store.check([f"arrival/{place}"])]:
            self.unread.remove(place)
            new = Arrival.from_json(self.store.get(f"arrival/{place}"))
            first = next(iter(self.here.values()), new)
            finding = check_arrival(first, self.here, new)
            if finding is not None:
                return finding
            self.here[new.rank] = new
        return None

    def waiting(self) -> str:
        self.note_arrivals()
        absent = [rank for rank in range(self.mine.world_size) if rank not in self.here]
        if not absent:
            return "for the verdict of whoever came first"
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
            if not self.deadline.pause(self.waiting):
                self.note_arrivals()
                return self.decide(_refusal(self._gave_up()))
        found: dict[str, Any] = json.loads(self.store.get("verdict"))
        return found

    def _gave_up(self) -> Finding:
        if len(self.here) < self.mine.world_size:
            finding, doubt = missing(self.here, self.mine.world_size, self.deadline.limit_s), self.doubt()
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
    store: Store,
    mine: Arrival,
    deadline: Deadline,
    judge: Callable[[Sequence[Arrival]], Any],
    hosted: bool,
    doubt: Callable[[], str] = str,
) -> Any:
    """Wait for all ranks; return what ``judge`` said about them, which is the same on every rank.

    Args:
        store: shared by all ranks, and private to this meeting.
        judge: called on one rank, with the records of all in the order of their ranks; a :class:`Finding` refuses them,
            anything else has to be JSON.
        hosted: the store ends with this process, which therefore is the last to leave a meeting that failed.
        doubt: says what may be wrong with the place, where ranks did not come.

    Raises:
        CommError: of the class that the finding names, with the same message on every rank.
    """
    meeting = _Meeting(store, mine, deadline, {}, doubt)
    place = store.add("arrived", 1)
    store.set(f"arrival/{place}", mine.to_json())
    verdict = meeting.decide(meeting.coordinate(judge)) if place == 1 else meeting.verdict()
    if "agreed" in verdict:
        if place <= mine.world_size == verdict["world_size"]:
            return verdict["agreed"]
        verdict = _refusal(meeting.too_late(verdict["world_size"]))
    heard = store.add("heard", 1)
    if hosted:
        _wait_until_heard(store, heard, mine.world_size)
    kind: type[CommError] = getattr(comm_utils.errors, str(verdict["kind"]), LaunchError)
    raise kind(f"init_distributed: {verdict['message']}")


def _wait_until_heard(store: Store, heard: int, world_size: int) -> None:
    end = time.monotonic() + _GRACE_S
    while heard < max(world_size, store.add("arrived", 0)) and time.monotonic() < end:
        time.sleep(0.01)
        heard = store.add("heard", 0)
