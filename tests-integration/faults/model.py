"""What every rank gets from a schedule: predicted from the schedule alone, without torch and without processes.

The rules are few. A step of a group is right while all its members live, come in time, and make the same call. The
step at which they do not raises, on every member that lives, the class of that fault, and breaks the group. On a broken
group every call raises BrokenGroupError. Other groups go on.
"""

from __future__ import annotations

from faults.schedule import Schedule, Step

__all__ = ["RIGHT", "predict", "result"]

RIGHT = "right"
_LOST = frozenset({"PeerLostError"})
_BROKEN = frozenset({"BrokenGroupError"})
#: A late rank finds the others gone from the call, or waits as long.
_LATE = frozenset({"CommTimeoutError", "PeerLostError", "BrokenGroupError"})
#: Or it finds all that they sent it before they gave up, and learns of that at its next call.
_LATE_AT_THE_STEP = _LATE | {RIGHT}
_AT_THE_STEP = {"late": frozenset({"CommTimeoutError"}), "differs": frozenset({"CollectiveMismatchError"})}


def predict(schedule: Schedule) -> dict[int, dict[int, frozenset[str]]]:
    """Return rank -> step -> what it may be, ``RIGHT`` or classes of errors; steps it takes no part in are absent."""
    found: dict[int, dict[int, frozenset[str]]] = {rank: {} for rank in schedule.groups[0]}
    broken: set[int] = set()
    for number, step in enumerate(schedule.steps):
        ranks = schedule.groups[step.group]
        dead = schedule.dies and number >= schedule.at
        outcome = frozenset({RIGHT})
        if step.group in broken:
            outcome = _BROKEN
        elif dead and schedule.culprit in ranks:
            outcome = _LOST
        elif number == schedule.at:
            outcome = _AT_THE_STEP[schedule.fault]
        if outcome != {RIGHT}:
            broken.add(step.group)
        for rank in ranks:
            if not (dead and rank == schedule.culprit):
                late = rank == schedule.culprit and schedule.fault == "late" and step.group in broken
                allowed = _LATE_AT_THE_STEP if number == schedule.at else _LATE
                found[rank][number] = allowed if late else outcome
    return found


def result(schedule: Schedule, number: int, rank: int) -> list[float]:
    """Return the numbers that a right step gives a rank; rank r gives r + 10 times the number of the step."""
    step: Step = schedule.steps[number]
    values = [float(one + 10 * number) for one in schedule.groups[step.group]]
    if step.operation == "all_reduce":
        return [sum(values)]
    return [] if step.operation == "barrier" else values
