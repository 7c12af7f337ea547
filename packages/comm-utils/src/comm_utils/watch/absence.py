"""Descriptions of ranks that others wait for, from what can be seen of them."""

from __future__ import annotations

from collections.abc import Sequence

from comm_utils.flight_recorder.calls import RingGroup
from comm_utils.flight_recorder.diagnosis import describe_rank, diagnose_group
from comm_utils.flight_recorder.matching import rank_list
from comm_utils.flight_recorder.snapshot import RankSnapshot
from comm_utils.watch.world_view import WorldView

__all__ = ["NOBODY", "describe_absent", "describe_missing"]

#: Said where no rank is seen to be missing.
NOBODY = "all ranks that can be seen from here are in this call"

# So many ranks are described, as a large group may miss thousands.
_MOST = 4


def describe_missing(view: WorldView, group: RingGroup, asks: bool = True) -> str:
    """Return who keeps the calls of a group waiting, and what they do instead; "" where nobody is seen to.

    Args:
        asks: ranks of other hosts, which takes up to a second.
    """
    known = _seen(view, group.ranks, asks)
    texts, named = [], set[int]()
    for one in diagnose_group(known, group):
        if not named.issuperset(one.ranks):  # a rank that has ended is missing as well
            texts.append(one.text)
            named.update(one.ranks)
    unseen = [rank for rank in group.ranks if rank not in known and rank not in named]
    if unseen:
        nothing = [] if texts else [NOBODY]
        texts = [*texts, *nothing, f"{rank_list(unseen)}: not seen from here"]
    return "; ".join(texts)


def describe_absent(view: WorldView, ranks: Sequence[int], call: str) -> str:
    """Return what ``ranks``, which are known not to have made ``call``, do instead."""
    known = _seen(view, ranks, asks=True)
    seen = [known[rank] for rank in ranks if rank in known]
    texts = [f"rank {one.rank} ({one.where}) has not called {call}: it {describe_rank(one)}" for one in seen[:_MOST]]
    if len(seen) > _MOST:
        texts.append(f"nor have {rank_list(one.rank for one in seen[_MOST:])}")
    unseen = [rank for rank in ranks if rank not in known]
    if unseen:
        texts.append(f"{rank_list(unseen)}: not seen from here")
    return "; ".join(texts)


def _seen(view: WorldView, ranks: Sequence[int], asks: bool) -> dict[int, RankSnapshot]:
    known = view.snapshots()
    unseen = [rank for rank in ranks if rank not in known]
    return {**known, **view.ask(unseen)} if unseen and asks else known
