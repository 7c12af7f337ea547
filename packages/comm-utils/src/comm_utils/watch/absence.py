"""Descriptions of ranks that others wait for, from what can be seen of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from comm_utils.flight_recorder.calls import Call, RingGroup
from comm_utils.flight_recorder.diagnosis import diagnose_group
from comm_utils.flight_recorder.findings import describe_rank
from comm_utils.flight_recorder.matching import rank_list
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.rank_processes import describe_unseen, named_ranks
from comm_utils.watch.indirect_waits import follow_waits
from comm_utils.watch.world_view import WorldView

__all__ = ["NOBODY", "describe_absent", "describe_missing", "find_unfinished"]

#: Said where no rank is seen to be missing.
NOBODY = "all ranks that can be seen from here are in this call"

# So many ranks are described, as a large group may miss thousands.
_MOST = 4
# Ranks that are a little late have so long to make a call that another one leaves unfinished.
_PATIENCE_S = 1.0


def describe_missing(view: WorldView, group: RingGroup, asks: bool = True) -> str:
    """Return who keeps the calls of a group waiting, and what they do instead; "" where nobody is seen to.

    Args:
        asks: ranks of other hosts, which takes up to a second.
    """
    known = _seen(view, group.ranks, asks)
    texts: list[str] = []
    named, more = set[int](), set[int]()
    findings = diagnose_group(known, group, view.processes)
    for one in findings:
        if named.issuperset(one.ranks):  # a rank that has ended is missing as well
            continue
        if len(texts) < _MOST:
            texts.append(one.text)
        else:
            more.update(set(one.ranks) - named)
        named.update(one.ranks)
    if more:
        texts.append(f"{rank_list(more)} {'keeps' if len(more) == 1 else 'keep'} it waiting as well")
    unseen = [rank for rank in group.ranks if rank not in known and rank not in named]
    if unseen:
        nothing = [] if texts else [NOBODY]
        texts = [*texts, *nothing, f"{named_ranks(unseen, view.processes)}: not seen from here"]
    behind = follow_waits(view, group, findings, known, asks)
    return ". ".join(
        ["; ".join(texts), *("There, " + "; ".join(one.text for one in found[:_MOST]) for found in behind)]
    )


def describe_absent(view: WorldView, ranks: Sequence[int], call: str) -> str:
    """Return what ``ranks``, which are known not to have made ``call``, do instead."""
    known = _seen(view, ranks, asks=True)
    seen = [known[rank] for rank in ranks if rank in known]
    texts = [f"rank {one.rank} ({one.where}) has not called {call}: it {describe_rank(one)}" for one in seen[:_MOST]]
    if len(seen) > _MOST:
        texts.append(f"nor have {rank_list(one.rank for one in seen[_MOST:])}")
    unseen = [rank for rank in ranks if rank not in known]
    if unseen:
        unseen_text = describe_unseen(unseen, view.processes)
        texts.append(f"{named_ranks(unseen, view.processes)}: {unseen_text}")
    return "; ".join(texts)


def _seen(view: WorldView, ranks: Sequence[int], asks: bool) -> dict[int, RankSnapshot]:
    known = view.snapshots()
    unseen = [rank for rank in ranks if rank not in known]
    return {**known, **view.ask(unseen)} if unseen and asks else known


def find_unfinished(view: WorldView, groups: Sequence[RingGroup]) -> dict[str, str]:
    """Return, by the name of a group, the collective of this rank that other ranks of its host keep from its end.

    Args:
        groups: to look at.
    """
    by_name = {one.name: one for one in groups if len(one.ranks) > 1}
    end = time.monotonic() + _PATIENCE_S
    while True:
        open_calls: dict[str, Call] = {}
        for call in () if view.own is None else take_snapshot(view.own).open_calls():
            if call.group.name in by_name and not call.is_message and not call.is_on_device:
                open_calls.setdefault(call.group.name, call)
        missing = _without(view, open_calls) if open_calls else {}
        if not missing or time.monotonic() >= end:
            break
        time.sleep(0.01)
    texts = {}
    for name, ranks in missing.items():
        call = open_calls[name]
        texts[name] = f"{call.name} is under way: {describe_absent(view, ranks, call.call or call.operation)}"
    return texts


def _without(view: WorldView, calls: Mapping[str, Call]) -> dict[str, list[int]]:
    """Return, by the name of their group, the ranks that have certainly not made ``calls``."""
    found: dict[str, list[int]] = {}
    view.local.refresh(now=True)
    for name, call in calls.items():
        for rank in call.group.ranks:
            reader = view.local.readers.get(rank)
            if reader is None:
                continue
            reader.refresh()
            backwards = (one for one in reader.backwards(call.lane) if one.group.name == name and not one.is_message)
            latest = next((one.in_series for one in backwards), None)
            if latest is None and reader.count(call.lane) > reader.records:
                continue  # what it made in this group was overwritten
            if (latest or 0) < call.in_series:
                found.setdefault(name, []).append(rank)
    return found
