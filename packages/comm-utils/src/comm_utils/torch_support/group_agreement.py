"""The members of a new group tell each other whether they can make it, before the library waits for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from comm_utils.errors import BackendUnavailableError, CommTimeoutError
from comm_utils.torch_support.failures import summarize

__all__ = ["agree"]

_READY = "ready"
# What a rank gives as a reason, in a store in which others may write as well.
_MOST_REASON_BYTES = 1000


def agree(
    store: Store, key: str, ranks: Sequence[int], rank: int, refusal: BackendUnavailableError | None, limit: timedelta
) -> None:
    """Return when every member is ready.

    Args:
        store: of the world, whose connection is open: a process without free descriptors can use it.
        key: of this attempt; no other has it.
        ranks: global ranks of the members.
        rank: this one's.
        refusal: why this rank cannot go on; None if it can.

    Raises:
        BackendUnavailableError: a member cannot go on; the same on every one.
        CommTimeoutError: members did not come in time; names them.
    """
    store.set(f"{key}/{rank}", _READY if refusal is None else str(refusal))
    if refusal is not None:
        raise refusal
    keys = {one: f"{key}/{one}" for one in ranks}
    try:
        store.wait(list(keys.values()), limit)
    except RuntimeError as error:
        missing = [one for one in ranks if not store.check([keys[one]])]
        if not missing:
            raise
        raise CommTimeoutError(
            f"new_group on rank {rank}: not every rank of {list(ranks)} came to make the group: {missing} did not "
            f"within {limit.total_seconds():g} s; all of them have to call new_group, and as often with these ranks "
            f"[{summarize(error)}]"
        ) from error
    for one in ranks:
        said = store.get(keys[one])[:_MOST_REASON_BYTES].decode(errors="replace")
        if said != _READY:
            raise BackendUnavailableError(f"{said} [reported by rank {one}; rank {rank} could go on]")
