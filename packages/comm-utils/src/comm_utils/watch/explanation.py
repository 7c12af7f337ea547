"""The error of a failed call, from what is wrong in its group and what other ranks say: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from comm_utils.errors import CollectiveMismatchError, CommTimeoutError
from comm_utils.flight_recorder.call_sites import LIBRARY
from comm_utils.flight_recorder.calls import Call, RingGroup, Stack
from comm_utils.flight_recorder.findings import IN_DIFFERENT_ORDERS, Finding, FindingKind
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.watch.trouble import Trouble, error_class

__all__ = [
    "addressed",
    "age_of_failed_call",
    "all_in_call",
    "cause_of_others",
    "combined",
    "for_others",
    "is_complete",
    "last_to_come",
    "until_failed_call",
]

_THIS_RANK = ". That is this rank, which came too late"

# Of the time since the first rank came.
_ALMOST = 0.7

# The age of a failed operation that no record tells, such as the making of a group.
_UNKNOWN_AGE_S = 30.0

# Of a stack, in a message.
_INNERMOST = 4
# Of a rank, beside the thread that makes calls.
_MOST_OTHER_THREADS = 3

# Of a large job, in a message.
_MOST_HOSTS = 8


def combined(own_rank: int, findings: Sequence[Finding], known: Mapping[int, RankSnapshot]) -> Trouble:
    """Return the first cause, with the others of its kind."""
    first = Trouble.of(findings[0])
    said = set(findings[0].ranks)
    same: list[str] = []
    ranks = first.ranks
    for one in findings[1:4]:
        if one.kind is findings[0].kind and not said & set(one.ranks):
            said |= set(one.ranks)
            same.append(one.text)
            ranks += one.ranks
    stacks = ""
    if findings[0].kind >= FindingKind.STOPPED:
        stacks = "".join(
            f". The Python stack of rank {rank}: {_told_of_threads(stack)}"
            for one in findings[:1]
            for rank in one.ranks[:1]
            if rank != own_rank
            and rank in known
            and (stack := known[rank].stack) is not None
            and not known[rank].silent_ns
            and (len(stack.by_thread) > 1 or len(stack.text.splitlines()) > 1)  # the text has the innermost frame
            and all(call.is_on_device for call in known[rank].open_calls())
        )
    return Trouble(first.kind, "; ".join([first.text, *same]) + stacks, ranks)


def _told_of_threads(stack: Stack) -> str:
    """Return where the thread that makes calls is, and others, which may hold what it waits for."""
    told = [_told(one) for one in stack.by_thread[: 1 + _MOST_OTHER_THREADS]]
    return "".join(told[:1]) + ("; of other threads: " + "; ".join(told[1:]) if len(told) > 1 else "")


def _told(stack: str) -> str:
    """Return the innermost frames of a stack, up to the innermost one of the program if that is not among them."""
    frames = stack.splitlines()[::-1]
    of_program = next((at for at, frame in enumerate(frames) if not LIBRARY.search(frame.strip())), 0)
    more = [] if of_program < _INNERMOST else [frames[of_program]]
    gap = ["..."] if of_program > _INNERMOST else []
    return " < ".join([*frames[:_INNERMOST], *gap, *more])


def cause_of_others(
    own_rank: int, group: RingGroup, known: Mapping[int, RankSnapshot], needs_cause: bool, age_ns: int
) -> Trouble | None:
    """Return why another member has given up, in this group or in one that it waited in instead, as it says.

    Args:
        needs_cause: what says no cause does not count.
        age_ns: of the call that failed here; an earlier failure in another group is no cause of it.
    """
    best: tuple[int, Trouble] | None = None
    for rank in group.ranks:
        if rank == own_rank or rank not in known:
            continue
        for failure in known[rank].failures:
            kind = error_class(failure.error)
            # Both times are by the clock of the rank's host, which has nothing to do with the one here.
            failure_age_ns = known[rank].taken_ns - failure.at_ns
            if kind is None or (failure.group != group.name and failure_age_ns > age_ns):
                continue
            if needs_cause and not failure.text:
                continue
            text = failure.text or f"rank {rank} ({known[rank].where}) gave up with {failure.error}"
            if failure.group != group.name and IN_DIFFERENT_ORDERS not in text:
                text = f"rank {rank} gave up{' in another group' if failure.group else ''}: {text}"
            order = (failure.group != group.name) + 2 * (not failure.text)
            if best is None or order < best[0]:
                best = order, Trouble(kind, text, failure.ranks)
    return None if best is None else best[1]


def age_of_failed_call(own: RankSnapshot | None, group: RingGroup, now_ns: int) -> int:
    """Return the age, in nanoseconds, of the call of this rank on a group that has just failed.

    Args:
        now_ns: by the monotonic clock of this host.
    """
    calls = () if own is None else [call for call in own.calls if call.group.name == group.name]
    begun = [call.begin_ns for call in calls if call.is_open] or [call.begin_ns for call in calls][-1:]
    return now_ns - min(begun) if begun else int(_UNKNOWN_AGE_S * 1e9)


def _failed_call(own: RankSnapshot | None, group: RingGroup) -> Call | None:
    """Return the collective of this rank on a group that has just failed, or is about to."""
    if own is None:
        return None
    calls = own.collectives(group.name)
    # Before those that nobody has waited for yet, which may have ended long ago.
    waiting = {call.in_series for call in own.waiting_calls() if call.group.name == group.name and not call.is_message}
    awaited = next((call for call in calls if call.in_series in waiting), None)
    return awaited or next((call for call in calls if call.is_open), calls[-1] if calls else None)


def until_failed_call(findings: Sequence[Finding], own: RankSnapshot | None, group: RingGroup) -> list[Finding]:
    """Leave out the ranks that are missing in a later call than the one of this rank that failed: they are in that."""
    failed = _failed_call(own, group)
    if own is None or failed is None:
        return list(findings)
    waiting = [call for call in own.waiting_calls() if call.group.name == group.name]
    if any(call.is_message for call in waiting):  # those of one pair have numbers of their own
        return list(findings)
    if failed.is_on_device:  # a later one may be the one that does not go on, on the device or on the host
        on_device = [call for call in own.calls_on_device(group.name) if not call.is_message]
        failed = max([failed, *on_device, *waiting], key=lambda call: call.in_series)
    return [one for one in findings if one.kind is not FindingKind.MISSING or one.number <= failed.in_series]


def last_to_come(own: RankSnapshot | None, group: RingGroup, known: Mapping[int, RankSnapshot]) -> Trouble | None:
    """Return the rank that began the call of this rank, which timed out, when the time was almost over.

    Clocks of one host are compared.
    """
    mine = _failed_call(own, group)
    if own is None or mine is None:
        return None
    begun = {
        rank: call.begin_ns
        for rank in group.ranks
        if rank in known and known[rank].header.identity == own.header.identity
        for call in known[rank].collectives(group.name)
        if call.in_series == mine.in_series
    }
    first, last = min(begun, key=lambda rank: begun[rank]), max(begun, key=lambda rank: begun[rank])
    late_ns = begun[last] - begun[first]
    if late_ns < _ALMOST * (own.taken_ns - begun[first]):
        return None
    text = f"rank {last} ({known[last].where}) called {mine.name} {late_ns / 1e9:.2f} s after rank {first} had"
    return Trouble(CommTimeoutError, text, (last,))


def all_in_call(own: RankSnapshot | None, group: RingGroup, known: Mapping[int, RankSnapshot]) -> Trouble | None:
    """Return why a call of ranks of several hosts timed out in which all of them are: one came late, or data is lost.

    Clocks of hosts differ, so it compares for how long each has been in the call, as it said when it was asked.

    Args:
        known: snapshots by global rank, of other hosts too.
    """
    mine = _failed_call(own, group)
    if mine is None or any(rank not in known or known[rank].is_gone for rank in group.ranks):
        return None
    ages_ns = {
        rank: known[rank].taken_ns - call.begin_ns
        for rank in group.ranks
        for call in known[rank].collectives(group.name)
        if call.in_series == mine.in_series
    }
    hosts = list(dict.fromkeys(known[rank].header.host for rank in group.ranks))
    if len(ages_ns) < len(group.ranks) or len(hosts) == 1:
        return None
    first, last = max(ages_ns, key=lambda rank: ages_ns[rank]), min(ages_ns, key=lambda rank: ages_ns[rank])
    late_ns = ages_ns[first] - ages_ns[last]
    if late_ns >= _ALMOST * ages_ns[first]:
        text = (
            f"rank {last} ({known[last].where}) called {mine.name} about {late_ns / 1e9:.1f} s after rank {first} had"
        )
        return Trouble(CommTimeoutError, text, (last,))
    named = f"{', '.join(hosts[:_MOST_HOSTS])}{', ...' if len(hosts) > _MOST_HOSTS else ''}"
    text = f"all ranks of the group are in {mine.name}, so what some of them send does not arrive; check the network "
    return Trouble(CommTimeoutError, text + f"between the hosts ({named})", ())


def addressed(rank: int, trouble: Trouble) -> Trouble:
    """Return a trouble that says so where ``rank``, which raises it, is the cause."""
    if trouble.ranks == (rank,) and not issubclass(trouble.kind, CollectiveMismatchError):
        return Trouble(trouble.kind, for_others(trouble).text + _THIS_RANK, trouble.ranks)
    return trouble


def for_others(trouble: Trouble) -> Trouble:
    """Return a trouble of :func:`addressed` as other ranks are to hear of it."""
    return Trouble(trouble.kind, trouble.text.removesuffix(_THIS_RANK), trouble.ranks)


def is_complete(finding: Finding, known: Mapping[int, RankSnapshot]) -> bool:
    """Return whether all ranks of a group that live have made the call that a finding is about."""
    here = (known[rank] for rank in finding.group.ranks if rank in known and not known[rank].is_gone)
    return all(any(call.in_series == finding.number for call in one.collectives(finding.group.name)) for one in here)
