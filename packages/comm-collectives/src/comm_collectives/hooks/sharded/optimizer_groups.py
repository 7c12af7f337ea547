"""The views of this rank's part that an optimizer gets, in groups with their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from comm_collectives.hooks.sharded.flat_shard import FlatShard, Segment
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown

__all__ = ["Grouped", "divide_into_groups"]

#: Groups of the user's: the parameters of the model as given, and the options of the group.
Grouped = Sequence[tuple[list[torch.Tensor], dict[str, Any]]]


def divide_into_groups(call: str, groups: Iterable[Any], flats: Sequence[FlatShard]) -> list[dict[str, Any]]:
    """Make the optimizer's tensors anew, so that each belongs to one group; return the groups with them.

    Args:
        call: the user's call, for messages.
        groups: as for ``torch.optim``: dicts with the model's parameters in ``"params"`` and with options, or
            parameters, which are one group.
        flats: the flat memories of all parameters that require gradients.

    Raises:
        ArgumentError: a parameter is none of the model, needs no gradients, or is in two groups.
    """
    given = _as_groups(call, groups)
    known = {id(one): (flat, place) for flat in flats for place, one in enumerate(flat.parameters)}
    group_of: dict[tuple[int, int], int] = {}
    for number, (parameters, _) in enumerate(given):
        for parameter in parameters:
            found = known.get(id(parameter))
            if found is None:
                raise ArgumentError(
                    f"{call}: groups: group {number} has a tensor of shape {tuple(parameter.shape)}; expected "
                    "parameters of the model that required gradients when its hooks were registered"
                )
            flat, place = found
            if group_of.setdefault((id(flat), place), number) != number:
                raise ArgumentError(
                    f"{call}: groups: parameter {flat.names[place]!r} is in group {group_of[id(flat), place]} and "
                    f"in group {number}; expected it in one"
                )
    made: list[dict[str, Any]] = [{**options, "params": []} for _, options in given]
    for flat in flats:
        flat.segments = []
        numbers = [group_of.get((id(flat), place)) for place in range(len(flat.parameters))]
        for owner, some in groupby(range(len(numbers)), key=numbers.__getitem__):
            if owner is not None:
                segment = _segment(flat, list(some))
                flat.segments.append(segment)
                made[owner]["params"].append(segment.parameter)
    return made


def _segment(flat: FlatShard, positions: list[int]) -> Segment:
    """Return this rank's part of neighbouring parameters; the padding at the end belongs to the last of them.

    It may be empty, so that optimizers have the same tensors on all ranks.
    """
    spans, is_last = flat.layout.spans, positions[-1] == len(flat.parameters) - 1
    end = flat.layout.numel if is_last else spans[positions[-1] + 1].start
    begin = min(max(spans[positions[0]].start - flat.begin, 0), flat.shard_numel)
    end = min(max(end - flat.begin, begin), flat.shard_numel)
    return flat.segment(begin, end, tuple(positions))


def _as_groups(call: str, groups: Iterable[Any]) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    if isinstance(groups, (torch.Tensor, Mapping)):
        raise ArgumentTypeError(f"{call}: groups: got {shown(groups)}; expected a list of groups or of parameters")
    entries = list(groups)
    if not any(isinstance(one, Mapping) for one in entries):
        entries = [{"params": entries}]
    found: list[tuple[list[torch.Tensor], dict[str, Any]]] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise ArgumentTypeError(
                f"{call}: groups: entry {number} is {shown(entry)}; expected a dict with parameters in 'params'"
            )
        members = entry["params"]
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        # torch also takes pairs of a name and a parameter.
        members = [one[1] if isinstance(one, tuple) and len(one) == 2 else one for one in members]
        for one in members:
            if not isinstance(one, torch.Tensor):
                raise ArgumentTypeError(
                    f"{call}: groups: group {number} has {shown(one)}; expected parameters of the model"
                )
        found.append((members, {name: value for name, value in entry.items() if name != "params"}))
    return found
