"""The agreement of the ranks of a pipeline before the first activation travels."""

from __future__ import annotations

import torch

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks, get_world_size
from comm_collectives.hooks.pipeline.actions import Schedule
from comm_collectives.objects import allgather_object
from comm_utils.errors import ArgumentError, CollectiveMismatchError, CommError

__all__ = ["agree_on_schedule"]

_REFUSED = 0


def agree_on_schedule(
    call: str, schedule: Schedule | None, error: CommError | None, group: Group, device: torch.device
) -> None:
    """Check that all ranks run the same schedule, with right arguments; costs one all_gather of 8 bytes.

    Args:
        call: the user's call, for messages.
        schedule: this rank's; None where it is none.
        error: what is wrong with this rank's arguments.
        group: the pipeline group.
        device: of the tensor that is exchanged.

    Raises:
        CommError: ``error``, on this rank.
        ArgumentError: on the other ranks; names the rank with wrong arguments and its error.
        CollectiveMismatchError: schedules differ; names the ranks of each.
    """
    number = _REFUSED if error is not None or schedule is None else schedule.fingerprint
    W = get_world_size(group)
    mine = torch.tensor([number], device=device)
    everyones = torch.empty(W, dtype=torch.int64, device=device)
    all_gather_into_tensor(everyones, mine, group)
    numbers = everyones.tolist()
    if number != _REFUSED and numbers == [number] * W:
        return
    texts = allgather_object([None if error is None else str(error), str(schedule)], group)
    if error is not None:
        raise error
    ranks = get_process_group_ranks(group)
    for rank, (refusal, _) in zip(ranks, texts, strict=True):
        if refusal is not None:
            raise ArgumentError(f"{call}: rank {rank} refused its arguments: {refusal}")
    differing: dict[int, list[int]] = {}
    for rank, one in zip(ranks, numbers, strict=True):
        differing.setdefault(one, []).append(rank)
    parts = [
        f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(map(str, members))}: "
        f"{texts[ranks.index(members[0])][1]}"
        for members in differing.values()
    ]
    raise CollectiveMismatchError(
        f"{call}: schedule: got different schedules ({'; '.join(parts)}); expected the same on all ranks"
    )
