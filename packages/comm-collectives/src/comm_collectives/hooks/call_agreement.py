"""The agreement of ranks on the arguments of one call, before anything that depends on them is sent."""

from __future__ import annotations

import hashlib

import torch

from comm_collectives.all_gather import all_gather_into_tensor
from comm_collectives.annotations import Group
from comm_collectives.groups import get_process_group_ranks, get_world_size
from comm_collectives.objects import allgather_object
from comm_utils.errors import ArgumentError, CollectiveMismatchError, CommError
from comm_utils.torch_support import factories

__all__ = ["agree_on_call", "fingerprint_of"]

_REFUSED = 0


def fingerprint_of(text: str) -> int:
    """Return a positive number of 62 bits of the SHA-256 of ``text``."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 2 | 1


def agree_on_call(
    call: str, subject: str, fingerprint: int, text: str, error: CommError | None, group: Group, device: torch.device
) -> None:
    """Check that all ranks give the same arguments, and right ones; costs one all_gather of 8 bytes.

    Args:
        call: the user's call, for messages.
        subject: what is compared, such as ``"schedule"``, for messages.
        fingerprint: of what is compared, from :func:`fingerprint_of`; ignored with an ``error``.
        text: describes it, for messages.
        error: what is wrong with this rank's arguments.
        group: whose ranks take part.
        device: of the tensor that is exchanged.

    Raises:
        CommError: ``error``, on this rank.
        ArgumentError: on the other ranks; names the rank with wrong arguments and its error.
        CollectiveMismatchError: fingerprints differ; names the ranks of each.
    """
    number = _REFUSED if error is not None else fingerprint
    W = get_world_size(group)
    mine = factories.tensor([number], device=device)
    everyones = factories.empty(W, dtype=torch.int64, device=device)
    all_gather_into_tensor(everyones, mine, group)
    numbers = everyones.tolist()
    if number != _REFUSED and numbers == [number] * W:
        return
    texts = allgather_object([None if error is None else str(error), text], group)
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
        f"{call}: {subject}: got different {subject}s ({'; '.join(parts)}); expected the same on all ranks"
    )
