"""One thing that is wrong in a job, and the text about a rank in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from comm_utils.flight_recorder.call_sites import LIBRARY, of_this_library
from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.matching import at_caller
from comm_utils.flight_recorder.snapshot import RankSnapshot

__all__ = ["IN_DIFFERENT_ORDERS", "Finding", "FindingKind", "describe_rank"]

#: In the text of a finding of :attr:`FindingKind.ORDER`.
IN_DIFFERENT_ORDERS = "use their groups in different orders"


class FindingKind(IntEnum):
    """The kind of a finding; causes come before their effects."""

    MISMATCH = 1
    LOST = 2
    STOPPED = 3
    ORDER = 4
    MISSING = 5


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        ranks: those that are the cause, as far as that is known.
        text: a sentence without a full stop.
        number: of the call in the group, where it concerns one.
        other_groups: the further groups, where several are used in different orders.
    """

    kind: FindingKind
    group: RingGroup
    ranks: tuple[int, ...]
    text: str
    number: int = 0
    other_groups: tuple[RingGroup, ...] = ()


def describe_rank(snapshot: RankSnapshot, awaited_in: RingGroup | None = None) -> str:
    """Return what a rank does, as the end of a sentence that begins with its name.

    Args:
        awaited_in: the group in which others wait for it; one of the same text is called another one.
    """
    last = snapshot.calls[-1] if snapshot.calls else None
    if snapshot.is_gone:
        return snapshot.end + (f"; its last call was {last}{at_caller(last.caller)}" if last is not None else "")
    found = "is stopped, " if snapshot.process == "stopped" else ""
    if snapshot.header.signal:
        found = f"{snapshot.end}; until then, it "
    open_calls, now = snapshot.waiting_calls(), snapshot.taken_ns
    call = next((one for one in open_calls if not one.is_on_device), None)
    if call is not None:
        found += (
            f"is in {call} on {_beside(call.group, awaited_in)}{_since(call.begin_ns, now)}{at_caller(call.caller)}"
        )
        return found + _silence(snapshot)
    place, silence = _stack_place(snapshot), _silence(snapshot)
    at = f", at {place}" if place else ""
    if silence:
        at = silence + (f" (until then, it was at {place})" if place else "")
    if open_calls:
        call = open_calls[0]
        found += f"has {call} on {_beside(call.group, awaited_in)}{at_caller(call.caller)} on its device"
        found += _since(call.begin_ns, now)
        return found + (at if silence else f", and its host goes on{f' at {place}' if place else ''}")
    doing = f"is in none of its calls{at}"
    if last is not None:
        how = "which failed" if last.failed else "which ended"
        ended = _since(last.end_ns, now).replace("since", how) + " ago" if last.end_ns else ""
        doing += f"; its last one was {last}{ended}{at_caller(last.caller)}"
    else:
        doing += ", and has made none yet"
    return found + doing


def _beside(group: RingGroup, other: RingGroup | None) -> str:
    is_namesake = other is not None and group.name != other.name and str(group) == str(other)
    return str(group).replace("the group", "another group", 1) if is_namesake else str(group)


def _since(begin_ns: int, now_ns: int) -> str:
    return f" since {max(0, now_ns - begin_ns) / 1e9:.1f} s"


def _silence(snapshot: RankSnapshot) -> str:
    """Return that the watch of a rank gives no sign, as the end of a sentence; "" where it does."""
    if not snapshot.silent_ns:
        return ""
    silent = f"its watch has given no sign for {snapshot.silent_ns / 1e9:.1f} s"
    return f", and {silent}: native code holds the GIL, or the process is frozen or gets no core"


def _stack_place(snapshot: RankSnapshot) -> str:
    """Return the innermost line of a rank's Python stack; of one that looks for why its call failed, of its program."""
    stack = "" if snapshot.stack is None else snapshot.stack.text
    frames = [line.strip() for line in stack.splitlines() if line.strip()]
    ours = max((at for at, frame in enumerate(frames) if of_this_library(frame)), default=-1)
    if ours >= 0 and all(LIBRARY.search(frame) for frame in frames[ours + 1 :]):
        outer = (one for one in reversed(frames[:ours]) if not of_this_library(one) and not LIBRARY.search(one))
        return next(outer, frames[-1])
    return frames[-1] if frames else ""
