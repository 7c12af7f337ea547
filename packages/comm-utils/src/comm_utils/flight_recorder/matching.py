"""Compare the calls of several ranks that belong together."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from comm_utils.flight_recorder.calls import Call, RingGroup

__all__ = ["agreed", "at_caller", "by_kind", "compare_calls", "compare_parts", "rank_list"]


def agreed(call: Call, in_equal_parts: bool = False) -> tuple[Any, ...]:
    """Return what the calls of all ranks that belong together have in common.

    Args:
        in_equal_parts: no rank gives split sizes.
    """
    has_sizes = call.is_uneven and (call.is_native or not in_equal_parts)
    return call.operation, call.dtype, call.op, call.root, None if has_sizes else call.elements, call.joined


def _agreed_of(at: Mapping[int, Call]) -> Callable[[Call], tuple[Any, ...]]:
    """Return :func:`agreed` for the calls of several ranks."""
    in_equal_parts = all(call.sent is None for call in at.values())
    return lambda call: agreed(call, in_equal_parts)


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2 and 5``."""
    found = [str(rank) for rank in sorted(ranks)]
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 8:
        return f"ranks {', '.join(found[:8])} and {len(found) - 8} more"
    return f"ranks {', '.join(found[:-1])} and {found[-1]}"


def at_caller(caller: str) -> str:
    """Return where a call was made, in brackets; "" where that is unknown."""
    return f" ({caller})" if caller else ""


def by_kind(at: Mapping[int, Call]) -> tuple[Any, list[list[int]]]:
    """Return what the calls of most ranks have in common, None without a majority, and the ranks of each kind.

    Args:
        at: calls by rank.

    Returns:
        the majority's ranks come first.
    """
    agreed = _agreed_of(at)
    most = Counter(agreed(call) for call in at.values()).most_common()
    usual = most[0][0] if len(most) == 1 or most[0][1] > most[1][1] else None
    sets: dict[Any, list[int]] = defaultdict(list)
    for rank, call in at.items():
        sets[agreed(call)].append(rank)
    return usual, sorted(sets.values(), key=lambda ranks: (agreed(at[ranks[0]]) != usual, min(ranks)))


def compare_calls(at: Mapping[int, Call], where: str = "") -> tuple[str, tuple[int, ...]]:
    """Return what differs between the calls of several ranks, and the ranks that are the cause; "" and none if nothing.

    Args:
        at: calls by rank.
        where: goes before the calls, such as ``in call 4 of the group of ranks [0, 1]``.
    """
    usual, ordered = by_kind(at)
    agreed = _agreed_of(at)
    if len(ordered) <= 1:
        return "", ()
    operations = {(call.name, call.operation) for call in at.values()}
    operations_of_name = Counter(name for name, _ in operations)
    said = "; ".join(
        f"{rank_list(ranks)} {'calls' if len(ranks) == 1 else 'call'} "
        f"{_with_operation(call) if operations_of_name[call.name] > 1 else call}{at_caller(call.caller)}"
        for ranks, call in ((ranks, _best_known([at[rank] for rank in ranks])) for ranks in ordered)
    )
    culprits = tuple(sorted(rank for ranks in ordered if agreed(at[ranks[0]]) != usual for rank in ranks))
    place = f"{where}, " if where else ""
    return f"the ranks' calls differ in {_aspects(list(at.values()))}: {place}{said}", culprits


def _best_known(calls: Sequence[Call]) -> Call:
    """Return the first of calls that are alike whose place in the program is known."""
    return next((call for call in calls if call.caller), calls[0])


def _with_operation(call: Call) -> str:
    """Return a call and the operation that implements it, as exchanges of bytes implement one with ``compression``."""
    if call.name == call.operation:
        return str(call)
    return f"{call.name}, by way of {replace(call, call=call.operation)}"


def _aspects(calls: Sequence[Call]) -> str:
    """Return the names of what differs."""
    if len({agreed(call)[0] for call in calls}) > 1:
        return "the operation"
    names = [
        name
        for name, values in (
            ("the dtype", {call.dtype for call in calls}),
            ("the reduce op", {call.op for call in calls}),
            ("the root", {call.root for call in calls}),
            ("the number of elements", {call.elements for call in calls}),
            ("the sizes of the tensors", {call.joined for call in calls}),
        )
        if len(values) > 1
    ]
    return " and ".join(names) or "the arguments"


def compare_parts(group: RingGroup, at: Mapping[int, Call], where: str = "") -> tuple[str, tuple[int, ...]]:
    """Return the first pair of ranks of which one sends another number of elements than the other expects; or "".

    Args:
        group: all ranks, in the order of the parts.
        at, where: as for :func:`compare_calls`.
    """
    first = next(iter(at.values()))
    if not first.is_uneven or first.is_native:
        return "", ()
    if all(call.sent is None and call.elements == first.elements for call in at.values()):
        return "", ()
    size = len(group.ranks)
    places = {rank: place for place, rank in enumerate(group.ranks)}
    targets = [places[rank] for rank in at]
    wanted_of = [_parts(call.received, call.elements, size) for call in at.values()]
    for source, sending in at.items():
        sent_to, place = _parts(sending.sent, sending.elements, size), places[source]
        # For very many pairs: first whether there is one, and then which.
        if [sent_to[target] for target in targets] == [wanted[place] for wanted in wanted_of]:
            continue
        for target, to, wanted_by in zip(at, targets, wanted_of, strict=True):
            sent, wanted = sent_to[to], wanted_by[place]
            if sent is not None and wanted is not None and sent != wanted:
                text = (
                    f"the ranks' calls differ in the split sizes: {where + ', ' if where else ''}rank {source} sends "
                    f"{sent} elements to rank {target}, which expects {wanted} ({sending.name}"
                    f"{', ' + sending.caller if sending.caller else ''})"
                )
                return text, tuple(sorted({source, target}))
    return "", ()


def _parts(parts: tuple[int, ...] | None, elements: int, size: int) -> Sequence[int | None]:
    """Return the elements for each of the ranks of a group, or from each; None where they are not known."""
    if parts is None:
        return (elements,) * size
    return parts if len(parts) == size else (None,) * size
